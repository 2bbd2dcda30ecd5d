// Distinct ids in first-seen order, by an open-addressing hash table that holds positions instead of keys.
//
// A slot holds the smallest input position seen so far with its id (atomicMin), so whichever thread comes first, in the end
// it holds the first position: the racy insertion order leaves no trace. Holding positions, the table needs no id as a mark
// for "empty". At most half of the slots are used.

#pragma once

#include "random.cuh"

namespace core {

constexpr u64 empty_slot = ~0ull;

// slot_of[i] = the table slot of ids[i]. `table` holds `capacity` (a power of two, at least 2 * num_ids) empty slots.
template <class I>
__global__ void __launch_bounds__(block_threads, min_blocks)
    insert_ids(const I* ids, u64* table, i64* slot_of, i64 num_ids, i64 capacity) {
    i64 i = global_thread();
    if (i >= num_ids) return;
    I id = ids[i];
    u64 last = u64(capacity) - 1;
    for (u64 slot = mix64(u64(i64(id))) & last;; slot = (slot + 1) & last) {
        u64 held = atomicCAS(&table[slot], empty_slot, u64(i));
        if (held != empty_slot && ids[held] != id) continue;
        if (held != empty_slot && held > u64(i)) atomicMin(&table[slot], u64(i));
        slot_of[i] = i64(slot);
        return;
    }
}

// is_first[i] = 1 where ids[i] is seen for the first time.
__global__ void __launch_bounds__(block_threads, min_blocks) mark_first(const u64* table, const i64* slot_of, i32* is_first, i64 num_ids) {
    i64 i = global_thread();
    if (i < num_ids) is_first[i] = table[slot_of[i]] == u64(i);
}

// `rank` is the inclusive running sum of is_first: the first of its kind at i becomes number rank[i] - 1.
template <class I>
__global__ void __launch_bounds__(block_threads, min_blocks)
    number_ids(const I* ids, const u64* table, const i64* slot_of, const i64* rank, I* unique, i64* local, i64 num_ids) {
    i64 i = global_thread();
    if (i >= num_ids) return;
    u64 first = table[slot_of[i]];
    local[i] = rank[first] - 1;
    if (first == u64(i)) unique[rank[i] - 1] = ids[i];
}

}  // namespace core

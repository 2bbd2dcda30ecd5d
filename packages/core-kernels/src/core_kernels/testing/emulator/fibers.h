// A thread block run by one CPU thread: every CUDA thread is a fiber with its own stack.
//
// A fiber runs until it must wait (barrier, warp collective) or returns; then the scheduler picks another one, in an order
// shuffled anew for every block and round. A wait ends when the threads it names have arrived, counted among the *live*
// ones: threads that returned early are not waited for. When no fiber can run and some have not returned, the block is
// stuck, which is an error and not a hang.
//
// Callers may not assume that a data race shows itself: the fibers are sequentially consistent and switch only where they
// wait. Running the same launch in two thread orders and comparing the results is what makes an order dependence visible.

#pragma once

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

struct uint3 {
    unsigned x, y, z;
};
typedef uint3 dim3;

static uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

namespace emulator {

const int max_threads = 1024;
const int max_meetings = 16;
#if defined(__SANITIZE_ADDRESS__)
const size_t stack_bytes = 256 << 10;
#else
const size_t stack_bytes = 64 << 10;
#endif

// Threads that wait for each other: those of `mask` in one warp, or (mask 0) the whole block.
struct Meeting {
    unsigned mask, arrived, generation;
    int num_arrived, kind;
    uint64_t given[32], result[32];
    int votes, result_votes;
};

struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    char* stack;
    void* fake_stack;
    bool started, finished;
    const unsigned* awaited;  // ready to run when null or when *awaited has moved on from `seen`
    unsigned seen;
};

static Fiber fibers[max_threads];
static Meeting block_meeting, warp_meetings[max_threads / 32][max_meetings];
static int num_meetings[max_threads / 32];
static unsigned live_lanes[max_threads / 32];
static int num_threads, num_live, current;
static ucontext_t scheduler_context;
static jmp_buf scheduler_resume;
static void* scheduler_fake_stack;
static const void* scheduler_stack;
static size_t scheduler_stack_bytes;
static void (*kernel_body)(void**);
static void** kernel_arguments;
static char failure[400];
static uint64_t shuffle_state;

inline uint64_t next_random() {
    uint64_t z = (shuffle_state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

inline void shuffle(int* order, int count) {
    for (int i = count - 1; i > 0; --i) {
        int j = int(next_random() % uint64_t(i + 1)), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

// ---- switching between the scheduler and the fibers -------------------------------------------------------------------

#if defined(__SANITIZE_ADDRESS__)
inline void leave_fiber() {
    Fiber& self = fibers[current];
    __sanitizer_start_switch_fiber(&self.fake_stack, scheduler_stack, scheduler_stack_bytes);
    swapcontext(&self.context, &scheduler_context);
    __sanitizer_finish_switch_fiber(fibers[current].fake_stack, &scheduler_stack, &scheduler_stack_bytes);
}

inline void enter_fiber(Fiber& fiber) {
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, stack_bytes);
    swapcontext(&scheduler_context, &fiber.context);
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
}
#else
// After its first entry a fiber is switched by setjmp, which unlike swapcontext makes no system call.
inline void leave_fiber() {
    if (!_setjmp(fibers[current].resume)) _longjmp(scheduler_resume, 1);
}

inline void enter_fiber(Fiber& fiber) {
    if (_setjmp(scheduler_resume)) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}
#endif

inline void fail(const char* what, unsigned detail) {
    if (!failure[0])
        snprintf(failure, sizeof failure, "block (%u, %u, %u), thread %d: %s (0x%x)", blockIdx.x, blockIdx.y, blockIdx.z,
                 current, what, detail);
    fibers[current].finished = true;
    for (;;) leave_fiber();  // the scheduler gives the block up and never comes back here
}

// ---- meetings -----------------------------------------------------------------------------------------------------------

inline void complete(Meeting& meeting) {
    memcpy(meeting.result, meeting.given, sizeof meeting.result);
    meeting.result_votes = meeting.votes;
    meeting.arrived = 0;
    meeting.num_arrived = meeting.votes = 0;
    ++meeting.generation;
}

inline void complete_if_all_arrived(Meeting& meeting, int warp) {
    if (!meeting.num_arrived) return;
    bool all = meeting.mask ? meeting.arrived == (meeting.mask & live_lanes[warp]) : meeting.num_arrived == num_live;
    if (all) complete(meeting);
}

inline Meeting& warp_meeting(unsigned mask) {
    int warp = current / 32;
    for (int i = 0; i < num_meetings[warp]; ++i)
        if (warp_meetings[warp][i].mask == mask) return warp_meetings[warp][i];
    if (num_meetings[warp] == max_meetings) fail("more different warp masks in one block than the emulator keeps", mask);
    Meeting& fresh = warp_meetings[warp][num_meetings[warp]++];
    memset(&fresh, 0, sizeof fresh);
    fresh.mask = mask;
    return fresh;
}

inline void wait_for_others(Meeting& meeting, int kind) {
    if (meeting.num_arrived && meeting.kind != kind) fail("threads meet at different collectives; kind", kind);
    meeting.kind = kind;
    ++meeting.num_arrived;
    Fiber& self = fibers[current];
    self.awaited = &meeting.generation;
    self.seen = meeting.generation;
    complete_if_all_arrived(meeting, current / 32);
    leave_fiber();
}

// Gives `value` to the lanes of `mask` and returns the meeting, whose `result` holds what every lane gave.
inline Meeting& meet_warp(unsigned mask, uint64_t value, int kind) {
    int lane = current % 32;
    if (!(mask >> lane & 1)) fail("a lane calls a warp collective whose mask leaves it out", mask);
    Meeting& meeting = warp_meeting(mask);
    meeting.given[lane] = value;
    meeting.arrived |= 1u << lane;
    wait_for_others(meeting, kind);
    return meeting;
}

inline int meet_block(int vote, int kind) {
    block_meeting.votes += vote;
    wait_for_others(block_meeting, kind);
    return block_meeting.result_votes;
}

// ---- the scheduler --------------------------------------------------------------------------------------------------------

inline void run_fiber() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    for (;;) {  // one turn per block: the stack and context are kept
        kernel_body(kernel_arguments);
        int warp = current / 32;
        fibers[current].finished = true;
        live_lanes[warp] &= ~(1u << (current % 32));
        --num_live;
        complete_if_all_arrived(block_meeting, warp);
        for (int i = 0; i < num_meetings[warp]; ++i) complete_if_all_arrived(warp_meetings[warp][i], warp);
        leave_fiber();
    }
}

inline void prepare_fiber(Fiber& fiber) {
    if (!fiber.stack)
        fiber.stack = (char*)mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fiber.started) return;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
#if defined(__SANITIZE_ADDRESS__)
    fiber.started = true;
#endif
}

inline void set_thread(int thread) {
    current = thread;
    threadIdx.x = thread % blockDim.x;
    threadIdx.y = thread / blockDim.x % blockDim.y;
    threadIdx.z = thread / (blockDim.x * blockDim.y);
}

inline void run_block() {
    int order[max_threads];
    memset(&block_meeting, 0, sizeof block_meeting);
    memset(live_lanes, 0, sizeof live_lanes);
    num_live = num_threads;
    for (int thread = 0; thread < num_threads; ++thread) {
        order[thread] = thread;
        prepare_fiber(fibers[thread]);
        fibers[thread].finished = false;
        fibers[thread].awaited = nullptr;
        live_lanes[thread / 32] |= 1u << (thread % 32);
    }
    for (int warp = 0; warp <= (num_threads - 1) / 32; ++warp) num_meetings[warp] = 0;
    while (num_live && !failure[0]) {
        bool ran = false;
        shuffle(order, num_threads);
        for (int i = 0; i < num_threads && !failure[0]; ++i) {
            Fiber& fiber = fibers[order[i]];
            if (fiber.finished || (fiber.awaited && *fiber.awaited == fiber.seen)) continue;
            fiber.awaited = nullptr;
            set_thread(order[i]);
            enter_fiber(fiber);
            ran = true;
        }
        if (!ran && num_live)
            snprintf(failure, sizeof failure, "block (%u, %u, %u) is stuck: %d threads wait for others that never arrive",
                     blockIdx.x, blockIdx.y, blockIdx.z, num_live);
    }
    if (failure[0])
        for (int thread = 0; thread < num_threads; ++thread) fibers[thread].started = false;
}

// Runs blocks [first, first + count) of the grid (as many as there are), in shuffled order, and returns 0, or 1 with
// `message` filled in.
inline int run_grid(void (*body)(void**), void** arguments, const unsigned* grid, const unsigned* block,
                    const uint64_t* window, uint64_t seed, char* message, int message_bytes) {
    num_threads = int(block[0] * block[1] * block[2]);
    if (num_threads < 1 || num_threads > max_threads) {
        snprintf(message, message_bytes, "a block has %d threads, outside [1, %d]", num_threads, max_threads);
        return 1;
    }
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    kernel_body = body;
    kernel_arguments = arguments;
    failure[0] = 0;
    shuffle_state = seed;
    const uint64_t in_grid = uint64_t(grid[0]) * grid[1] * grid[2], first = window[0] < in_grid ? window[0] : in_grid;
    const uint64_t num_blocks = window[1] < in_grid - first ? window[1] : in_grid - first;
    int* order = (int*)malloc(num_blocks * sizeof(int));
    for (uint64_t i = 0; i < num_blocks; ++i) order[i] = int(i);
    shuffle(order, int(num_blocks));
    for (uint64_t i = 0; i < num_blocks && !failure[0]; ++i) {
        const uint64_t number = first + uint64_t(order[i]);
        blockIdx = {unsigned(number % grid[0]), unsigned(number / grid[0] % grid[1]), unsigned(number / grid[0] / grid[1])};
        run_block();
    }
    free(order);
    snprintf(message, message_bytes, "%s", failure);
    return failure[0] ? 1 : 0;
}

}  // namespace emulator

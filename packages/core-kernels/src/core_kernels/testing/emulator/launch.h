// Calls a kernel of any signature with arguments given as an array of pointers, as cuLaunchKernel does.
//
// Every parameter is a pointer or a 64-bit scalar, so the caller cannot get a width wrong.

#pragma once

#include "device.h"

namespace emulator {

template <int... I>
struct Positions {};
template <int N, int... I>
struct CountTo : CountTo<N - 1, N - 1, I...> {};
template <int... I>
struct CountTo<0, I...> {
    typedef Positions<I...> type;
};

template <class F, F* kernel>
struct Caller;

template <class... Args, void (*kernel)(Args...)>
struct Caller<void(Args...), kernel> {
    static const int num_arguments = sizeof...(Args);
    static void call(void** arguments) { spread(arguments, typename CountTo<sizeof...(Args)>::type()); }

  private:
    template <int... I>
    static void spread(void** arguments, Positions<I...>) {
        static_assert(((sizeof(Args) == 8) && ...), "kernel parameters are pointers or 64-bit scalars");
        kernel(*(Args*)arguments[I]...);
    }
};

struct Entry {
    const char* name;
    void (*call)(void**);
    int num_arguments;
};

#define EMULATOR_ENTRY(NAME, ...) \
    { NAME, &emulator::Caller<decltype(__VA_ARGS__), &__VA_ARGS__>::call, \
      emulator::Caller<decltype(__VA_ARGS__), &__VA_ARGS__>::num_arguments }

inline int launch(const Entry* entries, int num_entries, const char* name, int num_arguments, void** arguments,
                  const unsigned* grid, const unsigned* block, const uint64_t* window, uint64_t seed, char* message,
                  int message_bytes) {
    for (int i = 0; i < num_entries; ++i) {
        if (strcmp(entries[i].name, name)) continue;
        if (entries[i].num_arguments != num_arguments) {
            snprintf(message, message_bytes, "%s takes %d arguments, got %d", name, entries[i].num_arguments, num_arguments);
            return 1;
        }
        return run_grid(entries[i].call, arguments, grid, block, window, seed, message, message_bytes);
    }
    snprintf(message, message_bytes, "no kernel named %s", name);
    return 1;
}

}  // namespace emulator

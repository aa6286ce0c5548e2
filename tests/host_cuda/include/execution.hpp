// How a kernel runs on the CPU.
//
// The threads of a block are fibers of one thread, switched only where CUDA threads can wait for
// each other: barriers and warp collectives. Blocks run one after another. Before each block its
// shared memory is filled with NaN. The order in which the fibers of a block run is the caller's
// choice, so that a result that depends on it (a missing barrier) shows. A barrier or warp
// collective that some of its threads never reach, or reach at another line, is an error, not a
// hang.
#pragma once

using size_t = decltype(sizeof(0));

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace cuda_on_host {

// What every kernel sees of the running thread; the scheduler sets them at each switch.
extern uint3 thread_index, block_index;
extern dim3 block_shape, grid_shape;

void* dynamic_shared();
void block_barrier(int line);
// Waits for the lanes of `mask`, then returns the 8-byte payloads of the warp's 32 lanes.
const unsigned long long* exchange(unsigned mask, unsigned long long payload, int line);
unsigned lane();
unsigned present_lanes();
void fail(const char* message);
// Waits until all others have run as far as they can.
void poll();

using Launch = void (*)(const void* parameters);

template <typename T>
inline unsigned long long pack(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    unsigned long long payload = 0;
    __builtin_memcpy(&payload, &value, sizeof(T));
    return payload;
}

template <typename T>
inline T shuffle(unsigned mask, T value, unsigned source, int line) {
    const unsigned long long* payloads = exchange(mask, pack(value), line);
    if (!(mask & present_lanes() & (1u << source)))
        fail("a shuffle reads a lane that does not take part");
    T result;
    __builtin_memcpy(&result, &payloads[source], sizeof(T));
    return result;
}

template <typename Parameters>
inline void call(void (*kernel)(Parameters), const void* parameters) {
    kernel(*static_cast<const Parameters*>(parameters));
}

}  // namespace cuda_on_host

// Barriers in shared memory (mbarrier), named barriers and register shares of sm_90.
//
// Addresses of shared memory are 32-bit, in the shared window.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

// ------------------------------------------------------------------------------ mbarrier

// A barrier of `count` arrivals a phase; `fence_barriers` makes it known to the copy engine.
__device__ __forceinline__ void barrier_begin(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase wait for `bytes` of copies too.
__device__ __forceinline__ void barrier_arrive_expecting(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Waits for the end of the phase of this parity; that before the first phase has parity 1.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra end;\n"
        "bra retry;\n"
        "end:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Where a ring of stages is read or written. One number: registers are for the accumulators.
template <int kStages>
struct Ring {
    int turn;  // 0..2 * kStages - 1

    __device__ __forceinline__ int stage() const { return turn < kStages ? turn : turn - kStages; }
    // Of the phase to wait for.
    __device__ __forceinline__ unsigned parity() const { return turn < kStages ? 0 : 1; }
    __device__ __forceinline__ void advance(int stages = 1) {
        turn += stages;
        turn = turn >= 2 * kStages ? turn - 2 * kStages : turn;
    }
};

// -------------------------------------------------------------------------- named barriers

// Barrier `id` of the block, 1..15, among `threads` threads of those that come.
__device__ __forceinline__ void named_barrier_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ----------------------------------------------------------------------- between blocks

// A number in global memory by which blocks follow one another. Who passes the turn on has done
// what it had to do in memory before.
__device__ __forceinline__ unsigned read_turn(const unsigned* turn) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(turn) : "memory");
    return x;
}
__device__ __forceinline__ void pass_turn(unsigned* turn) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory");
}

// ------------------------------------------------------------------------------- registers

// Moves registers between the warpgroups of a block. They come from what the block was launched
// with: to ask for more than others have given back is to wait for ever.
template <int kCount>
__device__ __forceinline__ void give_back_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace cuflash

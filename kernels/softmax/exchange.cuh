// What the warps of a row tell each other, in all blocks of a cluster (sm_90).
//
// Every warp writes its value to the shared memory of every block of the cluster, where the bytes
// count at a barrier: no warp waits for another but for what it has to say, and none twice a row.
#pragma once

#include "lib/ptx_barrier.cuh"
#include "lib/ptx_cluster.cuh"
#include "lib/ptx_mma.cuh"
#include "softmax/backward.cuh"

namespace cuflash {

template <typename A>
__device__ __forceinline__ void send(const OnlineSoftmax<A>& value, unsigned to, unsigned barrier) {
    cluster_send(to, value.m, value.l, barrier);
}
template <typename A>
__device__ __forceinline__ void send(const Sum<A>& value, unsigned to, unsigned barrier) {
    cluster_send(to, value.total, value.occupied, barrier);
}

// All lanes' values as one, known to all: unrolled, as a row costs each of its warps several.
template <typename V, typename Combine>
__device__ __forceinline__ V of_warp(V value, Combine combine) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) value = combine(value, shuffle_xor(value, bit));
    return value;
}

template <typename V, int kWarps, int kBlocks>
class Exchange {
  public:
    // Warps of a row.
    static constexpr int kCount = kWarps * kBlocks;

    // All threads, with 128-byte aligned memory. A block may write to another only once that one
    // runs and has made its barriers.
    __device__ __forceinline__ explicit Exchange(unsigned char* memory)
        : rank_(kBlocks > 1 ? cluster_rank() : 0), memory_(memory) {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int turn = 0; turn < 2; ++turn) {
                barrier_begin(barrier(turn), 1);
                barrier_arrive_expecting(barrier(turn), kCount * int(sizeof(V)));
            }
            fence_barriers();
        }
        if constexpr (kBlocks > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
    }

    // The number of this warp.
    __device__ __forceinline__ int number() const { return rank_ * kWarps + threadIdx.x / 32; }

    __device__ __forceinline__ unsigned char* memory_end() const {
        return memory_ + (16 + 2 * kCount * int(sizeof(V)) + 127) / 128 * 128;
    }

    // Sends this warp's value and returns those of all, once they are here. Two buffers take turns:
    // who sends for the next but one has read what all sent for the next one, and they had read.
    __device__ __forceinline__ const V* gather(const V& value) {
        V* values = reinterpret_cast<V*>(memory_ + 16) + turn_ * kCount;
        const int lane = threadIdx.x % 32;
        if (lane < kBlocks)
            send(value, cluster_address(values + number(), lane),
                 cluster_address(memory_ + 8 * turn_, lane));
        barrier_wait(barrier(turn_), parity_);
        if (threadIdx.x == 0) barrier_arrive_expecting(barrier(turn_), kCount * int(sizeof(V)));
        parity_ ^= turn_;
        turn_ ^= 1;
        return values;
    }

    // Calls visit(value) for this lane's share of the values.
    template <typename Visit>
    static __device__ __forceinline__ void for_each(const V* values, Visit visit) {
#pragma unroll
        for (int first = 0; first < kCount; first += 32) {
            const int i = first + threadIdx.x % 32;
            if (kCount % 32 == 0 || i < kCount) visit(values[i]);
        }
    }

  private:
    int rank_;
    unsigned char* memory_;
    int turn_ = 0, parity_ = 0;

    __device__ __forceinline__ unsigned barrier(int turn) const {
        return shared_address(memory_ + 8 * turn);
    }
};

}  // namespace cuflash

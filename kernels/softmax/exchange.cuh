// What the warps of a row tell each other, in all blocks of a cluster (sm_90), and which rows are
// theirs.
//
// Every warp writes its value to the shared memory of every block of the cluster, where the bytes
// count at a barrier: no warp waits for another but for what it has to say, and none twice a row.
//
// Rows are dealt out one by one, as clusters come to their ends: some multiprocessors get a third
// more of the memory's rate than others, and with as many rows for each they are done, and idle, in
// three quarters of the time. A cluster knows kKnown rows, from the one it works on: its first
// ones, in steps of the clusters, then one more by each exchange, along with the values.
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

constexpr int kKnown = 3;

template <typename V, int kWarps, int kBlocks>
class Exchange {
  public:
    // Warps of a row.
    static constexpr int kCount = kWarps * kBlocks;

    // All threads, with 128-byte aligned memory, and a number in global memory that is 0 before the
    // launch. A block may write to another only once that one runs and has made its barriers. (A
    // rank that is known to be 0 has ptxas spill where it does not otherwise.)
    __device__ __forceinline__ Exchange(unsigned char* memory, int* dealt)
        : rank_(kBlocks > 1 ? cluster_rank() : int(here(0))), memory_(memory), dealt_(dealt) {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int turn = 0; turn < 2; ++turn) {
                barrier_begin(barrier(turn), 1);
                barrier_arrive_expecting(barrier(turn), kBytes);
            }
            fence_barriers();
#pragma unroll
            for (int i = 0; i < kKnown; ++i) row_at(i) = blockIdx.x / kBlocks + i * clusters();
        }
        deal();
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
        return memory_ + (kHead + 2 * kCount * int(sizeof(V)) + 127) / 128 * 128;
    }

    // The number of row i of this cluster, one of those that are known; past the end there are
    // none.
    __device__ __forceinline__ int row(int i) const { return row_at(i); }

    // Sends this warp's value of row i and returns those of all, once they are here: then row
    // i + kKnown is known. Two buffers take turns: who sends for the next but one has read what all
    // sent for the next one, and they had read.
    __device__ __forceinline__ const V* gather(const V& value, int i) {
        return gather_by(i, [&](V* own, unsigned char* barrier) {
            const int block = threadIdx.x % 32;
            if (block < kBlocks)
                send(value, cluster_address(own, block), cluster_address(barrier, block));
        });
    }
    // The same where `tell(place of this warp's value, barrier)` sends it, to all blocks.
    template <typename Tell>
    __device__ __forceinline__ const V* gather_by(int i, Tell tell) {
        const int turn = i % 2, lane = threadIdx.x % 32;
        V* values = reinterpret_cast<V*>(memory_ + kHead) + turn * kCount;
        tell(values + number(), memory_ + 8 * turn);
        if (number() == 0) {
            const int next = kKnown * clusters() + __shfl_sync(kFullWarp, next_, 0);
            if (lane < kBlocks)
                cluster_send(cluster_address(&row_at(i + kKnown), lane), next,
                             cluster_address(memory_ + 8 * turn, lane));
            deal();
        }
        barrier_wait(barrier(turn), i / 2 % 2);
        if (threadIdx.x == 0) barrier_arrive_expecting(barrier(turn), kBytes);
        return values;
    }

    // Calls visit(value) for this lane's share of the values: two at a time, as registers are all
    // taken by the row, or four of float64, where the latency of each would tell.
    template <typename Visit>
    static __device__ __forceinline__ void for_each(const V* values, Visit visit) {
#pragma unroll(sizeof(V) == 16 && kCount <= 128 ? 4 : 2)
        for (int first = 0; first < kCount; first += 32) {
            const int i = first + threadIdx.x % 32;
            if (kCount % 32 == 0 || i < kCount) visit(values[i]);
        }
    }

  private:
    // [a barrier for each turn][numbers of rows][values, in two turns]
    static constexpr int kHead = 16 + 4 * (kKnown + 1), kBytes = kCount * int(sizeof(V)) + 4;

    int rank_;
    unsigned char* memory_;
    int* dealt_;
    int next_ = 0;  // of thread 0: rows dealt out before the one to be told

    __device__ __forceinline__ unsigned barrier(int turn) const {
        return shared_address(memory_ + 8 * turn);
    }
    static __device__ __forceinline__ int clusters() { return gridDim.x / kBlocks; }
    // A place more than rows are known: who is told another has done with the one before its own.
    __device__ __forceinline__ int& row_at(int i) const {
        return reinterpret_cast<int*>(memory_ + 16)[i % (kKnown + 1)];
    }
    // Asks one exchange ahead, so that nobody waits for the answer.
    __device__ __forceinline__ void deal() {
        if (rank_ == 0 && threadIdx.x == 0) next_ = atomicAdd(dealt_, 1);
    }
};

}  // namespace cuflash

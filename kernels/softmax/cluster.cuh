// The blocks of a cluster: what they send to each other, and how their teams unite.
#pragma once

#include "lib/ptx_cluster.cuh"
#include "softmax/backward.cuh"

namespace cuflash {

// Writes a value where it lies at `place` in this block, in the block `rank`.
template <typename A>
__device__ __forceinline__ void send(const OnlineSoftmax<A>& value, OnlineSoftmax<A>* place,
                                     int rank) {
    const unsigned to = cluster_address(place, rank);
    cluster_store(to, value.m);
    cluster_store(to + int(sizeof(A)), value.l);
}
__device__ __forceinline__ void send(float value, float* place, int rank) {
    cluster_store(cluster_address(place, rank), value);
}
__device__ __forceinline__ void send(double value, double* place, int rank) {
    cluster_store(cluster_address(place, rank), value);
}
template <typename A>
__device__ __forceinline__ void send(const Sum<A>& value, Sum<A>* place, int rank) {
    const unsigned to = cluster_address(place, rank);
    cluster_store(to, value.total);
    cluster_store(to + int(sizeof(A)), value.occupied);
}

template <int kBlocks>
struct Cluster {
    static constexpr bool kGather = true;

    // A block may write to another only once that one runs.
    __device__ __forceinline__ explicit Cluster(const SoftmaxParameters&) { cluster_arrive(); }

    __device__ __forceinline__ int count() const { return kBlocks; }
    __device__ __forceinline__ int rank() const { return cluster_rank(); }

    // Gives each lane of a warp the value of the block whose rank is the lane's number. As in a
    // team's exchange, two buffers take turns.
    template <typename V>
    __device__ __forceinline__ V gather(const V& value) {
        __shared__ V received[2][kBlocks];
        if (!started_) {
            cluster_wait();
            started_ = true;
        }
        turn_ ^= 1;
        if (threadIdx.x < kBlocks) send(value, &received[turn_][rank()], threadIdx.x);
        cluster_arrive();
        cluster_wait();
        return received[turn_][threadIdx.x % kBlocks];
    }

    // Nobody may leave before all have been heard.
    __device__ __forceinline__ ~Cluster() {
        if (!started_) cluster_wait();
    }

  private:
    bool started_ = false;
    int turn_ = 0;
};

}  // namespace cuflash

// Pairs of accumulators sent from one block of a cluster to another.
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
template <typename A>
__device__ __forceinline__ void send(const Sum<A>& value, Sum<A>* place, int rank) {
    const unsigned to = cluster_address(place, rank);
    cluster_store(to, value.total);
    cluster_store(to + int(sizeof(A)), value.occupied);
}

}  // namespace cuflash

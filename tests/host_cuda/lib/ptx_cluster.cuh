// kernels/lib/ptx_cluster.cuh where there are no clusters: what is there for kernels of one block.
#pragma once

#include "lib/ptx_barrier.cuh"

#define CUFLASH_CLUSTERS(blocks)

namespace cuflash {

inline int cluster_rank() {
    cuda_on_host::fail("there are no clusters here");
    return 0;
}
inline void cluster_arrive() {
    cluster_rank();
}
inline void cluster_wait() {
    cluster_rank();
}
inline unsigned cluster_address(const void* pointer, int rank) {
    return rank ? cluster_rank() : shared_address(pointer);
}
template <typename A>
void cluster_store(unsigned, A) {
    cluster_rank();
}
inline float2 cluster_load_pair(unsigned address) {
    cluster_rank();
    return {};
}
inline float4 cluster_load_four(unsigned address) {
    cluster_rank();
    return {};
}
inline void cluster_send(unsigned address, int a, unsigned barrier) {
    shared_at<int>(address) = a;
    shared_at<Barrier>(barrier).bytes_left -= int(sizeof(int));
}
template <typename A>
void cluster_send(unsigned address, A a, A b, unsigned barrier) {
    (&shared_at<A>(address))[0] = a;
    (&shared_at<A>(address))[1] = b;
    shared_at<Barrier>(barrier).bytes_left -= 2 * int(sizeof(A));
}

}  // namespace cuflash

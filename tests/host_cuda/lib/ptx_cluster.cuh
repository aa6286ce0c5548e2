// kernels/lib/ptx_cluster.cuh where there are no clusters: what is there for kernels of one block.
#pragma once

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
inline unsigned cluster_address(const void*, int) {
    return cluster_rank();
}
template <typename A>
void cluster_store(unsigned, A) {
    cluster_rank();
}

}  // namespace cuflash

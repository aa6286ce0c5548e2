// Thread-block clusters (sm_90): ranks, barriers, writes to the shared memory of other blocks.
#pragma once

// Of a kernel: the blocks of its clusters, one by one where there are none.
#if __CUDA_ARCH__ >= 900
#define CUFLASH_CLUSTERS(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CUFLASH_CLUSTERS(blocks)
#endif

namespace cuflash {

// The number of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of a cluster arrive, then wait; what one wrote before is seen by all after.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in the cluster's shared memory, of what lies at `pointer` in the block `rank`.
__device__ __forceinline__ unsigned cluster_address(const void* pointer, int rank) {
    unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(pointer)), remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    return remote;
}
__device__ __forceinline__ void cluster_store(unsigned address, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void cluster_store(unsigned address, double value) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
}

// Reads two or four numbers, aligned to all of them.
__device__ __forceinline__ float2 cluster_load_pair(unsigned address) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ float4 cluster_load_four(unsigned address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// Starts to write one number or two at `address`, aligned to all of them; their bytes count at
// `barrier` of the same block.
__device__ __forceinline__ void cluster_send(unsigned address, int a, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
            address),
        "r"(a), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void cluster_send(unsigned address, float a, float b, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(address),
        "f"(a), "f"(b), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void cluster_send(unsigned address, double a, double b,
                                             unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, [%3];" ::
            "r"(address),
        "d"(a), "d"(b), "r"(barrier)
        : "memory");
}

}  // namespace cuflash

// Softmax and its gradients of rows that one thread-block cluster holds on chip (sm_90): as `fused`
// and `reduced_vjp`, two trips to memory and three, for rows of up to 16 blocks' registers.
//
// The lanes of a row are all threads of a cluster. A block unites its warps as ever and then writes
// the result to the shared memory of each of the others: one cluster barrier a row.
//
// kChunks > 0: every lane holds that many 16-byte chunks in registers. kChunks = 0: in dynamic
// shared memory (softmax), or reads them twice (gradients).
// Grid: clusters of kBlocks blocks of one team, each cluster row by row. Dynamic shared memory: as
// in fused.cu.
#include "softmax/cluster.cuh"
#include "softmax/fused.cuh"

namespace cuflash {

template <typename T, typename Operation, Layout kLayout, int kChunks, int kBlocks>
__global__ void CUFLASH_CLUSTERS(kBlocks) __launch_bounds__(kMaxThreads, kMinBlocks<kChunks>)
    cluster(const __grid_constant__ SoftmaxParameters p) {
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    softmax_of_held<T, Operation, kLayout, kChunks, Cluster<kBlocks>>(p, memory);
}

template <typename T, typename Gradient, Layout kLayout, int kChunks, int kBlocks>
__global__ void CUFLASH_CLUSTERS(kBlocks)
    __launch_bounds__(kMaxThreads, kMinBlocksOfPairs<T, kChunks>)
        cluster_vjp(const __grid_constant__ SoftmaxParameters p) {
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    vjp_of_rows<T, Gradient, kLayout, kChunks, Cluster<kBlocks>>(p, memory);
}

}  // namespace cuflash

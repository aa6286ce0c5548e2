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

// Tiles of rows that lie side by side in memory: loads, stores, and the union of their states.
#pragma once

#include "softmax/cluster.cuh"
#include "softmax/result.cuh"

namespace cuflash {

template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<4> {
    using type = unsigned;
};
template <>
struct WordsOf<8> {
    using type = uint2;
};

// One column of kRows neighbouring rows, moved by one instruction: `Vector` is of neighbouring
// columns, and here each row costs a state.
template <typename T, int kRows>
struct alignas(kRows * sizeof(T)) Bundle {
    T element[kRows];
};
template <typename T, int kRows>
__device__ __forceinline__ Bundle<T, kRows> load_bundle(const T* source, bool present, T fill) {
    using Words = typename WordsOf<kRows * sizeof(T)>::type;
    Bundle<T, kRows> filled;
#pragma unroll
    for (int v = 0; v < kRows; ++v) filled.element[v] = fill;
    Words words = bytes_as<Words>(filled);
    if (present) words = __ldcs(reinterpret_cast<const Words*>(source));
    return bytes_as<Bundle<T, kRows>>(words);
}
template <typename T, int kRows>
__device__ __forceinline__ void store_bundle(T* target, const Bundle<T, kRows>& value) {
    using Words = typename WordsOf<kRows * sizeof(T)>::type;
    __stcs(reinterpret_cast<Words*>(target), bytes_as<Words>(value));
}

// The union of `count` values, `step` apart.
template <typename A>
__device__ __forceinline__ OnlineSoftmax<A> unite_all(const OnlineSoftmax<A>* first, int step,
                                                      int count) {
    OnlineSoftmax<A> state = OnlineSoftmax<A>::identity();
#pragma unroll 4
    for (int i = 0; i < count; ++i) state.m = maximum(state.m, first[i * step].m);
#pragma unroll 4
    for (int i = 0; i < count; ++i) state.l = add(state.l, first[i * step].relative_to(state.m));
    return state;
}
template <typename A>
__device__ __forceinline__ Sum<A> unite_all(const Sum<A>* first, int step, int count) {
    Sum<A> sum{A(0), A(0)};
#pragma unroll 4
    for (int i = 0; i < count; ++i) sum = Sum<A>{}(sum, first[i * step]);
    return sum;
}
// The union with the value of the lane whose number differs in one bit.
template <typename A>
__device__ __forceinline__ OnlineSoftmax<A> unite_with(const OnlineSoftmax<A>& state, int bit) {
    const A m = maximum(state.m, shuffle_xor(state.m, bit)), l = state.relative_to(m);
    return {m, add(l, shuffle_xor(l, bit))};
}
template <typename A>
__device__ __forceinline__ Sum<A> unite_with(const Sum<A>& sum, int bit) {
    return Sum<A>{}(sum, shuffle_xor(sum, bit));
}

// The rows and columns of one thread. A tile is kWidth bundles of rows; the lanes of a block, and
// those of all kBlocks of its cluster, share its columns: column c belongs to lane c % lanes.
// `State` is what a thread knows of a row. `memory`: 2 * (warps + kBlocks) * kWidth * kRows of it.
template <typename State, int kRows, int kWidth, int kBlocks>
class Tiles {
    static constexpr int kTile = kRows * kWidth;

  public:
    __device__ __forceinline__ explicit Tiles(State* memory) : memory_(memory) {
        if constexpr (kBlocks > 1) {  // a block may write to another only once that one runs
            cluster_arrive();
            cluster_wait();
        }
    }
    static __device__ __forceinline__ int rank() {
        if constexpr (kBlocks > 1) return cluster_rank();
        return 0;
    }
    __device__ __forceinline__ int lanes() const { return blockDim.x / kWidth * kBlocks; }
    __device__ __forceinline__ int lane() const {
        return threadIdx.x / kWidth + rank() * (blockDim.x / kWidth);
    }

    // Calls visit(first row of this thread's bundle, whether it is there), tile by tile.
    template <typename Visit>
    __device__ __forceinline__ void for_each(const SoftmaxParameters& p, Visit visit) const {
        const int64 bundles = p.rows / kRows, tiles = (bundles + kWidth - 1) / kWidth;
        for (int64 tile = blockIdx.x / kBlocks; tile < tiles; tile += gridDim.x / kBlocks) {
            const int64 bundle = tile * kWidth + threadIdx.x % kWidth;
            visit(bundle < bundles ? bundle * kRows : 0, bundle < bundles);
        }
    }

    // Unites the states of all lanes: of those in a warp, then of the warps, then of the blocks.
    // Two buffers take turns, as in `Team`. To be called by all threads.
    __device__ __forceinline__ void unite(State (&state)[kRows]) {
        const int at = threadIdx.x % kWidth * kRows, warps = blockDim.x / 32;
#pragma unroll
        for (int bit = kWidth; bit < 32; bit *= 2)
#pragma unroll
            for (int v = 0; v < kRows; ++v) state[v] = unite_with(state[v], bit);
        turn_ ^= 1;
        State* of_warps = memory_ + turn_ * (warps + kBlocks) * kTile;
        if (warps > 1) {
            if (threadIdx.x % 32 < kWidth) {
#pragma unroll
                for (int v = 0; v < kRows; ++v)
                    of_warps[threadIdx.x / 32 * kTile + at + v] = state[v];
            }
            __syncthreads();
#pragma unroll
            for (int v = 0; v < kRows; ++v) state[v] = unite_all(of_warps + at + v, kTile, warps);
        }
        if constexpr (kBlocks > 1) {
            State* of_blocks = of_warps + warps * kTile;
            for (int to = threadIdx.x / kWidth; to < kBlocks; to += blockDim.x / kWidth) {
#pragma unroll
                for (int v = 0; v < kRows; ++v)
                    send(state[v], of_blocks + rank() * kTile + at + v, to);
            }
            cluster_arrive();
            cluster_wait();
#pragma unroll
            for (int v = 0; v < kRows; ++v)
                state[v] = unite_all(of_blocks + at + v, kTile, kBlocks);
        }
    }

  private:
    State* memory_;
    int turn_ = 0;
};

// How many of the columns lane, lane + lanes, lane + 2 * lanes, ... there are.
__device__ __forceinline__ int columns_of_lane(int64 columns, int lane, int lanes) {
    return int((columns - lane + lanes - 1) / lanes);
}

}  // namespace cuflash

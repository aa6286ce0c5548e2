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
// Row v of a bundle, from whole words: the compiler would keep 16-bit elements in a register each.
template <typename T, int kRows>
__device__ __forceinline__ Accumulator<T> widened(const Bundle<T, kRows>& bundle, int v) {
    return widen(bundle.element[v]);
}
template <int kRows>
__device__ __forceinline__ float widened(const Bundle<__nv_bfloat16, kRows>& bundle, int v) {
    struct Words {
        unsigned word[kRows / 2];
    };
    const unsigned word = bytes_as<Words>(bundle).word[v / 2];
    return __uint_as_float(v % 2 ? word & 0xffff0000u : word << 16);
}
template <int kRows>
__device__ __forceinline__ float widened(const Bundle<__half, kRows>& bundle, int v) {
    struct Words {
        unsigned word[kRows / 2];
    };
    const unsigned word = bytes_as<Words>(bundle).word[v / 2];
    return widen(bytes_as<__half>(static_cast<unsigned short>(v % 2 ? word >> 16 : word)));
}
// The larger element of each row; of 16 bits two at a time, without widening them.
template <typename T, int kRows>
__device__ __forceinline__ Bundle<T, kRows> larger(const Bundle<T, kRows>& a,
                                                   const Bundle<T, kRows>& b) {
    Bundle<T, kRows> result;
#pragma unroll
    for (int v = 0; v < kRows; ++v) result.element[v] = maximum(a.element[v], b.element[v]);
    return result;
}
template <typename Two, typename Few>
__device__ __forceinline__ Few larger_pairs(const Few& a, const Few& b) {
    struct Pairs {
        Two pair[sizeof(Few) / 4];
    };
    const Pairs as = bytes_as<Pairs>(a), bs = bytes_as<Pairs>(b);
    Pairs result;
#pragma unroll
    for (int i = 0; i < int(sizeof(Few) / 4); ++i) result.pair[i] = __hmax2(as.pair[i], bs.pair[i]);
    return bytes_as<Few>(result);
}
template <int kRows>
__device__ __forceinline__ Bundle<__half, kRows> larger(const Bundle<__half, kRows>& a,
                                                        const Bundle<__half, kRows>& b) {
    return larger_pairs<__half2>(a, b);
}
template <int kRows>
__device__ __forceinline__ Bundle<__nv_bfloat16, kRows> larger(
    const Bundle<__nv_bfloat16, kRows>& a, const Bundle<__nv_bfloat16, kRows>& b) {
    return larger_pairs<__nv_bfloat162>(a, b);
}
// The largest element of each row of several bundles, -inf where all are NaN.
template <typename T, int kRows, int kCount>
__device__ __forceinline__ Bundle<T, kRows> largest_of(const Bundle<T, kRows> (&bundles)[kCount]) {
    Bundle<T, kRows> top;
#pragma unroll
    for (int v = 0; v < kRows; ++v) top.element[v] = lowest<T>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) top = larger(top, bundles[i]);
    return top;
}
template <typename T, int kRows, bool kOnce = true>
__device__ __forceinline__ Bundle<T, kRows> load_bundle(const T* source, bool present, T fill) {
    using Words = typename WordsOf<kRows * sizeof(T)>::type;
    Bundle<T, kRows> filled;
#pragma unroll
    for (int v = 0; v < kRows; ++v) filled.element[v] = fill;
    Words words = bytes_as<Words>(filled);
    if (present) {
        const Words* from = reinterpret_cast<const Words*>(source);
        words = kOnce ? __ldcs(from) : *from;
    }
    return bytes_as<Bundle<T, kRows>>(words);
}
template <typename T, int kRows>
__device__ __forceinline__ void store_bundle(T* target, const Bundle<T, kRows>& value) {
    using Words = typename WordsOf<kRows * sizeof(T)>::type;
    __stcs(reinterpret_cast<Words*>(target), bytes_as<Words>(value));
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

    // Unites the states of all lanes. To be called by all threads.
    template <typename A>
    __device__ __forceinline__ void unite(OnlineSoftmax<A> (&state)[kRows]) {
        // The maximum first: one exponential a lane, where uniting states pair by pair takes one
        // for each.
        A m[kRows], l[kRows];
#pragma unroll
        for (int v = 0; v < kRows; ++v) m[v] = state[v].m;
        reduce<!kTogether>(m, Maximum{});
#pragma unroll
        for (int v = 0; v < kRows; ++v) l[v] = state[v].relative_to(m[v]);
        reduce<!kTogether>(l, Plus{});
#pragma unroll
        for (int v = 0; v < kRows; ++v) state[v] = {m[v], l[v]};
        if constexpr (kTogether) {
            const OnlineSoftmax<A>* states = exchange(state, of_warps<State>() + warps() * kTile);
#pragma unroll
            for (int v = 0; v < kRows; ++v) state[v] = merge_all(states + v);
        }
    }
    template <typename A>
    __device__ __forceinline__ void unite(Sum<A> (&sum)[kRows]) {
        reduce(sum, Sum<A>{});
    }

  private:
    // Blocks exchange maxima and sums of several rows by one barrier, not two: an exponential for
    // each block costs less. Of one row it does not.
    static constexpr bool kTogether = kBlocks > 1 && kRows > 1;

    State* memory_;
    int turn_ = 0;

    static __device__ __forceinline__ int at() { return threadIdx.x % kWidth * kRows; }
    static __device__ __forceinline__ int warps() { return blockDim.x / 32; }

    // Memory for the values of the warps, then of the blocks. Two buffers take turns, as in `Team`.
    template <typename V>
    __device__ __forceinline__ V* of_warps() {
        static_assert(sizeof(V) <= sizeof(State), "more than an exchange can move");
        turn_ ^= 1;
        return reinterpret_cast<V*>(memory_ + turn_ * (warps() + kBlocks) * kTile);
    }

    // Combines the values of the lanes in a warp, then of the warps, then of the blocks.
    template <bool kOfBlocks = true, typename V, typename Combine>
    __device__ __forceinline__ void reduce(V (&value)[kRows], Combine combine) {
#pragma unroll
        for (int bit = kWidth; bit < 32; bit *= 2)
#pragma unroll
            for (int v = 0; v < kRows; ++v)
                value[v] = combine(value[v], shuffle_xor(value[v], bit));
        V* values = of_warps<V>();
        if (warps() > 1) {
            if (threadIdx.x % 32 < kWidth) {
#pragma unroll
                for (int v = 0; v < kRows; ++v)
                    values[threadIdx.x / 32 * kTile + at() + v] = value[v];
            }
            __syncthreads();
#pragma unroll
            for (int v = 0; v < kRows; ++v)
                value[v] = combine_all(values + at() + v, warps(), combine);
        }
        if constexpr (kOfBlocks && kBlocks > 1) {
            const V* of_blocks = exchange(value, values + warps() * kTile);
#pragma unroll
            for (int v = 0; v < kRows; ++v) value[v] = combine_all(of_blocks + v, kBlocks, combine);
        }
    }

    // Gives this block's values to all blocks, and returns those of block 0, each a tile before the
    // next one's. `memory` is the same in all blocks.
    template <typename V>
    static __device__ __forceinline__ const V* exchange(const V (&value)[kRows], V* memory) {
        for (int to = threadIdx.x / kWidth; to < kBlocks; to += blockDim.x / kWidth) {
#pragma unroll
            for (int v = 0; v < kRows; ++v) send(value[v], memory + rank() * kTile + at() + v, to);
        }
        cluster_arrive();
        cluster_wait();
        return memory + at();
    }

    // Of a row's values, one a warp or block, each a tile after the last.
    template <typename V, typename Combine>
    static __device__ __forceinline__ V combine_all(const V* first, int count, Combine combine) {
        V value = first[0];
#pragma unroll 2
        for (int i = 1; i < count; ++i) value = combine(value, first[i * kTile]);
        return value;
    }
    // The union of a row's states, one a block.
    template <typename A>
    static __device__ __forceinline__ OnlineSoftmax<A> merge_all(const OnlineSoftmax<A>* first) {
        A m = first[0].m, l = 0;
#pragma unroll 2
        for (int i = 1; i < kBlocks; ++i) m = maximum(m, first[i * kTile].m);
#pragma unroll 2
        for (int i = 0; i < kBlocks; ++i) l = add(l, first[i * kTile].relative_to(m));
        return {m, l};
    }
};

// How many of the columns lane, lane + lanes, lane + 2 * lanes, ... there are.
__device__ __forceinline__ int columns_of_lane(int64 columns, int lane, int lanes) {
    return int((columns - lane + lanes - 1) / lanes);
}

}  // namespace cuflash

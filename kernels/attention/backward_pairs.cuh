// What the gradients of attention on float64 and TF32 tensor cores share: operands, and pairs.
//
// Of a tile of pairs the block's own rows are the rows of fragments, be they keys or queries, and
// those that it meets the columns.
#pragma once

#include "attention/backward.cuh"
#include "attention/chunk_tile.cuh"
#include "attention/fragments.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"

namespace cuflash {

// Rows that are read along the features, as FeatureChunks, and down the columns, as ValueChunks.
template <typename T, int kColumns_>
struct CrossedRows {
    static constexpr int kColumns = kColumns_, kChunks = kColumns / kVector<T>;
    static constexpr int kPitch = int(sizeof(T)) * kColumns;

    static __device__ __forceinline__ constexpr int swap(int row) {
        return row / 2 % 4 * 32 ^ row % 2 * 64;
    }
    static __device__ __forceinline__ int at(int row, int chunk) {
        return row * kPitch + (chunk * 16 ^ swap(row));
    }
};

// A thread's pairs: own rows g and g + 8 of each 16, columns 2t and 2t + 1 of each 8 met rows.
template <typename Tile>
using PairFragments = typename Tile::Element[Tile::kRowTiles][Tile::kMetTiles][4];
template <typename Tile, int kTiles>
using SumFragments = typename Tile::Element[Tile::kRowTiles][kTiles][4];

// ------------------------------------------------------------------------------------------ loads

// Starts to copy rows `first`.. of a matrix into a tile, `count` of them: the others, and columns
// from `columns` on, become 0.
template <typename Layout, int kRows, int kThreads, typename T>
__device__ __forceinline__ void start_chunks(unsigned char* tile, const Matrix<const T>& matrix,
                                             int64 first, int64 count, int columns) {
    const int end = int(clamp(count, 0, kRows));
    if (!has_aligned_rows(matrix))
        return copy_to_chunks<Layout, kRows, kThreads>(tile, matrix, first, 0, end, columns);
    const ChunkCopies<Layout, kRows, kThreads, T> copies(tile, matrix, first);
    if (end == kRows && columns == Layout::kColumns)
        copies.start(0, matrix.row_stride);
    else
        copies.start_part(0, matrix.row_stride, 0, end, columns);
}

// The same of rows of k and v, or of q and dout, into tiles one after the other.
template <bool kKeys, typename Tile, int kRows, typename T, typename Score>
__device__ __forceinline__ void start_operands(unsigned char* tiles, const VjpParameters& p,
                                               const VjpWork<T, Score>& block, int64 first) {
    using Rows = typename Tile::Rows;
    const EntryBounds& bounds = block.score.bounds;
    const int64 count = (kKeys ? bounds.keys : bounds.queries) - first;
    start_chunks<Rows, kRows, Tile::kThreads>(tiles, kKeys ? block.k : block.q, first, count,
                                              int(p.features));
    start_chunks<Rows, kRows, Tile::kThreads>(
        tiles + kRows * Rows::kPitch, kKeys ? block.v : block.dout, first, count, int(p.values));
}

// ------------------------------------------------------------------------------------------ pairs

constexpr double kDoubleLog2OfE = 1.4426950408889634;

// What `weight_of` takes of an lse: in double, it in base 2.
__device__ __forceinline__ double state_lse(double lse) {
    return lse * kDoubleLog2OfE;
}
__device__ __forceinline__ float state_lse(float lse) {
    return lse;
}
// exp(score * scale - lse).
__device__ __forceinline__ double weight_of(double score, double scale, double lse) {
    return quick_exp2(multiply_add(score, scale * kDoubleLog2OfE, -lse));
}
// The product is rounded, as lse is: the weight of a row's only key is 1. No weight is larger,
// though scores that are not the forward's, bit for bit, may differ from a large lse by more than
// exponents can bear.
__device__ __forceinline__ float weight_of(float score, float scale, float lse) {
    const float exponent = multiply(add(multiply(score, scale), -lse), kLog2OfE);
    return exp2_approximate(minimum_or_nan(exponent, 0));
}

// What is known of a query, keys counted from `first_key`. A row that is not used, or has no
// weight, sees none of them.
template <typename T, typename Score>
__device__ __forceinline__ QueryState<T> state_of(const VjpWork<T, Score>& block, int64 row,
                                                  int64 first_key) {
    constexpr int kMost = 0x7fffffff;
    QueryState<T> x{0, 0, 0, 0};
    const T lse = block.score.is_used(row) ? block.lse.at(row) : -infinity<T>();
    // Of scores that are all -inf, none has a gradient.
    if (lse == -infinity<T>()) return x;
    // What has a score of +inf has none that is a number.
    x.lse = lse == infinity<T>() ? not_a_number<T>() : state_lse(lse);
    x.delta = block.delta.at(row);
    const KeyRange seen = block.score.range(row);
    x.low = int(clamp(seen.first - first_key, 0, kMost));
    x.high = int(clamp(seen.last + 1 - first_key, x.low, kMost));
    return x;
}

// Whether none of `count` queries sees one of the keys from `key` on, `keys` of them: for a warp.
template <typename T>
__device__ __forceinline__ bool see_nothing(const QueryState<T>* queries, int count, int key,
                                            int keys) {
    bool none = true;
    for (int i = threadIdx.x % 32; i < count; i += 32)
        none &= queries[i].high <= key || queries[i].low >= key + keys;
    return __all_sync(kFullWarp, none);
}

// Whether all of them see all of the keys.
template <typename T>
__device__ __forceinline__ bool see_everything(const QueryState<T>* queries, int count, int key,
                                               int keys) {
    bool all = true;
    for (int i = threadIdx.x % 32; i < count; i += 32)
        all &= queries[i].low <= key && queries[i].high >= key + keys;
    return __all_sync(kFullWarp, all);
}

// Calls visit(query, n, place_of) for each query of a thread's pairs, the n-th of its own: pair i
// of the query, with the thread's i-th key, is place_of(i)(fragments).
template <bool kOfKeys, typename Tile, typename Visit>
__device__ __forceinline__ void visit_queries(Visit visit) {
    constexpr int kOwnRows = 2 * Tile::kRowTiles, kMetRows = 2 * Tile::kMetTiles;
#pragma unroll
    for (int n = 0; n < (kOfKeys ? kMetRows : kOwnRows); ++n)
        visit(n, [n](PairFragments<Tile>& x, int i) -> typename Tile::Element& {
            const int row = kOfKeys ? i : n, column = kOfKeys ? n : i;
            return x[row / 2][column / 2][row % 2 * 2 + column % 2];
        });
}

// The number among own rows, or met ones, of the thread's i-th.
__device__ __forceinline__ constexpr int own_row(int i) {
    return 8 * i;
}
__device__ __forceinline__ constexpr int met_row(int i) {
    return i / 2 * 8 + i % 2;
}

// Turns a thread's dot products q.k into P, and leaves P times the slope of the score in `handed`.
// Unseen pairs get kUnseen; with `whole` all are seen that no step hides. `states` are those of the
// thread's first query, `own_key` its first key, both counted as the bounds of the states are;
// `first_row` and `first_key` are their numbers.
template <bool kOfKeys, typename Tile, typename T, typename Score>
__device__ __forceinline__ void weigh_dots(PairFragments<Tile>& dots, PairFragments<Tile>& handed,
                                           const Score& score, const QueryState<T>* states,
                                           int own_key, int64 first_row, int64 first_key,
                                           bool whole = false) {
    constexpr int kKeys = 2 * (kOfKeys ? Tile::kRowTiles : Tile::kMetTiles);
    const T scale = Score::kPerPair ? 1 : score.scale;
    auto column_of = [](int i) { return kOfKeys ? own_row(i) : met_row(i); };
    visit_queries<kOfKeys, Tile>([&](int n, auto place_of) {
        const int query = kOfKeys ? met_row(n) : own_row(n);
        const QueryState<T> state = states[query];
        const int low = state.low - own_key, count = state.high - state.low;
        T s[kKeys], slope[kKeys];
        unsigned hidden = 0;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            s[i] = place_of(dots, i);
            slope[i] = 1;
        }
        if constexpr (Score::kPerPair)
            hidden = score.change_row_with_slope(
                s, slope, RowPairs{first_row + query, first_key, low, count}, column_of);
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            const T weight = weight_of(s[i], scale, state.lse);
            const bool seen =
                (whole || unsigned(column_of(i) - low) < unsigned(count)) && !(hidden >> i & 1);
            place_of(dots, i) = seen ? weight : kUnseen<T>;
            const T bent = Score::kPerPair ? multiply_add(weight, slope[i], T(0)) : weight;
            place_of(handed, i) = seen ? bent : kUnseen<T>;
        }
    });
}

// As `is_unseen`, by integers.
__device__ __forceinline__ bool has_bits_of_unseen(double weight) {
    return __double2hiint(weight) == int(0x80000000) && __double2loint(weight) == 0;
}
__device__ __forceinline__ bool has_bits_of_unseen(float weight) {
    return __float_as_uint(weight) == 0x80000000u;
}

// dS times the slope, of P times the slope and dP less delta. NaN of an unseen pair is none.
template <typename T>
__device__ __forceinline__ T slope_of(T weight, T flow) {
    // A product that is -0 becomes +0: that of a seen pair is never kUnseen.
    return has_bits_of_unseen(weight) ? kUnseen<T> : multiply_add(weight, flow, T(0));
}

}  // namespace cuflash

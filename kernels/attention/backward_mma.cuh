// What the gradients of attention on 16-bit tensor cores are made of: tiles, pairs, products.
//
// Fragments of pairs have queries as rows and keys as columns, as those of scores in the forward.
#pragma once

#include "attention/backward.cuh"
#include "attention/fragments.cuh"
#include "attention/mma_steps.cuh"
#include "attention/mma_tile.cuh"
#include "attention/nonfinite_gradients.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/ptx_tma.cuh"
#include "lib/swizzle.cuh"

namespace cuflash {

// A block of `backward_mma_keys` has kKeys keys and meets kQueries queries at a time; D and Dv are
// padded to kWidth. Its warps share the pairs, kPairRows of them along the queries; half of them
// have the sums of dk and half those of dv, kSumRows of a half along the keys. There are kStages
// tiles of queries under way. If it is kStaged, what it adds to dq leaves by way of shared memory
// (sm_90). `device/attention_vjp_plans_mma.py` says which tiles there are.
template <int kKeys_, int kQueries_, int kWidth, int kWarps, int kPairRows, int kSumRows,
          int kStages_, bool kStaged_, int kBlocks_>
struct KeysTile {
    static constexpr int kKeys = kKeys_, kQueries = kQueries_, kStages = kStages_;
    static constexpr int kBlocks = kBlocks_, kThreads = 32 * kWarps, kColumns = kWidth;
    static constexpr bool kStaged = kStaged_;
    // Bytes from one row of sums to the next: 32 more than they are, so that 8 rows share no banks.
    static constexpr int kSumPitch = 4 * kWidth + 32;
    using Rows = SwizzledTile<kWidth>;
    using Pairs = SwizzledTile<kKeys>;
    static constexpr int kOwnBytes = kKeys * Rows::kPitch;
    static constexpr int kMetBytes = kQueries * Rows::kPitch;
    static constexpr int kPairBytes = kQueries * Pairs::kPitch;
    static_assert(kWarps >= 4, "four parts of a block's work are set up side by side");
    static_assert(kThreads >= kQueries, "a thread for what is known of each query");

    // A warp's part of the pairs, as `add_scores` takes it.
    struct PairPart {
        static constexpr int kRowTiles = kQueries / (16 * kPairRows), kRows = 2 * kRowTiles;
        static constexpr int kPairColumns = kKeys * kPairRows / kWarps;
        static constexpr int kKeyTiles = kPairColumns / 8, kFeatureSteps = kWidth / 16;
        using Features = Rows;
        static __device__ __forceinline__ int first_row(int warp) {
            return warp % kPairRows * 16 * kRowTiles;
        }
        static __device__ __forceinline__ int first_key(int warp) {
            return warp / kPairRows * kPairColumns;
        }
    };
    // Its part of the sums, as `store_rows` takes it.
    struct SumPart {
        static constexpr int kHalf = kWarps / 2, kSumColumns = kWidth * kSumRows / kHalf;
        static constexpr int kRowTiles = kKeys / (16 * kSumRows), kRows = 2 * kRowTiles;
        static constexpr int kWarpRows = 16 * kRowTiles, kValueTiles = kSumColumns / 8;
        static __device__ __forceinline__ bool is_of_values(int warp) { return warp < kHalf; }
        static __device__ __forceinline__ int first_key(int warp) {
            return warp % kSumRows * kWarpRows;
        }
        static __device__ __forceinline__ int first_column(int warp) {
            return warp % kHalf / kSumRows * kSumColumns;
        }
    };
    // Its part of what a tile of pairs adds to dq.
    struct QueryPart {
        static constexpr int kRowTiles = PairPart::kRowTiles, kRows = PairPart::kRows;
        static constexpr int kWarpColumns = kWidth * kPairRows / kWarps;
        // So many columns at a time: of more, sums would spill.
        static constexpr int kValueTiles = (kWarpColumns < 32 ? kWarpColumns : 32) / 8;
        static __device__ __forceinline__ int first_column(int warp) {
            return warp / kPairRows * kWarpColumns;
        }
    };
};

// ------------------------------------------------------------------------------------------ loads

template <typename T>
struct Rounded {
    __device__ __forceinline__ T operator()(float x) const { return narrow<T>(x); }
};

// Starts to copy rows `first`.. of a matrix into a tile, `count` of them: the others, and columns
// from `columns` on, become 0.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void start_rows(unsigned char* tile, const Matrix<const T>& matrix,
                                           int64 first, int64 count, int columns) {
    const int end = int(clamp(count, 0, kRows));
    if (!has_aligned_rows(matrix))
        return copy_elements<kRows, kColumns, kThreads>(tile, matrix, first, 0, end, columns);
    const RowCopies<kRows, kColumns, kThreads, T> copies(shared_address(tile), matrix, first);
    if (end == kRows && columns == kColumns)
        copies.start(0, matrix.row_stride);
    else
        copies.start_part(0, matrix.row_stride, 0, end, columns);
}

// The same of rows of q, and of dout, which may be wide; or of k, and of v.
template <int kRows, int kColumns, int kThreads, typename T, typename Score>
__device__ __forceinline__ void start_queries(unsigned char* queries, unsigned char* douts,
                                              const VjpParameters& p,
                                              const VjpWork<T, Score>& block, int64 first) {
    const int64 count = block.score.bounds.queries - first;
    const int values = int(p.values);
    start_rows<kRows, kColumns, kThreads>(queries, block.q, first, count, int(p.features));
    if (p.dout_is_wide)
        copy_elements<kRows, kColumns, kThreads>(douts, block.wide_dout, first, 0,
                                                 int(clamp(count, 0, kRows)), values, Rounded<T>());
    else
        start_rows<kRows, kColumns, kThreads>(douts, block.dout, first, count, values);
}
template <int kRows, int kColumns, int kThreads, typename T, typename Score>
__device__ __forceinline__ void start_keys(unsigned char* keys, unsigned char* values,
                                           const VjpParameters& p, const VjpWork<T, Score>& block,
                                           int64 first) {
    const int64 count = block.score.bounds.keys - first;
    start_rows<kRows, kColumns, kThreads>(keys, block.k, first, count, int(p.features));
    start_rows<kRows, kColumns, kThreads>(values, block.v, first, count, int(p.values));
}

// ------------------------------------------------------------------------------------------ pairs

// What is known of a query with these numbers; `lse` in base 2. A row that is not used, or has no
// weight, sees none of the keys from `first_key` on.
template <typename Score>
__device__ __forceinline__ QueryState<float> state_of(float lse, float delta, const Score& score,
                                                      int64 row, int64 first_key, int keys) {
    QueryState<float> x{0, 0, 0, 0};
    // Of scores that are all -inf, none has a gradient.
    if (!score.is_used(row) || lse == -infinity<float>()) return x;
    // What has a score of +inf has none that is a number.
    x.lse = lse == infinity<float>() ? not_a_number<float>() : lse * kLog2OfE;
    x.delta = delta;
    const KeyRange seen = score.range(row);
    x.low = int(clamp(seen.first - first_key, 0, keys));
    x.high = int(clamp(seen.last + 1 - first_key, x.low, keys));
    return x;
}

// Reads lse and delta of a warp's rows. False if some have no weight, or are not used.
template <int kRows, typename T, typename Score>
__device__ __forceinline__ bool read_numbers(float2* numbers, const VjpWork<T, Score>& block,
                                             int64 first_row) {
    bool alive = true;
    for (int i = threadIdx.x % 32; i < kRows; i += 32) {
        const bool used = block.score.is_used(first_row + i);
        const float lse = used ? block.lse.at(first_row + i) : -infinity<float>();
        numbers[i] = make_float2(lse, used ? block.delta.at(first_row + i) : 0);
        alive &= fabs(lse) != infinity<float>();
    }
    return __all_sync(kFullWarp, alive);
}

// Turns a thread's dot products q.k in `dots` and dout.v in `flows` into P, and into dS times the
// slope of the score, if `kWithSlope`. Unseen pairs get kUnseen and 0; with `whole` all are seen.
// `state_of_row(i)` is that of the thread's row i, bounds relative to key `first_key`, where the
// fragments begin at `column`; `row_of(i)` is the number of the row.
template <typename Part, bool kWithSlope, typename Score, typename StateOf, typename RowOf>
__device__ __forceinline__ void weigh_pairs(ScoreFragments<Part>& dots, ScoreFragments<Part>& flows,
                                            const Score& score, int64 first_key, int column,
                                            bool whole, StateOf state_of_row, RowOf row_of) {
    constexpr int kOwn = 2 * Part::kKeyTiles;
    const int own_key = column + 2 * (threadIdx.x % 4);
    const float unit = Score::kPerPair ? kLog2OfE : score.scale * kLog2OfE;
    auto column_of = [](int j) { return 8 * (j / 2) + j % 2; };
#pragma unroll
    for (int i = 0; i < Part::kRows; ++i) {
        const QueryState<float> state = state_of_row(i);
        const int low = state.low - own_key, count = state.high - state.low;
        float s[kOwn], slope[kOwn];
        unsigned hidden = 0;
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            s[j] = dots[i / 2][j / 2][i % 2 * 2 + j % 2];
            slope[j] = 1;
        }
        if constexpr (Score::kPerPair)
            hidden = score.change_row_with_slope(
                s, slope, RowPairs{row_of(i), first_key + own_key, low, count}, column_of);
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            float& dot = dots[i / 2][j / 2][i % 2 * 2 + j % 2];
            float& flow = flows[i / 2][j / 2][i % 2 * 2 + j % 2];
            const float weight = exp2_approximate(multiply_add(s[j], unit, -state.lse));
            float gradient = weight * (flow - state.delta);
            if (Score::kPerPair && kWithSlope) gradient *= slope[j];
            const bool seen =
                (whole || unsigned(column_of(j) - low) < unsigned(count)) && !(hidden >> j & 1);
            dot = seen ? weight : kUnseen<float>;
            flow = seen ? gradient : 0;
        }
    }
}

// --------------------------------------------------------------------------------------- products

// The left operand of `add_scores`, read from shared memory; `own` is the address of a lane's row.
template <typename Part>
struct LeftRows {
    unsigned own;

    using Fragments = unsigned[Part::kRowTiles][4];
    __device__ __forceinline__ const Fragments& operator()(Fragments& a, int step) const {
        using Layout = typename Part::Features;
#pragma unroll
        for (int m = 0; m < Part::kRowTiles; ++m)
            load_matrices(a[m], Layout::advance(own, step) + m * 16 * Layout::kPitch);
        return a;
    }
};

// sums += left @ values, or left^T @ values, over kDepth columns, or rows, of `left` and rows of
// `values`; addresses are those of a lane's rows.
template <typename T, typename Part, typename Left, typename Values, int kDepth, bool kTransposed>
__device__ __forceinline__ void add_product(ValueFragments<Part>& sums, unsigned own_left,
                                            unsigned own_value) {
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
        unsigned a[Part::kRowTiles][4];
#pragma unroll
        for (int m = 0; m < Part::kRowTiles; ++m)
            if (kTransposed)
                load_transposed_matrices(a[m],
                                         Left::advance(own_left, m) + step * 16 * Left::kPitch);
            else
                load_matrices(a[m], Left::advance(own_left, step) + m * 16 * Left::kPitch);
#pragma unroll
        for (int j = 0; j < Part::kValueTiles; j += 2) {
            unsigned b[4];
            load_transposed_matrices(
                b, Values::advance(own_value, j / 2) + step * 16 * Values::kPitch);
#pragma unroll
            for (int m = 0; m < Part::kRowTiles; ++m) {
                MatrixProduct<T>::add(sums[m][j], a[m], b[0], b[1]);
                MatrixProduct<T>::add(sums[m][j + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// ------------------------------------------------------------------------------ non-finite values

// Tells, bit by bit, which of a thread's rows of sums have met NaN or inf.
template <typename Part>
__device__ __forceinline__ unsigned damaged_rows(const ValueFragments<Part>& sums) {
    unsigned damaged = 0;
#pragma unroll
    for (int i = 0; i < Part::kRows; ++i) {
        float zero = 0;  // times NaN or inf it is NaN
#pragma unroll
        for (int j = 0; j < Part::kValueTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) zero = multiply_add(sums[i / 2][j][i % 2 * 2 + e], 0, zero);
        if (zero != 0) damaged |= 1u << i;
    }
    return damaged;
}

}  // namespace cuflash

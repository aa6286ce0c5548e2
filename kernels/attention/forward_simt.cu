// Attention forward in plain CUDA: every dtype, shape, stride and option.
//
// out (batch, Tq, Dv), lse (batch, Tq) from q (batch, Tq, D), k (batch, Tk, D), v (batch, Tk, Dv):
// online softmax over key tiles (Dao et al. 2022, algorithm 1), the division by l at the end.
//
// The error of n equal terms added one by one grows like n. Sums are of a tile first, then of a
// group of tiles, and those of a group are put aside before the next one: normalizers, which cost
// little and of which more is asked, in shared memory; out's, seldom, in `out`, where it has the
// accumulator's type. Rounded to 16 bits, what 2^20 keys and more err by does not show.
//
// Grid: one block for each tile of query rows, tile of value columns, share of the keys and batch
// entry (lib/scheduler.cuh). A warp owns 4 x kRows query rows, and a row never leaves its 8 lanes.
// Without columns of v (Dv = 0) there is the lse alone, and half of the products.
// Dynamic shared memory, in the accumulator's type:
//   keys     kKeys x kFeatures      one chunk of features of a key tile
//   values   kKeys x kValues
//   weights  kQueries x kKeys       the lanes of a row exchange exp(s - m)
//   queries  kQueries x kFeatures   of one chunk, or of all chunks if they stay
#include "attention/block.cuh"
#include "attention/parameters.cuh"
#include "lib/nonfinite.cuh"
#include "lib/numeric.cuh"
#include "lib/scheduler.cuh"
#include "lib/score.cuh"
#include "lib/tile.cuh"

namespace cuflash {

// Rows and keys of a thread, warps of a block, features of a chunk, value columns of a block, and
// blocks that an SM should hold. `device/attention_plans.py` says which tiles there are, and why.
template <int kRows_, int kColumns_, int kWarps, int kFeatures_, int kValues_, int kBlocks_,
          bool kChunked_>
struct SimtTile {
    static constexpr int kRows = kRows_, kColumns = kColumns_;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kFeatures = kFeatures_, kValues = kValues_, kBlocks = kBlocks_;
    // Whether there may be more features than one chunk. If not, scores are not live while tiles
    // are loaded, which frees as many registers.
    static constexpr bool kChunked = kChunked_;
    static constexpr int kWarpRows = kLaneRows * kRows;
    static constexpr int kQueries = kWarpRows * kWarps;
    static constexpr int kKeys = kLaneColumns * kColumns;
    static constexpr int kOwnValues = kValues / kLaneColumns;
    static constexpr int kWeightStride = kElementWriteStride<kKeys>;

    // Where a thread's weight (i, j) lies relative to that of its first row.
    static __device__ __forceinline__ int weight_at(int i, int j, const LanePosition& lane) {
        return kLaneRows * i * kWeightStride + kLaneColumns * j + lane.column;
    }
};

// exp(x) for x <= 0; in float to 2^-22 + 2^-23 * abs(x), for a third of expf's instructions.
__device__ __forceinline__ float weight(float x) {
    return exp2f(x * 1.44269504f);
}
__device__ __forceinline__ double weight(double x) {
    return exp(x);
}

// Tiles of a group; out's are in memory, where a group costs the time of a few tiles.
constexpr int kNormalizerGroup = 64, kOutGroup = 256;

// The online softmax of one row. Unlike OnlineSoftmax, each lane holds the normalizer of its own
// keys, and +inf makes a row NaN.
template <typename A>
struct RowState {
    A m, l;

    // What exponents are relative to: 0 while no key was seen, since -inf - -inf would be NaN.
    __device__ __forceinline__ A reference() const { return m == -infinity<A>() ? A(0) : m; }

    // Returns the factor of sums relative to the old maximum.
    __device__ __forceinline__ A raise(A score) {
        A before = m;
        m = maximum(m, score);
        A factor = weight(before - reference());
        l *= factor;
        return factor;
    }

    __device__ __forceinline__ A normalizer() const {
        return reduce_row(l, [](A a, A b) { return a + b; });
    }
};

// Turns a thread's dot products with the keys from `first_key` on into scores, -inf where unseen.
template <typename Tile, typename T, typename Score, typename A, typename RowOf>
__device__ __forceinline__ void change_scores(A (&s)[Tile::kRows][Tile::kColumns],
                                              const BlockWork<T, Score>& block, int64 first_key,
                                              const LanePosition& lane, RowOf row_of) {
    const bool whole = block.all.has(first_key) && block.all.has(first_key + Tile::kKeys - 1);
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Tile::kColumns; ++j) s[i][j] = block.score(s[i][j], 0, 0);
    if (whole) return;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        const KeyRange seen = block.score.range(row_of(i));
        const int low = int(clamp(seen.first - first_key, 0, Tile::kKeys));
        const int high = int(clamp(seen.last + 1 - first_key, 0, Tile::kKeys));
#pragma unroll
        for (int j = 0; j < Tile::kColumns; ++j) {
            const int key = kLaneColumns * j + lane.column;
            if (key < low || key >= high) s[i][j] = -infinity<A>();
        }
    }
}

// The same where each pair needs its own treatment. The steps are long: the scores go by way of the
// thread's own places in `weights`, which a loop that is not unrolled can index.
template <typename Tile, typename T, typename Score, typename A, typename RowOf>
__device__ __forceinline__ void change_scores_by_pair(A (&s)[Tile::kRows][Tile::kColumns],
                                                      A* weights, const BlockWork<T, Score>& block,
                                                      int64 first_key, const LanePosition& lane,
                                                      RowOf row_of) {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Tile::kColumns; ++j) weights[Tile::weight_at(i, j, lane)] = s[i][j];
#pragma unroll 1
    for (int i = 0; i < Tile::kRows; ++i) {
        const KeyRange seen = block.score.range(row_of(i));
#pragma unroll 1
        for (int j = 0; j < Tile::kColumns; ++j) {
            const int64 key = first_key + kLaneColumns * j + lane.column;
            A& x = weights[Tile::weight_at(i, j, lane)];
            x = seen.has(key) ? block.score(x, row_of(i), key) : -infinity<A>();
        }
    }
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Tile::kColumns; ++j) s[i][j] = weights[Tile::weight_at(i, j, lane)];
}

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    forward_simt(const __grid_constant__ AttentionParameters p) {
    using A = Accumulator<T>;
    constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns, kOwnValues = Tile::kOwnValues;
    constexpr int kKeys = Tile::kKeys, kFeatures = Tile::kFeatures, kThreads = Tile::kThreads;
    constexpr int kKeyStride = kRowReadStride<A, kFeatures>;
    constexpr int kAtOnce = sizeof(T) < sizeof(A) ? 2 : 4;  // conversions take registers

    CUFLASH_DYNAMIC_SHARED(A, shared);
    A* const keys = shared;
    A* const values = keys + kKeys * kKeyStride;
    A* const weights = values + kKeys * Tile::kValues;
    A* const queries = weights + Tile::kQueries * Tile::kWeightStride;
    __shared__ BlockWork<T, Score> block;
    if (!block.begin(p, Tile::kQueries, Tile::kValues, kKeys)) return;

    __shared__ int64 out_start, lse_start;
    if (threadIdx.x == 0) {
        const Output<T> output(p, block.index, block.work.split);
        out_start = output.out_start;
        lse_start = output.lse_start;
    }
    __syncthreads();

    const LanePosition lane;
    const int warp_row = threadIdx.x / 32 * Tile::kWarpRows;
    auto row_of = [&](int i) { return block.first_row + warp_row + kLaneRows * i + lane.row; };
    auto column_of = [&](int c) {
        return block.first_value + c / kVector<A> * kVector<A> * kLaneColumns +
               lane.column * kVector<A> + c % kVector<A>;
    };
    A* const own_weights = weights + (warp_row + lane.row) * Tile::kWeightStride;

    RowState<A> state[kRows];
    A out[kRows][kOwnValues];
    // Of the groups before: normalizers, and what out in memory is relative to.
    __shared__ RowState<A> aside[Tile::kQueries];
    __shared__ A maxima_of_out[Tile::kQueries];
    const bool out_aside = sizeof(T) == sizeof(A) || p.out_is_wide;
    auto for_each_sum = [&](int i, auto visit) {
        if (!out_aside || row_of(i) >= block.end_row) return;
        const Matrix<A> sums = Output<T>(p, out_start, lse_start).template matrix<A>();
#pragma unroll
        for (int c = 0; c < kOwnValues; ++c) {
            const int64 column = column_of(c);
            if (column < block.end_value) visit(out[i][c], sums.at(row_of(i), column));
        }
    };
    // Adds what was put aside before the group of a tile, if anything was.
    auto take_back = [&](int tile, bool of_out) {
        if (tile / kNormalizerGroup * kNormalizerGroup <= int(block.tiles.begin)) return;
        of_out &= tile / kOutGroup * kOutGroup > int(block.tiles.begin);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = warp_row + kLaneRows * i + lane.row;
            const A now = state[i].reference();
            if (lane.column == 0) state[i].l += aside[row].l * weight(aside[row].m - now);
            if (!of_out) continue;
            const A factor = weight(maxima_of_out[row] - now);
            for_each_sum(i, [&](A& own, A& sum) { own += sum * factor; });
        }
    };
    auto put_aside = [&](int tile) {
        const bool of_out = (tile + 1) % kOutGroup == 0;
        take_back(tile, of_out);
        __syncwarp();  // all lanes of a row have read what its first one overwrites
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = warp_row + kLaneRows * i + lane.row;
            const A l = state[i].normalizer();
            if (lane.column == 0) aside[row] = {state[i].m, l};
            state[i].l = 0;
            if (!of_out) continue;
            if (lane.column == 0) maxima_of_out[row] = state[i].m;
            for_each_sum(i, [](A& own, A& sum) {
                sum = own;
                own = 0;
            });
        }
        __syncwarp();  // all lanes of a row read what its first one wrote
    };
    // Bit i: row i met a non-finite value in a column of the thread. Registers are few.
    __shared__ unsigned char damaged_rows[kThreads];
    static_assert(kRows <= 8, "a bit for each");

    // A second turn only after non-finite values: see lib/nonfinite.cuh.
    for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            // A sink is a logit before all keys that has no value. +inf, like NaN, makes l NaN.
            const A sink = block.work.split == 0 ? block.score.sink : -infinity<A>();
            const bool counts = sink != -infinity<A>() && lane.column == 0;
            state[i] = {sink, counts ? 1 + (sink - sink) : A(0)};
#pragma unroll
            for (int c = 0; c < kOwnValues; ++c) out[i][c] = 0;
        }

        const int first_tile = int(block.tiles.begin), end_tile = int(block.tiles.end);
        for (int tile = first_tile; tile < end_tile; ++tile) {
            const int64 first_key = int64(tile) * kKeys;
            const int begin = int(clamp(block.any.first - first_key, 0, kKeys));
            const int end = int(clamp(block.any.last + 1 - first_key, 0, kKeys));

            A s[kRows][kColumns];
            A* chunk_queries = queries;
            for (int64 chunk = 0;; chunk += kFeatures) {
                const int64 features = min(p.features - chunk, int64(kFeatures));
                __syncthreads();  // everyone is done with the tiles before these
                load_tile<T, kKeys, kFeatures, kKeyStride, kThreads, kAtOnce>(
                    keys, block.k, first_key, chunk, begin, end, features);
                if (chunk == 0 && p.values > 0)
                    load_tile<T, kKeys, Tile::kValues, Tile::kValues, kThreads, kAtOnce>(
                        values, block.v, first_key, block.first_value, begin, end,
                        block.end_value - block.first_value, turn > 0);
                if (!p.queries_stay || tile == int(block.tiles.begin))
                    load_tile<T, Tile::kQueries, kFeatures, kKeyStride, kThreads, kAtOnce>(
                        chunk_queries, block.q, block.first_row, chunk, 0,
                        int(block.end_row - block.first_row), features);
                __syncthreads();
                if (chunk == 0) {
#pragma unroll
                    for (int i = 0; i < kRows; ++i)
#pragma unroll
                        for (int j = 0; j < kColumns; ++j) s[i][j] = 0;
                }
                add_inner_products<kFeatures, kKeyStride, kKeyStride>(
                    s, chunk_queries + (warp_row + lane.row) * kKeyStride,
                    keys + lane.column * kKeyStride, int(features));
                if (!Tile::kChunked || chunk + kFeatures >= p.features) break;
                if (p.queries_stay) chunk_queries += Tile::kQueries * kKeyStride;
            }

            if constexpr (Score::kPerPair)
                change_scores_by_pair<Tile>(s, own_weights, block, first_key, lane, row_of);
            else
                change_scores<Tile>(s, block, first_key, lane, row_of);

#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                A top = s[i][0];
#pragma unroll
                for (int j = 1; j < kColumns; ++j) top = maximum(top, s[i][j]);
                top = reduce_row(top, [](A a, A b) { return maximum(a, b); });
                const A factor = state[i].raise(top);
#pragma unroll
                for (int c = 0; c < kOwnValues; ++c) out[i][c] *= factor;
                A sum = 0;  // of the tile first, as in add_weighted_rows
#pragma unroll
                for (int j = 0; j < kColumns; ++j) {
                    const A w = weight(s[i][j] - state[i].reference());
                    sum += w;
                    own_weights[Tile::weight_at(i, j, lane)] = w;
                }
                state[i].l += sum;
            }
            if (p.values > 0) {
                __syncwarp();  // the lanes of a row read each other's weights
                add_weighted_rows<Tile::kWeightStride, Tile::kValues>(
                    out, own_weights, values + lane.column * kVector<A>, end);
            }

            if ((tile + 1) % kNormalizerGroup == 0 && tile + 1 < end_tile) put_aside(tile);
        }
        take_back(end_tile - 1, true);

        if (turn > 0) break;
        unsigned damaged = 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            bool finite = true;
#pragma unroll
            for (int c = 0; c < kOwnValues; ++c) finite &= is_finite(out[i][c]);
            const A l = state[i].normalizer();
            if (!finite && is_finite(l) && block.score.is_used(row_of(i))) damaged |= 1u << i;
        }
        damaged_rows[thread_here()] = damaged;
        if (damaged) block.redo = 1;
        __syncthreads();
        if (!block.redo) break;
    }

    const Output<T> output(p, out_start, lse_start);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int64 row = row_of(i);
        A l = state[i].normalizer();
        if (!block.score.is_used(row)) l = 0;
        if (row >= block.end_row) continue;
        const A inverse = A(1) / l;
#pragma unroll
        for (int c = 0; c < kOwnValues; ++c) {
            const int64 column = column_of(c);
            if (column < block.end_value)
                output.store(row, column, l == A(0) ? A(0) : out[i][c] * inverse);
        }
        if (block.work.column_tile == 0 && lane.column == 0)
            output.store_lse(row, l == A(0) ? -infinity<A>() : state[i].m + logarithm(l));
    }
    if (!block.redo) return;

    __syncwarp();  // add_nonfinite overwrites what other lanes wrote
#pragma unroll 1
    for (int warp_own = 0; warp_own < Tile::kWarpRows; ++warp_own) {
        const int i = warp_own / kLaneRows;
        const bool mine =
            warp_own % kLaneRows == lane.row && (damaged_rows[thread_here()] >> i & 1);
        const unsigned owners = __ballot_sync(kFullWarp, mine);
        if (!owners) continue;
        A m = 0;
#pragma unroll
        for (int own = 0; own < kRows; ++own)
            if (own == i) m = state[own].reference();
        m = __shfl_sync(kFullWarp, m, __ffs(owners) - 1);
        const int64 row = block.first_row + warp_row + warp_own;
        KeyRange seen = block.score.range(row);
        seen.first = max(seen.first, block.tiles.begin * kKeys);
        seen.last = min(seen.last, block.tiles.end * kKeys - 1);
        add_nonfinite(
            block.q, block.k, block.v, p.features, block.first_value, block.end_value, row, seen,
            block.score, [&](A s) { return weight(s - m); },
            [&](int64 column, A x) { output.store(row, column, x); });
    }
}

}  // namespace cuflash

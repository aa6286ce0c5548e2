// What the kernels of attention's gradients share: parameters, and the work of a block.
//
// With S the scores, P = exp(S - lse), dP = dout v^T and delta = sum(dout * out) - dlse of each
// row (Dao et al. 2022, appendix B.2), dS = P * (dP - delta) is the gradient of the scores.
#pragma once

#include "lib/nonfinite.cuh"
#include "lib/numeric.cuh"
#include "lib/runtime_dtype.cuh"
#include "lib/scheduler.cuh"
#include "lib/score.cuh"
#include "lib/sequences.cuh"
#include "lib/tile.cuh"

namespace cuflash {

// Mirrored by `cuflash/device/parameters.py`. A gradient that a launch is not to write has no data.
struct VjpParameters {
    BatchAxes batch;  // outermost those that the gradient has, then those it is summed along
    int64 summed;     // entries that one of the gradient is summed over
    int64 adds;       // the gradients hold the sums over entries of earlier launches
    Grid grid;
    BatchedArray q, k, v;                      // (Tq, D), (Tk, D), (Tk, Dv)
    BatchedArray dout, out, lse, dlse, delta;  // (Tq, Dv) twice, (Tq); dlse may be absent
    BatchedArray dq, dk, dv, dbias, dsinks;
    BatchedArray
        dq_sums;  // (Tq, D up to a multiple of 8), accumulators, if dq is summed by atomics
    int64 features, values;  // D, Dv
    int chunks;              // of the features of a tile that the larger of D and Dv takes
    int dout_is_wide;        // dout has the accumulator's type
    ScoreParameters score;
    Sequences sequences;  // if there are any, `batch` has an axis for them in front, of size 1
};

// A thread owns rows 4 apart and columns 8 apart of a tile of pairs, a warp 4 x kRows rows, a block
// kWarps times as many. kFeatures features, of q and k as of dout and v, are in shared memory at a
// time: as many columns of a gradient are a block's. An SM should hold kBlocks blocks.
template <int kRows_, int kColumns_, int kWarps, int kFeatures_, int kBlocks_>
struct PairTile {
    static constexpr int kRows = kRows_, kColumns = kColumns_;
    static constexpr int kFeatures = kFeatures_, kBlocks = kBlocks_;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kWarpRows = kLaneRows * kRows;
    static constexpr int kTileRows = kWarpRows * kWarps, kTileColumns = kLaneColumns * kColumns;
    static constexpr int kOwn = kFeatures / kLaneColumns;
    static constexpr int kWeightStride = kElementWriteStride<kTileColumns>;
    static_assert(kWarps >= 4, "four parts of a block's work are set up side by side");
};

// A number for each row of one entry.
template <typename A>
struct RowNumbers {
    A* data;
    int64 stride;

    static __device__ __forceinline__ RowNumbers of(const BatchedArray& array,
                                                    const BatchAxes& axes,
                                                    const BatchIndex& index) {
        return {static_cast<A*>(array.data) + entry_offset(array.batch_stride, axes, index),
                array.row_stride};
    }
    __device__ __forceinline__ A& at(int64 row) const { return data[row * stride]; }
};

// What all threads of a block know; it lies in shared memory. Keys are numbered from the first one
// of their sequence, rows through.
template <typename T, typename Score>
struct VjpWork {
    using A = Accumulator<T>;

    BatchIndex index;
    Work work;
    Segment segment;
    int64 first, end;  // the rows, or keys, of the block's part of the gradient
    Matrix<const T> q, k, v, dout;
    Matrix<const A> wide_dout;
    RowNumbers<const A> lse;
    RowNumbers<A> delta;
    Score score;
    int redo;  // a sum met a non-finite value

    // To be called by all threads. False, for all of them, if there is no row, or no key; there are
    // `least` of them at least.
    template <bool kOfKeys>
    __device__ __forceinline__ bool begin(const VjpParameters& p, int size, int least = 0) {
        if (threadIdx.x == 0) {
            work = Work::of(p.grid, blockIdx.x);
            // The last rows see the most keys, the first keys are seen by the most rows.
            if (kOfKeys) work.row_tile = p.grid.row_tiles - 1 - work.row_tile;
            const Sequences& given = p.sequences;
            const Sequences by_own{kOfKeys ? given.keys : given.queries,
                                   kOfKeys ? given.queries : given.keys, given.count};
            const int64 own = kOfKeys ? p.score.keys : p.score.queries;
            const int64 met = kOfKeys ? p.score.queries : p.score.keys;
            segment = {0, own, own, 0, met, 0};
            if (given.queries.data) segment = Segment::find(by_own, own, met, work.row_tile, size);
            first = segment.row_of(work.row_tile, size);
            end = min(first + size, max(segment.end, int64(least)));
            if (kOfKeys) {
                first -= segment.start;
                end -= segment.start;
                segment = segment.transposed();
            }
            redo = 0;
        }
        __syncthreads();
        if (first >= end) return false;
        enter(p, 0);
        return true;
    }

    // Turns to one of the entries that the gradient is summed over. To be called by all threads.
    __device__ __forceinline__ void enter(const VjpParameters& p, int64 entry) {
        __syncthreads();  // everyone is done with the entry before
        decode_batch(p.batch, work.entry * max(p.summed, 1LL) + entry, index, threadIdx.x);
        if (threadIdx.x == 0 && p.sequences.queries.data)
            index.on_axis[0] = min(segment.index, max(p.sequences.count - 1, 0LL));
        __syncthreads();
        if (threadIdx.x == 0) {
            q = Matrix<const T>::of(p.q, p.batch, index);
            dout = Matrix<const T>::of(p.dout, p.batch, index);
            wide_dout = Matrix<const A>::of(p.dout, p.batch, index);
        } else if (threadIdx.x == 32) {
            k = Matrix<const T>::of(p.k, p.batch, index);
            v = Matrix<const T>::of(p.v, p.batch, index);
            k.data += segment.first_key * k.row_stride;
            v.data += segment.first_key * v.row_stride;
        } else if (threadIdx.x == 64) {
            score.load(p.score, p.batch, index, segment);
        } else if (threadIdx.x == 96) {
            lse = RowNumbers<const A>::of(p.lse, p.batch, index);
            delta = RowNumbers<A>::of(p.delta, p.batch, index);
        }
        __syncthreads();
    }
};

// What is known of a query: the keys of a tile that it sees are low..high - 1.
template <typename A>
struct alignas(16) QueryState {
    A lse, delta;
    int low, high;
};

// A chunk of features of q and dout, or of k and v.
template <typename A>
struct TilePair {
    A* features;
    A* values;
};

// Dynamic shared memory of a block, in the accumulator's type. `weights` and `slopes` are places of
// a thread's own pairs until they hold P and the gradient of the dot products.
template <typename A, typename Tile>
struct VjpTiles {
    static constexpr int kStride = kRowReadStride<A, Tile::kFeatures>;
    TilePair<A> rows, columns;
    A *weights, *slopes;

    __device__ __forceinline__ explicit VjpTiles(A* shared) {
        constexpr int kRowsSize = Tile::kTileRows * kStride;
        constexpr int kColumnsSize = Tile::kTileColumns * kStride;
        rows = {shared, shared + kRowsSize};
        columns = {rows.values + kRowsSize, rows.values + kRowsSize + kColumnsSize};
        weights = columns.values + kColumnsSize;
        slopes = weights + Tile::kTileRows * Tile::kWeightStride;
    }
};

// Where a thread stands in a tile of pairs.
template <typename Tile>
struct PairPosition {
    LanePosition lane;
    int warp_row;

    __device__ __forceinline__ PairPosition() : PairPosition(threadIdx.x) {}
    __device__ __forceinline__ explicit PairPosition(unsigned thread)
        : lane(thread), warp_row(thread / 32 * Tile::kWarpRows) {}
    __device__ __forceinline__ int first_row() const { return warp_row + lane.row; }
    __device__ __forceinline__ int row(int i) const { return first_row() + kLaneRows * i; }
    __device__ __forceinline__ int column(int j) const { return lane.column + kLaneColumns * j; }
    __device__ __forceinline__ int pair(int i, int j) const {
        return row(i) * Tile::kWeightStride + column(j);
    }
    // The column of a gradient, within the block's, of the thread's sum c.
    template <typename A>
    __device__ __forceinline__ int own(int c) const {
        return c / kVector<A> * kVector<A> * kLaneColumns + lane.column * kVector<A> +
               c % kVector<A>;
    }
};

// Loads a chunk of q and dout from row `first` on, or of k and v from key `first` on. What is not
// used, by lengths, becomes 0.
template <bool kOfKeys, typename Tile, int kCount, typename T, typename Score, typename A>
__device__ __forceinline__ void load_pair(const TilePair<A>& tile, const VjpParameters& p,
                                          const VjpWork<T, Score>& block, int64 first,
                                          int64 chunk) {
    constexpr int kFeatures = Tile::kFeatures, kThreads = Tile::kThreads;
    constexpr int kStride = VjpTiles<A, Tile>::kStride;
    const EntryBounds& bounds = block.score.bounds;
    const int end = int(clamp((kOfKeys ? bounds.keys : bounds.queries) - first, 0, kCount));
    const int64 features = clamp(p.features - chunk, 0, kFeatures);
    const int64 values = clamp(p.values - chunk, 0, kFeatures);
    load_tile<T, kCount, kFeatures, kStride, kThreads>(tile.features, kOfKeys ? block.k : block.q,
                                                       first, chunk, 0, end, features);
    if constexpr (sizeof(T) < sizeof(A))
        if (!kOfKeys && p.dout_is_wide)
            return load_tile<A, kCount, kFeatures, kStride, kThreads>(tile.values, block.wide_dout,
                                                                      first, chunk, 0, end, values);
    load_tile<T, kCount, kFeatures, kStride, kThreads>(tile.values, kOfKeys ? block.v : block.dout,
                                                       first, chunk, 0, end, values);
}

template <int kCount, int kThreads, typename T, typename Score, typename A>
__device__ __forceinline__ void load_queries(QueryState<A> (&queries)[kCount],
                                             const VjpWork<T, Score>& block, int64 first_row,
                                             int64 first_key, int keys) {
    for (int i = threadIdx.x; i < kCount; i += kThreads) {
        const int64 row = first_row + i;
        QueryState<A> x{A(0), A(0), 0, 0};
        if (block.score.is_used(row)) {
            x.lse = block.lse.at(row);
            x.delta = block.delta.at(row);
            // What has a score of +inf has none that is a number.
            if (x.lse == infinity<A>()) x.lse = not_a_number<A>();
            // Of scores that are all -inf, none has a gradient.
            if (x.lse != -infinity<A>()) {
                const KeyRange seen = block.score.range(row);
                x.low = int(clamp(seen.first - first_key, 0, keys));
                x.high = int(clamp(seen.last + 1 - first_key, 0, keys));
            }
        }
        queries[i] = x;
    }
}

// Turns the thread's dot products q.k in `weights` and dout.v in `slopes` into P, and into dS times
// the slope of the score, or without it. Unseen pairs get kUnseen in both.
template <bool kRowsAreKeys, bool kWithSlope, typename Tile, typename T, typename Score, typename A,
          int kQueries>
__device__ __forceinline__ void weigh_pairs(const VjpTiles<A, Tile>& tiles,
                                            const QueryState<A> (&queries)[kQueries],
                                            const VjpWork<T, Score>& block, int64 first_row,
                                            int64 first_key, const PairPosition<Tile>& at) {
    constexpr int kOuter = kRowsAreKeys ? Tile::kColumns : Tile::kRows;
    constexpr int kInner = kRowsAreKeys ? Tile::kRows : Tile::kColumns;
    // Pairs that need more than the scale take long steps, once in the code.
    constexpr int kUnroll = Score::kPerPair ? 1 : 32;
#pragma unroll kUnroll
    for (int outer = 0; outer < kOuter; ++outer) {
        const int query = kRowsAreKeys ? at.column(outer) : at.row(outer);
        const QueryState<A> state = queries[query];
#pragma unroll kUnroll
        for (int inner = 0; inner < kInner; ++inner) {
            const int key = kRowsAreKeys ? at.row(inner) : at.column(inner);
            const int pair = kRowsAreKeys ? at.pair(inner, outer) : at.pair(outer, inner);
            const A dot = tiles.weights[pair], flow = tiles.slopes[pair];
            bool seen = key >= state.low && key < state.high;
            ScoreAndSlope<A> x{dot * block.score.scale, A(1)};
            if constexpr (Score::kPerPair) {
                if (seen) {
                    x = block.score.with_slope(dot, first_row + query, first_key + key);
                    seen = block.score.sees(first_row + query, first_key + key);
                }
            }
            const A weight = quick_exponential(x.score - state.lse);
            // A product that is -0 becomes +0: that of a seen pair is never kUnseen.
            A slope = multiply_add(weight, flow - state.delta, A(0));
            if (kWithSlope && Score::kPerPair) slope = multiply_add(slope, x.slope, A(0));
            tiles.weights[pair] = seen ? weight : kUnseen<A>;
            tiles.slopes[pair] = seen ? slope : kUnseen<A>;
        }
    }
}

// The block's rows meet a tile of columns, which starts at row `first_row` and key `first_key` with
// them: leaves P and dS as `weigh_pairs` does, for the lanes of a row to read. Of the features,
// chunk `slice` is what the tiles hold in the end. `fresh`: the rows are not those of the call
// before.
template <bool kRowsAreKeys, bool kWithSlope, typename Tile, typename T, typename Score, typename A,
          int kQueries>
__device__ __forceinline__ void meet(const VjpTiles<A, Tile>& tiles,
                                     QueryState<A> (&queries)[kQueries], const VjpParameters& p,
                                     const VjpWork<T, Score>& block, int64 first_row,
                                     int64 first_key, int slice, bool fresh,
                                     const PairPosition<Tile>& at) {
    constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns;
    constexpr int kStride = VjpTiles<A, Tile>::kStride;
    const int64 first_own = kRowsAreKeys ? first_key : first_row;
    const int64 first_met = kRowsAreKeys ? first_row : first_key;
    for (int turn = 1; turn <= p.chunks; ++turn) {
        const int64 chunk = int64((slice + turn) % p.chunks) * Tile::kFeatures;
        __syncthreads();  // everyone is done with the tiles before these
        if (fresh || p.chunks > 1)
            load_pair<kRowsAreKeys, Tile, Tile::kTileRows>(tiles.rows, p, block, first_own, chunk);
        load_pair<!kRowsAreKeys, Tile, Tile::kTileColumns>(tiles.columns, p, block, first_met,
                                                           chunk);
        if (turn == 1)
            load_queries<kQueries, Tile::kThreads>(
                queries, block, first_row, first_key,
                kRowsAreKeys ? Tile::kTileRows : Tile::kTileColumns);
        __syncthreads();
        auto multiply = [&](A* sums, const A* rows, const A* columns, int64 all) {
            A sum[kRows][kColumns] = {};
            add_inner_products<Tile::kFeatures, kStride, kStride>(
                sum, rows + at.first_row() * kStride, columns + at.lane.column * kStride,
                int(clamp(all - chunk, 0, Tile::kFeatures)));
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < kColumns; ++j) {
                    A& place = sums[at.pair(i, j)];
                    place = turn == 1 ? sum[i][j] : place + sum[i][j];
                }
        };
        multiply(tiles.weights, tiles.rows.features, tiles.columns.features, p.features);
        multiply(tiles.slopes, tiles.rows.values, tiles.columns.values, p.values);
    }
    weigh_pairs<kRowsAreKeys, kWithSlope>(tiles, queries, block, first_row, first_key, at);
    __syncwarp();  // the lanes of a row read each other's weights
}

// Stores dbias of the block's rows and its keys from `own_key` on: `sums`, kRows x kKeys numbers in
// shared memory that all threads have written, or the sums of these along an axis that is summed.
template <int kRows, int kKeys, int kStride, int kThreads, typename T, typename Score, typename A>
__device__ __forceinline__ void store_bias(A* sums, const VjpParameters& p,
                                           const VjpWork<T, Score>& block, int64 own_key) {
    const bool sums_rows = p.dbias.row_stride == 0, sums_keys = p.dbias.column_stride == 0;
    // Sums over rows or keys leave by the first of them.
    __syncthreads();
    if (sums_rows && threadIdx.x < kKeys) {
        A sum = 0;
        for (int row = 0; row < kRows; ++row) sum += sums[row * kStride + threadIdx.x];
        sums[threadIdx.x] = sum;
    }
    __syncthreads();
    if (sums_keys && threadIdx.x < kRows) {
        A* const row = sums + threadIdx.x * kStride;
        A sum = 0;
        for (int key = 0; key < kKeys; ++key) sum += row[key];
        row[0] = sum;
    }
    __syncthreads();
    const int64 rows = sums_rows ? 1 : block.end - block.first;
    const int64 keys = sums_keys ? 1 : min(int64(kKeys), p.score.keys - own_key);
    const int64 start = entry_offset(p.dbias.batch_stride, p.batch, block.index);
    for (int i = threadIdx.x; i < rows * keys; i += kThreads) {
        const int row = i / int(keys), key = i % int(keys);
        const int64 element = start + (block.first + row) * p.dbias.row_stride +
                              (own_key + key) * p.dbias.column_stride;
        A x = sums[row * kStride + key];
        if (p.adds) x += read_float<A>(p.dbias.data, element, p.dbias.type);
        write_float(p.dbias.data, element, p.dbias.type, x);
    }
}

}  // namespace cuflash

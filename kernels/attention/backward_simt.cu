// Gradients of attention in plain CUDA: every dtype, shape, stride and option, without atomics.
//
//   backward_keys     dk = scale (dS o g)^T q and dv = P^T dout, g the slope of the score
//   backward_queries  dq = scale (dS o g) k
//   backward_bias     dbias = dS
//
// P is computed again from q, k and lse, and nothing of Tq x Tk is kept: FlashAttention-2's
// backward (Dao 2023, algorithm 2), with a kernel of its own for dq in place of atomic additions.
//
// Grid: one block for each tile of rows of the gradient (keys in backward_keys), tile of its
// columns and entry of the gradient's own batch (lib/scheduler.cuh). The block walks over the tiles
// that see its rows, in every batch entry that the gradient is summed over. A warp owns 4 x kRows
// rows, and a row never leaves its 8 lanes; so the orders of all sums are fixed.
// Dynamic shared memory, in the accumulator's type, each of kTileRows or kTileColumns rows:
//   rows     kFeatures of k and of v, or of q and of dout: the block's own
//   columns  kFeatures of q and of dout, or of k and of v: those it meets
//   weights, slopes   kTileRows x kTileColumns: P and dS, exchanged by the lanes of a row
#include "attention/backward.cuh"

namespace cuflash {

// sum += weights @ values; in the turn after non-finite sums over seen pairs alone.
template <typename Tile, typename A>
__device__ __forceinline__ void add_values(A (&sum)[Tile::kRows][Tile::kOwn], const A* weights,
                                           const A* values, int depth, int turn,
                                           const PairPosition<Tile>& at) {
    constexpr int kStride = VjpTiles<A, Tile>::kStride;
    const A* const own = weights + at.first_row() * Tile::kWeightStride;
    const A* const columns = values + at.lane.column * kVector<A>;
    if (turn == 0)
        add_weighted_rows<Tile::kWeightStride, kStride>(sum, own, columns, depth);
    else
        add_weighted_rows<Tile::kWeightStride, kStride, true>(sum, own, columns, depth);
}

template <int kRows, int kOwn, typename A>
__device__ __forceinline__ bool all_finite(const A (&sum)[kRows][kOwn]) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int c = 0; c < kOwn; ++c) finite &= is_finite(sum[i][c]);
    return finite;
}

template <int kRows, int kOwn, typename A>
__device__ __forceinline__ void clear(A (&sum)[kRows][kOwn]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int c = 0; c < kOwn; ++c) sum[i][c] = 0;
}

// Writes the block's rows and columns of a gradient, if it is asked for; row 0 is `start`.
template <typename T, typename Score, typename Tile, typename A>
__device__ __forceinline__ void store_gradient(const BatchedArray& gradient, const VjpParameters& p,
                                               const VjpWork<T, Score>& block, int64 start,
                                               int64 columns,
                                               const A (&sum)[Tile::kRows][Tile::kOwn], A factor) {
    if (!gradient.data) return;
    const PairPosition<Tile> at(thread_here());  // found again: registers were for the sums
    const Matrix<T> matrix = Matrix<T>::of(gradient, p.batch, block.index);
    const int64 first_column = int64(block.work.column_tile) * Tile::kFeatures;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        const int64 row = block.first + at.row(i);
        if (row >= block.end) continue;
#pragma unroll
        for (int c = 0; c < Tile::kOwn; ++c) {
            const int64 column = first_column + at.template own<A>(c);
            if (column >= columns) continue;
            T& element = matrix.at(start + row, column);
            const A x = sum[i][c] * factor;
            element = narrow<T>(p.adds ? widen(element) + x : x);
        }
    }
}

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_keys(const __grid_constant__ VjpParameters p) {
    using A = Accumulator<T>;
    constexpr int kQueries = Tile::kTileColumns;
    CUFLASH_DYNAMIC_SHARED(A, shared);
    __shared__ VjpWork<T, Score> block;
    __shared__ QueryState<A> queries[kQueries];
    if (!block.template begin<true>(p, Tile::kTileRows)) return;

    const VjpTiles<A, Tile> tiles(shared);
    const PairPosition<Tile> at;
    A dk[Tile::kRows][Tile::kOwn], dv[Tile::kRows][Tile::kOwn];
    // A second turn only after non-finite values: see lib/nonfinite.cuh.
    for (int turn = 0; turn < 2; ++turn) {
        clear(dk);
        clear(dv);
        for (int64 entry = 0; entry < p.summed; ++entry) {
            block.enter(p, entry);
            const EntryBounds& bounds = block.score.bounds;
            const TileRange walk =
                TileRange::of(bounds.rows_that_see(block.first, block.end), kQueries, 0, 1);
            for (int64 tile = walk.begin; tile < walk.end; ++tile) {
                const int64 first_row = bounds.first + tile * kQueries;
                meet<true, true>(tiles, queries, p, block, first_row, block.first,
                                 block.work.column_tile, tile == walk.begin, at);
                const int rows = int(min(bounds.queries - first_row, int64(kQueries)));
                if (p.dv.data) add_values(dv, tiles.weights, tiles.columns.values, rows, turn, at);
                if (p.dk.data) add_values(dk, tiles.slopes, tiles.columns.features, rows, turn, at);
            }
        }
        if (turn > 0) break;
        if (!all_finite(dk) || !all_finite(dv)) block.redo = 1;
        __syncthreads();
        if (!block.redo) break;
    }
    const int64 start = block.segment.first_key;
    store_gradient<T, Score, Tile>(p.dk, p, block, start, p.features, dk, block.score.scale);
    store_gradient<T, Score, Tile>(p.dv, p, block, start, p.values, dv, A(1));
}

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_queries(const __grid_constant__ VjpParameters p) {
    using A = Accumulator<T>;
    constexpr int kKeys = Tile::kTileColumns;
    CUFLASH_DYNAMIC_SHARED(A, shared);
    __shared__ VjpWork<T, Score> block;
    __shared__ QueryState<A> queries[Tile::kTileRows];
    if (!block.template begin<false>(p, Tile::kTileRows)) return;

    const VjpTiles<A, Tile> tiles(shared);
    const PairPosition<Tile> at;
    A dq[Tile::kRows][Tile::kOwn];
    for (int turn = 0; turn < 2; ++turn) {
        clear(dq);
        for (int64 entry = 0; entry < p.summed; ++entry) {
            block.enter(p, entry);
            const TileRange walk =
                TileRange::of(block.score.range_of_any(block.first, block.end), kKeys, 0, 1);
            for (int64 tile = walk.begin; tile < walk.end; ++tile) {
                const int64 first_key = tile * kKeys;
                meet<false, true>(tiles, queries, p, block, block.first, first_key,
                                  block.work.column_tile, tile == walk.begin, at);
                const int keys = int(min(block.score.bounds.keys - first_key, int64(kKeys)));
                add_values(dq, tiles.slopes, tiles.columns.features, keys, turn, at);
            }
        }
        if (turn > 0) break;
        if (!all_finite(dq)) block.redo = 1;
        __syncthreads();
        if (!block.redo) break;
    }
    store_gradient<T, Score, Tile>(p.dq, p, block, 0, p.features, dq, block.score.scale);
}

// A block for each tile of rows and keys of dbias: of one of its axes that is summed, it walks over
// all tiles.
template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_bias(const __grid_constant__ VjpParameters p) {
    using A = Accumulator<T>;
    constexpr int kRows = Tile::kTileRows, kKeys = Tile::kTileColumns;
    CUFLASH_DYNAMIC_SHARED(A, shared);
    __shared__ VjpWork<T, Score> block;
    __shared__ QueryState<A> queries[kRows];
    const bool sums_rows = p.dbias.row_stride == 0, sums_keys = p.dbias.column_stride == 0;
    // A sum over no row is one, too.
    if (!block.template begin<false>(p, kRows, sums_rows)) return;

    const VjpTiles<A, Tile> tiles(shared);
    const PairPosition<Tile> at;
    const int64 own_key = int64(block.work.column_tile) * kKeys;
    A dbias[Tile::kRows][Tile::kColumns];
    clear(dbias);
    for (int64 entry = 0; entry < p.summed; ++entry) {
        block.enter(p, entry);
        const int64 end_row = sums_rows ? block.score.bounds.queries : block.end;
        for (int64 first_row = block.first; first_row < end_row; first_row += kRows) {
            KeyRange met = block.score.range_of_any(first_row, min(first_row + kRows, end_row));
            if (!sums_keys) {
                met.first = max(met.first, own_key);
                met.last = min(met.last, own_key + kKeys - 1);
            }
            const TileRange walk = TileRange::of(met, kKeys, 0, 1);
            for (int64 tile = walk.begin; tile < walk.end; ++tile) {
                meet<false, false>(tiles, queries, p, block, first_row, tile * kKeys, p.chunks - 1,
                                   tile == walk.begin, at);
#pragma unroll
                for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
                    for (int j = 0; j < Tile::kColumns; ++j)
                        dbias[i][j] += tiles.slopes[at.pair(i, j)];
            }
        }
    }

#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Tile::kColumns; ++j) tiles.slopes[at.pair(i, j)] = dbias[i][j];
    store_bias<kRows, kKeys, Tile::kWeightStride, Tile::kThreads>(tiles.slopes, p, block, own_key);
}

}  // namespace cuflash

// Gradients of attention on tensor cores, for 16-bit inputs of any shape and stride (sm_80 and
// later).
//
//   backward_mma_keys     dk = scale (dS o g)^T q and dv = P^T dout, g the slope of the score; with
//                         kAddsQueries also the sums of dq, in float, by atomic additions
//   backward_mma_queries  dq = scale (dS o g) k, where it is to have the same bits in every run
//   backward_mma_bias     dbias = dS
//   backward_mma_clear, backward_mma_round  the sums of dq before the additions, 0, and after:
//                         dq = scale sums
//
// FlashAttention-2 (Dao 2023, algorithm 2). P and dS are rounded to 16 bits, as operands of
// products; sums are in float.
//
// Grid: one block for each tile of keys, of queries, or of both, and entry of the gradient's own
// batch (lib/scheduler.cuh). The block walks over the tiles that see its rows, in every batch entry
// that the gradient is summed over, and has the next one fetched in the background.
//
// Dynamic shared memory, as swizzled tiles:
//   backward_mma_keys     keys and values (kKeys x kWidth); kStages times queries and douts
//                         (kQueries x kWidth); P and dS (kQueries x kKeys), by which warps hand the
//                         pairs that they made to those who sum them; if it is staged, what a tile
//                         adds to dq (kQueries x kWidth, in float)
//   backward_mma_queries  queries and douts (kQueries x kWidth), two stages of keys and values
//   backward_mma_bias     the same with one stage, then the tile of dbias in float
// In the end results leave by way of it. The others have none.
#include "attention/backward_mma.cuh"

namespace cuflash {

// Adds dS o g of a tile of pairs, times the keys, to the sums of dq: `rows` of them from
// `first_row` on; or writes it to `staged`, for `add_staged` to do that.
template <typename T, typename Tile>
__device__ __forceinline__ void add_queries(const Matrix<float>& to, int64 first_row, int rows,
                                            unsigned own_slope, unsigned own_key,
                                            unsigned char* staged) {
    using Part = typename Tile::QueryPart;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = Tile::PairPart::first_row(warp) + lane / 4;
#pragma unroll
    for (int pass = 0; pass < Part::kWarpColumns; pass += 8 * Part::kValueTiles) {
        ValueFragments<Part> sums = {};
        add_product<T, Part, typename Tile::Pairs, typename Tile::Rows, Tile::kKeys, false>(
            sums, own_slope, Tile::Rows::advance(own_key, pass / 16));
        const int column = Part::first_column(warp) + pass + lane % 4 * 2;
        unsigned char* const own_place = staged + row * Tile::kSumPitch + 4 * column;
        float* const own = &to.at(first_row + row, column);
#pragma unroll
        for (int i = 0; i < Part::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Part::kValueTiles; ++j) {
                const float* const x = &sums[i / 2][j][i % 2 * 2];
                if constexpr (Tile::kStaged)
                    store_pair<float>(own_place + 8 * i * Tile::kSumPitch + 32 * j, x[0], x[1]);
                else if (row + 8 * i < rows && column + 8 * j < to.row_stride)
                    add_pair(own + 8 * i * to.row_stride + 8 * j, x[0], x[1]);
            }
    }
    if constexpr (Tile::kStaged) fence_shared_for_copies();
}

// Starts to add what all threads have staged, row by row.
template <typename Tile>
__device__ __forceinline__ void add_staged(const Matrix<float>& to, int64 first_row, int rows,
                                           const unsigned char* staged) {
    constexpr int kPerWarp = Tile::kQueries * 32 / Tile::kThreads;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * kPerWarp + lane;
    if (lane < kPerWarp && row < rows)
        add_floats(&to.at(first_row + row, 0), shared_address(staged) + row * Tile::kSumPitch,
                   4 * int(to.row_stride));
    commit_boxes();
}

// Adds to the same what the rows do see of keys that are not finite, whose places in the tile are
// to become 0: of each element of dq by one thread.
template <typename T, typename Tile, typename Score>
__device__ __noinline__ void add_seen_nonfinite(const VjpParameters& p,
                                                const VjpWork<T, Score>& block, int64 first_row,
                                                int rows, const unsigned char* weights,
                                                const unsigned char* slopes) {
    using Pairs = typename Tile::Pairs;
    const int keys = int(min(block.score.bounds.keys - block.first, int64(Tile::kKeys)));
    const int features = int(p.features);
    const Matrix<float> to = Matrix<float>::of(p.dq_sums, p.batch, block.index);
    for (int i = threadIdx.x; i < rows * features; i += Tile::kThreads) {
        const int row = i / features, column = i % features;
        float sum = 0;
        for (int key = 0; key < keys; ++key) {
            const float x = widen(block.k.at(block.first + key, column));
            if (is_finite(x)) continue;
            const int at = Pairs::at(row, key / kVector<T>) + key % kVector<T> * int(sizeof(T));
            // dS may have become -0 by rounding: P tells what is seen.
            if (!is_unseen(widen(*reinterpret_cast<const T*>(weights + at))))
                sum += widen(*reinterpret_cast<const T*>(slopes + at)) * x;
        }
        if (!is_finite(sum)) atomicAdd(&to.at(first_row + row, column), sum);
    }
}

template <typename T, typename Score, typename Tile, bool kAddsQueries>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_mma_keys(const __grid_constant__ VjpParameters p) {
    using Rows = typename Tile::Rows;
    using Pairs = typename Tile::Pairs;
    using PairPart = typename Tile::PairPart;
    using SumPart = typename Tile::SumPart;
    constexpr int kKeys = Tile::kKeys, kQueries = Tile::kQueries, kColumns = Tile::kColumns;
    constexpr int kThreads = Tile::kThreads, kStages = Tile::kStages;
    constexpr bool kStagesQueries = kAddsQueries && Tile::kStaged;

    CUFLASH_DYNAMIC_SHARED(unsigned char, shared);
    unsigned char* const values = shared + Tile::kOwnBytes;
    unsigned char* const met = values + Tile::kOwnBytes;
    unsigned char* const weights = met + 2 * kStages * Tile::kMetBytes;
    unsigned char* const slopes = weights + Tile::kPairBytes;
    unsigned char* const staged = slopes + Tile::kPairBytes;
    __shared__ VjpWork<T, Score> block;
    __shared__ QueryState<float> states[2][kQueries];
    __shared__ bool damaged[kKeys], keys_damaged;
    __shared__ Matrix<float> dq_sums;
    if (!block.template begin<true>(p, kKeys)) return;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < kKeys; i += kThreads) damaged[i] = false;

    // The warp's pairs, and where a lane's rows of 8 x 8 matrices begin.
    const int pair_row = PairPart::first_row(warp), pair_key = PairPart::first_key(warp);
    const unsigned shared_at = here(shared_address(shared));
    const unsigned met_at = shared_at + 2 * Tile::kOwnBytes;
    const unsigned own_key =
        here(shared_at + Rows::at(pair_key + lane % 8 + lane / 16 * 8, lane / 8 % 2));
    const unsigned own_query = here(met_at + Rows::at(pair_row + lane % 16, lane / 16));
    // A thread's two pairs of row lane / 4 and the warp's first keys.
    const unsigned own_pair = here(Pairs::at(pair_row + lane / 4, pair_key / 8) + lane % 4 * 4);

    // The warp's sums.
    const bool of_values = SumPart::is_of_values(warp);
    const unsigned pairs_at = met_at + 2 * kStages * Tile::kMetBytes;
    const unsigned own_weight =
        here(pairs_at + (of_values ? 0 : Tile::kPairBytes) +
             Pairs::at(lane % 8 + lane / 16 * 8, SumPart::first_key(warp) / 8 + lane / 8 % 2));
    const unsigned own_value =
        here(met_at + (of_values ? Tile::kMetBytes : 0) +
             Rows::at(lane % 16, SumPart::first_column(warp) / 8 + lane / 16));
    ValueFragments<SumPart> sums;
    // Its part of dq.
    const unsigned own_slope =
        here(pairs_at + Tile::kPairBytes + Pairs::at(pair_row + lane % 16, lane / 16));
    const unsigned own_key_column =
        here(shared_at + Rows::at(lane % 16, Tile::QueryPart::first_column(warp) / 8 + lane / 16));

    // A second turn only after non-finite values: see lib/nonfinite.cuh.
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
        for (int m = 0; m < SumPart::kRowTiles; ++m)
#pragma unroll
            for (int j = 0; j < SumPart::kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[m][j][e] = 0;

#pragma unroll 1
        for (int64 entry = 0; entry < p.summed; ++entry) {
            block.enter(p, entry);
            const EntryBounds& bounds = block.score.bounds;
            const TileRange walk =
                TileRange::of(bounds.rows_that_see(block.first, block.end), kQueries, 0, 1);
            const int tiles = int(walk.end - walk.begin);
            if (tiles == 0) continue;
            const int64 start = bounds.first + walk.begin * kQueries;

            auto first_row = [&](int tile) { return start + tile * kQueries; };
            auto load_tile = [&](int tile) {
                unsigned char* const queries = met + tile % kStages * 2 * Tile::kMetBytes;
                start_queries<kQueries, kColumns, kThreads>(queries, queries + Tile::kMetBytes, p,
                                                            block, first_row(tile));
            };
            auto rows_of = [&](int tile) {
                return int(min(bounds.queries - first_row(tile), int64(kQueries)));
            };
            auto start_adding = [&](int tile) {
                add_staged<Tile>(dq_sums, first_row(tile), rows_of(tile), staged);
            };
            // What is known of a query is read while something else is computed.
            float lse = 0, delta = 0;
            auto read_state = [&](int tile) {
                const int64 row = first_row(tile) + threadIdx.x;
                if (threadIdx.x >= kQueries || !block.score.is_used(row)) return;
                lse = block.lse.at(row);
                delta = block.delta.at(row);
            };
            auto keep_state = [&](int tile) {
                if (threadIdx.x < kQueries)
                    states[tile % 2][threadIdx.x] = state_of(
                        lse, delta, block.score, first_row(tile) + threadIdx.x, block.first, kKeys);
            };

            start_keys<kKeys, kColumns, kThreads>(shared, values, p, block, block.first);
            load_tile(0);
            commit_copies();
            read_state(0);
            keep_state(0);
            if (kAddsQueries && threadIdx.x == 0) {
                keys_damaged = false;
                dq_sums = Matrix<float>::of(p.dq_sums, p.batch, block.index);
            }
#pragma unroll 1
            for (int tile = 0; tile < tiles; ++tile) {
                const unsigned stage = tile % kStages * 2 * Tile::kMetBytes;
                wait_for_copies<0>();
                __syncthreads();  // the tile is there, and everyone is done with the one before
                if (kStagesQueries && turn == 0 && tile > 0) start_adding(tile - 1);
                const bool more = tile + 1 < tiles;
                if (more) {
                    if (kStages > 1) load_tile(tile + 1);
                    read_state(tile + 1);
                }
                commit_copies();
                if (kAddsQueries && tile == 0 &&
                    has_nonfinite<kKeys, kColumns, kThreads, T>(shared))
                    keys_damaged = true;

                // Every lane looks at one row of each 32, or fewer, of the warp's.
                const QueryState<float>* const state = states[tile % 2] + pair_row;
                bool all_see = true, none_sees = true;
#pragma unroll
                for (int i = lane; i < 16 * PairPart::kRowTiles; i += 32) {
                    const int low = state[i].low, high = state[i].high;
                    all_see &= low <= pair_key && high >= pair_key + PairPart::kPairColumns;
                    none_sees &= high <= pair_key || low >= pair_key + PairPart::kPairColumns;
                }
                const bool whole = __all_sync(kFullWarp, all_see);
                ScoreFragments<PairPart> dots = {}, flows = {};
                if (!__all_sync(kFullWarp, none_sees)) {
                    add_scores<T, PairPart>(dots, own_key, LeftRows<PairPart>{own_query + stage});
                    add_scores<T, PairPart>(
                        flows, own_key + Tile::kOwnBytes,
                        LeftRows<PairPart>{own_query + stage + Tile::kMetBytes});
                }
                auto row_in_warp = [&](int i) { return 8 * i + lane / 4; };
                weigh_pairs<PairPart, true>(
                    dots, flows, block.score, block.first, pair_key, whole,
                    [&](int i) { return state[row_in_warp(i)]; },
                    [&](int i) { return first_row(tile) + pair_row + row_in_warp(i); });
#pragma unroll
                for (int i = 0; i < PairPart::kRows; ++i)
#pragma unroll
                    for (int j = 0; j < PairPart::kKeyTiles; ++j) {
                        const int at =
                            (own_pair ^ (j * Pairs::kChunkBytes)) + 8 * i * Pairs::kPitch;
                        const int e = i % 2 * 2;
                        store_pair<T>(weights + at, dots[i / 2][j][e], dots[i / 2][j][e + 1]);
                        store_pair<T>(slopes + at, flows[i / 2][j][e], flows[i / 2][j][e + 1]);
                    }
                if (more) keep_state(tile + 1);
                if constexpr (kStagesQueries) wait_for_boxes_read();
                __syncthreads();  // all pairs are there
                if (kAddsQueries && turn == 0) {
                    if (keys_damaged) {
                        add_seen_nonfinite<T, Tile>(p, block, first_row(tile), rows_of(tile),
                                                    weights, slopes);
                        keep_finite<kKeys, kColumns, kThreads, T>(shared);
                        __syncthreads();
                    }
                    add_queries<T, Tile>(dq_sums, first_row(tile), rows_of(tile), own_slope,
                                         own_key_column, staged);
                    if (keys_damaged && more) {
                        __syncthreads();  // everyone is done with the keys: back to what they are
                        start_rows<kKeys, kColumns, kThreads>(shared, block.k, block.first,
                                                              bounds.keys - block.first,
                                                              int(p.features));
                        commit_copies();
                    }
                }
                if (turn > 0) {
                    unsigned char* const queries = met + stage;
                    keep_finite<kQueries, kColumns, kThreads, T>(queries);
                    keep_finite<kQueries, kColumns, kThreads, T>(queries + Tile::kMetBytes);
                    __syncthreads();
                }
                add_product<T, SumPart, Pairs, Rows, kQueries, true>(sums, own_weight,
                                                                     own_value + stage);
                if (kStages == 1 && more) {
                    __syncthreads();  // everyone is done with the tile
                    load_tile(tile + 1);
                    commit_copies();
                }
            }
            if (kStagesQueries && turn == 0) {
                __syncthreads();  // all sums are there
                start_adding(tiles - 1);
            }
        }
        if (turn > 0) break;
        const unsigned rows = damaged_rows<SumPart>(sums);
        if (rows) block.redo = 1;
#pragma unroll
        for (int i = 0; i < SumPart::kRows; ++i)
            if (rows >> i & 1) damaged[SumPart::first_key(warp) + 8 * i + lane / 4] = true;
        __syncthreads();
        if (!block.redo) break;
    }
    if constexpr (kStagesQueries) wait_for_boxes();
    __syncthreads();  // everyone is done with shared memory

    const float factor = of_values ? 1 : block.score.scale;
#pragma unroll
    for (int m = 0; m < SumPart::kRowTiles; ++m)
#pragma unroll
        for (int j = 0; j < SumPart::kValueTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][j][e] *= factor;
    const BatchedArray& gradient = of_values ? p.dv : p.dk;
    if (gradient.data) {
        Matrix<T> to = Matrix<T>::of(gradient, p.batch, block.index);
        const int column = SumPart::first_column(warp);
        const int64 first = block.first + SumPart::first_key(warp);
        to.data += column * to.column_stride;
        store_rows<SumPart>(shared, sums, to, block.segment.first_key + first,
                            int(clamp(block.end - first, 0, SumPart::kWarpRows)),
                            (of_values ? p.values : p.features) - column);
    }
    if (!block.redo) return;

#pragma unroll 1
    for (int64 entry = 0; entry < p.summed; ++entry) {
        block.enter(p, entry);
#pragma unroll 1
        for (int64 key = block.first + warp; key < block.end; key += kThreads / 32)
            if (damaged[key - block.first]) put_back<true>(p, block, key);
    }
}

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_mma_queries(const __grid_constant__ VjpParameters p) {
    using Rows = typename Tile::Features;
    constexpr int kRowTiles = Tile::kRowTiles, kRows = Tile::kRows, kKeys = Tile::kKeys;
    constexpr int kQueries = Tile::kQueries, kThreads = Tile::kThreads;
    constexpr int kColumns = Rows::kPitch / 2, kStageBytes = Tile::kKeyBytes + Tile::kValueBytes;

    CUFLASH_DYNAMIC_SHARED(unsigned char, shared);
    unsigned char* const keys = shared + 2 * Tile::kQueryBytes;
    __shared__ VjpWork<T, Score> block;
    // What the loop seldom needs lies in shared memory: registers are few.
    __shared__ WarpTiles tiles_of_warp[kThreads / 32];
    __shared__ float2 numbers[kQueries];  // lse and delta
    __shared__ int64 first_tile;
    __shared__ bool damaged[kQueries];
    if (!block.template begin<false>(p, kQueries)) return;

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * Tile::kWarpRows;
    auto row_of = [&](int i) { return block.first + warp_row + 8 * i + lane / 4; };
    WarpTiles& seen = tiles_of_warp[threadIdx.x / 32];
    for (int i = threadIdx.x; i < kQueries; i += kThreads) damaged[i] = false;

    // Where a lane's rows of 8 x 8 matrices begin.
    const unsigned keys_at = here(shared_address(keys));
    const unsigned own_query =
        here(shared_address(shared) + Rows::at(warp_row + lane % 16, lane / 16));
    const unsigned own_key = here(own_key_row<Tile>(keys_at));
    const unsigned own_value = here(own_value_row<Tile>(keys_at));
    ValueFragments<Tile> sums;

#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int j = 0; j < Tile::kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[m][j][e] = 0;

#pragma unroll 1
        for (int64 entry = 0; entry < p.summed; ++entry) {
            block.enter(p, entry);
            const TileRange walk =
                TileRange::of(block.score.range_of_any(block.first, block.end), kKeys, 0, 1);
            const int tiles = int(walk.end - walk.begin);
            if (tiles == 0) continue;
            if (threadIdx.x == 0) first_tile = walk.begin;
            __syncthreads();
            auto load_tile = [&](int tile) {
                unsigned char* const to = keys + tile % 2 * kStageBytes;
                start_keys<kKeys, kColumns, kThreads>(to, to + Tile::kKeyBytes, p, block,
                                                      (first_tile + tile) * kKeys);
            };
            start_queries<kQueries, kColumns, kThreads>(shared, shared + Tile::kQueryBytes, p,
                                                        block, block.first);
            load_tile(0);
            commit_copies();

            const bool alive =
                read_numbers<Tile::kWarpRows>(numbers + warp_row, block, block.first + warp_row);
            if (lane == 0) {
                seen = WarpTiles::of(block.score, block.first + warp_row, Tile::kWarpRows, walk,
                                     kKeys);
                if (!alive) seen.whole_end = seen.whole_begin;
            }
            __syncwarp();

#pragma unroll 1
            for (int tile = 0; tile < tiles; ++tile) {
                const unsigned stage = tile % 2 * kStageBytes;
                wait_for_copies<0>();
                __syncthreads();  // the tile is there, and everyone is done with the one before
                if (tile + 1 < tiles) load_tile(tile + 1);
                commit_copies();
                const int64 first_key = (first_tile + tile) * kKeys;
                const bool shown = seen.has(tile), whole = seen.has_whole(tile);
                ScoreFragments<Tile> dots = {}, flows = {};
                if (shown) {
                    add_scores<T, Tile>(dots, own_key + stage, LeftRows<Tile>{own_query});
                    add_scores<T, Tile>(flows, own_key + stage + Tile::kKeyBytes,
                                        LeftRows<Tile>{own_query + Tile::kQueryBytes});
                    weigh_pairs<Tile, true>(
                        dots, flows, block.score, first_key, 0, whole,
                        [&](int i) {
                            const float2 x = numbers[warp_row + 8 * i + lane / 4];
                            if (whole && !Score::kPerPair)
                                return QueryState<float>{x.x * kLog2OfE, x.y, 0, kKeys};
                            return state_of(x.x, x.y, block.score, row_of(i), first_key, kKeys);
                        },
                        row_of);
                }
                if (turn > 0) {
                    __syncthreads();
                    keep_finite<kKeys, kColumns, kThreads, T>(keys + stage);
                    __syncthreads();
                }
                if (shown) add_values<T, Tile>(sums, flows, own_value + stage);
            }
        }
        if (turn > 0) break;
        const unsigned rows = damaged_rows<Tile>(sums);
        if (rows) block.redo = 1;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            if (rows >> i & 1) damaged[warp_row + 8 * i + lane / 4] = true;
        __syncthreads();
        if (!block.redo) break;
    }
    __syncthreads();  // everyone is done with shared memory

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int j = 0; j < Tile::kValueTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][j][e] *= block.score.scale;
    const int64 first_row = block.first + warp_row;
    store_rows<Tile>(shared, sums, Matrix<T>::of(p.dq, p.batch, block.index), first_row,
                     int(clamp(block.end - first_row, 0, Tile::kWarpRows)), p.features);
    if (!block.redo) return;

#pragma unroll 1
    for (int64 entry = 0; entry < p.summed; ++entry) {
        block.enter(p, entry);
#pragma unroll 1
        for (int64 row = block.first + threadIdx.x / 32; row < block.end; row += kThreads / 32)
            if (damaged[row - block.first]) put_back<false>(p, block, row);
    }
}

// A block for each tile of rows and keys of dbias: of one of its axes that is summed, it walks over
// all tiles.
template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_mma_bias(const __grid_constant__ VjpParameters p) {
    using Rows = typename Tile::Features;
    constexpr int kKeys = Tile::kKeys, kQueries = Tile::kQueries, kThreads = Tile::kThreads;
    constexpr int kColumns = Rows::kPitch / 2, kSumStride = kKeys + 8;

    CUFLASH_DYNAMIC_SHARED(unsigned char, shared);
    unsigned char* const keys = shared + 2 * Tile::kQueryBytes;
    __shared__ VjpWork<T, Score> block;
    __shared__ float2 numbers[kQueries];  // lse and delta
    const bool sums_rows = p.dbias.row_stride == 0, sums_keys = p.dbias.column_stride == 0;
    // A sum over no row is one, too.
    if (!block.template begin<false>(p, kQueries, sums_rows)) return;

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * Tile::kWarpRows;
    const unsigned own_query = shared_address(shared) + Rows::at(warp_row + lane % 16, lane / 16);
    const unsigned own_key_at = own_key_row<Tile>(shared_address(keys));
    const int64 own_key = int64(block.work.column_tile) * kKeys;
    ScoreFragments<Tile> sums = {};

#pragma unroll 1
    for (int64 entry = 0; entry < p.summed; ++entry) {
        block.enter(p, entry);
        const int64 end_row = sums_rows ? block.score.bounds.queries : block.end;
#pragma unroll 1
        for (int64 first_row = block.first; first_row < end_row; first_row += kQueries) {
            KeyRange met = block.score.range_of_any(first_row, min(first_row + kQueries, end_row));
            if (!sums_keys) {
                met.first = max(met.first, own_key);
                met.last = min(met.last, own_key + kKeys - 1);
            }
            const TileRange walk = TileRange::of(met, kKeys, 0, 1);
            if (walk.begin == walk.end) continue;
            __syncthreads();  // everyone is done with the rows before
            start_queries<kQueries, kColumns, kThreads>(shared, shared + Tile::kQueryBytes, p,
                                                        block, first_row);
            read_numbers<Tile::kWarpRows>(numbers + warp_row, block, first_row + warp_row);
#pragma unroll 1
            for (int64 tile = walk.begin; tile < walk.end; ++tile) {
                __syncthreads();  // everyone is done with the keys before
                start_keys<kKeys, kColumns, kThreads>(keys, keys + Tile::kKeyBytes, p, block,
                                                      tile * kKeys);
                commit_copies();
                wait_for_copies<0>();
                __syncthreads();
                ScoreFragments<Tile> dots = {}, flows = {};
                add_scores<T, Tile>(dots, own_key_at, LeftRows<Tile>{own_query});
                add_scores<T, Tile>(flows, own_key_at + Tile::kKeyBytes,
                                    LeftRows<Tile>{own_query + Tile::kQueryBytes});
                auto row_of = [&](int i) { return first_row + warp_row + 8 * i + lane / 4; };
                weigh_pairs<Tile, false>(
                    dots, flows, block.score, tile * kKeys, 0, false,
                    [&](int i) {
                        const float2 x = numbers[warp_row + 8 * i + lane / 4];
                        return state_of(x.x, x.y, block.score, row_of(i), tile * kKeys, kKeys);
                    },
                    row_of);
#pragma unroll
                for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
                    for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
                        for (int e = 0; e < 4; ++e) sums[m][j][e] += flows[m][j][e];
            }
        }
    }

    __syncthreads();  // everyone is done with shared memory
    float* const out = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Tile::kKeyTiles; ++j)
            *reinterpret_cast<float2*>(out + (warp_row + 8 * i + lane / 4) * kSumStride + 8 * j +
                                       lane % 4 * 2) =
                make_float2(sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]);
    store_bias<kQueries, kKeys, kSumStride, kThreads>(out, p, block, own_key);
}

// Sums of dq of a tile of rows: 0, where atomic additions begin.
template <typename T>
__global__ void __launch_bounds__(128) backward_mma_clear(const __grid_constant__ VjpParameters p) {
    constexpr int kRows = 32;
    __shared__ VjpWork<T, RangedScore<float>> block;
    if (!block.template begin<false>(p, kRows)) return;
    const Matrix<float> sums = Matrix<float>::of(p.dq_sums, p.batch, block.index);
    const int columns = int(sums.row_stride);
    const int count = int(block.end - block.first) * columns / kVector<float>;
    auto* const first = reinterpret_cast<float4*>(&sums.at(block.first, 0));
    for (int i = threadIdx.x; i < count; i += blockDim.x) first[i] = make_float4(0, 0, 0, 0);
}

// dq of a tile of rows: scale times the sums, rounded.
template <typename T>
__global__ void __launch_bounds__(128) backward_mma_round(const __grid_constant__ VjpParameters p) {
    constexpr int kRows = 32;
    __shared__ VjpWork<T, RangedScore<float>> block;
    if (!block.template begin<false>(p, kRows)) return;
    const Matrix<const float> sums = Matrix<const float>::of(p.dq_sums, p.batch, block.index);
    const Matrix<T> to = Matrix<T>::of(p.dq, p.batch, block.index);
    const int columns = int(p.features), rows = int(block.end - block.first);
    const float scale = block.score.scale;
    if (has_aligned_rows(to) && columns % kVector<T> == 0) {
        const int chunks = columns / kVector<T>;
        for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
            const int64 row = block.first + i / chunks;
            const int column = i % chunks * kVector<T>;
            const auto* from = reinterpret_cast<const float4*>(&sums.at(row, column));
            const float4 low = __ldcs(from), high = __ldcs(from + 1);
            const uint4 words = {
                pack<T>(low.x * scale, low.y * scale), pack<T>(low.z * scale, low.w * scale),
                pack<T>(high.x * scale, high.y * scale), pack<T>(high.z * scale, high.w * scale)};
            __stcs(reinterpret_cast<uint4*>(&to.at(row, column)), words);
        }
        return;
    }
    for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
        const int64 row = block.first + i / columns;
        to.at(row, i % columns) = narrow<T>(sums.at(row, i % columns) * scale);
    }
}

}  // namespace cuflash

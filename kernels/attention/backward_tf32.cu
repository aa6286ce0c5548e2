// Gradients of attention in float32 on TF32 tensor cores, for inputs of any shape and stride (sm_80
// and later).
//
//   backward_tf32, of keys     dk = scale (dS o g)^T q and dv = P^T dout, g the slope of the score;
//                              with kAddsQueries also the sums of dq, by atomic additions
//   backward_tf32, of queries  dq = scale (dS o g) k, where it is to have the same bits in every
//                              run
//
// FlashAttention-2 (Dao 2023, algorithm 2), as in backward_dmma.cu: a block owns rows of k and v,
// or of q and dout, and meets tiles of the others, one ahead of the products in the background. Two
// warps share 16 or 32 of its rows: one multiplies features and makes P, the other multiplies
// values; each hands what it made to the other, lane by lane, and both go on with half of the sums:
// dv and dk, or the halves of the columns of dq. What a tile adds to dq is multiplied beside the
// pairs of the next one. Each product is three, of the parts of its operands: see tf32_tile.cuh.
//
// An infinite operand makes such a product NaN, whatever it should be: dot products that are not
// finite are computed again, without tensor cores.
//
// Grid: one block for each tile of keys, or of queries, and entry of the gradient's own batch
// (lib/scheduler.cuh); the block walks over the tiles that see its rows in every batch entry that
// the gradient is summed over.
//
// Dynamic shared memory: the block's own rows of both operands (2 x kOwn x kWidth); two stages of
// those it meets (2 x kMet x kWidth each); what warps hand over (kOwn x kMet; of queries, or to add
// to dq, twice).
#include "attention/backward_tf32.cuh"
#include "attention/nonfinite_gradients.cuh"

namespace cuflash {

// Whether a tile that has arrived has NaN, inf or numbers near it, of which the parts have no sum,
// for the threads that see some: to be called by all.
template <int kCount, int kThreads>
__device__ __forceinline__ bool has_indivisible(const unsigned char* tile) {
    float zero = 0;  // times NaN or inf it is NaN
#pragma unroll 1
    for (int i = threadIdx.x; i < kCount; i += kThreads) {
        const float x = reinterpret_cast<const float*>(tile)[i];
        zero = multiply_add(x + x, 0, zero);
    }
    return zero != 0;
}

// `add_queries` where keys have no parts: what no row sees of them stays out.
template <typename Tile, typename Score>
__device__ __noinline__ void add_queries_one_by_one(const Matrix<float>& to, int64 first_row,
                                                    int rows, const unsigned char* slopes,
                                                    const VjpParameters& p,
                                                    const VjpWork<float, Score>& block) {
    const int keys = int(min(block.score.bounds.keys - block.first, int64(Tile::kOwn)));
    const int features = int(p.features);
    for (int i = threadIdx.x; i < rows * features; i += Tile::kThreads) {
        const int row = i / features, column = i % features;
        float sum = 0;
        for (int key = 0; key < keys; ++key) {
            const float slope =
                *reinterpret_cast<const float*>(slopes + key / Tile::kWarpRows * Tile::kPairBytes +
                                                handed_place<Tile>(row, key % Tile::kWarpRows));
            if (!is_unseen(slope)) sum += slope * block.k.at(block.first + key, column);
        }
        atomicAdd(&to.at(first_row + row, column), sum);
    }
}

template <typename Score, typename Tile, bool kOfKeys, bool kAddsQueries>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_tf32(const __grid_constant__ VjpParameters p) {
    using Rows = typename Tile::Rows;
    using Handed = typename Tile::Handed;
    constexpr int kOwn = Tile::kOwn, kMet = Tile::kMet, kThreads = Tile::kThreads;
    constexpr int kWarpRows = Tile::kWarpRows, kStageBytes = 2 * Tile::kMetBytes;
    constexpr int kQueries = kOfKeys ? kMet * Tile::kGroup : kOwn;
    constexpr int kSumTiles = Tile::kWidth / 8 / (kOfKeys ? 1 : 2);
    using Sums = typename Tile::template Sums<kSumTiles>;
    // P and dS o g, where both are handed over as they are.
    constexpr bool kReadsAgain = kAddsQueries && !Score::kPerPair;

    CUFLASH_DYNAMIC_SHARED(unsigned char, shared);
    unsigned char* const met = shared + 2 * Tile::kOwnBytes;
    unsigned char* const handed = met + 2 * kStageBytes;
    __shared__ VjpWork<float, Score> block;
    __shared__ QueryState<float> states[kQueries];
    __shared__ int64 start;  // the first row of the walk
    __shared__ int shift;    // and the tile of it with which the block begins
    __shared__ bool damaged[kOwn];
    // Of two blocks on a multiprocessor one has its warps the other way round, so that each quarter
    // has one of each kind: those of features have more to do.
    __shared__ bool turned;
    if (threadIdx.x == 0) turned = Tile::kPairs % 4 != 0 && hardware_warp() / (kThreads / 32) % 2;
    if (!block.template begin<kOfKeys>(p, kOwn)) return;
    if (threadIdx.x < kOwn) damaged[threadIdx.x] = false;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int pair = warp % Tile::kPairs, warp_row = pair * kWarpRows;
    const bool of_values = warp >= Tile::kPairs != turned;  // of the first product, dout v^T
    // Where a lane's first chunks are, and how far from there its second ones.
    const int first_chunk = Rows::at(g, t), other_chunk = half_after(Rows::swap(g));
    const unsigned char* const own =
        shared + of_values * Tile::kOwnBytes + warp_row * Rows::kPitch + first_chunk;
    const unsigned char* const met_rows = met + of_values * Tile::kMetBytes + first_chunk;
    // The second product takes the other operand's rows, or columns from the middle of the same.
    const int first_column = kOfKeys ? 0 : of_values * Tile::kWidth / 2;
    const int other_row = half_after(g * 16 ^ Rows::swap(2 * t));
    const int columns = int(kOfKeys && !of_values ? p.values : p.features) - first_column;
    // Found again for each tile: registers are few.
    auto met_columns = [&] {
        const int lane = thread_here() % 32;
        return met + (kOfKeys && !of_values) * Tile::kMetBytes + 4 * first_column +
               Rows::at(lane % 4 * 2, lane / 4);
    };
    auto own_handed = [&] {
        const int thread = thread_here(), lane = thread % 32;
        return handed + thread / 32 % Tile::kPairs * Tile::kPairBytes +
               Handed::at(lane % 4 * 2, lane / 4);
    };
    unsigned char* const slopes = handed + Tile::kHandedBytes;  // dS o g, if dq is summed
    __shared__ bool keys_damaged;
    __shared__ Matrix<float> dq_sums;
    SumFragments<Tile, kSumTiles> sums;

    auto clear = [&] {
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
            for (int j = 0; j < kSumTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[m][j][e] = 0;
    };
    auto look_for_damage = [&] {
#pragma unroll
        for (int i = 0; i < Sums::kRows; ++i) {
            float zero = 0;  // times NaN or inf it is NaN
#pragma unroll
            for (int j = 0; j < kSumTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    zero = multiply_add(sums[i / 2][j][i % 2 * 2 + e], 0, zero);
            if (zero != 0) damaged[warp_row + own_row(i) + g] = block.redo = true;
        }
    };
    // Stores the sums times their factor, or adds them to what is there.
    auto store = [&](bool adds) {
        const BatchedArray& gradient = !kOfKeys ? p.dq : of_values ? p.dk : p.dv;
        if (!gradient.data) return;
        const int64 first = kOfKeys ? block.segment.first_key : 0;
        const OwnResults to(Matrix<float>::of(gradient, p.batch, block.index),
                            first + block.first + warp_row + g, first + block.end,
                            first_column + 8 * t, kOfKeys && !of_values ? p.values : p.features);
        const float factor = kOfKeys && !of_values ? 1 : block.score.scale;
        visit_sums<Sums>(sums, [&](int i, int column, Vector<float>& x) {
            if (!to.has(8 * i)) return;
            const Vector<float> before = adds ? to.load(8 * i, column) : Vector<float>{};
#pragma unroll
            for (int n = 0; n < 4; ++n)
                x.element[n] = multiply_add(x.element[n], factor, before.element[n]);
            to.store(8 * i, column, x);
        });
    };

    // The sums of many rows lie among the results while others are made: the error of n terms that
    // are alike, added one by one, grows like n.
    constexpr int kTilesApart = 1024 / kMet;
    __shared__ int met_tiles;
    __shared__ bool again;  // a second turn

    // A second turn only after non-finite values: see lib/nonfinite.cuh.
#pragma unroll 1
    for (;;) {
        clear();
        if (threadIdx.x == 0) {
            met_tiles = 0;
            again = block.redo;
        }
#pragma unroll 1
        for (int64 entry = 0; entry < p.summed; ++entry) {
            block.enter(p, entry);
            const EntryBounds& bounds = block.score.bounds;
            const TileRange walk =
                TileRange::of(kOfKeys ? bounds.rows_that_see(block.first, block.end)
                                      : block.score.range_of_any(block.first, block.end),
                              kMet, 0, 1);
            const int tiles = int(walk.end - walk.begin);
            if (tiles == 0) continue;
            if (threadIdx.x == 0) {
                start = (kOfKeys ? bounds.first : 0) + walk.begin * kMet;
                shift = kOfKeys ? int(block.first / kMet % tiles) / Tile::kGroup * Tile::kGroup : 0;
            }
            __syncthreads();
            // Blocks that run together begin at different rows, or all would add to the same ones.
            auto place_of = [&](int tile) {
                const int place = tile + shift;
                return place < tiles ? place : place - tiles;
            };
            auto first_query = [&] { return kOfKeys ? start : block.first; };
            auto first_key = [&] { return kOfKeys ? block.first : start; };

            // Most tiles are copied whole, from where a thread's first chunks are.
            const Matrix<const float>& features = kOfKeys ? block.q : block.k;
            const Matrix<const float>& values = kOfKeys ? block.dout : block.v;
            const ChunkCopies<Rows, kMet, kThreads, float> feature_copies(met, features, start);
            const ChunkCopies<Rows, kMet, kThreads, float> value_copies(met, values, start);
            const bool filled = has_aligned_rows(features) && has_aligned_rows(values) &&
                                p.features == Tile::kWidth && p.values == Tile::kWidth;
            const int whole_tiles =
                filled ? int(clamp(((kOfKeys ? bounds.queries : bounds.keys) - start) / kMet, 0,
                                   int64(tiles)))
                       : 0;
            auto load_tile = [&](int tile) {
                const int place = place_of(tile), stage = tile % 2 * kStageBytes;
                if (__builtin_expect(place >= whole_tiles, 0))
                    return start_operands<!kOfKeys, Tile, kMet>(met + stage, p, block,
                                                                start + place * kMet);
                auto start_whole = [&](auto copies, int64 row_stride, int to) {
                    copies.advance(row_stride, place);
                    copies.start(to, row_stride);
                };
                start_whole(feature_copies, (kOfKeys ? p.q : p.k).row_stride, stage);
                start_whole(value_copies, (kOfKeys ? p.dout : p.v).row_stride,
                            stage + Tile::kMetBytes);
            };
            // What is known of queries is read for several tiles at a time.
            auto read_states = [&](int place) {
                if (threadIdx.x >= kQueries) return;
                const int64 row = first_query() + place * kMet + threadIdx.x;
                states[threadIdx.x] = state_of(block, row, first_key());
            };

            start_operands<kOfKeys, Tile, kOwn>(shared, p, block, block.first);
            load_tile(0);
            if (kAddsQueries && threadIdx.x == 0) {
                keys_damaged = false;
                dq_sums = Matrix<float>::of(p.dq_sums, p.batch, block.index);
            }
            commit_copies();
            if (!kOfKeys) read_states(0);
#pragma unroll 1
            for (int tile = 0;; ++tile) {
                const int stage = tile % 2 * kStageBytes;
                wait_for_copies<0>();
                // The tile is there, and so are the slopes of the one before, with which everyone
                // is done but for them.
                __syncthreads();
                if (tile + 1 < tiles) load_tile(tile + 1);
                commit_copies();
                const int place = place_of(tile);
                if (kOfKeys && place % Tile::kGroup == 0 && tile < tiles) {
                    read_states(place);
                    if (kAddsQueries && tile == 0 &&
                        has_indivisible<kOwn * Tile::kWidth, kThreads>(shared))
                        keys_damaged = true;
                    __syncthreads();
                }
                if (kAddsQueries && !again && tile > 0) {
                    const int64 row = start + place_of(tile - 1) * kMet;
                    const int rows = int(min(bounds.queries - row, int64(kMet)));
                    if (keys_damaged)
                        add_queries_one_by_one<Tile>(dq_sums, row, rows, slopes, p, block);
                    else
                        add_queries<Tile>(dq_sums, row, rows, slopes, shared, int(p.features));
                }
                if (tile == tiles) break;
                if (threadIdx.x == 0) ++met_tiles;

                const int key = kOfKeys ? warp_row : place * kMet;
                const QueryState<float>* const state =
                    states + (kOfKeys ? place % Tile::kGroup * kMet : warp_row);
                const bool shown = !see_nothing(state, kOfKeys ? kMet : kWarpRows, key,
                                                kOfKeys ? kWarpRows : kMet);
                PairFragments<Tile> pairs = {};
                auto hand_over = [&](unsigned char* to, PairFragments<Tile>& from) {
                    visit_handed<Tile>(to, other_row, [&](Vector<float>& x, auto pair) {
#pragma unroll
                        for (int n = 0; n < 4; ++n)
                            x.element[n] = shown ? pair(from, n) : kUnseen<float>;
                    });
                };
                if (shown) {
                    add_tf32_scores<typename Tile::Scores, 1>(
                        pairs, own, met_rows + stage, other_chunk,
                        int(of_values ? p.values : p.features));
                    if (__builtin_expect(!are_finite<Tile>(pairs), 0))
                        replace_nonfinite_scores<typename Tile::Scores>(
                            pairs, own - first_chunk, met_rows + stage - first_chunk);
                    const QueryState<float>* const first = state + (kOfKeys ? 2 * t : g);
                    if (!of_values) {
                        PairFragments<Tile> bent;
                        const int own_key = key + (kOfKeys ? g : 2 * t);
                        const int64 row =
                            first_query() + (kOfKeys ? place * kMet + 2 * t : warp_row + g);
                        if (!Score::kPerPair && see_everything(state, kOfKeys ? kMet : kWarpRows,
                                                               key, kOfKeys ? kWarpRows : kMet))
                            weigh_dots<kOfKeys, Tile>(pairs, bent, block.score, first, own_key, row,
                                                      first_key() + own_key, true);
                        else
                            weigh_dots<kOfKeys, Tile>(pairs, bent, block.score, first, own_key, row,
                                                      first_key() + own_key);
                        visit_handed<Tile>(own_handed(), other_row,
                                           [&](Vector<float>& x, auto pair) {
#pragma unroll
                                               for (int n = 0; n < 4; ++n) {
                                                   x.element[n] = pair(bent, n);
                                                   if (!kOfKeys) pair(pairs, n) = x.element[n];
                                               }
                                           });
                    } else {
                        visit_queries<kOfKeys, Tile>([&](int n, auto pair_of) {
                            const float below = first[kOfKeys ? met_row(n) : own_row(n)].delta;
#pragma unroll
                            for (int i = 0; i < 2 * (kOfKeys ? Tile::kRowTiles : Tile::kMetTiles);
                                 ++i)
                                pair_of(pairs, i) -= below;
                        });
                        if (!kOfKeys) hand_over(own_handed() + Tile::kHandedBytes, pairs);
                    }
                }
                __syncthreads();  // what is handed over is there, and slopes have been added
                if (shown && (of_values || !kOfKeys))
                    visit_handed<Tile>(own_handed() + (of_values ? 0 : Tile::kHandedBytes),
                                       other_row, [&](const Vector<float>& handed_over, auto pair) {
#pragma unroll
                                           for (int n = 0; n < 4; ++n) {
                                               float& x = pair(pairs, n);
                                               const float y = handed_over.element[n];
                                               x = of_values ? slope_of(y, x) : slope_of(x, y);
                                           }
                                       });
                if (kAddsQueries && of_values) hand_over(own_handed() + Tile::kHandedBytes, pairs);
                if (again) {
                    keep_divisible<2 * kMet * Tile::kWidth, kThreads>(met + stage);
                    __syncthreads();
                }
                if (shown)
                    add_rows<Tile, kSumTiles, kReadsAgain>(
                        sums, pairs, own_handed() + (of_values ? Tile::kHandedBytes : 0),
                        met_columns() + stage, other_row, columns);
                if (met_tiles % kTilesApart == 0 && !p.adds) {
                    look_for_damage();
                    store(met_tiles > kTilesApart);
                    clear();
                }
            }
        }
        if (again) break;
        look_for_damage();
        __syncthreads();
        if (!block.redo) break;
    }
    store(p.adds || met_tiles >= kTilesApart);
    if (!block.redo) return;

#pragma unroll 1
    for (int64 entry = 0; entry < p.summed; ++entry) {
        block.enter(p, entry);
#pragma unroll 1
        for (int64 row = block.first + warp; row < block.end; row += kThreads / 32)
            if (damaged[row - block.first]) put_back<kOfKeys>(p, block, row);
    }
}

}  // namespace cuflash

// Gradients of attention on float64 tensor cores, for inputs of any shape and stride (sm_80 and
// later).
//
//   backward_dmma, of keys     dk = scale (dS o g)^T q and dv = P^T dout, g the slope of the score;
//                              with kAddsQueries also the sums of dq, by atomic additions
//   backward_dmma, of queries  dq = scale (dS o g) k, where it is to have the same bits in every
//                              run
//
// FlashAttention-2 (Dao 2023, algorithm 2). A block owns rows of k and v, or of q and dout, and
// meets tiles of the others, one ahead of the products in the background. Two warps share 16 or 32
// of its rows: one multiplies features and makes P, the other multiplies values; each hands what it
// made to the other, lane by lane, and both go on with half of the sums: dv and dk, or the halves
// of the columns of dq. What they made are left operands of these as they are.
//
// Grid: one block for each tile of keys, or of queries, and entry of the gradient's own batch
// (lib/scheduler.cuh); the block walks over the tiles that see its rows in every batch entry that
// the gradient is summed over.
//
// Dynamic shared memory of backward_dmma: the block's own rows of both operands (2 x kOwn x
// kWidth); two stages of those it meets (2 x kMet x kWidth each); what warps hand over (kOwn x
// kMet; of queries, or to add to dq, twice).
#include "attention/backward_dmma.cuh"
#include "attention/nonfinite_gradients.cuh"

namespace cuflash {

// Adds dS o g of a tile of pairs, times the block's keys, to the sums of dq: `rows` of them from
// `first_row` on. The warps share the columns.
template <typename Tile>
__device__ __forceinline__ void add_queries(const Matrix<double>& to, int64 first_row, int rows,
                                            const unsigned char* slopes, const unsigned char* keys,
                                            int columns) {
    using Rows = typename Tile::Rows;
    constexpr int kTiles = Tile::kWidth / 8 / (2 * Tile::kPairs);
    constexpr int kQueryTiles = Tile::kMetTiles / 2;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first_tile = threadIdx.x / 32 * kTiles, odd = first_tile % 2;
    if (8 * first_tile >= columns) return;
    // Lane (g, t) takes keys 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16, and query g of each 8.
    const unsigned char* const own_slope = slopes + (8 * t + g / 2 ^ 2 * t) * 16 + g % 2 * 8;
    const int other_slope = (8 * t + g / 2 ^ 2 * t) & 4 ? -64 : 64;
    const unsigned char* const own_key =
        keys + first_tile / 2 * 128 + Rows::at(2 * t, g / 2) + g % 2 * 8;
    const int other_key = Rows::swap(2 * t) & 64 ? -64 : 64;
    double sums[kQueryTiles][kTiles][4] = {};
#pragma unroll
    for (int step = 0; step < Tile::kOwn / 16; ++step) {
        double a[kQueryTiles][8];
#pragma unroll
        for (int m = 0; m < kQueryTiles; ++m)
#pragma unroll
            for (int part = 0; part < 8; ++part)
                a[m][part] = *reinterpret_cast<const double*>(
                    own_slope + step * Tile::kMet * 128 +
                    ((2 * m + part % 2) * 2 + part / 4) * 512 + part / 2 % 2 * other_slope);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            double b[4];
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int row = step * 16 + part / 2 * 8 + part % 2;
                b[part] =
                    *reinterpret_cast<const double*>(own_key + n / 2 * 128 + row * Rows::kPitch +
                                                     ((n ^ part) & 1 ^ odd) * other_key);
            }
#pragma unroll
            for (int m = 0; m < kQueryTiles; ++m) Tile::multiply(sums[m][n], a[m], b);
        }
    }
    const int own_column = 8 * first_tile + 2 * t;
    double* const own = &to.at(first_row + g, own_column);
#pragma unroll
    for (int i = 0; i < 2 * kQueryTiles; ++i)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (g + 8 * i < rows && own_column + 8 * n + e < columns)
                    atomicAdd(own + 8 * i * to.row_stride + 8 * n + e,
                              sums[i / 2][n][i % 2 * 2 + e]);
}

// The same where keys are not finite: what no row sees of them stays out.
template <typename Tile, typename Score>
__device__ __noinline__ void add_queries_one_by_one(const Matrix<double>& to, int64 first_row,
                                                    int rows, const unsigned char* slopes,
                                                    const VjpParameters& p,
                                                    const VjpWork<double, Score>& block) {
    const int keys = int(min(block.score.bounds.keys - block.first, int64(Tile::kOwn)));
    const int features = int(p.features);
    for (int i = threadIdx.x; i < rows * features; i += Tile::kThreads) {
        const int row = i / features, column = i % features;
        double sum = 0;
        for (int key = 0; key < keys; ++key) {
            const int slot = key % 8 * 4 + row % 8 / 2 ^ key % 8 / 2 * 2;
            const double slope = *reinterpret_cast<const double*>(
                slopes + key / 16 * Tile::kMet * 128 + (row / 8 * 2 + key / 8 % 2) * 512 +
                slot * 16 + row % 2 * 8);
            if (!is_unseen(slope)) sum += slope * block.k.at(block.first + key, column);
        }
        atomicAdd(&to.at(first_row + row, column), sum);
    }
}

template <typename Score, typename Tile, bool kOfKeys, bool kAddsQueries>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_dmma(const __grid_constant__ VjpParameters p) {
    using Rows = typename Tile::Rows;
    constexpr int kOwn = Tile::kOwn, kMet = Tile::kMet, kThreads = Tile::kThreads;
    constexpr int kWarpRows = Tile::kWarpRows, kStageBytes = 2 * Tile::kMetBytes;
    constexpr int kQueries = kOfKeys ? kMet * Tile::kGroup : kOwn;
    constexpr int kSumTiles = Tile::kWidth / 8 / (kOfKeys ? 1 : 2);

    CUFLASH_DYNAMIC_SHARED(unsigned char, shared);
    unsigned char* const met = shared + 2 * Tile::kOwnBytes;
    unsigned char* const handed = met + 2 * kStageBytes;
    __shared__ VjpWork<double, Score> block;
    __shared__ QueryState<double> states[kQueries];
    __shared__ int64 start;  // the first row of the walk
    __shared__ bool damaged[kOwn];
    if (!block.template begin<kOfKeys>(p, kOwn)) return;
    if (threadIdx.x < kOwn) damaged[threadIdx.x] = false;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int warp_row = warp % Tile::kPairs * kWarpRows;
    const bool of_values = warp >= Tile::kPairs;  // of the first product, dout v^T
    // Where a lane's first chunks are, and how far from there its second ones.
    const int first_chunk = Rows::at(g, t), other_chunk = Rows::swap(g) & 64 ? -64 : 64;
    const unsigned char* const own =
        shared + of_values * Tile::kOwnBytes + warp_row * Rows::kPitch + first_chunk;
    const unsigned char* const met_rows = met + of_values * Tile::kMetBytes + first_chunk;
    // The second product takes the other operand's rows, or columns from the middle of the same.
    const int first_column = kOfKeys ? 0 : of_values * Tile::kWidth / 2;
    const unsigned char* const met_columns = met + (kOfKeys && !of_values) * Tile::kMetBytes +
                                             8 * first_column + Rows::at(2 * t, g / 2) + g % 2 * 8;
    const int other_column = Rows::swap(2 * t) & 64 ? -64 : 64;
    const int columns = int(kOfKeys && !of_values ? p.values : p.features) - first_column;
    unsigned char* const own_handed = handed + warp_row * kMet * 8 + (lane ^ g / 2 % 4 * 2) * 16;
    unsigned char* const slopes = handed + Tile::kHandedBytes;  // dS o g, if dq is summed
    __shared__ bool keys_damaged;
    __shared__ Matrix<double> dq_sums;
    SumFragments<Tile, kSumTiles> sums;

    // A second turn only after non-finite values: see lib/nonfinite.cuh.
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
            for (int j = 0; j < kSumTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[m][j][e] = 0;

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
            if (threadIdx.x == 0) start = (kOfKeys ? bounds.first : 0) + walk.begin * kMet;
            __syncthreads();
            auto first_query = [&] { return kOfKeys ? start : block.first; };
            auto first_key = [&] { return kOfKeys ? block.first : start; };

            auto load_tile = [&](int tile) {
                start_operands<!kOfKeys, Tile, kMet>(met + tile % 2 * kStageBytes, p, block,
                                                     start + tile * kMet);
            };
            // What is known of queries is read for several tiles at a time.
            auto read_states = [&](int tile) {
                if (threadIdx.x >= kQueries) return;
                const int64 row = first_query() + tile * kMet + threadIdx.x;
                states[threadIdx.x] = state_of(block, row, first_key());
            };

            start_operands<kOfKeys, Tile, kOwn>(shared, p, block, block.first);
            load_tile(0);
            if (kAddsQueries && threadIdx.x == 0) {
                keys_damaged = false;
                dq_sums = Matrix<double>::of(p.dq_sums, p.batch, block.index);
            }
            commit_copies();
            if (!kOfKeys) read_states(0);
#pragma unroll 1
            for (int tile = 0; tile < tiles; ++tile) {
                const int stage = tile % 2 * kStageBytes;
                wait_for_copies<0>();
                __syncthreads();  // the tile is there, and everyone is done with the one before
                if (tile + 1 < tiles) load_tile(tile + 1);
                commit_copies();
                if (kOfKeys && tile % Tile::kGroup == 0) {
                    read_states(tile);
                    if (kAddsQueries && tile == 0 &&
                        has_nonfinite<kOwn, Tile::kWidth, kThreads, double>(shared))
                        keys_damaged = true;
                    __syncthreads();
                }

                const int key = kOfKeys ? warp_row : tile * kMet;
                const QueryState<double>* const state =
                    states + (kOfKeys ? tile % Tile::kGroup * kMet : warp_row);
                const bool shown = !see_nothing(state, kOfKeys ? kMet : kWarpRows, key,
                                                kOfKeys ? kWarpRows : kMet);
                PairFragments<Tile> pairs;
                if (shown) {
                    multiply_rows<Tile>(pairs, own, met_rows + stage, other_chunk,
                                        int(of_values ? p.values : p.features));
                    const QueryState<double>* const first = state + (kOfKeys ? 2 * t : g);
                    if (!of_values) {
                        PairFragments<Tile> bent;
                        const int own_key = key + (kOfKeys ? g : 2 * t);
                        weigh_dots<kOfKeys, Tile>(
                            pairs, bent, block.score, first, own_key,
                            first_query() + (kOfKeys ? tile * kMet + 2 * t : warp_row + g),
                            first_key() + own_key);
                        visit_handed<Tile>(own_handed,
                                           [&](Vector<double>& place, int m, int j, int e) {
                                               place = {bent[m][j][e], bent[m][j][e + 1]};
                                               if (kOfKeys) return;
                                               pairs[m][j][e] = bent[m][j][e];
                                               pairs[m][j][e + 1] = bent[m][j][e + 1];
                                           });
                    } else {
                        visit_queries<kOfKeys, Tile>([&](int n, auto place_of) {
                            const double below = first[kOfKeys ? met_row(n) : own_row(n)].delta;
#pragma unroll
                            for (int i = 0; i < 2 * (kOfKeys ? Tile::kRowTiles : Tile::kMetTiles);
                                 ++i)
                                place_of(pairs, i) -= below;
                        });
                        if (!kOfKeys)
                            visit_handed<Tile>(own_handed + Tile::kHandedBytes,
                                               [&](Vector<double>& place, int m, int j, int e) {
                                                   place = {pairs[m][j][e], pairs[m][j][e + 1]};
                                               });
                    }
                }
                __syncthreads();  // what is handed over is there
                if (shown && (of_values || !kOfKeys))
                    visit_handed<Tile>(own_handed + (of_values ? 0 : Tile::kHandedBytes),
                                       [&](const Vector<double>& place, int m, int j, int e) {
#pragma unroll
                                           for (int i = 0; i < 2; ++i) {
                                               double& x = pairs[m][j][e + i];
                                               const double y = place.element[i];
                                               x = of_values ? slope_of(y, x) : slope_of(x, y);
                                           }
                                       });
                if (kAddsQueries && of_values)
                    visit_handed<Tile>(own_handed + Tile::kHandedBytes, [&](Vector<double>& place,
                                                                            int m, int j, int e) {
                        const double none = kUnseen<double>;
                        place = {shown ? pairs[m][j][e] : none, shown ? pairs[m][j][e + 1] : none};
                    });
                if (turn > 0) {
                    keep_finite<2 * kMet, Tile::kWidth, kThreads, double>(met + stage);
                    __syncthreads();
                }
                if (shown)
                    add_rows<Tile, kSumTiles>(sums, pairs, met_columns + stage, other_column,
                                              columns);
                if (kAddsQueries && turn == 0) {
                    __syncthreads();  // all slopes are there
                    const int64 row = start + tile * kMet;
                    const int rows = int(min(bounds.queries - row, int64(kMet)));
                    if (keys_damaged)
                        add_queries_one_by_one<Tile>(dq_sums, row, rows, slopes, p, block);
                    else
                        add_queries<Tile>(dq_sums, row, rows, slopes, shared, int(p.features));
                }
            }
        }
        if (turn > 0) break;
#pragma unroll
        for (int i = 0; i < 2 * Tile::kRowTiles; ++i) {
            double zero = 0;  // times NaN or inf it is NaN
#pragma unroll
            for (int j = 0; j < kSumTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    zero = multiply_add(sums[i / 2][j][i % 2 * 2 + e], 0, zero);
            if (zero != 0) damaged[warp_row + own_row(i) + g] = block.redo = true;
        }
        __syncthreads();
        if (!block.redo) break;
    }

    const BatchedArray& gradient = !kOfKeys ? p.dq : of_values ? p.dk : p.dv;
    if (gradient.data)
        store_sums<Tile, kSumTiles>(
            sums, kOfKeys && !of_values ? 1 : block.score.scale,
            Matrix<double>::of(gradient, p.batch, block.index),
            (kOfKeys ? block.segment.first_key : 0) + block.first + warp_row,
            int(clamp(block.end - block.first - warp_row, 0, kWarpRows)), first_column,
            kOfKeys && !of_values ? p.values : p.features, p.adds);
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

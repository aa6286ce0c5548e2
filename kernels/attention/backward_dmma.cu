// Gradients of attention on float64 tensor cores, for inputs of any shape and stride (sm_80 and
// later).
//
//   backward_dmma, of keys     dk = scale (dS o g)^T q and dv = P^T dout, g the slope of the score;
//                              with kAddsQueries also the sums of dq, by atomic additions
//   backward_dmma, of queries  dq = scale (dS o g) k, where it is to have the same bits in every
//   run backward_dmma_sums         the sums of dq before the additions, 0, and after: dq = scale
//   sums
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
// kMet; of queries, or to add to dq, twice). The others have none.
#include "attention/backward.cuh"
#include "attention/dmma_tile.cuh"
#include "attention/nonfinite_gradients.cuh"

namespace cuflash {

// Rows that are read along the features, as FeatureRows, and down the columns, as ValueRows.
template <int kColumns_>
struct CrossedRows {
    static constexpr int kColumns = kColumns_, kChunks = kColumns / 2, kPitch = 8 * kColumns;

    static __device__ __forceinline__ constexpr int swap(int row) {
        return row / 2 % 4 * 32 ^ row % 2 * 64;
    }
    static __device__ __forceinline__ int at(int row, int chunk) {
        return row * kPitch + (chunk * 16 ^ swap(row));
    }
};

// Pairs of warps in a block, tiles of 16 rows of a pair, rows that a block meets at a time, what D
// and Dv are padded to, blocks that a multiprocessor should hold.
// `device/attention_vjp_plans_dmma.py` says which tiles there are, and why.
template <int kPairs_, int kRowTiles_, int kMet_, int kWidth_, int kBlocks_>
struct DmmaVjpTile {
    static constexpr int kPairs = kPairs_, kRowTiles = kRowTiles_, kMet = kMet_, kWidth = kWidth_;
    static constexpr int kBlocks = kBlocks_, kThreads = 64 * kPairs;
    static constexpr int kWarpRows = 16 * kRowTiles, kOwn = kWarpRows * kPairs;
    static constexpr int kMetTiles = kMet / 8;  // 8 met rows each
    static constexpr int kGroup = 128 / kMet;   // tiles of queries that are looked up at a time
    static constexpr int kFeatureSteps = kWidth / 16, kMetSteps = kMet / 16;
    using Rows = CrossedRows<kWidth>;
    static constexpr int kOwnBytes = kOwn * Rows::kPitch, kMetBytes = kMet * Rows::kPitch;
    static constexpr int kHandedBytes = 8 * kOwn * kMet;

    // With few rows at a time a warp often multiplies alone.
    static __device__ __forceinline__ void multiply(double (&c)[4], const double (&a)[8],
                                                    const double (&b)[4]) {
        if constexpr (kMet > 16)
            MatrixProduct<double>::add(c, a, b);
        else
            add_by_quarters(c, a, b);
    }
    static_assert(kThreads >= 128, "four parts of a block's work are set up side by side");
    static_assert(kThreads >= kOwn && kMet <= 128, "a thread for each query");
};

// A thread's pairs: own rows g and g + 8 of each 16, columns 2t and 2t + 1 of each 8 met rows.
template <typename Tile>
using PairFragments = double[Tile::kRowTiles][Tile::kMetTiles][4];
template <typename Tile, int kTiles>
using SumFragments = double[Tile::kRowTiles][kTiles][4];

// ------------------------------------------------------------------------------------------ loads

// Starts to copy rows `first`.. of a matrix into a tile, `count` of them: the others, and columns
// from `columns` on, become 0.
template <typename Layout, int kRows, int kThreads>
__device__ __forceinline__ void start_doubles(unsigned char* tile,
                                              const Matrix<const double>& matrix, int64 first,
                                              int64 count, int columns) {
    const int end = int(clamp(count, 0, kRows));
    if (!has_aligned_rows(matrix))
        return copy_doubles<Layout, kRows, kThreads>(tile, matrix, first, 0, end, columns);
    const DoubleCopies<Layout, kRows, kThreads> copies(tile, matrix, first);
    if (end == kRows && columns == Layout::kColumns)
        copies.start(0, matrix.row_stride);
    else
        copies.start_part(0, matrix.row_stride, 0, end, columns);
}

// The same of rows of k and v, or of q and dout, into tiles one after the other.
template <bool kKeys, typename Tile, int kRows, typename Score>
__device__ __forceinline__ void start_operands(unsigned char* tiles, const VjpParameters& p,
                                               const VjpWork<double, Score>& block, int64 first) {
    using Rows = typename Tile::Rows;
    const EntryBounds& bounds = block.score.bounds;
    const int64 count = (kKeys ? bounds.keys : bounds.queries) - first;
    start_doubles<Rows, kRows, Tile::kThreads>(tiles, kKeys ? block.k : block.q, first, count,
                                               int(p.features));
    start_doubles<Rows, kRows, Tile::kThreads>(
        tiles + kRows * Rows::kPitch, kKeys ? block.v : block.dout, first, count, int(p.values));
}

// ------------------------------------------------------------------------------------------ pairs

constexpr double kDoubleLog2OfE = 1.4426950408889634;

// What is known of a query, its lse in base 2, keys counted from `first_key`. A row that is not
// used, or has no weight, sees none of them.
template <typename Score>
__device__ __forceinline__ QueryState<double> state_of(const VjpWork<double, Score>& block,
                                                       int64 row, int64 first_key) {
    constexpr int kMost = 0x7fffffff;
    QueryState<double> x{0, 0, 0, 0};
    const double lse = block.score.is_used(row) ? block.lse.at(row) : -infinity<double>();
    // Of scores that are all -inf, none has a gradient.
    if (lse == -infinity<double>()) return x;
    // What has a score of +inf has none that is a number.
    x.lse = lse == infinity<double>() ? not_a_number<double>() : lse * kDoubleLog2OfE;
    x.delta = block.delta.at(row);
    const KeyRange seen = block.score.range(row);
    x.low = int(clamp(seen.first - first_key, 0, kMost));
    x.high = int(clamp(seen.last + 1 - first_key, x.low, kMost));
    return x;
}

// Whether none of `count` queries sees one of the keys from `key` on, `keys` of them: for a warp.
__device__ __forceinline__ bool see_nothing(const QueryState<double>* queries, int count, int key,
                                            int keys) {
    bool none = true;
    for (int i = threadIdx.x % 32; i < count; i += 32)
        none &= queries[i].high <= key || queries[i].low >= key + keys;
    return __all_sync(kFullWarp, none);
}

// Calls visit(query, n, place_of) for each query of a thread's pairs, the n-th of its own: pair i
// of the query, with the thread's i-th key, is place_of(i)(fragments).
template <bool kOfKeys, typename Tile, typename Visit>
__device__ __forceinline__ void visit_queries(Visit visit) {
    constexpr int kOwnRows = 2 * Tile::kRowTiles, kMetRows = 2 * Tile::kMetTiles;
#pragma unroll
    for (int n = 0; n < (kOfKeys ? kMetRows : kOwnRows); ++n)
        visit(n, [n](PairFragments<Tile>& x, int i) -> double& {
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
// Unseen pairs get kUnseen. `states` are those of the thread's first query, `own_key` its first
// key, both counted as the bounds of the states are; `first_row` and `first_key` are their numbers.
template <bool kOfKeys, typename Tile, typename Score>
__device__ __forceinline__ void weigh_dots(PairFragments<Tile>& dots, PairFragments<Tile>& handed,
                                           const Score& score, const QueryState<double>* states,
                                           int own_key, int64 first_row, int64 first_key) {
    constexpr int kKeys = 2 * (kOfKeys ? Tile::kRowTiles : Tile::kMetTiles);
    const double unit = (Score::kPerPair ? 1 : score.scale) * kDoubleLog2OfE;
    auto column_of = [](int i) { return kOfKeys ? own_row(i) : met_row(i); };
    visit_queries<kOfKeys, Tile>([&](int n, auto place_of) {
        const int query = kOfKeys ? met_row(n) : own_row(n);
        const QueryState<double> state = states[query];
        const int low = state.low - own_key, count = state.high - state.low;
        double s[kKeys], slope[kKeys];
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
            const double weight = quick_exp2(multiply_add(s[i], unit, -state.lse));
            const bool seen = unsigned(column_of(i) - low) < unsigned(count) && !(hidden >> i & 1);
            place_of(dots, i) = seen ? weight : kUnseen<double>;
            const double bent = Score::kPerPair ? multiply_add(weight, slope[i], 0.0) : weight;
            place_of(handed, i) = seen ? bent : kUnseen<double>;
        }
    });
}

// dS times the slope, of P times the slope and dP less delta. NaN of an unseen pair is none.
__device__ __forceinline__ double slope_of(double weight, double flow) {
    const bool unseen = __double2hiint(weight) == int(0x80000000) && __double2loint(weight) == 0;
    // A product that is -0 becomes +0: that of a seen pair is never kUnseen.
    return unseen ? kUnseen<double> : multiply_add(weight, flow, 0.0);
}

// A thread's place among what its pair of warps hands over, by two neighbours.
template <typename Tile, typename Change>
__device__ __forceinline__ void visit_handed(unsigned char* own, Change change) {
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
        for (int j = 0; j < Tile::kMetTiles; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                change(*reinterpret_cast<Vector<double>*>(
                           own + ((m * Tile::kMetTiles + j) * 2 + h) * 512),
                       m, j, 2 * h);
}

// --------------------------------------------------------------------------------------- products

// pairs = own rows @ met rows^T, which have `columns` columns. `own_row` and `own_met` are where a
// lane's first rows begin.
template <typename Tile>
__device__ __forceinline__ void multiply_rows(PairFragments<Tile>& pairs,
                                              const unsigned char* own_row,
                                              const unsigned char* own_met, int other,
                                              int columns) {
    constexpr int kPitch = Tile::Rows::kPitch;
    constexpr int kBlock = 2;  // steps whose products are summed before they join the others
#pragma unroll
    for (int start = 0; start < Tile::kFeatureSteps; start += kBlock) {
        if (start > 0 && start * 16 >= columns) break;
        PairFragments<Tile> block = {};
#pragma unroll
        for (int step = start; step < start + kBlock; ++step) {
            double a[Tile::kRowTiles][8];
#pragma unroll
            for (int part = 0; part < 4 * Tile::kRowTiles; ++part) {
                const int row = part % (2 * Tile::kRowTiles), half = part / (2 * Tile::kRowTiles);
                const Vector<double> x =
                    chunk_at(own_row + step * 128 + row * 8 * kPitch + half * other);
                a[row / 2][4 * half + row % 2] = x.element[0];
                a[row / 2][4 * half + 2 + row % 2] = x.element[1];
            }
#pragma unroll
            for (int j = 0; j < Tile::kMetTiles; ++j) {
                const unsigned char* from = own_met + step * 128 + j * 8 * kPitch;
                const Vector<double> x = chunk_at(from), y = chunk_at(from + other);
                const double b[4] = {x.element[0], x.element[1], y.element[0], y.element[1]};
#pragma unroll
                for (int m = 0; m < Tile::kRowTiles; ++m) Tile::multiply(block[m][j], a[m], b);
            }
        }
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
            for (int j = 0; j < Tile::kMetTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    pairs[m][j][e] = start == 0 ? block[m][j][e] : pairs[m][j][e] + block[m][j][e];
    }
}

// sums += pairs @ met rows, `columns` columns of them. `own_met` is where a lane's value of its
// first row and 8 columns lies, and `other` how far from there that of the next 8: the next row's
// are the other way round.
template <typename Tile, int kTiles>
__device__ __forceinline__ void add_rows(SumFragments<Tile, kTiles>& sums,
                                         const PairFragments<Tile>& pairs,
                                         const unsigned char* own_met, int other, int columns) {
    constexpr int kPitch = Tile::Rows::kPitch;
    constexpr int kPass = 2;  // products that hide each other's latency
#pragma unroll
    for (int start = 0; start < kTiles; start += kPass) {
        // It also keeps the compiler from making all products before it adds the first of them.
        if (start % 4 == 0 && start * 8 >= columns) break;
        SumFragments<Tile, kPass> block = {};
#pragma unroll
        for (int step = 0; step < Tile::kMetSteps; ++step)
#pragma unroll
            for (int n = 0; n < kPass; ++n) {
                double b[4];
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int row = step * 16 + part / 2 * 8 + part % 2;
                    b[part] = *reinterpret_cast<const double*>(
                        own_met + start / 2 * 128 + row * kPitch + (n ^ part % 2) * other);
                }
#pragma unroll
                for (int m = 0; m < Tile::kRowTiles; ++m) {
                    double a[8];
#pragma unroll
                    for (int part = 0; part < 8; ++part)
                        a[part] = pairs[m][2 * step + part / 4][part % 2 * 2 + part / 2 % 2];
                    Tile::multiply(block[m][n], a, b);
                }
            }
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
            for (int n = 0; n < kPass; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[m][start + n][e] += block[m][n][e];
    }
}

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

// ---------------------------------------------------------------------------------------- results

// Stores a warp's sums times a factor: rows and columns from `first_row` and `first_column` on.
template <typename Tile, int kTiles>
__device__ __forceinline__ void store_sums(const SumFragments<Tile, kTiles>& sums, double factor,
                                           const Matrix<double>& to, int64 first_row, int rows,
                                           int64 first_column, int64 columns, bool adds) {
    const int lane = threadIdx.x % 32;
    const bool by_chunks = has_aligned_rows(to);
#pragma unroll
    for (int i = 0; i < 2 * Tile::kRowTiles; ++i) {
        const int row = lane / 4 + own_row(i);
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const int64 column = first_column + 8 * j + lane % 4 * 2;
            double* const place = &to.at(first_row + row, column);
            Vector<double> x;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                x.element[e] = sums[i / 2][j][i % 2 * 2 + e] * factor;
                if (adds && column + e < columns) x.element[e] += place[e * to.column_stride];
            }
            if (by_chunks && column + 1 < columns) {
                store_streaming(place, x);
                continue;
            }
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (column + e < columns) place[e * to.column_stride] = x.element[e];
        }
    }
}

// ----------------------------------------------------------------------------------------- kernel

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

// Sums of dq of a tile of rows: 0, where atomic additions begin; or, in the end, dq: scale times
// them.
template <bool kClears>
__global__ void __launch_bounds__(128) backward_dmma_sums(const __grid_constant__ VjpParameters p) {
    constexpr int kRows = 32;
    __shared__ VjpWork<double, RangedScore<double>> block;
    if (!block.template begin<false>(p, kRows)) return;
    const Matrix<double> sums = Matrix<double>::of(p.dq_sums, p.batch, block.index);
    const Matrix<double> to = Matrix<double>::of(p.dq, p.batch, block.index);
    const int columns = int(kClears ? sums.row_stride : p.features);
    const int rows = int(block.end - block.first);
    for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
        const int64 row = block.first + i / columns;
        if (kClears)
            sums.at(row, i % columns) = 0;
        else
            to.at(row, i % columns) = sums.at(row, i % columns) * block.score.scale;
    }
}

}  // namespace cuflash

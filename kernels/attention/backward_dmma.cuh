// What the gradients of attention on float64 tensor cores are made of: tiles, pairs, products.
#pragma once

#include "attention/backward.cuh"
#include "attention/dmma_tile.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"

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
        return copy_to_chunks<Layout, kRows, kThreads>(tile, matrix, first, 0, end, columns);
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
                    chunk_at<double>(own_row + step * 128 + row * 8 * kPitch + half * other);
                a[row / 2][4 * half + row % 2] = x.element[0];
                a[row / 2][4 * half + 2 + row % 2] = x.element[1];
            }
#pragma unroll
            for (int j = 0; j < Tile::kMetTiles; ++j) {
                const unsigned char* from = own_met + step * 128 + j * 8 * kPitch;
                const Vector<double> x = chunk_at<double>(from), y = chunk_at<double>(from + other);
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

}  // namespace cuflash

// What the gradients of attention on float64 tensor cores are made of: tiles, products, results.
#pragma once

#include "attention/backward_pairs.cuh"
#include "attention/dmma_tile.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"

namespace cuflash {

// Pairs of warps in a block, tiles of 16 rows of a pair, rows that a block meets at a time, what D
// and Dv are padded to, blocks that a multiprocessor should hold.
// `device/attention_vjp_plans_dmma.py` says which tiles there are, and why.
template <int kPairs_, int kRowTiles_, int kMet_, int kWidth_, int kBlocks_>
struct DmmaVjpTile {
    using Element = double;
    static constexpr int kPairs = kPairs_, kRowTiles = kRowTiles_, kMet = kMet_, kWidth = kWidth_;
    static constexpr int kBlocks = kBlocks_, kThreads = 64 * kPairs;
    static constexpr int kWarpRows = 16 * kRowTiles, kOwn = kWarpRows * kPairs;
    static constexpr int kMetTiles = kMet / 8;  // 8 met rows each
    static constexpr int kGroup = 128 / kMet;   // tiles of queries that are looked up at a time
    static constexpr int kFeatureSteps = kWidth / 16, kMetSteps = kMet / 16;
    using Rows = CrossedRows<double, kWidth>;
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

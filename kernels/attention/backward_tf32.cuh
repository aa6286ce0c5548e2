// What the gradients of attention in float32 on TF32 tensor cores are made of: tiles, products,
// results. Of products and their errors see tf32_tile.cuh.
#pragma once

#include "attention/backward_pairs.cuh"
#include "attention/tf32_tile.cuh"

namespace cuflash {

// Pairs of warps in a block, tiles of 16 rows of a pair, rows that a block meets at a
// time, what D and Dv are padded to, blocks that a multiprocessor should hold.
// `device/attention_vjp_plans_tf32.py` says which tiles there are, and why.
template <int kPairs_, int kRowTiles_, int kMet_, int kWidth_, int kBlocks_>
struct Tf32VjpTile {
    using Element = float;
    static constexpr int kPairs = kPairs_, kRowTiles = kRowTiles_, kMet = kMet_, kWidth = kWidth_;
    static constexpr int kBlocks = kBlocks_, kThreads = 64 * kPairs;
    static constexpr int kWarpRows = 16 * kRowTiles, kOwn = kWarpRows * kPairs;
    static constexpr int kMetTiles = kMet / 8;  // 8 met rows each
    static constexpr int kGroup = 128 / kMet;   // tiles of queries that are looked up at a time
    using Rows = CrossedRows<float, kWidth>;
    static constexpr int kOwnBytes = kOwn * Rows::kPitch, kMetBytes = kMet * Rows::kPitch;
    // What a pair of warps hands over, as lane (g, t) has pairs of met rows 2t and 2t + 1 of each
    // 8: chunk g of a row has those of two met rows, 8 apart, and of own rows g and g + 8 of a
    // tile.
    using Handed = CrossedRows<float, 32>;
    static constexpr int kPairBytes = kMet / 2 * kRowTiles * Handed::kPitch;
    static constexpr int kHandedBytes = kPairs * kPairBytes;
    static_assert(kThreads >= 128 && kMet <= 128, "a thread for each of 128 queries");

    // The pairs, as `add_tf32_scores` takes them.
    struct Scores {
        static constexpr int kRowTiles = kRowTiles_, kRows = 2 * kRowTiles;
        static constexpr int kKeyTiles = kMetTiles, kFeatures = kWidth;
        using Features = Tf32VjpTile::Rows;
    };
    // A warp's sums of own rows, as `visit_sums` takes them.
    template <int kTiles>
    struct Sums {
        static constexpr int kRowTiles = kRowTiles_, kRows = 2 * kRowTiles;
        static constexpr int kValueTiles = kTiles;
    };
    // The warps' parts of what a tile of pairs adds to dq: 32 columns, and all own keys of some
    // pairs of warps.
    struct Queries {
        static constexpr int kColumnParts = kWidth / 32, kKeyParts = 2 * kPairs / kColumnParts;
        static constexpr int kPairsEach = kPairs / kKeyParts;
        static constexpr int kRowTiles = kMet / 16, kRows = 2 * kRowTiles, kValueTiles = 4;
    };
};

// Where the second half of a lane's chunks is, or the next row's, that differ in this bit of a
// place.
__device__ __forceinline__ int half_after(int place) {
    return place & 64 ? -64 : 64;
}

// Lets `change(x, pair)` read or write what a thread hands over, four pairs at a time: element n of
// x is that of pair(n), a place among fragments.
template <typename Tile, typename Change>
__device__ __forceinline__ void visit_handed(unsigned char* own, int other, Change change) {
#pragma unroll
    for (int j = 0; j < Tile::kMetTiles / 2; ++j)
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = (j * Tile::kRowTiles + m) * 8 + e;
                change(
                    *reinterpret_cast<Vector<float>*>(own + row * Tile::Handed::kPitch + e * other),
                    [j, m, e](PairFragments<Tile>& pairs, int n) -> float& {
                        return pairs[m][2 * j + n / 2][n % 2 * 2 + e];
                    });
            }
}

// Where such a place lies, of a met row and one of the pair's own rows.
template <typename Tile>
__device__ __forceinline__ int handed_place(int met, int own) {
    const int row = (met / 16 * Tile::kRowTiles + own / 16) * 8 + met % 8;
    return Tile::Handed::at(row, own % 8) + 4 * (met / 8 % 2 * 2 + own / 8 % 2);
}

// Whether all of a thread's pairs are finite.
template <typename Tile>
__device__ __forceinline__ bool are_finite(const PairFragments<Tile>& pairs) {
    float zero[4] = {};  // times NaN or inf they are NaN
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
        for (int j = 0; j < Tile::kMetTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) zero[e] = multiply_add(pairs[m][j][e], 0, zero[e]);
    return zero[0] + zero[1] + zero[2] + zero[3] == 0;
}

// --------------------------------------------------------------------------------------- products

// sums += pairs @ met rows, by 8, `columns` columns of them. `own_met` is where a lane's chunk of
// its first row lies, and `other` how far from there, besides a row, that of the next. With
// `kHanded` pairs are read from `handed`, where they are as they were handed over: then the code is
// short enough for the cache of instructions.
template <typename Tile, int kTiles, bool kHanded>
__device__ __forceinline__ void add_rows(SumFragments<Tile, kTiles>& sums,
                                         PairFragments<Tile>& pairs, unsigned char* handed,
                                         const unsigned char* own_met, int other, int columns) {
    constexpr int kPitch = Tile::Rows::kPitch;
    constexpr int kUnroll = kHanded ? 1 : Tile::kMetTiles / 2;
#pragma unroll kUnroll
    for (int j = 0; j < Tile::kMetTiles / 2; ++j) {
        float two[Tile::kRowTiles][2][4];  // tiles of 8 met rows
        if constexpr (kHanded) {
#pragma unroll
            for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int row = (j * Tile::kRowTiles + m) * 8 + e;
                    const Vector<float> x =
                        chunk_at<float>(handed + row * Tile::Handed::kPitch + e * other);
#pragma unroll
                    for (int n = 0; n < 4; ++n) two[m][n / 2][n % 2 * 2 + e] = x.element[n];
                }
        } else {
#pragma unroll
            for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n) two[m][n / 4][n % 4] = pairs[m][2 * j + n / 4][n % 4];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Tf32Parts<4> a[Tile::kRowTiles][1];
#pragma unroll
            for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
                for (int part = 0; part < 4; ++part)
                    a[m][0].set(part, two[m][half][part % 2 * 2 + part / 2]);
#pragma unroll
            for (int first = 0; first < kTiles; first += 4) {
                if (first * 8 >= columns) continue;
                Tf32Parts<2> b[4][1];
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const Vector<float> x = chunk_at<float>(
                        own_met + (j * 16 + half * 8 + row) * kPitch + row * other + first * 32);
#pragma unroll
                    for (int n = 0; n < 4; ++n) b[n][0].set(row, x.element[n]);
                }
                float block[Tile::kRowTiles][4][4] = {};
                add_tf32_products(block, a, b);
#pragma unroll
                for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
                    for (int n = 0; n < 4; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) sums[m][first + n][e] += block[m][n][e];
            }
        }
    }
}

// Adds dS o g of a tile of pairs, times the block's keys, to the sums of dq: `rows` of them from
// `first_row` on.
template <typename Tile>
__device__ __forceinline__ void add_queries(const Matrix<float>& to, int64 first_row, int rows,
                                            const unsigned char* slopes, const unsigned char* keys,
                                            int columns) {
    using Rows = typename Tile::Rows;
    using Handed = typename Tile::Handed;
    using Part = typename Tile::Queries;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first_column = warp % Part::kColumnParts * 32;
    if (first_column >= columns) return;
    const int first_pair = warp / Part::kColumnParts * Part::kPairsEach;
    const unsigned char* own_slope = slopes + first_pair * Tile::kPairBytes + Handed::at(g, t);
    const unsigned char* own_key =
        keys + first_pair * Tile::kWarpRows * Rows::kPitch + 4 * first_column + Rows::at(t, g);
    const int other_slope = half_after(Handed::swap(g)), other_key = half_after(Rows::at(t, g));
    ValueFragments<Part> sums = {};
#pragma unroll 1
    for (int tile = 0; tile < Part::kPairsEach * Tile::kRowTiles; ++tile) {
        const int pair = tile / Tile::kRowTiles;
        Vector<float> slope[Part::kRowTiles][2];
#pragma unroll
        for (int m = 0; m < Part::kRowTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                slope[m][half] = chunk_at<float>(own_slope + pair * Tile::kPairBytes +
                                                 (m * Tile::kRowTiles + tile % Tile::kRowTiles) *
                                                     8 * Handed::kPitch +
                                                 half * other_slope);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            Tf32Parts<4> a[Part::kRowTiles][1];
#pragma unroll
            for (int m = 0; m < Part::kRowTiles; ++m)
#pragma unroll
                for (int part = 0; part < 4; ++part)
                    a[m][0].set(part, slope[m][part / 2].element[part % 2 * 2 + step]);
            Tf32Parts<2> b[4][1];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Vector<float> x = chunk_at<float>(
                    own_key + (16 * tile + 8 * step + 4 * half) * Rows::kPitch + half * other_key);
#pragma unroll
                for (int n = 0; n < 4; ++n) b[n][0].set(half, x.element[n]);
            }
            float block[Part::kRowTiles][4][4] = {};
            add_tf32_products(block, a, b);
#pragma unroll
            for (int m = 0; m < Part::kRowTiles; ++m)
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[m][n][e] += block[m][n][e];
        }
    }
    const int column = first_column + 8 * t;
    if (column >= to.row_stride) return;
    float* const own = &to.at(first_row + g, column);
    visit_sums<Part>(sums, [&](int i, int n, const Vector<float>& x) {
        if (g + 8 * i < rows) add_chunk(own + 8 * i * to.row_stride + n, x);
    });
}

}  // namespace cuflash

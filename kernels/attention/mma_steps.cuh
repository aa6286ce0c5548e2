// What a warp does with a tile of keys and values on 16-bit tensor cores: scores, weights, sums.
//
// `Tile` says how many fragments there are, as `MmaTile` and `DecodeTile` do; addresses are those
// of a lane's rows of 8 x 8 matrices. A right operand is two matrices in neighbouring registers:
// keys and values come in the order that gives that.
#pragma once

#include "attention/fragments.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/scheduler.cuh"
#include "lib/score.cuh"

namespace cuflash {

template <typename Tile>
using ScoreFragments = float[Tile::kRowTiles][Tile::kKeyTiles][4];
template <typename Tile>
using ValueFragments = float[Tile::kRowTiles][Tile::kValueTiles][4];

// Where a lane's rows of keys begin in a tile at `keys`, and of values in one at `values`.
template <typename Tile>
__device__ __forceinline__ unsigned own_key_row(unsigned keys) {
    const int lane = threadIdx.x % 32;
    return keys + Tile::Features::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <typename Tile>
__device__ __forceinline__ unsigned own_value_row(unsigned values) {
    const int lane = threadIdx.x % 32;
    return values + Tile::Values::at(lane % 16, lane / 16);
}

// s += queries @ keys^T; `queries_of(a, step)` gives the fragments of 16 features.
template <typename T, typename Tile, typename QueriesOf>
__device__ __forceinline__ void add_scores(ScoreFragments<Tile>& s, unsigned own_key,
                                           QueriesOf queries_of) {
    using Features = typename Tile::Features;
#pragma unroll
    for (int step = 0; step < Tile::kFeatureSteps; ++step) {
        unsigned read[Tile::kRowTiles][4];
        const auto& a = queries_of(read, step);
#pragma unroll
        for (int j = 0; j < Tile::kKeyTiles; j += 2) {
            unsigned b[4];
            load_matrices(b, Features::advance(own_key, step) + j * 8 * Features::kPitch);
#pragma unroll
            for (int m = 0; m < Tile::kRowTiles; ++m) {
                MatrixProduct<T>::add(s[m][j], a[m], b[0], b[1]);
                MatrixProduct<T>::add(s[m][j + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// A thread has two neighbours of each 8 keys. Bit j of the result: its key j comes before `end`.
__device__ __forceinline__ unsigned own_keys_below(int end) {
    const int own_key = 2 * (threadIdx.x % 4);
    const int count = end / 8 * 2 + min(max(end % 8 - own_key, 0), 2);
    return count < 32 ? (1u << count) - 1 : ~0u;
}

// Turns a thread's dot products with the keys of a tile into scores, -inf where unseen; without
// steps the scale is left to `FragmentRow`. `score_of(i)` and `row_of(i)` are those of its row i.
template <typename Tile, typename Score, typename ScoreOf, typename RowOf>
__device__ __forceinline__ void change_scores(ScoreFragments<Tile>& s, int64 first_key, bool whole,
                                              ScoreOf score_of, RowOf row_of) {
    static_assert(2 * Tile::kKeyTiles <= 32, "a bit for each");
    const int own_key = 2 * (threadIdx.x % 4);
    auto column_of = [](int j) { return 8 * (j / 2) + j % 2; };
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        const Score& score = score_of(i);
        const KeyRange seen = score.range(row_of(i));
        const int low = int(clamp(seen.first - first_key, 0, Tile::kKeys));
        const int high = int(clamp(seen.last + 1 - first_key, low, Tile::kKeys));
        const RowPairs pairs{row_of(i), first_key + own_key, low - own_key, high - low};
        float row[2 * Tile::kKeyTiles];
#pragma unroll
        for (int j = 0; j < 2 * Tile::kKeyTiles; ++j) row[j] = s[i / 2][j / 2][i % 2 * 2 + j % 2];
        if constexpr (Score::kPerPair) score.change_row(row, pairs, column_of);
        if (!whole) {
            // Bits are as few registers as a row's predicates would be many.
            const unsigned shown = own_keys_below(high) & ~own_keys_below(low);
#pragma unroll
            for (int j = 0; j < 2 * Tile::kKeyTiles; ++j)
                if (!(shown >> j & 1)) row[j] = -infinity<float>();
        }
#pragma unroll
        for (int j = 0; j < 2 * Tile::kKeyTiles; ++j) s[i / 2][j / 2][i % 2 * 2 + j % 2] = row[j];
    }
}

// Turns scores into weights relative to the rows' references, which rise, and with them the sums,
// where a weight would be too large.
template <typename Tile>
__device__ __forceinline__ void weigh_scores(ScoreFragments<Tile>& s,
                                             FragmentRow (&state)[Tile::kRows],
                                             ValueFragments<Tile>& out, float unit) {
    float top[Tile::kRows];  // of the keys of this thread alone, until a row needs more
    bool passed = false;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        top[i] = -infinity<float>();
#pragma unroll
        for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) top[i] = maximum(top[i], s[i / 2][j][i % 2 * 2 + e]);
        passed |= state[i].is_passed_by(top[i], unit);
    }
    if (__any_sync(kFullWarp, passed)) {
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i) {
            top[i] = reduce_quad(top[i], [](float a, float b) { return maximum(a, b); });
            const float factor = state[i].raise(top[i], unit);
#pragma unroll
            for (int j = 0; j < Tile::kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) out[i / 2][j][i % 2 * 2 + e] *= factor;
        }
    }
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = s[i / 2][j][i % 2 * 2 + e];
                x = state[i].weight(x, unit);
                sum += x;
            }
        state[i].l += sum;
    }
}

// out += weights @ values.
template <typename T, typename Tile>
__device__ __forceinline__ void add_values(ValueFragments<Tile>& out,
                                           const ScoreFragments<Tile>& weights,
                                           unsigned own_value) {
    using Values = typename Tile::Values;
#pragma unroll
    for (int step = 0; step < Tile::kKeyTiles / 2; ++step) {
        unsigned a[Tile::kRowTiles][4];
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const float* pair = &weights[m][2 * step + part / 2][part % 2 * 2];
                a[m][part] = pack<T>(pair[0], pair[1]);
            }
#pragma unroll
        for (int j = 0; j < Tile::kValueTiles; j += 2) {
            unsigned b[4];
            load_transposed_matrices(
                b, Values::advance(own_value, j / 2) + step * 16 * Values::kPitch);
#pragma unroll
            for (int m = 0; m < Tile::kRowTiles; ++m) {
                MatrixProduct<T>::add(out[m][j], a[m], b[0], b[1]);
                MatrixProduct<T>::add(out[m][j + 1], a[m], b[2], b[3]);
            }
        }
    }
}

}  // namespace cuflash

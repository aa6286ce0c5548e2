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

// The part of a mask for a tile of keys and a warp's rows, whose bytes lie at multiples of 16, as
// bits: one instruction loads 16 bytes a lane, and a tile with no bit, or with all, is known.
template <typename Tile>
struct MaskTile {
    static constexpr int kBytes = Tile::kWarpRows * Tile::kKeys / 32;  // of a lane
    static constexpr int kLanes = Tile::kKeys / kBytes;                // of a row
    static constexpr int kWords = (kBytes + 31) / 32;
    static constexpr unsigned kAll = kBytes < 32 ? (1u << kBytes % 32) - 1 : ~0u;
    uint4 bytes[kBytes / 16];  // under way
    unsigned word[kWords];

    __device__ __forceinline__ void start(const Matrix<const unsigned char>& mask, int64 first_row,
                                          int64 first_key) {
        const int lane = threadIdx.x % 32;
        const unsigned char* from =
            &mask.at(first_row + lane / kLanes, first_key + lane % kLanes * kBytes);
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) bytes[i] = reinterpret_cast<const uint4*>(from)[i];
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int w = 0; w < kWords; ++w) word[w] = 0;
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
            const unsigned four[4] = {bytes[i].x, bytes[i].y, bytes[i].z, bytes[i].w};
#pragma unroll
            for (int n = 0; n < 4; ++n)
                word[i / 2] |= bits_of_bytes(four[n]) << (i % 2 * 16 + n * 4);
        }
    }

    __device__ __forceinline__ bool has_any() const {
        unsigned any = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) any |= word[w];
        return __any_sync(kFullWarp, any);
    }
    __device__ __forceinline__ bool has_all() const {
        unsigned all = ~0u;
#pragma unroll
        for (int w = 0; w < kWords; ++w) all &= word[w];
        return __all_sync(kFullWarp, (all & kAll) == kAll);
    }

    // Keys first..first + 31 of row `row` of the warp.
    __device__ __forceinline__ unsigned of_row(int row, int first) const {
        unsigned bits = 0;
#pragma unroll
        for (int part = 0; part < 32 && first + part < Tile::kKeys; part += kBytes) {
            const int lane = row * kLanes + (first + part) / kBytes;
            bits |= __shfl_sync(kFullWarp, word[first / 32 % kWords], lane) << part;
        }
        return bits;
    }

  private:
    // Which of four bytes are not 0, the lowest first: NumPy's are 0 or 1, others' may be anything.
    static __device__ __forceinline__ unsigned bits_of_bytes(unsigned bytes) {
        const unsigned high = ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu | bytes) & 0x80808080u;
        return high * 0x00204081u >> 28;
    }
};

// Dot products of row i of a thread, and scores in their place.
template <typename Tile, typename A, typename Change>
__device__ __forceinline__ void change_row_of(A (&s)[Tile::kRowTiles][Tile::kKeyTiles][4], int i,
                                              Change change) {
    A row[2 * Tile::kKeyTiles];
#pragma unroll
    for (int j = 0; j < 2 * Tile::kKeyTiles; ++j) row[j] = s[i / 2][j / 2][i % 2 * 2 + j % 2];
    change(row);
#pragma unroll
    for (int j = 0; j < 2 * Tile::kKeyTiles; ++j) s[i / 2][j / 2][i % 2 * 2 + j % 2] = row[j];
}

// Makes a thread's scores of a row -inf outside of a range. Bits are as few registers as the
// predicates of all of them would be many.
template <int kCount, typename A>
__device__ __forceinline__ void hide_outside(A (&scores)[kCount], int low, int high) {
    static_assert(kCount <= 32, "a bit for each");
    const unsigned shown = own_keys_below(high) & ~own_keys_below(low);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
        if (!(shown >> j & 1)) scores[j] = -infinity<A>();
}

// Turns a thread's dot products with the keys of a tile into scores, -inf where unseen; without
// steps the scale is left to `FragmentRow`. `score_of(i)` and `row_of(i)` are those of its row i.
template <typename Tile, typename Score, typename A, typename ScoreOf, typename RowOf>
__device__ __forceinline__ void change_scores(A (&s)[Tile::kRowTiles][Tile::kKeyTiles][4],
                                              int64 first_key, bool whole, ScoreOf score_of,
                                              RowOf row_of) {
    const int own_key = 2 * (threadIdx.x % 4);
    auto column_of = [](int j) { return 8 * (j / 2) + j % 2; };
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        const Score& score = score_of(i);
        const KeyRange seen = score.range(row_of(i));
        const int low = int(clamp(seen.first - first_key, 0, Tile::kKeys));
        const int high = int(clamp(seen.last + 1 - first_key, low, Tile::kKeys));
        const RowPairs pairs{row_of(i), first_key + own_key, low - own_key, high - low};
        change_row_of<Tile>(s, i, [&](auto& row) {
            if constexpr (Score::kPerPair) score.change_row(row, pairs, column_of);
            if (!whole) hide_outside(row, low, high);
        });
    }
}

// A thread's scores of a tile for all of whose pairs options have elements: see `change_pairs`.
template <typename Tile>
struct FragmentPairs {
    static constexpr int kRows = Tile::kRows, kRowStep = 8, kColumns = 2 * Tile::kKeyTiles;
    ScoreFragments<Tile>& s;
    float (&shift)[kRows];
    int64 first_row, first_key;
    int distance, side;

    static __device__ __forceinline__ constexpr int column(int j) { return 8 * (j / 2) + j % 2; }
    __device__ __forceinline__ float& at(int i, int j) const {
        return s[i / 2][j / 2][i % 2 * 2 + j % 2];
    }
};

// Hides what rows do not see of a tile: by their ranges, unless it is whole, and by the mask, if it
// is `masked`. The thread's row i is `row_of(i)`.
template <typename Tile, typename Score, typename RowOf>
__device__ __forceinline__ void hide_unseen(ScoreFragments<Tile>& s, int64 first_key, bool whole,
                                            const Score& score, bool masked,
                                            const MaskTile<Tile>& mask, RowOf row_of) {
    if (whole && !masked) return;
    const int lane = threadIdx.x % 32;
    auto below = [](int count) { return count < 32 ? (1u << max(count, 0)) - 1 : ~0u; };
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        int low = 0, high = Tile::kKeys;
        if (!whole) {
            const KeyRange seen = score.range(row_of(i));
            low = int(clamp(seen.first - first_key, 0, Tile::kKeys));
            high = int(clamp(seen.last + 1 - first_key, low, Tile::kKeys));
        }
#pragma unroll
        for (int first = 0; first < Tile::kKeys; first += 32) {
            unsigned shown = below(high - first) & ~below(low - first);
            if (masked) shown &= mask.of_row(8 * i + lane / 4, first);
            shown >>= lane % 4 * 2;  // a thread has two neighbours of each 8 keys
#pragma unroll
            for (int j = first / 4; j < 2 * Tile::kKeyTiles && j < first / 4 + 8; ++j)
                if (!(shown >> (8 * (j / 2) + j % 2 - first) & 1))
                    s[i / 2][j / 2][i % 2 * 2 + j % 2] = -infinity<float>();
        }
    }
}

// Whether some row of the warp has a large reference.
template <int kRows>
__device__ __forceinline__ bool have_large(const FragmentRow (&state)[kRows]) {
    bool large = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) large |= state[i].is_large();
    return __any_sync(kFullWarp, large);
}

// Turns scores into weights relative to the rows' references, which rise, and with them the sums,
// where a weight would be too large. Scores come times 1 / unit, and less the shift of their row.
// `large` is `have_large(state)`.
template <typename Tile>
__device__ __forceinline__ void weigh_scores(ScoreFragments<Tile>& s,
                                             FragmentRow (&state)[Tile::kRows],
                                             ValueFragments<Tile>& out, float unit, bool& large,
                                             const float (&shift)[Tile::kRows] = {}) {
    float top[Tile::kRows];  // of the keys of this thread alone, until a row needs more
    bool passed = false;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        top[i] = -infinity<float>();
#pragma unroll
        for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) top[i] = maximum(top[i], s[i / 2][j][i % 2 * 2 + e]);
        // Rounded, as a reference would be: rows must not move where others of the warp do.
        top[i] = multiply_add(top[i], unit, shift[i] * unit);
        passed |= state[i].is_passed_by(top[i], 1);
    }
    if (__any_sync(kFullWarp, passed)) {
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i) {
            top[i] = reduce_quad(top[i], [](float a, float b) { return maximum(a, b); });
            const float factor = state[i].raise(top[i], 1);
#pragma unroll
            for (int j = 0; j < Tile::kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) out[i / 2][j][i % 2 * 2 + e] *= factor;
        }
        large = have_large(state);
    }
    if (large) {
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[i / 2][j][i % 2 * 2 + e];
                    x = state[i].is_large() ? state[i].weight_of_large(x, unit, shift[i] * unit)
                                            : state[i].weight(x, unit, shift[i] * unit);
                }
    } else {
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[i / 2][j][i % 2 * 2 + e];
                    x = state[i].weight(x, unit, shift[i] * unit);
                }
    }
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) sum += s[i / 2][j][i % 2 * 2 + e];
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

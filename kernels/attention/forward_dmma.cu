// Attention forward on float64 tensor cores, for inputs of any shape and stride (sm_80 and later).
//
// FlashAttention-2 (Dao 2023, algorithm 1), as in forward_mma.cu: a warp owns 16 query rows, keeps
// their scores and sums in registers, and uses the weights as the left operand of the second
// product as they are. Keys and values come by background copies, one tile ahead of the products.
//
// Sums of products are kept short before they join others: the error of n equal terms added one by
// one grows like n, which for rows of thousands of keys, or for one visible key, would exceed what
// is promised. Those of some tiles are put aside before the next ones: out's in `out`, and more
// often the normalizers, which cost less and of which more is asked.
//
// The grid is that of lib/scheduler.cuh. Dynamic shared memory: queries (kQueries x kFeatures)
// unless registers hold them, then two stages of keys (kKeys x kFeatures) and of values (kKeys x
// kValues), at last a SumAside for each query.
#include "attention/block.cuh"
#include "attention/dmma_tile.cuh"
#include "attention/mma_steps.cuh"
#include "attention/parameters.cuh"
#include "lib/nonfinite.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/score.cuh"

namespace cuflash {

// Tiles of a group; out's are in memory, where a group costs the time of about four tiles.
constexpr int kNormalizerGroup = 64, kOutGroup = 512;

// A thread's part of 16 rows and 8 columns for each entry: pairs of neighbours of two rows.
template <int kTiles>
using DoubleFragments = double[kTiles][4];

// An integer that rises with the number, be it infinite; its upper half decides.
__device__ __forceinline__ int order_of(double x) {
    const int high = __double2hiint(x);
    return high ^ (high >> 31 & 0x7fffffff);
}

// The online softmax of one row in base 2, as `FragmentRow` is for float. Scores come times
// 1 / unit; each lane has the normalizer of its own keys.
struct DoubleRow {
    static constexpr double kLog2OfE = 1.4426950408889634, kLogOf2 = 0.6931471805599453;
    // As for float: weights may grow to 2^kSlack before sums become relative to a larger score.
    static constexpr double kSlack = 8;
    // The reference of a row that has seen no key: below all scores.
    static constexpr double kNoReference = -1.7976931348623157e308;
    // From here on products in full, less a rounded one, are too far from 0 at the largest score.
    static constexpr double kLarge = 0x1p50;

    double reference;  // exponents are relative to it
    double l;
    int limit;  // no score of a lesser order makes the row move

    // A sink is a logit before all keys that has no value; it counts in one lane. +inf, like NaN,
    // makes l NaN.
    __device__ __forceinline__ void begin(double sink, double unit, bool counts) {
        const bool present = sink != -infinity<double>();
        l = present && counts ? 1 + (sink - sink) : 0;
        refer_to(present ? sink * kLog2OfE : kNoReference, unit);
    }

    __device__ __forceinline__ bool is_large() const {
        return fabs(reference) >= kLarge && reference != kNoReference;
    }

    // Makes room for a score. Returns the factor of sums relative to the reference before.
    __device__ __forceinline__ double raise(double score, double unit) {
        if (!(multiply_add(score, unit, -reference) > kSlack)) return 1;
        const double before = reference;
        refer_to(score * unit, unit);
        return quick_exp2(before - reference);
    }

  private:
    __device__ __forceinline__ void refer_to(double score, double unit) {
        reference = score;
        // One less than the slack: room for rounding.
        limit = score == kNoReference ? -0x7fffffff - 1 : order_of((score + (kSlack - 1)) / unit);
    }
};

// The normalizer of a row over the groups before, what it is relative to, and what out is.
struct SumAside {
    double reference, l, out_reference;
};

// Reduces over the 4 lanes of a row; all of them get the result, of the same bits.
template <typename Combine>
__device__ __forceinline__ double reduce_quad(double x, Combine combine) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, 1));
    return combine(x, __shfl_xor_sync(kFullWarp, x, 2));
}

// The fragment of 16 features of a warp's queries that begin at `row`.
template <typename Layout>
__device__ __forceinline__ void load_queries(double (&a)[8], const unsigned char* row, int other) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Vector<double> x = chunk_at<double>(row + i * 8 * Layout::kPitch + half * other);
            a[4 * half + i] = x.element[0];
            a[4 * half + 2 + i] = x.element[1];
        }
}

// s += queries @ keys^T. `own_key` is where a lane's row begins; `queries_of(a, step)` gives the
// fragment of 16 features.
template <typename Tile, typename QueriesOf>
__device__ __forceinline__ void add_double_scores(DoubleFragments<Tile::kKeyTiles>& s,
                                                  const unsigned char* own_key, int other,
                                                  QueriesOf queries_of) {
    constexpr int kBlock = 1;  // steps whose products are summed before they join the score
    constexpr int kPass = 2;   // products that hide each other's latency
#pragma unroll
    for (int first = 0; first < Tile::kKeyTiles; first += kPass)
#pragma unroll(Tile::kQueriesHeld ? Tile::kFeatureSteps / kBlock : 1)
        for (int start = 0; start < Tile::kFeatureSteps; start += kBlock) {
            DoubleFragments<kPass> block = {};
#pragma unroll
            for (int step = start; step < start + kBlock; ++step) {
                double read[8];
                const auto& a = queries_of(read, step);
#pragma unroll
                for (int n = 0; n < kPass; ++n) {
                    const unsigned char* from =
                        own_key + step * 128 + (first + n) * 8 * Tile::Features::kPitch;
                    const Vector<double> x = chunk_at<double>(from),
                                         y = chunk_at<double>(from + other);
                    MatrixProduct<double>::add(
                        block[n], a, {x.element[0], x.element[1], y.element[0], y.element[1]});
                }
            }
#pragma unroll
            for (int n = 0; n < kPass; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[first + n][e] += block[n][e];
        }
}

// Turns scores into weights relative to the rows' references, which rise where a weight would be
// too large. Scores come times 1 / unit. Returns in `factor` what sums before are to be taken by.
template <typename Tile>
__device__ __forceinline__ void weigh_double_scores(DoubleFragments<Tile::kKeyTiles>& s,
                                                    DoubleRow (&state)[2], double (&factor)[2],
                                                    double unit) {
    bool passed = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int top = -0x7fffffff - 1;
#pragma unroll
        for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) top = max(top, order_of(s[j][2 * i + e]));
        passed |= top >= state[i].limit;
        factor[i] = 1;
    }
    if (__any_sync(kFullWarp, passed)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            double top = -infinity<double>();
#pragma unroll
            for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) top = maximum(top, s[j][2 * i + e]);
            top = reduce_quad(top, [](double a, double b) { return maximum(a, b); });
            factor[i] = state[i].raise(top, unit);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        double own_unit = unit;
        if (state[i].is_large()) {
            own_unit = 1;
#pragma unroll
            for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) s[j][2 * i + e] = multiply(s[j][2 * i + e], unit);
        }
        double sum = 0;
#pragma unroll
        for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                double& x = s[j][2 * i + e];
                x = quick_exp2(multiply_add(x, own_unit, -state[i].reference));
                sum += x;
            }
        state[i].l = multiply_add(state[i].l, factor[i], sum);
    }
}

// out = out * factor + weights @ values. `own_value` is where a lane's value of its first key and 8
// columns lies, and `other` how far from there that of the next 8.
template <typename Tile>
__device__ __forceinline__ void add_double_values(DoubleFragments<Tile::kValueTiles>& out,
                                                  const DoubleFragments<Tile::kKeyTiles>& weights,
                                                  const double (&factor)[2],
                                                  const unsigned char* own_value, int other) {
    constexpr int kPitch = Tile::Values::kPitch;
    constexpr int kPass = 2;  // products that hide each other's latency
#pragma unroll
    for (int start = 0; start < Tile::kValueTiles; start += kPass) {
        DoubleFragments<kPass> block = {};
#pragma unroll
        for (int step = 0; step < Tile::kKeySteps; ++step) {
            double a[8];
#pragma unroll
            for (int part = 0; part < 8; ++part)
                a[part] = weights[2 * step + part / 4][part % 2 * 2 + part / 2 % 2];
#pragma unroll
            for (int n = 0; n < kPass; ++n) {
                const unsigned char* from =
                    own_value + step * 16 * kPitch + (start + n) / 2 * 128 + n % 2 * other;
                double b[4];
#pragma unroll
                for (int part = 0; part < 4; ++part)
                    b[part] =
                        *reinterpret_cast<const double*>(from + (part / 2 * 8 + part % 2) * kPitch);
                MatrixProduct<double>::add(block[n], a, b);
            }
        }
#pragma unroll
        for (int n = 0; n < kPass; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                out[start + n][e] = multiply_add(out[start + n][e], factor[e / 2], block[n][e]);
    }
}

// ----------------------------------------------------------------------------------------- kernel

template <typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    forward_dmma(const __grid_constant__ AttentionParameters p) {
    using Features = typename Tile::Features;
    using Values = typename Tile::Values;
    constexpr int kKeys = Tile::kKeys, kThreads = Tile::kThreads;
    constexpr int kValueTiles = Tile::kValueTiles;

    CUFLASH_DYNAMIC_SHARED(unsigned char, shared);
    unsigned char* const queries = shared;
    unsigned char* const keys = queries + Tile::kQueryBytes;
    unsigned char* const values = keys + 2 * Tile::kKeyBytes;
    auto* const sums_aside = reinterpret_cast<SumAside*>(values + 2 * Tile::kValueBytes);
    __shared__ BlockWork<double, Score> block;
    if (!block.begin(p, Tile::kQueries, Tile::kValues, kKeys)) return;

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_row = threadIdx.x / 32 * Tile::kWarpRows;
    auto row_of = [&](int i) { return block.first_row + warp_row + 8 * i + g; };
    const int tiles = int(block.tiles.end - block.tiles.begin);
    // What the loop seldom needs lies in shared memory, or is formed where it is: registers are
    // few.
    __shared__ WarpTiles tiles_of_warp[kThreads / 32];
    __shared__ unsigned damaged_rows[kThreads];  // bit i: NaN or inf in columns of row i
    WarpTiles& seen = tiles_of_warp[threadIdx.x / 32];
    if (lane == 0)
        seen = WarpTiles::of(block.score, block.first_row + warp_row, Tile::kWarpRows, block.tiles,
                             kKeys);
    __shared__ int64 out_start, lse_start;
    if (threadIdx.x == 0) {
        const Output<double> output(p, block.index, block.work.split);
        out_start = output.out_start;
        lse_start = output.lse_start;
    }
    __syncthreads();
    const double unit = (Score::kScales ? 1 : block.score.scale) * DoubleRow::kLog2OfE;
    auto v = [&]() -> Matrix<const double> {
        return {&block.v.at(0, block.first_value), block.v.row_stride, block.v.column_stride};
    };
    const int columns = int(block.end_value - block.first_value);
    const bool aligned = has_aligned_rows(block.k) && has_aligned_rows(v());
    const bool filled = aligned && p.features == Tile::kFeatures && columns == Tile::kValues;
    // Tiles before this one are copied whole. What no row sees in the first of them is a key, and a
    // value that is not finite there is found in the end.
    const int whole_end = filled ? tiles - (block.any.last + 1 < block.tiles.end * kKeys) : 0;
    DoubleCopies<Features, kKeys, kThreads> key_copies(keys, block.k, block.tiles.begin * kKeys);
    DoubleCopies<Values, kKeys, kThreads> value_copies(values, v(), block.tiles.begin * kKeys);
    auto load_tile = [&](int tile) {
        const int key_shift = (tile & 1) * Tile::kKeyBytes;
        const int value_shift = (tile & 1) * Tile::kValueBytes;
        if (__builtin_expect(tile < whole_end, 1)) {
            key_copies.start(key_shift, p.k.row_stride);
            value_copies.start(value_shift, p.v.row_stride);
            return;
        }
        const int64 first_key = (block.tiles.begin + tile) * kKeys;
        const int begin = int(clamp(block.any.first - first_key, 0, kKeys));
        const int end = int(clamp(block.any.last + 1 - first_key, 0, kKeys));
        if (aligned) {
            key_copies.start_part(key_shift, p.k.row_stride, begin, end, int(p.features));
            value_copies.start_part(value_shift, p.v.row_stride, begin, end, columns);
        } else {
            copy_to_chunks<Features, kKeys, kThreads>(keys + key_shift, block.k, first_key, begin,
                                                      end, int(p.features));
            copy_to_chunks<Values, kKeys, kThreads>(values + value_shift, v(), first_key, begin,
                                                    end, columns);
        }
    };

    // Where a lane's first chunks are, and how far from there its second ones.
    const int own_row = Features::at(g, t), other = g % 2 ? -64 : 64;
    const int own_value = Values::at(2 * t, g / 2) + g % 2 * 8, other_value = t / 2 ? -64 : 64;
    const unsigned char* const own_query = queries + warp_row * Features::kPitch + own_row;

    double held[Tile::kQueriesHeld ? Tile::kFeatureSteps : 1][8];
    if constexpr (Tile::kQueriesHeld) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool present = tiles > 0 && row_of(i) < block.end_row;
            const double* from = &block.q.at(row_of(i), 2 * t);
#pragma unroll
            for (int step = 0; step < Tile::kFeatureSteps; ++step)
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int feature = 16 * step + part / 2 * 8 + part % 2;
                    held[step][2 * part + i] = present && 2 * t + feature < p.features
                                                   ? from[feature * block.q.column_stride]
                                                   : 0.0;
                }
        }
    } else if (tiles > 0) {
        const int rows = int(block.end_row - block.first_row);
        if (has_aligned_rows(block.q))
            DoubleCopies<Features, Tile::kQueries, kThreads>(queries, block.q, block.first_row)
                .start_part(0, p.q.row_stride, 0, rows, int(p.features));
        else
            copy_to_chunks<Features, Tile::kQueries, kThreads>(queries, block.q, block.first_row, 0,
                                                               rows, int(p.features));
    }

    DoubleRow state[2];
    DoubleFragments<kValueTiles> out;
    // Adds the sums of the groups before tile `tile`, if there are any, and puts the new ones
    // aside, unless there are no more to come.
    auto end_group = [&](int tile) {
        const bool last = tile == tiles, first = tile == kNormalizerGroup;
        const bool of_out = last ? tiles > kOutGroup : tile % kOutGroup == 0;
        const bool first_of_out = tile == kOutGroup;
        const Matrix<double> sums = Output<double>(p, out_start, lse_start).matrix<double>();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            SumAside& aside = sums_aside[warp_row + 8 * i + g];
            const double now = state[i].reference;
            double l = reduce_quad(state[i].l, [](double a, double b) { return add(a, b); });
            if (!first) l = multiply_add(aside.l, quick_exp2(aside.reference - now), l);
            const double factor = first_of_out ? 1 : quick_exp2(aside.out_reference - now);
            __syncwarp();  // all lanes of the row have read it
            if (t == 0) aside = {now, l, of_out ? now : aside.out_reference};
            state[i].l = last && t == 0 ? l : 0;
            if (!of_out || row_of(i) >= block.end_row) continue;
            const int own_columns = int(block.end_value - block.first_value) - 2 * t;
            double* sum = &sums.at(row_of(i), block.first_value + 2 * t);
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j, sum += 8 * sums.column_stride)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (8 * j + e >= own_columns) continue;
                    double& own = out[j][2 * i + e];
                    double& other = sum[e * sums.column_stride];
                    if (!first_of_out) own = multiply_add(other, factor, own);
                    other = own;
                    own = last ? own : 0;
                }
        }
    };

    // A second turn only after non-finite values: see lib/nonfinite.cuh.
#pragma unroll 1
    for (;;) {
        const double sink = block.work.split == 0 ? block.score.sink : -infinity<double>();
#pragma unroll
        for (int i = 0; i < 2; ++i) state[i].begin(sink, unit, t == 0);
#pragma unroll
        for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[j][e] = 0;

#pragma unroll 1
        for (int tile = -1;; ++tile) {
            if (tile == tiles ? tiles > kNormalizerGroup : tile > 0 && tile % kNormalizerGroup == 0)
                end_group(tile);
            if (tile == tiles) break;
            const int stage = tile & 1;
            if (tile >= 0) {
                wait_for_copies<0>();
                if (seen.again) {
                    __syncthreads();
                    keep_finite<kKeys, Tile::kValues, kThreads, double>(values +
                                                                        stage * Tile::kValueBytes);
                }
                __syncthreads();  // the tile is there, and everyone is done with the one before
            }
            if (tile + 1 < tiles) {
                load_tile(tile + 1);
                key_copies.advance(p.k.row_stride, 1);
                value_copies.advance(p.v.row_stride, 1);
            }
            commit_copies();
            if (!seen.has(tile)) continue;

            double s[1][Tile::kKeyTiles][4] = {};
            add_double_scores<Tile>(s[0], keys + stage * Tile::kKeyBytes + own_row, other,
                                    [&](double (&read)[8], int step) -> const auto& {
                                        if constexpr (Tile::kQueriesHeld) return held[step];
                                        load_queries<Features>(read, own_query + step * 128, other);
                                        return read;
                                    });
            const bool whole = seen.has_whole(tile);
            if (Score::kPerPair || !whole)
                change_scores<Tile, Score>(
                    s, (block.tiles.begin + tile) * kKeys, whole,
                    [&](int) -> const Score& { return block.score; }, row_of);
            double factor[2];
            weigh_double_scores<Tile>(s[0], state, factor, unit);
            add_double_values<Tile>(out, s[0], factor,
                                    values + stage * Tile::kValueBytes + own_value, other_value);
        }

#pragma unroll
        for (int i = 0; i < 2; ++i)
            state[i].l = reduce_quad(state[i].l, [](double a, double b) { return add(a, b); });
        if (seen.again) break;
        unsigned damaged = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            double zero = 0;  // times NaN or inf it is NaN
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) zero = multiply_add(out[j][2 * i + e], 0, zero);
            if (zero != 0 && is_finite(state[i].l) && block.score.is_used(row_of(i)))
                damaged |= 1u << i;
        }
        damaged_rows[threadIdx.x] = damaged;
        if (damaged) block.redo = 1;
        __syncthreads();
        if (!block.redo) break;
        if (thread_here() % 32 == 0) seen.again = true;
        __syncwarp();
        key_copies.advance(p.k.row_stride, -tiles);
        value_copies.advance(p.v.row_stride, -tiles);
    }

    const Output<double> output(p, out_start, lse_start);
    const Matrix<double> to = output.template matrix<double>();
    const bool by_chunks = has_aligned_rows(to);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int64 row = row_of(i);
        if (row >= block.end_row) continue;
        const double l = block.score.is_used(row) ? state[i].l : 0;
        const double inverse = 1 / l;
        if (block.work.column_tile == 0 && t == 0)
            output.store_lse(
                row, l == 0 ? -infinity<double>()
                            : multiply_add(state[i].reference, DoubleRow::kLogOf2, logarithm(l)));
#pragma unroll
        for (int j = 0; j < kValueTiles; ++j) {
            const int64 column = block.first_value + 8 * j + 2 * t;
            Vector<double> x;
#pragma unroll
            for (int e = 0; e < 2; ++e) x.element[e] = l == 0 ? 0 : out[j][2 * i + e] * inverse;
            if (by_chunks && column + 1 < block.end_value) {
                store_streaming(&to.at(row, column), x);
                continue;
            }
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (column + e < block.end_value) to.at(row, column + e) = x.element[e];
        }
    }
    if (!block.redo) return;

    __syncwarp();  // add_nonfinite overwrites what other lanes wrote
#pragma unroll 1
    for (int own = 0; own < Tile::kWarpRows; ++own) {
        const int i = own / 8;
        const bool met = own % 8 == g && (damaged_rows[threadIdx.x] >> i & 1);
        const unsigned owners = __ballot_sync(kFullWarp, met);
        if (!owners) continue;
        const double reference =
            __shfl_sync(kFullWarp, i ? state[1].reference : state[0].reference, __ffs(owners) - 1);
        const int64 row = block.first_row + warp_row + own;
        KeyRange keys_seen = block.score.range(row);
        keys_seen.first = max(keys_seen.first, block.tiles.begin * kKeys);
        keys_seen.last = min(keys_seen.last, block.tiles.end * kKeys - 1);
        add_nonfinite(
            block.q, block.k, block.v, p.features, block.first_value, block.end_value, row,
            keys_seen, block.score,
            [&](double s) { return quick_exp2(add(multiply(s, DoubleRow::kLog2OfE), -reference)); },
            [&](int64 column, double x) { output.store(row, column, x); });
    }
}

}  // namespace cuflash

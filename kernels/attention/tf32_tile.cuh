// The tile of attention in float32 on TF32 tensor cores, and products of nearly float32 accuracy.
//
// A float is the sum of two TF32 numbers, big and small, but for its last bit or two: three
// products give that of two floats (3xTF32). Tensor cores cut off what a sum has no bits for,
// always toward zero, so that errors of many terms add up. Sums are therefore short, begin with the
// small products, and join those of a row by rounded additions.
//
// Of 16 features lane (g, t) takes the chunk t, two for each of two products; of 8 keys it takes 2t
// and 2t + 1, as which it has weights, and of 32 columns of v the chunk g, one for each of four
// products: of these its sums are those of columns 8t..8t + 7.
#pragma once

#include "attention/chunk_tile.cuh"
#include "attention/mma_steps.cuh"
#include "lib/nonfinite.cuh"

namespace cuflash {

// 16-row tiles of a warp, warps of a block, keys of a tile, padded features, columns of v that a
// block takes, blocks that a multiprocessor should hold. `device/attention_plans_tf32.py` says
// which tiles there are, and why.
template <int kRowTiles_, int kWarps, int kKeys_, int kFeatures_, int kValues_, int kBlocks_>
struct Tf32Tile {
    static constexpr int kRowTiles = kRowTiles_, kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles, kQueries = kWarpRows * kWarps;
    static constexpr int kKeys = kKeys_, kFeatures = kFeatures_, kValues = kValues_;
    static constexpr int kBlocks = kBlocks_;
    static constexpr int kRows = 2 * kRowTiles;      // rows that a thread has a part of
    static constexpr int kKeyTiles = kKeys / 8;      // 8 keys each
    static constexpr int kValueTiles = kValues / 8;  // 8 columns each
    static constexpr int kFeatureSteps = kFeatures / 16;
    using Features = FeatureChunks<float, kFeatures>;
    using Values = ValueChunks<float, kValues>;
    static constexpr int kQueryBytes = kQueries * Features::kPitch;
    static constexpr int kKeyBytes = kKeys * Features::kPitch;
    static constexpr int kValueBytes = kKeys * Values::kPitch;
};

// Floats as the sums of two TF32 numbers.
template <int kCount>
struct Tf32Parts {
    unsigned big[kCount], small[kCount];

    // Beside a big part of infinity, which numbers from 2^128 - 2^115 on have too, the small one is
    // an infinity of the other sign, or NaN.
    __device__ __forceinline__ void set(int i, float x) {
        big[i] = __float_as_uint(x) + 0x1000u & 0xffffe000u;  // rounded, ties away from zero
        small[i] = __float_as_uint(x - __uint_as_float(big[i]));
    }
};

// sum[m][n] += left[m] @ right[n] for kSteps products of depth 8.
template <int kRowTiles, int kColumns, int kSteps>
__device__ __forceinline__ void add_tf32_products(float (&sum)[kRowTiles][kColumns][4],
                                                  const Tf32Parts<4> (&left)[kRowTiles][kSteps],
                                                  const Tf32Parts<2> (&right)[kColumns][kSteps]) {
#pragma unroll
    for (int part = 0; part < 3; ++part)
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kColumns; ++n)
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
                    const Tf32Parts<4>& a = left[m][step];
                    const Tf32Parts<2>& b = right[n][step];
                    const unsigned (&of_b)[2] = part == 1 ? b.small : b.big;
                    MatrixProduct<float>::add(sum[m][n], part == 0 ? a.small : a.big, of_b[0],
                                              of_b[1]);
                }
}

// s += queries @ keys^T, by 16 of `features` features, once or twice in the code. `own_query` and
// `own_key` are where a lane's rows begin, and `other` how far from there the second tile is.
template <typename Tile, int kInCode = 2>
__device__ __forceinline__ void add_tf32_scores(ScoreFragments<Tile>& s,
                                                const unsigned char* own_query,
                                                const unsigned char* own_key, int other,
                                                int features) {
    constexpr int kPass = 4 / Tile::kRowTiles;  // products that hide each other's latency
    constexpr int kPitch = Tile::Features::kPitch;
#pragma unroll 1
    for (int pair = 0; 32 * pair < features; ++pair)
#pragma unroll kInCode
        for (int half = 0; half < 2; ++half) {
            const int shift = pair * 128 + half * other;
            Tf32Parts<4> a[Tile::kRowTiles][2];
#pragma unroll
            for (int i = 0; i < Tile::kRows; ++i) {
                const Vector<float> x = chunk_at<float>(own_query + i * 8 * kPitch + shift);
#pragma unroll
                for (int e = 0; e < 4; ++e) a[i / 2][e / 2].set(e % 2 * 2 + i % 2, x.element[e]);
            }
#pragma unroll
            for (int first = 0; first < Tile::kKeyTiles; first += kPass) {
                Tf32Parts<2> b[kPass][2];
#pragma unroll
                for (int n = 0; n < kPass; ++n) {
                    const Vector<float> x =
                        chunk_at<float>(own_key + (first + n) * 8 * kPitch + shift);
#pragma unroll
                    for (int e = 0; e < 4; ++e) b[n][e / 2].set(e % 2, x.element[e]);
                }
                float block[Tile::kRowTiles][kPass][4] = {};
                add_tf32_products(block, a, b);
#pragma unroll
                for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
                    for (int n = 0; n < kPass; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) s[m][first + n][e] += block[m][n][e];
            }
        }
}

// Replaces a thread's scores that are not finite by dot products in float32: of infinite operands,
// and of large ones, the parts have no sum. `queries` and `keys` are the warp's rows and the tile.
template <typename Tile>
__device__ __forceinline__ void replace_nonfinite_scores(ScoreFragments<Tile>& s,
                                                         const unsigned char* queries,
                                                         const unsigned char* keys) {
    using Features = typename Tile::Features;
    constexpr int kColumns = 2 * Tile::kKeyTiles;
    static_assert(Tile::kRows * kColumns <= 64, "a bit for each");
    const int lane = threadIdx.x % 32;
    unsigned long long left = 0;
#pragma unroll
    for (int n = 0; n < Tile::kRows * kColumns; ++n) {
        const int i = n / kColumns, j = n % kColumns;
        if (!is_finite(s[i / 2][j / 2][i % 2 * 2 + j % 2])) left |= 1ull << n;
    }
#pragma unroll 1
    for (int own = 0; left; ++own, left >>= 1) {
        if (!(left & 1)) continue;
        const int column = own % kColumns;
        const int row = own / kColumns * 8 + lane / 4;
        const int key = column / 2 * 8 + lane % 4 * 2 + column % 2;
        float dot = 0;
#pragma unroll 1
        for (int start = 0; start < Tile::kFeatures / 4; start += 4) {
            float block = 0;
#pragma unroll 1
            for (int chunk = start; chunk < start + 4; ++chunk) {
                const Vector<float> x = chunk_at<float>(queries + Features::at(row, chunk));
                const Vector<float> y = chunk_at<float>(keys + Features::at(key, chunk));
#pragma unroll
                for (int e = 0; e < 4; ++e) block = multiply_add(x.element[e], y.element[e], block);
            }
            dot += block;
        }
#pragma unroll
        for (int n = 0; n < Tile::kRows * kColumns; ++n) {
            const int i = n / kColumns, j = n % kColumns;
            if (n == own) s[i / 2][j / 2][i % 2 * 2 + j % 2] = dot;
        }
    }
}

// Makes all elements of a tile that has arrived sums of two parts: NaN and inf become 0, and
// numbers whose big part would be infinite the largest of the others, 2^-12 less.
template <int kCount, int kThreads>
__device__ __forceinline__ void keep_divisible(unsigned char* tile) {
    const float most = __uint_as_float(0x7f7fefffu);
#pragma unroll 1
    for (int i = thread_here(); i < kCount; i += kThreads) {
        float& x = reinterpret_cast<float*>(tile)[i];
        x = fminf(fmaxf(finite_or_zero(x), -most), most);
    }
}

// Turns scores into weights relative to the rows' references, which rise, and with them the sums,
// where a weight would be too large. Scores come times 1 / unit. Their products with it are
// rounded, as references are: the weight of a row's only key is 1.
template <typename Tile>
__device__ __forceinline__ void weigh_rounded_scores(ScoreFragments<Tile>& s,
                                                     FragmentRow (&state)[Tile::kRows],
                                                     ValueFragments<Tile>& out, float unit) {
    float top[Tile::kRows];  // of the keys of this thread alone, until a row needs more
    bool passed = false;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        top[i] = -infinity<float>();
#pragma unroll
        for (int j = 0; j < 2 * Tile::kKeyTiles; ++j)
            top[i] = maximum(top[i], s[i / 2][j / 2][i % 2 * 2 + j % 2]);
        top[i] = multiply(top[i], unit);
        passed |= state[i].is_passed_by(top[i], 1);
    }
    if (__any_sync(kFullWarp, passed)) {
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i) {
            top[i] = reduce_quad(top[i], [](float a, float b) { return maximum(a, b); });
            const float factor = state[i].raise(top[i], 1);
#pragma unroll
            for (int j = 0; j < 2 * Tile::kValueTiles; ++j)
                out[i / 2][j / 2][i % 2 * 2 + j % 2] *= factor;
        }
    }
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 2 * Tile::kKeyTiles; ++j) {
            float& x = s[i / 2][j / 2][i % 2 * 2 + j % 2];
            x = exp2_approximate(add(multiply(x, unit), -state[i].reference));
            sum += x;
        }
        state[i].l += sum;
    }
}

// out += weights @ values of the first `keys` keys, by 8. `own_value` is where a lane's chunk of
// its first key lies.
template <typename Tile>
__device__ __forceinline__ void add_tf32_values(ValueFragments<Tile>& out,
                                                const ScoreFragments<Tile>& weights,
                                                const unsigned char* own_value, int keys) {
    constexpr int kPitch = Tile::Values::kPitch;
#pragma unroll
    for (int j = 0; j < Tile::kKeyTiles; ++j) {
        // Also where the compiler stops reading ahead, or it would spill.
        if (j % 2 == 0 && 8 * j >= keys) break;
        Tf32Parts<4> a[Tile::kRowTiles][1];
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
            for (int part = 0; part < 4; ++part)
                a[m][0].set(part, weights[m][j][part % 2 * 2 + part / 2]);
#pragma unroll
        for (int first = 0; first < Tile::kValueTiles; first += 4) {
            Tf32Parts<2> b[4][1];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const Vector<float> x =
                    chunk_at<float>(own_value + (j * 8 + row) * kPitch + first * 32);
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
                    for (int e = 0; e < 4; ++e) out[m][first + n][e] += block[m][n][e];
        }
    }
}

// Where a thread's results go: rows 8 apart, four neighbours at a time, from its first one on.
struct OwnResults {
    Matrix<float> to;
    int rows, columns;  // that there are
    bool aligned;

    // All from `first_row` and `first_column` on up to the ends.
    __device__ __forceinline__ OwnResults(const Matrix<float>& matrix, int64 first_row,
                                          int64 end_row, int64 first_column, int64 end_column)
        : to{&matrix.at(first_row, first_column), matrix.row_stride, matrix.column_stride},
          rows(int(clamp(end_row - first_row, 0, 1 << 20))),
          columns(int(clamp(end_column - first_column, 0, 1 << 20))),
          aligned(has_aligned_rows(matrix)) {}

    __device__ __forceinline__ bool has(int row) const { return row < rows; }
    __device__ __forceinline__ Vector<float> load(int row, int column) const {
        Vector<float> x{};
        if (is_whole(column)) return *reinterpret_cast<const Vector<float>*>(&to.at(row, column));
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (column + n < columns) x.element[n] = to.at(row, column + n);
        return x;
    }
    __device__ __forceinline__ void store(int row, int column, const Vector<float>& x) const {
        if (is_whole(column)) return store_streaming(&to.at(row, column), x);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (column + n < columns) to.at(row, column + n) = x.element[n];
    }

  private:
    __device__ __forceinline__ bool is_whole(int column) const {
        return aligned && column + 3 < columns;
    }
};

// Lets `visit(i, column, x)` change a thread's sums of its row i, four at a time; columns are
// counted from its first one.
template <typename Tile, typename Visit>
__device__ __forceinline__ void visit_sums(ValueFragments<Tile>& out, Visit visit) {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Tile::kValueTiles; j += 4)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                Vector<float> x;
#pragma unroll
                for (int n = 0; n < 4; ++n) x.element[n] = out[i / 2][j + n][i % 2 * 2 + e];
                visit(i, 8 * j + 4 * e, x);
#pragma unroll
                for (int n = 0; n < 4; ++n) out[i / 2][j + n][i % 2 * 2 + e] = x.element[n];
            }
}

}  // namespace cuflash

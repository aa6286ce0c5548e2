// out = activation(a @ b + bias) in float32 and float64 on tensor cores (sm_80): mma.sync,
// cp.async.
//
// float32 is three products of TF32 parts, whose sums are cut off and therefore short: see
// attention/tf32_tile.cuh. Those of float64 round as FMA does.
//
// A block owns kTileRows x kTileColumns results and walks over the contracted axis 128 bytes at a
// time; kStages tiles of each operand are under way. Rows of a hold the terms, and so do rows of b
// (kTermsInRows) or its columns; all begin at multiples of 16 bytes. Terms and columns come in the
// order in which lanes read 16 bytes: of four such chunks of terms lane (g, t) takes chunk t, and
// of eight chunks of columns chunk g / 2 + g % 2 * 4, a column for each of kVector products. Of
// these, its sums are those of chunks t and t + 4, which leave from registers, neighbours side by
// side.
//
// a (rows, depth), b (depth, columns), bias (columns,) -> out (rows, columns)
// Grid: a block for each tile (MatmulTile) of each entry. Dynamic shared memory: kStages tiles of
// a, then kStages of b; sums of float32 where there are more than kSumTerms terms.
#include "attention/chunk_tile.cuh"
#include "attention/tf32_tile.cuh"
#include "fused/matmul.cuh"
#include "lib/nonfinite.cuh"

namespace cuflash {

// The columns of b as rows of terms, or its rows: there, of four chunks that lanes t read in rows
// kVector apart, each takes its own place.
template <typename T, int kDepth, int kColumns, bool kTermsInRows>
struct RightChunks : FeatureChunks<T, kDepth, 4 * kVector<T>> {};
template <typename T, int kDepth, int kColumns_>
struct RightChunks<T, kDepth, kColumns_, false> {
    static constexpr int kColumns = kColumns_, kChunks = kColumns / kVector<T>;
    static constexpr int kPitch = int(sizeof(T)) * kColumns;

    static __device__ __forceinline__ constexpr int swap(int row) {
        return row / kVector<T> % 4 * 16;
    }
    static __device__ __forceinline__ int at(int row, int chunk) {
        return row * kPitch + (chunk * 16 ^ swap(row));
    }
};

// 16-row tiles and columns of a warp, warps down and across a block, stages, blocks that a
// multiprocessor should hold, times 8 columns that a warp multiplies at a time.
// `device/fused_plans.py` says which there are, and why.
template <typename T, int kRowTiles_, int kWarpColumns_, int kWarpsDown, int kWarpsAcross_,
          int kStages_, int kBlocks_, int kPass_, bool kTermsInRows_>
struct WideProduct {
    static constexpr bool kTermsInRows = kTermsInRows_;
    static constexpr int kPass = kPass_;
    static constexpr int kRowTiles = kRowTiles_, kWarpRows = 16 * kRowTiles;
    static constexpr int kWarpColumns = kWarpColumns_, kWarpsAcross = kWarpsAcross_;
    static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross, kBlocks = kBlocks_;
    static constexpr int kTileRows = kWarpRows * kWarpsDown;
    static constexpr int kTileColumns = kWarpColumns * kWarpsAcross;
    static constexpr int kStages = kStages_, kDepth = 128 / int(sizeof(T));
    static constexpr int kColumnTiles = kWarpColumns / 8;      // 8 columns each
    static constexpr int kGroups = kColumnTiles / kVector<T>;  // 8 chunks of columns each
    using Left = FeatureChunks<T, kDepth>;
    using Right = RightChunks<T, kDepth, kTileColumns, kTermsInRows>;
    static constexpr int kLeftBytes = kTileRows * 128, kRightBytes = kTileColumns * 128;
};
constexpr unsigned kWideBand = 16;

// What products take of half a slice: of rows of a, i and i + 8 of 16, and of a column of b. The
// error of terms that are alike grows like the number of additions to a sum: after kSumTerms terms,
// unless 0, sums are added to others.
template <typename T>
struct WideFragments;

template <>
struct WideFragments<float> {
    static constexpr int kSumTerms = 1024;
    using Left = Tf32Parts<4>[2];
    using Right = Tf32Parts<2>[2];

    static __device__ __forceinline__ void set_left(Left& a, int i, const Vector<float>& x) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e / 2].set(e % 2 * 2 + i, x.element[e]);
    }
    static __device__ __forceinline__ void set_right(Right& b, int e, float x) {
        b[e / 2].set(e % 2, x);
    }
    template <int kRows, int kColumns, int kAll>
    static __device__ __forceinline__ void add(float (&sum)[kRows][kAll][4], int first,
                                               const Left (&a)[kRows], const Right (&b)[kColumns]) {
        float block[kRows][kColumns][4] = {};
        add_tf32_products(block, a, b);
#pragma unroll
        for (int m = 0; m < kRows; ++m)
#pragma unroll
            for (int n = 0; n < kColumns; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[m][first + n][e] += block[m][n][e];
    }
};

template <>
struct WideFragments<double> {
    static constexpr int kSumTerms = 0;
    using Left = double[4];
    using Right = double[2];

    static __device__ __forceinline__ void set_left(Left& a, int i, const Vector<double>& x) {
#pragma unroll
        for (int e = 0; e < 2; ++e) a[2 * e + i] = x.element[e];
    }
    static __device__ __forceinline__ void set_right(Right& b, int e, double x) { b[e] = x; }
    template <int kRows, int kColumns, int kAll>
    static __device__ __forceinline__ void add(double (&sum)[kRows][kAll][4], int first,
                                               const Left (&a)[kRows], const Right (&b)[kColumns]) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
            for (int m = 0; m < kRows; ++m)
                MatrixProduct<double>::add(sum[m][first + n], a[m], b[n]);
    }
};

// A result by itself, in float32: the parts of infinite operands, and of large ones, have no sum.
template <typename T>
__device__ __forceinline__ T lone_product(const T* a, int64 a_step, const T* b, int64 b_step,
                                          int64 depth) {
    T dot = 0;
#pragma unroll 1
    for (int64 start = 0; start < depth && dot == dot; start += 16) {
        T block = 0;
#pragma unroll 1
        for (int64 k = start; k < min(start + 16, depth); ++k)
            block = multiply_add(a[k * a_step], b[k * b_step], block);
        dot += block;
    }
    return dot;
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    matmul_wide(const __grid_constant__ MatmulParameters p) {
    using Fragments = WideFragments<T>;
    constexpr bool kTermsInRows = Shape::kTermsInRows;
    constexpr int kDepth = Shape::kDepth, kStages = Shape::kStages, kRowTiles = Shape::kRowTiles;
    constexpr int kChunk = kVector<T>, kPass = Shape::kPass;
    using RightLayout = typename Shape::Right;
    constexpr int kPitch = RightLayout::kPitch;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    __shared__ BatchIndex index;
    const MatmulTile tile(p, blockIdx.x, kWideBand);
    decode_batch(p.batch, tile.entry, index, threadIdx.x);
    __syncthreads();
    const auto a = Matrix<const T>::of(p.a, p.batch, index);
    auto b = Matrix<const T>::of(p.b, p.batch, index);
    if (kTermsInRows) b = {b.data, b.column_stride, b.row_stride};

    const int64 first_row = int64(tile.row) * Shape::kTileRows;
    const int64 first_column = int64(tile.column) * Shape::kTileColumns;
    const int rows = int(min(p.rows - first_row, int64(Shape::kTileRows)));
    const int columns = int(min(p.columns - first_column, int64(Shape::kTileColumns)));
    unsigned char* const left = memory;
    unsigned char* const right = memory + kStages * Shape::kLeftBytes;
    ChunkCopies<typename Shape::Left, Shape::kTileRows, Shape::kThreads, T> left_copies(left, a,
                                                                                        first_row);
    ChunkCopies<RightLayout, kTermsInRows ? Shape::kTileColumns : kDepth, Shape::kThreads, T>
        right_copies(right, b, kTermsInRows ? first_column : 0);
    if (!kTermsInRows) right_copies.source += first_column;

    const int steps = int((p.depth + kDepth - 1) / kDepth);
    const bool whole = rows == Shape::kTileRows && columns == Shape::kTileColumns;
    auto next_of = [](int stage) { return stage + 1 < kStages ? stage + 1 : 0; };
    // Starts to copy the tiles of the next step, if there is one, as a group.
    int left_to_fetch = int(p.depth), stage_to_fill = 0;
    auto fetch = [&] {
        if (left_to_fetch > 0) {
            const int depth = min(left_to_fetch, kDepth);
            const int left_shift = stage_to_fill * Shape::kLeftBytes;
            const int right_shift = stage_to_fill * Shape::kRightBytes;
            if (whole && depth == kDepth) {
                left_copies.start(left_shift, a.row_stride);
                right_copies.start(right_shift, b.row_stride);
            } else {
                left_copies.start_part(left_shift, a.row_stride, 0, rows, depth);
                if (kTermsInRows)
                    right_copies.start_part(right_shift, b.row_stride, 0, columns, depth);
                else
                    right_copies.start_part(right_shift, b.row_stride, 0, depth, columns);
            }
            left_copies.source += kDepth;
            right_copies.source += kTermsInRows ? kDepth : kDepth * b.row_stride;
            left_to_fetch -= kDepth;
            stage_to_fill = next_of(stage_to_fill);
        }
        commit_copies();
    };

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int warp_row = warp / Shape::kWarpsAcross * Shape::kWarpRows;
    const int warp_column = warp % Shape::kWarpsAcross * Shape::kWarpColumns;
    const int own_chunk = g / 2 + g % 2 * 4;
    // Where a lane's chunks begin, and how far from there those of the other half of a row are.
    const unsigned char* const own_left = left + Shape::Left::at(warp_row + g, t);
    const unsigned char* const own_right =
        right + (kTermsInRows ? RightLayout::at(warp_column + kChunk * own_chunk, t)
                              : RightLayout::at(kChunk * t, warp_column / kChunk + own_chunk));
    const int other = g % 2 ? -64 : 64;  // in a's rows and b's

    T sum[kRowTiles][Shape::kColumnTiles][4] = {};
#pragma unroll 1
    for (int step = 0; step < kStages - 1; ++step) fetch();
    constexpr int kSumSteps = Fragments::kSumTerms / kDepth;
    auto visit_sums = [&](auto visit) {
        T* const own =
            reinterpret_cast<T*>(memory + kStages * (Shape::kLeftBytes + Shape::kRightBytes)) +
            threadIdx.x;
#pragma unroll
        for (int n = 0; n < 4 * kRowTiles * Shape::kColumnTiles; ++n)
            visit(sum[n / 4 / Shape::kColumnTiles][n / 4 % Shape::kColumnTiles][n % 4],
                  own[n * Shape::kThreads]);
    };
    int stage = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, stage = next_of(stage)) {
        if constexpr (kSumSteps > 0)
            if (step > 0 && step % kSumSteps == 0) {
                const bool first = step == kSumSteps;
                visit_sums([&](T& x, T& total) {
                    total = first ? x : total + x;
                    x = 0;
                });
            }
        wait_for_copies<kStages - 2>();
        __syncthreads();  // all have read what the next tiles replace
        const unsigned char* const left_here = own_left + stage * Shape::kLeftBytes;
        const unsigned char* const right_here = own_right + stage * Shape::kRightBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == 1) fetch();  // beside products: before the first ones it costs registers
            typename Fragments::Left x[kRowTiles];
#pragma unroll
            for (int i = 0; i < 2 * kRowTiles; ++i)
                Fragments::set_left(
                    x[i / 2], i % 2,
                    chunk_at<T>(left_here + 8 * i * Shape::Left::kPitch + half * other));
#pragma unroll
            for (int group = 0; group < Shape::kGroups; ++group) {
                // Of terms, for a column each, or of columns, for a term each.
                Vector<T> chunks[kChunk];
#pragma unroll
                for (int n = 0; n < kChunk; ++n)
                    chunks[n] = chunk_at<T>(right_here +
                                            (kTermsInRows
                                                 ? (8 * kChunk * group + n) * kPitch + half * other
                                                 : (4 * kChunk * half + n) * kPitch + 128 * group));
#pragma unroll
                for (int first = 0; first < kChunk; first += kPass) {
                    typename Fragments::Right y[kPass];
#pragma unroll
                    for (int n = 0; n < kPass; ++n)
#pragma unroll
                        for (int e = 0; e < kChunk; ++e)
                            Fragments::set_right(y[n], e,
                                                 kTermsInRows ? chunks[first + n].element[e]
                                                              : chunks[e].element[first + n]);
                    Fragments::add(sum, group * kChunk + first, x, y);
                }
            }
        }
    }

    if constexpr (kSumSteps > 0)
        if (steps > kSumSteps) visit_sums([](T& x, T& total) { x += total; });

    const auto out = Matrix<T>::of(p.out, p.batch, index);
    auto row_of = [&](int i) { return warp_row + 8 * i + g; };
    auto column_of = [&](int group, int e) {
        return warp_column + kChunk * (8 * group + 4 * e + t);
    };
    if constexpr (sizeof(T) == 4) {
        static_assert(4 * kRowTiles * Shape::kColumnTiles <= 64, "a bit for each");
        // Asked for again: over the loop they would cost registers.
        const auto every_a = Matrix<const T>::of(p.a, p.batch, index);
        const auto every_b = Matrix<const T>::of(p.b, p.batch, index);
        unsigned long long left_out = 0;
#pragma unroll
        for (int n = 0; n < 4 * kRowTiles * Shape::kColumnTiles; ++n)
            if (!is_finite(sum[n / 4 / Shape::kColumnTiles][n / 4 % Shape::kColumnTiles][n % 4]))
                left_out |= 1ull << n;
#pragma unroll 1
        for (int own = 0; left_out; ++own, left_out >>= 1) {
            if (!(left_out & 1)) continue;
            const int j = own / 4 % Shape::kColumnTiles;
            const int row = row_of(own / 4 / Shape::kColumnTiles * 2 + own % 4 / 2);
            const int column = column_of(j / kChunk, own % 2) + j % kChunk;
            if (row >= rows || column >= columns) continue;
            const T dot =
                lone_product(&every_a.at(first_row + row, 0), every_a.column_stride,
                             &every_b.at(0, first_column + column), every_b.row_stride, p.depth);
#pragma unroll
            for (int n = 0; n < 4 * kRowTiles * Shape::kColumnTiles; ++n)
                if (n == own)
                    sum[n / 4 / Shape::kColumnTiles][n / 4 % Shape::kColumnTiles][n % 4] = dot;
        }
    }

    const T* const bias = static_cast<const T*>(p.bias) + first_column;
    const Matrix<T> to = {&out.at(first_row, first_column), out.row_stride, out.column_stride};
    const bool aligned = has_aligned_rows(to);
    with_activation(p.activation, [&](auto activation) {
#pragma unroll
        for (int group = 0; group < Shape::kGroups; ++group)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = column_of(group, e), own = min(columns - column, kChunk);
                Vector<T> shift{};
#pragma unroll
                for (int n = 0; n < kChunk; ++n)
                    if (n < own) shift.element[n] = bias[column + n];
#pragma unroll
                for (int i = 0; i < 2 * kRowTiles; ++i) {
                    Vector<T> x;
#pragma unroll
                    for (int n = 0; n < kChunk; ++n)
                        x.element[n] = activation(
                            add(sum[i / 2][group * kChunk + n][i % 2 * 2 + e], shift.element[n]));
                    const int row = row_of(i);
                    if (row >= rows) continue;
                    if (aligned && own == kChunk) {
                        store_streaming(&to.at(row, column), x);
                    } else {
#pragma unroll
                        for (int n = 0; n < kChunk; ++n)
                            if (n < own) to.at(row, column + n) = x.element[n];
                    }
                }
            }
    });
}

}  // namespace cuflash

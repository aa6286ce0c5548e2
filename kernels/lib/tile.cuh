// Tiles of matrices in shared memory, held in the accumulator's type, and their products by threads
// that each own a small block of the result.
//
// A warp is a grid of 4 rows x 8 columns of threads. A thread owns rows 4 apart and columns 8
// apart; every access to shared memory is 16 bytes along the contracted axis or along columns of
// the result. Bit 0 of the lane is a row bit and bit 1 a column bit: a 16-byte access takes two
// cycles instead of four if lanes i and i^1, or i and i^2, want the same address.
#pragma once

#include "lib/nonfinite.cuh"
#include "lib/numeric.cuh"
#include "lib/scheduler.cuh"

namespace cuflash {

constexpr int kLaneRows = 4;
constexpr int kLaneColumns = 8;

struct LanePosition {
    int row, column;

    __device__ __forceinline__ LanePosition() : LanePosition(threadIdx.x) {}
    __device__ __forceinline__ explicit LanePosition(unsigned thread) {
        int lane = thread % 32;
        row = (lane & 1) | (lane >> 3 & 2);
        column = lane >> 1 & 7;
    }
};

// Reduces over the 8 lanes of a row; all of them get the result, of the same bits.
template <typename A, typename Combine>
__device__ __forceinline__ A reduce_row(A x, Combine combine) {
#pragma unroll
    for (int bit = 2; bit <= 8; bit *= 2) x = combine(x, __shfl_xor_sync(kFullWarp, x, bit));
    return x;
}

// Stride of a tile whose rows are read by neighbouring lanes: 16 bytes more than the columns moves
// each row on by four banks.
template <typename A, int kColumns>
constexpr int kRowReadStride = kColumns + kVector<A>;
// Stride of a tile that is written element by element, 8 neighbours in each of 4 rows.
template <int kColumns>
constexpr int kElementWriteStride = kColumns + kLaneColumns;

template <typename A>
__device__ __forceinline__ Vector<A> read_vector(const A* shared) {
    return *reinterpret_cast<const Vector<A>*>(shared);
}

// Copies kRows x kColumns elements from row and column `row`, `column` of a matrix into a tile.
// Tile rows outside begin..end - 1 and columns from `columns` on become 0: what lies there may be
// no memory, or NaN. With `finite_only`, so do non-finite elements.
//
// A thread reads kAtOnce elements at a time where they are no neighbours.
template <typename T, int kRows, int kColumns, int kStride, int kThreads, int kAtOnce = 4>
__device__ __forceinline__ void load_tile(Accumulator<T>* tile, const Matrix<const T>& matrix,
                                          int64 row, int64 column, int begin, int end,
                                          int64 columns, bool finite_only = false) {
    using A = Accumulator<T>;
    const T* source = &matrix.at(row, column);
    auto value = [&](T x) { return finite_only ? finite_or_zero(widen(x)) : widen(x); };

    if (matrix.column_stride == 1 && matrix.row_stride % kVector<T> == 0 &&
        columns % kVector<T> == 0 && is_vector_aligned(source)) {
        constexpr int kPerRow = kColumns / kVector<T>;
#pragma unroll 4
        for (int i = threadIdx.x; i < kRows * kPerRow; i += kThreads) {
            int r = i / kPerRow, c = i % kPerRow * kVector<T>;
            Vector<T> elements{};
            if (r >= begin && r < end && c < columns)
                elements = *reinterpret_cast<const Vector<T>*>(source + r * matrix.row_stride + c);
#pragma unroll
            for (int part = 0; part < kVector<T>; part += kVector<A>) {
                Vector<A> out;
#pragma unroll
                for (int e = 0; e < kVector<A>; ++e)
                    out.element[e] = value(elements.element[part + e]);
                *reinterpret_cast<Vector<A>*>(tile + r * kStride + c + part) = out;
            }
        }
        return;
    }
    // Neighbouring threads take neighbours in memory, be they in a row or in a column.
    const bool by_column = llabs(matrix.row_stride) < llabs(matrix.column_stride);
#pragma unroll kAtOnce
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
        int r = by_column ? i % kRows : i / kColumns, c = by_column ? i / kRows : i % kColumns;
        A x = 0;
        if (r >= begin && r < end && c < columns)
            x = value(source[r * matrix.row_stride + c * matrix.column_stride]);
        tile[r * kStride + c] = x;
    }
}

// sum[i][j] += x[row i] . y[row j] over `depth` elements, rounded up to kBlock; both tiles hold 0
// past their ends. `x` and `y` point to the thread's own first rows, 4 and 8 apart.
//
// Products are summed in blocks of kBlock before they join the sum. Plain summation of n products
// has an error that grows like n, which alone can exceed what is promised of lse for one visible
// key; blocks make it about sqrt(n) for one addition in kBlock.
template <int kDepth, int kXStride, int kYStride, int kRows, int kColumns, typename A>
__device__ __forceinline__ void add_inner_products(A (&sum)[kRows][kColumns], const A* x,
                                                   const A* y, int depth) {
    constexpr int kBlock = 16;
    static_assert(kDepth % kBlock == 0, "a tile holds whole blocks");
#pragma unroll 1
    for (int start = 0; start < depth; start += kBlock) {
        A block[kRows][kColumns] = {};
#pragma unroll 2  // reads of one step beside the products of another; 4 steps spill
        for (int d = 0; d < kBlock; d += kVector<A>) {
            Vector<A> right[kColumns];
#pragma unroll
            for (int j = 0; j < kColumns; ++j)
                right[j] = read_vector(y + kLaneColumns * j * kYStride + start + d);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                Vector<A> left = read_vector(x + kLaneRows * i * kXStride + start + d);
#pragma unroll
                for (int e = 0; e < kVector<A>; ++e)
#pragma unroll
                    for (int j = 0; j < kColumns; ++j)
                        block[i][j] += left.element[e] * right[j].element[e];
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < kColumns; ++j) sum[i][j] += block[i][j];
    }
}

// sum[i][.] += weights[row i] @ values over `depth` rows of values, rounded up to a vector. The
// thread's own columns are whole vectors, 8 vectors apart. With kSeenOnly, values do not enter the
// sum at all where their weight is kUnseen.
//
// The products of a tile are summed before they join the sum: the error of n equal terms added one
// by one grows like n, and would break what is promised of long rows with equal weights.
template <int kWeightStride, int kValueStride, bool kSeenOnly = false, int kRows, int kOwn,
          typename A>
__device__ __forceinline__ void add_weighted_rows(A (&sum)[kRows][kOwn], const A* weights,
                                                  const A* values, int depth) {
    constexpr int kWide = kVector<A>;
    static_assert(kOwn % kWide == 0, "a thread owns whole vectors");
    constexpr int kPass = kOwn < 8 ? kOwn : 8;  // columns at a time: more would spill
#pragma unroll
    for (int first = 0; first < kOwn; first += kPass) {
        A block[kRows][kPass] = {};
#pragma unroll 2
        for (int start = 0; start < depth; start += kWide) {
            Vector<A> left[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                left[i] = read_vector(weights + kLaneRows * i * kWeightStride + start);
#pragma unroll
            for (int e = 0; e < kWide; ++e) {
#pragma unroll
                for (int g = 0; g < kPass; g += kWide) {
                    Vector<A> right = read_vector(values + (start + e) * kValueStride +
                                                  kLaneColumns * (first + g));
#pragma unroll
                    for (int i = 0; i < kRows; ++i)
#pragma unroll
                        for (int c = 0; c < kWide; ++c)
                            if (!kSeenOnly || !is_unseen(left[i].element[e]))
                                block[i][g + c] += left[i].element[e] * right.element[c];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int c = 0; c < kPass; ++c) sum[i][first + c] += block[i][c];
    }
}

}  // namespace cuflash

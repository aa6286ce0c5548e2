// out = activation(a @ b + bias) on 16-bit tensor cores (sm_80): mma.sync, ldmatrix, cp.async.
//
// A block owns 128 x 128 results, each of its 8 warps 64 x 32, and walks over the contracted axis
// 32 terms at a time; kStages tiles of each operand are under way. Rows of a hold the terms, and so
// do rows of b (kTermsInRows) or its columns; all begin at multiples of 16 bytes.
//
// a (rows, depth), b (depth, columns), bias (columns,) -> out (rows, columns)
// Grid: a block for each tile (MatmulTile) of each entry. Dynamic shared memory: kStages tiles of
// a, kStages of b; then results on their way out.
#include "attention/mma_tile.cuh"
#include "fused/matmul.cuh"

namespace cuflash {

template <bool kTermsInRows>
struct MmaProduct {
    static constexpr int kThreads = 256, kStages = 4, kDepth = 32;
    static constexpr int kTileRows = 128, kTileColumns = 128;
    // Of a warp, in the names that `store_rows` knows.
    static constexpr int kRowTiles = 4, kValueTiles = 4, kRows = 2 * kRowTiles;
    static constexpr int kWarpRows = 64, kWarpColumns = 32;
    using Left = SwizzledTile<kDepth>;
    using Right = SwizzledTile<kTermsInRows ? kDepth : kTileColumns>;
    static constexpr int kLeftBytes = kTileRows * kDepth * 2;
    static constexpr int kRightBytes = kTileColumns * kDepth * 2;
};
constexpr unsigned kMmaBand = 16;

// Fragments of 16 terms of b for 16 columns: pairs for columns 0..7 and 8..15.
template <bool kTermsInRows>
__device__ __forceinline__ void load_right(unsigned (&b)[4], unsigned tile, int column, int step) {
    using Right = typename MmaProduct<kTermsInRows>::Right;
    const int lane = threadIdx.x % 32;
    if constexpr (kTermsInRows)
        load_matrices(b,
                      tile + Right::at(column + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
    else
        load_transposed_matrices(b,
                                 tile + Right::at(16 * step + lane % 16, column / 8 + lane / 16));
}

template <typename T, bool kTermsInRows>
__global__ void __launch_bounds__(256, 2) matmul_mma(const __grid_constant__ MatmulParameters p) {
    using Shape = MmaProduct<kTermsInRows>;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    __shared__ BatchIndex index;
    const MatmulTile tile(p, blockIdx.x, kMmaBand);
    decode_batch(p.batch, tile.entry, index, threadIdx.x);
    __syncthreads();
    const auto a = Matrix<const T>::of(p.a, p.batch, index);
    auto b = Matrix<const T>::of(p.b, p.batch, index);
    if (kTermsInRows) b = {b.data, b.column_stride, b.row_stride};
    auto out = Matrix<T>::of(p.out, p.batch, index);

    const int64 first_row = int64(tile.row) * Shape::kTileRows;
    const int64 first_column = int64(tile.column) * Shape::kTileColumns;
    const int rows = int(min(p.rows - first_row, int64(Shape::kTileRows)));
    const int columns = int(min(p.columns - first_column, int64(Shape::kTileColumns)));
    const unsigned left = shared_address(memory);
    const unsigned right = left + Shape::kStages * Shape::kLeftBytes;
    RowCopies<Shape::kTileRows, Shape::kDepth, Shape::kThreads, T> left_copies(left, a, first_row);
    RowCopies<kTermsInRows ? Shape::kTileColumns : Shape::kDepth,
              kTermsInRows ? Shape::kDepth : Shape::kTileColumns, Shape::kThreads, T>
        right_copies(right, b, kTermsInRows ? first_column : 0);
    if (!kTermsInRows) right_copies.source += first_column;

    const int64 steps = (p.depth + Shape::kDepth - 1) / Shape::kDepth;
    const bool whole = rows == Shape::kTileRows && columns == Shape::kTileColumns;
    // Starts to copy the tiles of one step, if there is one, as a group.
    auto fetch = [&](int64 step) {
        if (step < steps) {
            const int stage = int(step % Shape::kStages);
            const int depth = int(min(p.depth - step * Shape::kDepth, int64(Shape::kDepth)));
            const unsigned left_shift = stage * Shape::kLeftBytes;
            const unsigned right_shift = stage * Shape::kRightBytes;
            if (whole && depth == Shape::kDepth) {
                left_copies.start(left_shift, a.row_stride);
                right_copies.start(right_shift, b.row_stride);
            } else {
                left_copies.start_part(left_shift, a.row_stride, 0, rows, depth);
                if (kTermsInRows)
                    right_copies.start_part(right_shift, b.row_stride, 0, columns, depth);
                else
                    right_copies.start_part(right_shift, b.row_stride, 0, depth, columns);
            }
            left_copies.source += Shape::kDepth;
            right_copies.source += kTermsInRows ? Shape::kDepth : Shape::kDepth * b.row_stride;
        }
        commit_copies();
    };

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / 4 * Shape::kWarpRows, warp_column = warp % 4 * Shape::kWarpColumns;
    float sum[Shape::kRowTiles][Shape::kValueTiles][4] = {};
#pragma unroll 1
    for (int step = 0; step < Shape::kStages - 1; ++step) fetch(step);
#pragma unroll 1
    for (int64 step = 0; step < steps; ++step) {
        wait_for_copies<Shape::kStages - 2>();
        __syncthreads();  // all have read what the next tiles replace
        fetch(step + Shape::kStages - 1);
        const int stage = int(step % Shape::kStages);
        const unsigned left_tile = left + stage * Shape::kLeftBytes;
        const unsigned right_tile = right + stage * Shape::kRightBytes;
#pragma unroll
        for (int k = 0; k < Shape::kDepth / 16; ++k) {
            unsigned x[Shape::kRowTiles][4], y[Shape::kValueTiles / 2][4];
#pragma unroll
            for (int i = 0; i < Shape::kRowTiles; ++i)
                load_matrices(x[i], left_tile + Shape::Left::at(warp_row + 16 * i + lane % 16,
                                                                2 * k + lane / 16));
#pragma unroll
            for (int j = 0; j < Shape::kValueTiles / 2; ++j)
                load_right<kTermsInRows>(y[j], right_tile, warp_column + 16 * j, k);
#pragma unroll
            for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
                for (int j = 0; j < Shape::kValueTiles; ++j)
                    MatrixProduct<T>::add(sum[i][j], x[i], y[j / 2][j % 2 * 2],
                                          y[j / 2][j % 2 * 2 + 1]);
        }
    }
    wait_for_copies<0>();
    __syncthreads();  // results take the place of operands

    with_activation(p.activation, [&](auto activation) {
#pragma unroll
        for (int j = 0; j < Shape::kValueTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = warp_column + 8 * j + lane % 4 * 2 + e;
                const float shift =
                    column < columns ? widen(static_cast<const T*>(p.bias)[first_column + column])
                                     : 0.0f;
#pragma unroll
                for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float& x = sum[i][j][2 * half + e];
                        x = activation(add(x, shift));
                    }
            }
    });
    out.data += (first_column + warp_column) * out.column_stride;
    store_rows<Shape, T>(memory, sum, out, first_row + warp_row,
                         min(rows - warp_row, Shape::kWarpRows), columns - warp_column);
}

}  // namespace cuflash

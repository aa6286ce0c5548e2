// out = activation(a @ b + bias) by plain CUDA, any dtype and strides: what float32 and float64
// take, and 16 bits where there is nothing better.
//
// A block of kThreads owns a tile of kTileRows x kTileColumns results and walks over the contracted
// axis; tiles of a and of the transposed b lie in shared memory in the accumulator's type.
//
// a (rows, depth), b (depth, columns), bias (columns,) -> out (rows, columns)
// Grid: a block for each tile (MatmulTile) of each entry. Static shared memory.
#include "fused/matmul.cuh"
#include "lib/tile.cuh"

namespace cuflash {

template <typename T>
struct SimtProduct {
    static constexpr bool kWide = sizeof(Accumulator<T>) == 8;
    // Rows and columns of a thread; a warp has 4 x 8 threads, a block 4 x 2 warps.
    static constexpr int kRows = kWide ? 4 : 8, kColumns = 4, kDepth = kWide ? 16 : 32;
    static constexpr int kThreads = 256, kWarpColumns = 2;
    static constexpr int kTileRows = 4 * kLaneRows * kRows;
    static constexpr int kTileColumns = kWarpColumns * kLaneColumns * kColumns;
    static constexpr int kStride = kRowReadStride<Accumulator<T>, kDepth>;
};
constexpr unsigned kSimtBand = 8;

template <typename T>
__global__ void __launch_bounds__(SimtProduct<T>::kThreads, 2)
    matmul_simt(const __grid_constant__ MatmulParameters p) {
    using A = Accumulator<T>;
    using Shape = SimtProduct<T>;
    __shared__ __align__(16) A left[Shape::kTileRows * Shape::kStride];
    __shared__ __align__(16) A right[Shape::kTileColumns * Shape::kStride];
    __shared__ BatchIndex index;

    const MatmulTile tile(p, blockIdx.x, kSimtBand);
    decode_batch(p.batch, tile.entry, index, threadIdx.x);
    __syncthreads();
    const auto a = Matrix<const T>::of(p.a, p.batch, index);
    auto b = Matrix<const T>::of(p.b, p.batch, index);
    b = {b.data, b.column_stride, b.row_stride};  // its columns are the rows of the tile
    const auto out = Matrix<T>::of(p.out, p.batch, index);

    const int64 first_row = int64(tile.row) * Shape::kTileRows;
    const int64 first_column = int64(tile.column) * Shape::kTileColumns;
    const int rows = int(min(p.rows - first_row, int64(Shape::kTileRows)));
    const int columns = int(min(p.columns - first_column, int64(Shape::kTileColumns)));
    const LanePosition lane;
    const int warp = threadIdx.x / 32;
    const int row = warp / Shape::kWarpColumns * kLaneRows * Shape::kRows + lane.row;
    const int column = warp % Shape::kWarpColumns * kLaneColumns * Shape::kColumns + lane.column;

    A sum[Shape::kRows][Shape::kColumns] = {};
    for (int64 start = 0; start < p.depth; start += Shape::kDepth) {
        const int64 depth = min(p.depth - start, int64(Shape::kDepth));
        __syncthreads();
        load_tile<T, Shape::kTileRows, Shape::kDepth, Shape::kStride, Shape::kThreads>(
            left, a, first_row, start, 0, rows, depth);
        load_tile<T, Shape::kTileColumns, Shape::kDepth, Shape::kStride, Shape::kThreads>(
            right, b, first_column, start, 0, columns, depth);
        __syncthreads();
        add_inner_products<Shape::kDepth, Shape::kStride, Shape::kStride>(
            sum, left + row * Shape::kStride, right + column * Shape::kStride, int(depth));
    }

    A shift[Shape::kColumns];
#pragma unroll
    for (int j = 0; j < Shape::kColumns; ++j) {
        const int at = column + kLaneColumns * j;
        shift[j] = at < columns ? widen(static_cast<const T*>(p.bias)[first_column + at]) : A(0);
    }
    with_activation(p.activation, [&](auto activation) {
#pragma unroll
        for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Shape::kColumns; ++j) {
                const int r = row + kLaneRows * i, c = column + kLaneColumns * j;
                if (r < rows && c < columns)
                    out.at(first_row + r, first_column + c) =
                        narrow<T>(activation(add(sum[i][j], shift[j])));
            }
    });
}

}  // namespace cuflash

// Attention's gradients row by row: what the kernels over pairs read, and the gradient of sinks.
//
//   row_deltas       delta = sum(dout * out) - dlse of every row, 0 where a row has no gradient
//   query_sums       sums of dq before atomic additions, 0, and after them: dq = scale sums
//   sink_gradients   dsinks = -exp(sink - lse) * delta, summed over the rows and entries of a sink
//
// Grid: row_deltas and query_sums a block for each tile of rows and batch entry; sink_gradients a
// block for each sink. No dynamic shared memory.
#include "attention/backward.cuh"

namespace cuflash {

// kWide neighbours of a row as A, 0 past its end. Elements have either type: rows of 16-bit results
// may be float.
template <typename A, int kWide>
__device__ __forceinline__ void read_chunk(A (&x)[kWide], const BatchedArray& array, int64 start,
                                           int64 row, int64 column, int64 columns) {
    const int64 first = start + row * array.row_stride + column * array.column_stride;
    if constexpr (sizeof(A) == 4) {
        const auto* const source = static_cast<const unsigned short*>(array.data) + first;
        const bool short_elements = array.type == kFloat16 || array.type == kBFloat16;
        if (short_elements && array.column_stride == 1 && column + kWide <= columns &&
            is_vector_aligned(source)) {
            const auto chunk =
                bytes_as<Vector<unsigned short>>(*reinterpret_cast<const uint4*>(source));
#pragma unroll
            for (int e = 0; e < kWide; ++e)
                x[e] = array.type == kFloat16 ? widen(bytes_as<__half>(chunk.element[e]))
                                              : widen(bytes_as<__nv_bfloat16>(chunk.element[e]));
            return;
        }
    }
#pragma unroll
    for (int e = 0; e < kWide; ++e)
        x[e] = column + e < columns
                   ? read_float<A>(array.data, first + e * array.column_stride, array.type)
                   : A(0);
}

template <typename A>
__global__ void __launch_bounds__(128) row_deltas(const __grid_constant__ VjpParameters p) {
    constexpr int kRows = 32, kWarps = 4, kWide = 32 / int(sizeof(A));
    __shared__ VjpWork<A, RangedScore<A>> block;
    if (!block.template begin<false>(p, kRows)) return;

    // Rows of few chunks share a warp, so that all its lanes have one.
    const int64 chunks = (p.values + kWide - 1) / kWide;
    int lanes = 1;
    while (lanes < 32 && lanes < chunks) lanes *= 2;
    const int lane = threadIdx.x % lanes, rows = kWarps * 32 / lanes;
    const int64 dout = entry_offset(p.dout.batch_stride, p.batch, block.index);
    const int64 out = entry_offset(p.out.batch_stride, p.batch, block.index);
    const auto dlse = RowNumbers<const A>::of(p.dlse, p.batch, block.index);
    for (int64 start = block.first; start < block.end; start += rows) {
        const int64 row = start + threadIdx.x / lanes;
        const bool inside = row < block.end;
        const A lse = inside && block.score.is_used(row) ? block.lse.at(row) : -infinity<A>();
        A sum = 0;
        if (lse != -infinity<A>()) {
            // A row that only the sink gives weight has an out of 0, whatever dout is.
            const bool sink_alone = lse == block.score.sink;
            for (int64 chunk = lane; chunk < chunks; chunk += lanes) {
                A x[kWide], y[kWide];
                read_chunk(x, p.dout, dout, row, chunk * kWide, p.values);
                read_chunk(y, p.out, out, row, chunk * kWide, p.values);
#pragma unroll
                for (int e = 0; e < kWide; ++e)
                    if (!sink_alone || y[e] != A(0)) sum += x[e] * y[e];
            }
        }
        for (int bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(kFullWarp, sum, bit);
        if (lane > 0 || !inside) continue;
        if (lse != -infinity<A>() && p.dlse.data) sum -= dlse.at(row);
        block.delta.at(row) = sum;
    }
}

// Sums of dq of a tile of rows: 0, where atomic additions begin; or, in the end, dq: scale times
// them.
template <typename A, bool kClears>
__global__ void __launch_bounds__(128) query_sums(const __grid_constant__ VjpParameters p) {
    constexpr int kRows = 32;
    __shared__ VjpWork<A, RangedScore<A>> block;
    if (!block.template begin<false>(p, kRows)) return;
    const Matrix<A> sums = Matrix<A>::of(p.dq_sums, p.batch, block.index);
    const Matrix<A> to = Matrix<A>::of(p.dq, p.batch, block.index);
    const int columns = int(kClears ? sums.row_stride : p.features);
    const int rows = int(block.end - block.first);
    for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
        const int64 row = block.first + i / columns;
        if (kClears)
            sums.at(row, i % columns) = 0;
        else
            to.at(row, i % columns) = sums.at(row, i % columns) * block.score.scale;
    }
}

template <typename A>
__global__ void __launch_bounds__(256) sink_gradients(const __grid_constant__ VjpParameters p) {
    constexpr int kThreads = 256;
    __shared__ BatchIndex index;
    __shared__ A sums[kThreads];
    A sum = 0;
    int64 element = 0;
    for (int64 entry = 0; entry < max(p.summed, 1LL); ++entry) {
        __syncthreads();  // everyone is done with the entry before
        decode_batch(p.batch, blockIdx.x * max(p.summed, 1LL) + entry, index, threadIdx.x);
        __syncthreads();
        element = entry_offset(p.dsinks.batch_stride, p.batch, index);
        if (p.summed == 0) break;
        const A sink = read_entry(p.score.sinks, p.batch, index, -infinity<A>());
        if (sink == -infinity<A>()) break;  // none, for all entries
        const auto lse = RowNumbers<const A>::of(p.lse, p.batch, index);
        const auto delta = RowNumbers<const A>::of(p.delta, p.batch, index);
        for (int64 row = threadIdx.x; row < p.score.queries; row += kThreads) {
            const A below = delta.at(row);
            // Also of rows that nobody uses, whose lse may be anything.
            if (below != A(0)) sum -= exponential(sink - lse.at(row)) * below;
        }
    }
    sums[threadIdx.x] = sum;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x > 0) return;
    A x = sums[0];
    if (p.adds) x += read_float<A>(p.dsinks.data, element, p.dsinks.type);
    write_float(p.dsinks.data, element, p.dsinks.type, x);
}

}  // namespace cuflash

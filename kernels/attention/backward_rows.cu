// Attention's gradients row by row: what the kernels over pairs read, and the gradient of sinks.
//
//   row_deltas       delta = sum(dout * out) - dlse of every row, 0 where a row has no gradient
//   sink_gradients   dsinks = -exp(sink - lse) * delta, summed over the rows and entries of a sink
//
// Grid: row_deltas a block for each tile of rows and batch entry, a warp for 8 of its rows;
// sink_gradients a block for each sink. No dynamic shared memory.
#include "attention/backward.cuh"

namespace cuflash {

// An element of either type: rows of 16-bit results may be float.
template <typename A>
__device__ __forceinline__ A element_of(const BatchedArray& x, int64 start, int64 row,
                                        int64 column) {
    return read_float<A>(x.data, start + row * x.row_stride + column * x.column_stride, x.type);
}

template <typename A>
__global__ void __launch_bounds__(128) row_deltas(const __grid_constant__ VjpParameters p) {
    constexpr int kRows = 32;
    __shared__ VjpWork<A, RangedScore<A>> block;
    if (!block.template begin<false>(p, kRows)) return;

    const int lane = threadIdx.x % 32;
    const int64 dout = entry_offset(p.dout.batch_stride, p.batch, block.index);
    const int64 out = entry_offset(p.out.batch_stride, p.batch, block.index);
    const auto dlse = RowNumbers<const A>::of(p.dlse, p.batch, block.index);
    for (int64 row = block.first + threadIdx.x / 32; row < block.end; row += 4) {
        A sum = 0;
        if (block.score.is_used(row) && block.lse.at(row) != -infinity<A>()) {
            // A row that only the sink gives weight has an out of 0, whatever dout is.
            const bool sink_alone = block.lse.at(row) == block.score.sink;
            for (int64 column = lane; column < p.values; column += 32) {
                const A y = element_of<A>(p.out, out, row, column);
                if (!sink_alone || y != A(0)) sum += element_of<A>(p.dout, dout, row, column) * y;
            }
            for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(kFullWarp, sum, bit);
            if (p.dlse.data) sum -= dlse.at(row);
        }
        if (lane == 0) block.delta.at(row) = sum;
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

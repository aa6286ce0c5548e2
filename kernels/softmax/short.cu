// Softmax of rows so short that several lie in the 16 bytes that a thread moves, or in a few of
// those: a row is one thread's, and nothing is exchanged.
//
// x (rows, kColumns) -> output[0] (rows, kColumns), or one or two entries a row; contiguous and
// aligned to 16 bytes. A thread takes the fewest chunks that are whole rows at a time.
// Grid: any number of blocks is right.
#include "softmax/result.cuh"

namespace cuflash {

constexpr int common_divisor(int a, int b) {
    return b == 0 ? a : common_divisor(b, a % b);
}

template <typename T, typename Operation, int kColumns>
__global__ void __launch_bounds__(256) short_rows(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    constexpr int kV = kVector<T>;
    constexpr int kChunks = kColumns / common_divisor(kColumns, kV);  // of a group of whole rows
    constexpr int kRows = kChunks * kV / kColumns;
    constexpr int kGroups = kChunks < 4 ? 4 / kChunks : 1;  // of a thread at a time: 64 bytes
    const T* x = static_cast<const T*>(p.input[0].data);
    T* y = static_cast<T*>(p.output[0].data);
    const int64 chunks = (p.rows * kColumns + kV - 1) / kV, elements = p.rows * kColumns;
    const int64 groups = (p.rows + kRows - 1) / kRows;

#pragma unroll 1
    for (int64 first = int64(blockIdx.x) * blockDim.x * kGroups; first < groups;
         first += int64(gridDim.x) * blockDim.x * kGroups) {
        Vector<T> held[kGroups][kChunks];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                const int64 chunk = (first + g * blockDim.x + threadIdx.x) * kChunks + i;
                held[g][i] =
                    load_streaming(x + chunk * kV, (chunk + 1) * kV <= elements, lowest<T>());
                if (chunk == chunks - 1) {  // perhaps not whole
#pragma unroll
                    for (int v = 0; v < kV; ++v)
                        if (chunk * kV + v < elements) held[g][i].element[v] = x[chunk * kV + v];
                }
            }
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int64 group = first + g * blockDim.x + threadIdx.x;
            A scores[kChunks * kV];
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                const Wide<T> wide(held[g][i]);
#pragma unroll
                for (int v = 0; v < kV; ++v) scores[i * kV + v] = wide.element[v];
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                A* const row = scores + r * kColumns;
                OnlineSoftmax<A> state = OnlineSoftmax<A>::identity();
#pragma unroll
                for (int c = 0; c < kColumns; ++c) state.m = maximum(state.m, row[c]);
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const A weight = state.weight(row[c]);
                    if constexpr (Operation::kOfWeights) row[c] = weight;
                    state.l = add(state.l, weight);
                }
                const Operation operation(state, state);
                if constexpr (Operation::kColumns) {
#pragma unroll
                    for (int c = 0; c < kColumns; ++c)
                        row[c] = result_of<Operation::kOfWeights>(operation, row[c]);
                } else if (group * kRows + r < p.rows) {
                    operation.template write<T>(p, Place(p, group * kRows + r));
                }
            }
            if constexpr (Operation::kColumns) {
#pragma unroll
                for (int i = 0; i < kChunks; ++i) {
                    const int64 chunk = group * kChunks + i;
                    Vector<T> result;
#pragma unroll
                    for (int v = 0; v < kV; ++v)
                        result.element[v] = cuflash::narrow<T>(scores[i * kV + v]);
                    if ((chunk + 1) * kV <= elements) {
                        store_streaming(y + chunk * kV, result);
                    } else {
#pragma unroll
                        for (int v = 0; v < kV; ++v)
                            if (chunk * kV + v < elements) y[chunk * kV + v] = result.element[v];
                    }
                }
            }
        }
    }
}

}  // namespace cuflash

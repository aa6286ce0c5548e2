// x = activation(x + bias) in place: what is left to do behind a product that a library computed.
//
// x (rows, columns) in C order, bias (columns,). Grid: any number of blocks, octets of columns in
// turn.
#include "fused/matmul.cuh"
#include "fused/rows.cuh"

namespace cuflash {

struct EpilogueParameters {
    int64 rows, columns;
    void* x;
    const void* bias;
    int activation;
};

constexpr int kEpilogueThreads = 256;

template <typename T, bool kPacked>
__global__ void __launch_bounds__(kEpilogueThreads)
    epilogue(const __grid_constant__ EpilogueParameters p) {
    const int64 octets = (p.columns + 7) / 8, step = int64(gridDim.x) * kEpilogueThreads;
    const T* const bias = static_cast<const T*>(p.bias);
    for (int64 i = int64(blockIdx.x) * kEpilogueThreads + threadIdx.x; i < p.rows * octets;
         i += step) {
        const Column<int64> column{0, i % octets * 8, false};
        T* const row = static_cast<T*>(p.x) + i / octets * p.columns;
        Octet<T> octet, shifts;
        octet.template load<kPacked, true>(row, column, p.columns);
        shifts.template load<kPacked, false>(bias, column, p.columns);
        Accumulator<T> x[8], shift[8];
        octet.widen_to(x);
        shifts.widen_to(shift);
        with_activation(p.activation, [&](auto activation) {
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] = activation(add(x[e], shift[e]));
        });
        octet.narrow_from(x);
        octet.template store<kPacked>(row, column, p.columns);
    }
}

}  // namespace cuflash

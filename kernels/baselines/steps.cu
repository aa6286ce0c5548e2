// The operations of softmax and of the fused chains one by one, each reading its operand from
// memory and writing its result to it: what the fused kernels are measured against.
//
// x (rows, columns), in C order -> y of the same, or a number for each row.
// `map_step`: grid of any number of blocks, octets of columns in turn. `reduce_step`: a block for
// each row, in turn.
#include "fused/matmul.cuh"
#include "fused/rows.cuh"

namespace cuflash {

struct StepParameters {
    int64 rows, columns;
    const void* x;
    void* y;
    const void* vector;  // (columns,)
    void* statistic;     // (rows,), of the accumulator's type
    int activation;
    Dropout dropout;
};

constexpr int kStepThreads = 256;

// Steps: `z` is an octet of x, of row `row` from column `column` on.
template <typename T>
struct AddBias {
    template <bool kPacked>
    static __device__ __forceinline__ void apply(const StepParameters& p, int64, int64 column,
                                                 Accumulator<T> (&z)[8]) {
        Octet<T> bias;
        bias.template load<kPacked, false>(static_cast<const T*>(p.vector),
                                           Column<int64>{0, column, false}, p.columns);
        Accumulator<T> shift[8];
        bias.widen_to(shift);
#pragma unroll
        for (int e = 0; e < 8; ++e) z[e] = add(z[e], shift[e]);
    }
};
template <typename T>
struct Activate {
    template <bool kPacked>
    static __device__ __forceinline__ void apply(const StepParameters& p, int64, int64,
                                                 Accumulator<T> (&z)[8]) {
        with_activation(p.activation, [&](auto activation) {
#pragma unroll
            for (int e = 0; e < 8; ++e) z[e] = activation(z[e]);
        });
    }
};
template <typename T>
struct Drop {
    template <bool kPacked>
    static __device__ __forceinline__ void apply(const StepParameters& p, int64 row, int64 column,
                                                 Accumulator<T> (&z)[8]) {
        Dropout::Octet bits[1];
        bool dropped[8];
        const Dropout::Place first[1] = {p.dropout.place(row * p.columns + column)};
        p.dropout.template draw<kPacked>(bits, first);
        p.dropout.decide<false>(bits[0], dropped);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            z[e] = dropped[e] ? Accumulator<T>(0) : z[e] * p.dropout.scale.as<Accumulator<T>>();
    }
};
template <typename T>
struct ShiftedExponential {
    template <bool kPacked>
    static __device__ __forceinline__ void apply(const StepParameters& p, int64 row, int64 column,
                                                 Accumulator<T> (&z)[8]) {
        const Accumulator<T> top = static_cast<const Accumulator<T>*>(p.statistic)[row];
        const Accumulator<T> shift = top == -infinity<Accumulator<T>>() ? Accumulator<T>(0) : top;
        // A branch between them: of float64, eight side by side would not fit the registers.
        constexpr int kAtOnce = sizeof(T) == 8 && !kPacked ? 4 : 8;
#pragma unroll
        for (int first = 0; first < 8; first += kAtOnce)
            if (first == 0 || column + first < p.columns)
#pragma unroll
                for (int e = first; e < first + kAtOnce; ++e) z[e] = exponential(z[e] - shift);
    }
};
template <typename T>
struct Divide {
    template <bool kPacked>
    static __device__ __forceinline__ void apply(const StepParameters& p, int64 row, int64,
                                                 Accumulator<T> (&z)[8]) {
        const Accumulator<T> total = static_cast<const Accumulator<T>*>(p.statistic)[row];
#pragma unroll
        for (int e = 0; e < 8; ++e)
            z[e] = total == Accumulator<T>(0) ? Accumulator<T>(0) : z[e] / total;
    }
};

template <typename T, bool kPacked, typename Step>
__global__ void __launch_bounds__(kStepThreads) map_step(const __grid_constant__ StepParameters p) {
    const int64 octets = (p.columns + 7) / 8;
    const int64 step = int64(gridDim.x) * kStepThreads;
    for (int64 i = int64(blockIdx.x) * kStepThreads + threadIdx.x; i < p.rows * octets; i += step) {
        const int64 row = i / octets, column = i % octets * 8;
        const Column<int64> at{0, column, false};
        Octet<T> octet;
        octet.template load<kPacked, true>(static_cast<const T*>(p.x) + row * p.columns, at,
                                           p.columns);
        Accumulator<T> z[8];
        octet.widen_to(z);
        Step::template apply<kPacked>(p, row, column, z);
        octet.narrow_from(z);
        octet.template store<kPacked>(static_cast<T*>(p.y) + row * p.columns, at, p.columns);
    }
}

// NaN is the maximum of a row that holds NaN.
struct Top {
    template <typename A>
    static __device__ __forceinline__ A none() {
        return -infinity<A>();
    }
    template <typename A>
    __device__ __forceinline__ A operator()(A a, A b) const {
        return is_nan(a) || is_nan(b) ? not_a_number<A>() : maximum(a, b);
    }
};
struct Total {
    template <typename A>
    static __device__ __forceinline__ A none() {
        return A(0);
    }
    template <typename A>
    __device__ __forceinline__ A operator()(A a, A b) const {
        return add(a, b);
    }
};

template <typename T, bool kPacked, typename Reduction>
__global__ void __launch_bounds__(kStepThreads)
    reduce_step(const __grid_constant__ StepParameters p) {
    using A = Accumulator<T>;
    __shared__ A exchange[kStepThreads / 32];
    const Reduction reduce;
    for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        A value = Reduction::template none<A>();
        for (int64 column = 8 * threadIdx.x; column < p.columns; column += 8 * kStepThreads) {
            const Column<int64> at{0, column, false};
            Octet<T> octet;
            octet.template load<kPacked, true>(static_cast<const T*>(p.x) + row * p.columns, at,
                                               p.columns);
            A z[8];
            octet.widen_to(z);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (at.template is_there<kPacked>(e, p.columns)) value = reduce(value, z[e]);
        }
        for (int bit = 1; bit < 32; bit *= 2)
            value = reduce(value, __shfl_xor_sync(kFullWarp, value, bit));
        __syncthreads();  // the row before has been read
        if (threadIdx.x % 32 == 0) exchange[threadIdx.x / 32] = value;
        __syncthreads();
        if (threadIdx.x > 0) continue;
        for (int warp = 1; warp < kStepThreads / 32; ++warp) value = reduce(value, exchange[warp]);
        static_cast<A*>(p.statistic)[row] = value;
    }
}

}  // namespace cuflash

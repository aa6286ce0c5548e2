// What the matrix products with an epilogue share: parameters, activations, the order of tiles.
#pragma once

#include "lib/scheduler.cuh"

namespace cuflash {

// As `ACTIVATIONS` of device/fused_plans.py.
enum Activation { kIdentity, kRelu, kGelu, kGeluTanh };

struct MatmulParameters {
    BatchAxes batch;
    BatchedArray a, b, out;  // (rows, depth), (depth, columns), (rows, columns)
    const void* bias;        // (columns,)
    int64 rows, columns, depth;
    int row_tiles, column_tiles;
    int activation;
};

struct Identity {
    template <typename A>
    __device__ __forceinline__ A operator()(A x) const {
        return x;
    }
};
struct Relu {  // NaN stays
    template <typename A>
    __device__ __forceinline__ A operator()(A x) const {
        return x < A(0) ? A(0) : x;
    }
};
struct Gelu {
    __device__ __forceinline__ float operator()(float x) const {
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    }
    __device__ __forceinline__ double operator()(double x) const {
        return 0.5 * x * (1.0 + erf(x * 0.70710678118654752));
    }
};
struct GeluTanh {
    template <typename A>
    __device__ __forceinline__ A operator()(A x) const {
        const A inner = A(0.79788456080286536) * (x + A(0.044715) * x * x * x);
        return A(0.5) * x * (A(1) + hyperbolic_tangent(inner));
    }

  private:
    static __device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
    static __device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }
};

// Calls work(activation): a choice for all elements of a thread at once.
template <typename Work>
__device__ __forceinline__ void with_activation(int activation, Work work) {
    switch (activation) {
        case kRelu:
            return work(Relu{});
        case kGelu:
            return work(Gelu{});
        case kGeluTanh:
            return work(GeluTanh{});
        default:
            return work(Identity{});
    }
}

// Tiles in the order in which blocks take them: bands of `band` row tiles, in each of them column
// by column, so that the tiles under way at a time share rows as well as columns through L2.
struct MatmulTile {
    unsigned row, column, entry;

    __device__ __forceinline__ MatmulTile(const MatmulParameters& p, unsigned number,
                                          unsigned band) {
        const unsigned rows = p.row_tiles, columns = p.column_tiles;
        entry = number / (rows * columns);
        const unsigned in_entry = number - entry * rows * columns;
        const unsigned first = in_entry / (band * columns) * band;
        const unsigned height = min(band, rows - first);
        const unsigned in_band = in_entry - first * columns;
        column = in_band / height;
        row = first + in_band % height;
    }
};

}  // namespace cuflash

// NaN and inf in values that not every row sees: the slow path of all attention kernels.
//
// In the matmul of weights and values an unseen value has weight 0, but 0 * NaN and 0 * inf are
// NaN. Selecting the values of each row in the main loop would cost every call; so kernels look at
// the finished accumulators instead. If a row with a finite normalizer has a non-finite sum,
//   1. the block walks over its keys again with `finite_or_zero` applied to values as they are
//      loaded: the same operations in the same order as if 0 stood there, hence the same bits;
//   2. `add_nonfinite` puts back, in each such row, what the row does see: w * NaN, w * inf.
//
// Gradients take weights of both signs, and sums over rows as well as over keys. There the second
// walk leaves out, weight by weight, what is not seen: kernels write kUnseen, which no weight of a
// seen pair is, and `is_unseen` tells it in `add_weighted_rows`.
#pragma once

#include "lib/numeric.cuh"
#include "lib/scheduler.cuh"

namespace cuflash {

template <typename A>
__device__ __forceinline__ bool is_finite(A x) {
    return x - x == A(0);
}

template <typename A>
__device__ __forceinline__ A finite_or_zero(A x) {
    return is_finite(x) ? x : A(0);
}

// The weight of an unseen pair: as good as 0 in a sum of finite numbers, which begins at +0.
template <typename A>
constexpr A kUnseen = A(-0.0);

template <typename A>
__device__ __forceinline__ bool is_unseen(A weight) {
    return weight == A(0) && A(1) / weight < A(0);
}

// Overwrites the columns of one finished row of the output in which the row sees a non-finite
// value. To be called by a whole warp, after the row was written.
//
// `weight(score)` is the weight relative to the row's maximum; `seen` is what the row sees of the
// keys that this block was given; `store(column, x)` writes the output.
template <typename T, typename Score, typename Weight, typename Store>
__device__ __forceinline__ void add_nonfinite(const Matrix<const T>& q, const Matrix<const T>& k,
                                              const Matrix<const T>& v, int64 features,
                                              int64 first_column, int64 end_column, int64 row,
                                              KeyRange seen, const Score& score,
                                              const Weight& weight, const Store& store) {
    using A = Accumulator<T>;
    const int lane = threadIdx.x % 32;
    for (int64 start = first_column; start < end_column; start += 32) {
        const int64 column = start + lane;
        A total = 0;
        for (int64 key = seen.first; key <= seen.last; ++key) {
            A value = column < end_column ? widen(v.at(key, column)) : A(0);
            bool counts = !is_finite(value) && score.sees(row, key);
            if (!__any_sync(kFullWarp, counts)) continue;
            A dot = 0;
            for (int64 d = lane; d < features; d += 32)
                dot += widen(q.at(row, d)) * widen(k.at(key, d));
            for (int bit = 1; bit < 32; bit *= 2) dot += __shfl_xor_sync(kFullWarp, dot, bit);
            if (counts) total += weight(score(dot, row, key)) * value;
        }
        if (!is_finite(total)) store(column, total);
    }
}

}  // namespace cuflash

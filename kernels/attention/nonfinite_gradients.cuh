// What is not finite in the gradients of attention on tensor cores: see lib/nonfinite.cuh.
#pragma once

#include "attention/backward.cuh"

namespace cuflash {

// Whether a tile that has arrived has NaN or inf, for the threads that see some: to be called by
// all.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ bool has_nonfinite(const unsigned char* tile) {
    Accumulator<T> zero = 0;  // times NaN or inf it is NaN
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kColumns / kVector<T>; i += kThreads) {
        const Vector<T> x = reinterpret_cast<const Vector<T>*>(tile)[i];
#pragma unroll
        for (int e = 0; e < kVector<T>; ++e) zero = multiply_add(widen(x.element[e]), 0, zero);
    }
    return zero != 0;
}

template <typename A>
__device__ __forceinline__ A reduce_warp(A x) {
    for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(kFullWarp, x, bit);
    return x;
}

// Adds to gradients that were summed and stored without them the non-finite numbers that key, or
// row, `own` does see. To be called by a warp, for each entry that the gradient is summed over.
template <bool kOfKeys, typename T, typename Score>
__device__ __forceinline__ void put_back(const VjpParameters& p, const VjpWork<T, Score>& block,
                                         int64 own) {
    using A = Accumulator<T>;
    const int lane = threadIdx.x % 32;
    const EntryBounds& bounds = block.score.bounds;
    auto dout_at = [&](int64 row, int64 column) {
        return p.dout_is_wide ? widen(narrow<T>(block.wide_dout.at(row, column)))
                              : widen(block.dout.at(row, column));
    };
    auto dot_of = [&](int64 row, int64 key) {
        A sum = 0;
        for (int64 d = lane; d < p.features; d += 32)
            sum += widen(block.q.at(row, d)) * widen(block.k.at(key, d));
        return reduce_warp(sum);
    };
    auto flow_of = [&](int64 row, int64 key) {
        A sum = 0;
        for (int64 d = lane; d < p.values; d += 32)
            sum += dout_at(row, d) * widen(block.v.at(key, d));
        return reduce_warp(sum);
    };
    KeyRange met = kOfKeys ? bounds.rows_that_see(own, own + 1) : block.score.range(own);
    if (kOfKeys) met = {met.first + bounds.first, met.last + bounds.first};
    const int64 columns = kOfKeys ? max(p.features, p.values) : p.features;
    for (int64 column = lane; column - lane < columns; column += 32) {
        A by_slope = 0, by_weight = 0;
        for (int64 other = met.first; other <= met.last; ++other) {
            const int64 row = kOfKeys ? other : own, key = kOfKeys ? own : other;
            A feature = 0, value = 0;
            if (column < p.features)
                feature = widen((kOfKeys ? block.q : block.k).at(other, column));
            if (kOfKeys && column < p.values) value = dout_at(other, column);
            const bool counts = !is_finite(feature) || !is_finite(value);
            if (!__any_sync(kFullWarp, counts)) continue;
            const A lse = block.lse.at(row);
            if (lse == -infinity<A>() || !block.score.sees(row, key)) continue;
            const auto x = block.score.with_slope(dot_of(row, key), row, key);
            const A flow = flow_of(row, key);
            const A weight = exponential(x.score - lse);
            if (!is_finite(feature))
                by_slope += weight * (flow - block.delta.at(row)) * x.slope * feature;
            if (!is_finite(value)) by_weight += weight * value;
        }
        auto add_to = [&](const BatchedArray& gradient, A total) {
            if (!gradient.data || is_finite(total)) return;
            T& x = Matrix<T>::of(gradient, p.batch, block.index)
                       .at(kOfKeys ? block.segment.first_key + own : own, column);
            x = narrow<T>(widen(x) + total);
        };
        add_to(kOfKeys ? p.dk : p.dq, by_slope * block.score.scale);
        if (kOfKeys) add_to(p.dv, by_weight);
    }
}

}  // namespace cuflash

// What an attention kernel is given by value, mirrored by `cuflash/device/parameters.py`.
#pragma once

#include "lib/scheduler.cuh"
#include "lib/score.cuh"
#include "lib/sequences.cuh"

namespace cuflash {

struct AttentionParameters {
    BatchAxes batch;
    Grid grid;
    BatchedArray q, k, v;        // (Tq, D), (Tk, D), (Tk, Dv)
    BatchedArray out, lse;       // (Tq, Dv), (Tq); lse may be absent
    int64 out_split, lse_split;  // elements from one share's partial result to the next
    int64 features, values;      // D, Dv
    int out_is_wide;             // out has the accumulator's type
    int queries_stay;            // shared memory holds all features of a block's queries
    int group, members;          // packed_rows.cuh: entries that share keys, those of a block
    ScoreParameters score;
    Sequences sequences;  // if there are any, `batch` has an axis for them in front, of size 1
};

// Where the results of one entry and share go: out in T or unrounded, lse if it is asked for.
template <typename T>
struct Output {
    using A = Accumulator<T>;
    const AttentionParameters& p;
    int64 out_start, lse_start;

    __device__ __forceinline__ Output(const AttentionParameters& p, const BatchIndex& index,
                                      int split)
        : Output(p, entry_offset(p.out.batch_stride, p.batch, index) + split * p.out_split,
                 entry_offset(p.lse.batch_stride, p.batch, index) + split * p.lse_split) {}
    __device__ __forceinline__ Output(const AttentionParameters& p, int64 out_start,
                                      int64 lse_start)
        : p(p), out_start(out_start), lse_start(lse_start) {}

    // Results as a matrix of R, the type that `out_is_wide` says.
    template <typename R>
    __device__ __forceinline__ Matrix<R> matrix() const {
        return {static_cast<R*>(p.out.data) + out_start, p.out.row_stride, p.out.column_stride};
    }

    __device__ __forceinline__ void store(int64 row, int64 column, A x) const {
        int64 element = out_start + row * p.out.row_stride + column * p.out.column_stride;
        if (p.out_is_wide)
            static_cast<A*>(p.out.data)[element] = x;
        else
            static_cast<T*>(p.out.data)[element] = narrow<T>(x);
    }

    __device__ __forceinline__ void store_lse(int64 row, A x) const {
        if (p.lse.data) static_cast<A*>(p.lse.data)[lse_start + row * p.lse.row_stride] = x;
    }
};

}  // namespace cuflash

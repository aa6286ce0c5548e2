// What a row's (m, l) makes of its columns: the operations of the softmax family.
//
// An operation is built from a row's state. One with columns has `value(x)`; value(-inf) is
// `hidden()`, what a column gets that `where` hides, unless the row holds NaN or +inf. One without
// writes the row's entries.
#pragma once

#include "softmax/rows.cuh"

namespace cuflash {

template <typename A>
struct Softmax {
    static constexpr bool kColumns = true;
    OnlineSoftmax<A> state;
    A scale;

    __device__ __forceinline__ explicit Softmax(const OnlineSoftmax<A>& state)
        : state(state), scale(state.scale()) {}
    // An empty row is 0 whatever x is: a state may meet columns it was not made from.
    __device__ __forceinline__ A value(A x) const {
        return scale == A(0) ? A(0) : multiply(state.weight(x), scale);
    }
    static __device__ __forceinline__ A hidden() { return A(0); }
};

template <typename A>
struct LogSoftmax {
    static constexpr bool kColumns = true;
    A shift, log_l;

    __device__ __forceinline__ explicit LogSoftmax(const OnlineSoftmax<A>& state)
        : shift(reference(state.m)), log_l(state.log_normalizer()) {}
    __device__ __forceinline__ A value(A x) const { return add(add(x, -shift), -log_l); }
    static __device__ __forceinline__ A hidden() { return -infinity<A>(); }
};

template <typename A>
struct Logsumexp {
    static constexpr bool kColumns = false;
    A lse;

    __device__ __forceinline__ explicit Logsumexp(const OnlineSoftmax<A>& state)
        : lse(state.logsumexp()) {}
    template <typename T>
    __device__ __forceinline__ void write(const SoftmaxParameters& p, const Place& place) const {
        write_entry<T>(p.output[0], place.output[0], lse);
    }
};

template <typename A>
struct State {
    static constexpr bool kColumns = false;
    OnlineSoftmax<A> state;

    __device__ __forceinline__ explicit State(const OnlineSoftmax<A>& state) : state(state) {}
    template <typename T>
    __device__ __forceinline__ void write(const SoftmaxParameters& p, const Place& place) const {
        write_entry<T>(p.output[0], place.output[0], state.maximum());
        write_entry<T>(p.output[1], place.output[1], state.normalizer());
    }
};

// Turns a chunk of scores into a chunk of the result.
template <typename T, Layout kLayout, typename Operation>
__device__ __forceinline__ Vector<T> evaluate(const Operation& operation, const Vector<T>& scores,
                                              const WhereRow<kLayout>& where, int64 column) {
    Vector<T> result;
#pragma unroll
    for (int v = 0; v < kVector<T>; ++v)
        result.element[v] = narrow<T>(operation.value(widen(scores.element[v])));
    if (is_nan(operation.value(-infinity<Accumulator<T>>())))
        where.hide(column, result, narrow<T>(operation.hidden()));
    return result;
}

// Writes the result of a row, reading its scores once more.
template <typename T, Layout kLayout, typename Operation>
__device__ __forceinline__ void write_result(const SoftmaxParameters& p, const Team& team,
                                             const Place& place, const Operation& operation) {
    if constexpr (Operation::kColumns) {
        Row<T, kLayout> x(p, p.input[0], place.input[0]);
        Row<T, kLayout> y(p, p.output[0], place.output[0]);
        WhereRow<kLayout> where(p, p.where, place.where);
        for_each_chunk<T>(p, team, [&](int, int64 column) {
            Vector<T> scores = x.load(column, where, lowest<T>());
            y.store(column, evaluate<T>(operation, scores, where, column));
        });
    } else if (team.lane == 0) {
        operation.template write<T>(p, place);
    }
}

}  // namespace cuflash

// What a row's (m, l) makes of its columns: the operations of the softmax family.
//
// An operation is built from a row's state. One with columns has `value(x)`; value(-inf) is
// `hidden()`, what a column gets that `where` hides, unless the row holds NaN or +inf. With
// kOfWeights it is a function of the weight exp(x - base.m), too, for a base of another maximum:
// that of the part of the row in whose state the column is. An operation without columns writes the
// row's entries.
#pragma once

#include "softmax/rows.cuh"

namespace cuflash {

template <typename A>
struct Softmax {
    static constexpr bool kColumns = true, kOfWeights = true;
    OnlineSoftmax<A> base;
    A scale;

    Softmax() = default;
    __device__ __forceinline__ explicit Softmax(const OnlineSoftmax<A>& state)
        : base(state), scale(state.scale()) {}
    __device__ __forceinline__ Softmax(const OnlineSoftmax<A>& state, const OnlineSoftmax<A>& base)
        : base(base), scale(multiply(exponential(base.m - reference(state.m)), state.scale())) {}

    __device__ __forceinline__ A of_weight(A weight) const { return multiply(weight, scale); }
    // An empty row is 0 whatever x is: a state may meet columns it was not made from.
    __device__ __forceinline__ A value(A x) const {
        return scale == A(0) ? A(0) : of_weight(base.weight(x));
    }
    static __device__ __forceinline__ A hidden() { return A(0); }
};

template <typename A>
struct LogSoftmax {
    static constexpr bool kColumns = true, kOfWeights = false;
    A shift, log_l;

    LogSoftmax() = default;
    __device__ __forceinline__ explicit LogSoftmax(const OnlineSoftmax<A>& state)
        : shift(reference(state.m)), log_l(state.log_normalizer()) {}
    __device__ __forceinline__ LogSoftmax(const OnlineSoftmax<A>& state, const OnlineSoftmax<A>&)
        : LogSoftmax(state) {}

    __device__ __forceinline__ A value(A x) const { return add(add(x, -shift), -log_l); }
    static __device__ __forceinline__ A hidden() { return -infinity<A>(); }
};

template <typename A>
struct Logsumexp {
    static constexpr bool kColumns = false, kOfWeights = false;
    A lse;

    __device__ __forceinline__ explicit Logsumexp(const OnlineSoftmax<A>& state)
        : lse(state.logsumexp()) {}
    __device__ __forceinline__ Logsumexp(const OnlineSoftmax<A>& state, const OnlineSoftmax<A>&)
        : Logsumexp(state) {}
    template <typename T>
    __device__ __forceinline__ void write(const SoftmaxParameters& p, const Place& place) const {
        write_entry<T>(p.output[0], place.output[0], lse);
    }
};

template <typename A>
struct State {
    static constexpr bool kColumns = false, kOfWeights = false;
    OnlineSoftmax<A> state;

    __device__ __forceinline__ explicit State(const OnlineSoftmax<A>& state) : state(state) {}
    __device__ __forceinline__ State(const OnlineSoftmax<A>& state, const OnlineSoftmax<A>&)
        : state(state) {}
    template <typename T>
    __device__ __forceinline__ void write(const SoftmaxParameters& p, const Place& place) const {
        write_entry<T>(p.output[0], place.output[0], state.maximum());
        write_entry<T>(p.output[1], place.output[1], state.normalizer());
    }
};

// The result of a score whose state is the operation's base, or with kWeight of its weight.
template <bool kWeight, typename Operation, typename A>
__device__ __forceinline__ A result_of(const Operation& operation, A x) {
    if constexpr (kWeight) return operation.of_weight(x);
    if constexpr (Operation::kOfWeights) return operation.of_weight(operation.base.weight(x));
    return operation.value(x);
}

// Writes the result of a row, reading its scores once more.
template <typename T, Layout kLayout, typename Operation, typename Blocks>
__device__ __forceinline__ void write_result(const SoftmaxParameters& p,
                                             const Team<kLayout, Blocks>& team, const Place& place,
                                             const Operation& operation) {
    if constexpr (Operation::kColumns) {
        Row<T, kLayout> x(p, p.input[0], place.input[0]);
        Row<T, kLayout> y(p, p.output[0], place.output[0]);
        WhereRow<kLayout> where(p, p.where, place.where);
        const bool poisoned = is_nan(operation.value(-infinity<Accumulator<T>>()));
        for_each_batch<T, kBatch<T>>(
            p, team, [&](int64 column) { return x.load(column, where, lowest<T>()); },
            [&](const Vector<T>* scores, int64 column) {
#pragma unroll
                for (int j = 0; j < kBatch<T>; ++j, column += chunk_step<T>(team)) {
                    const Wide<T> chunk(scores[j]);
                    Vector<T> result;
#pragma unroll
                    for (int v = 0; v < kVector<T>; ++v)
                        result.element[v] = narrow<T>(operation.value(chunk.element[v]));
                    if (poisoned) where.hide(column, result, narrow<T>(operation.hidden()));
                    y.store(column, result);
                }
            });
    } else if (team.lane_of_all() == 0) {
        operation.template write<T>(p, place);
    }
}

}  // namespace cuflash

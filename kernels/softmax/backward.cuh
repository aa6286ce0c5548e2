// Gradients through softmax and log_softmax, whose rows are reduced first.
#pragma once

#include "softmax/rows.cuh"

namespace cuflash {

// Each gradient: `term` is a column's share in the row's sum; `value` is the result, 0 for an
// absent column (dy = 0, y = absent()) unless the sum is not finite.
template <typename A>
struct SoftmaxVjp {
    A sum;

    static __device__ __forceinline__ A absent() { return A(0); }
    static __device__ __forceinline__ A term(A dy, A y) { return multiply(y, dy); }
    __device__ __forceinline__ A value(A dy, A y) const { return multiply(y, add(dy, -sum)); }
};

template <typename A>
struct LogSoftmaxVjp {
    A sum;

    static __device__ __forceinline__ A absent() { return -infinity<A>(); }
    static __device__ __forceinline__ A term(A dy, A) { return dy; }
    __device__ __forceinline__ A value(A dy, A y) const {
        // Of double, quick_exponential is as accurate, and takes fewer registers.
        const A weight = sizeof(A) == 8 ? quick_exponential(y) : exponential(y);
        return multiply_add(-weight, sum, dy);
    }
};

template <typename T>
struct Pair {
    Vector<T> dy, y;
};

// The sum of a row, and 1 if the row has a y that an empty one has not, else 0.
template <typename A>
struct Sum {
    A total, occupied;

    __device__ __forceinline__ Sum operator()(const Sum& a, const Sum& b) const {
        return {add(a.total, b.total), maximum(a.occupied, b.occupied)};
    }
};
template <typename A>
__device__ __forceinline__ Sum<A> shuffle_xor(const Sum<A>& value, int bits) {
    return {shuffle_xor(value.total, bits), shuffle_xor(value.occupied, bits)};
}

// Of the gradient's passes over a row, kSums leaves the sums of parts in p.states, from where
// kGradients takes them.
enum Passes { kSums, kGradients, kBothPasses };

// output[0] = Gradient of dy and y, row by row. `memory` is the block's dynamic shared memory.
template <typename T, typename Gradient, Layout kLayout, int kChunks, typename Blocks = OneBlock,
          Passes kPasses = kBothPasses>
__device__ __forceinline__ void vjp_of_rows(const SoftmaxParameters& p, unsigned char* memory) {
    using A = Accumulator<T>;
    Team<kLayout, Blocks> team(p, memory);

    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        const int64 row = first + team.slot;
        const bool active = row < p.rows;
        const Place place(p, active ? row : 0);
        const Row<T, kLayout> dy(p, p.input[0], place.input[0]), y(p, p.input[1], place.input[1]);
        const WhereRow<kLayout> where(p, p.where, place.where);
        auto load = [&](auto column) -> Pair<T> {
            return {dy.load(column, where, narrow<T>(A(0))),
                    y.load(column, where, narrow<T>(Gradient::absent()))};
        };
        Sum<A> sum{A(0), A(0)};
        auto accumulate = [&](const Pair<T>& pair) {
            const Wide<T> dys(pair.dy), ys(pair.y);
            Wide<T> terms;
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v) {
                terms.element[v] = Gradient::term(dys.element[v], ys.element[v]);
                if (ys.element[v] != Gradient::absent()) sum.occupied = 1;
            }
            return cuflash::sum(terms);
        };

        constexpr int kPairs = kBatch<T> / 2;
        Pair<T> held[kChunks > 0 ? kChunks : 1];
        Sum<A>* sums = static_cast<Sum<A>*>(p.states) + row * p.parts;
        if (active) {
            if constexpr (kPasses == kGradients) {
                for (int part = team.lane; part < p.parts; part += team.lanes)
                    sum = Sum<A>{}(sum, sums[part]);
            } else if constexpr (kChunks > 0) {
                for_each_chunk<T, kChunks>(p, team,
                                           [&](int i, auto column) { held[i] = load(column); });
                for_each_chunk<T, kChunks>(
                    p, team, [&](int i, auto) { sum.total = add(sum.total, accumulate(held[i])); });
            } else {
                CompensatedSum<A> total;
                for_each_batch<T, kPairs>(p, team, load, [&](const Pair<T>* pairs, int64) {
                    A batch = 0;
#pragma unroll
                    for (int j = 0; j < kPairs; ++j) batch = add(batch, accumulate(pairs[j]));
                    total.push(batch);
                });
                sum.total = total.sum;
            }
        }
        sum = team.reduce(sum, Sum<A>{});
        if (!active) continue;
        if constexpr (kPasses == kSums) {
            if (team.lane == 0) sums[team.blocks().rank()] = sum;
            continue;
        }

        const Row<T, kLayout> dx(p, p.output[0], place.output[0]);
        const Gradient gradient{sum.total};
        const bool empty = sum.occupied == A(0);
        const bool poisoned = is_nan(gradient.value(A(0), Gradient::absent()));
        auto write = [&](const Pair<T>& pair, auto column) {
            const Wide<T> dys(pair.dy), ys(pair.y);
            Vector<T> result;
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v) {
                const A value = gradient.value(dys.element[v], ys.element[v]);
                result.element[v] = narrow<T>(empty ? A(0) : value);
            }
            if (poisoned) where.hide(column, result, narrow<T>(A(0)));
            dx.store(column, result);
        };
        if constexpr (kChunks > 0) {
            for_each_chunk<T, kChunks>(p, team,
                                       [&](int i, auto column) { write(held[i], column); });
        } else {
            for_each_batch<T, kPairs>(p, team, load, [&](const Pair<T>* pairs, int64 column) {
#pragma unroll
                for (int j = 0; j < kPairs; ++j, column += chunk_step<T>(team))
                    write(pairs[j], column);
            });
        }
    }
}

}  // namespace cuflash

// Gradients of the softmax family.
//
//   softmax_vjp      dx = y * (dy - sum(y * dy))   input[0] dy, input[1] y (rows, columns)
//   log_softmax_vjp  dx = dy - exp(y) * sum(dy)    as above
//   logsumexp_vjp    dx = dlse * exp(x - lse)      input[0] dlse, input[2] lse (rows), input[1] x
//
// An empty row (y all 0, y all -inf, lse -inf) gets 0, whatever its cotangent holds.
// kChunks > 0: every lane holds that many 16-byte chunks of dy and of y in registers: three trips
// to memory, two reads and a write. kChunks = 0: rows of any length are read twice: five trips.
// logsumexp_vjp reduces nothing: two trips.
//
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: one accumulator a thread (across) or a warp, for reductions.
#include "softmax/rows.cuh"

namespace cuflash {

// Each gradient: `term` adds a column to the row's sum; `value` is the result, 0 for an absent
// column (dy = 0, y = absent()) unless the sum is not finite.
template <typename A>
struct SoftmaxVjp {
    A sum;

    static __device__ __forceinline__ A absent() { return A(0); }
    static __device__ __forceinline__ A term(A dy, A y, A sum) { return multiply_add(y, dy, sum); }
    __device__ __forceinline__ A value(A dy, A y) const { return multiply(y, add(dy, -sum)); }
};

template <typename A>
struct LogSoftmaxVjp {
    A sum;

    static __device__ __forceinline__ A absent() { return -infinity<A>(); }
    static __device__ __forceinline__ A term(A dy, A, A sum) { return add(dy, sum); }
    __device__ __forceinline__ A value(A dy, A y) const {
        return multiply_add(-exponential(y), sum, dy);
    }
};

template <typename T>
struct Pair {
    Vector<T> dy, y;
};

template <typename T, typename Gradient, Layout kLayout, int kChunks>
__global__ void __launch_bounds__(kMaxThreads, 1)
    reduced_vjp(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    constexpr bool kHolds = kChunks > 0;
    CUFLASH_DYNAMIC_SHARED(A, scratch);
    const Team team(p);
    Pair<T> held[kHolds ? kChunks : 1];

    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        int64 row = first + team.slot;
        bool active = row < p.rows;
        Place place(p, active ? row : 0);
        Row<T, kLayout> dy(p, p.input[0], place.input[0]), y(p, p.input[1], place.input[1]);
        WhereRow<kLayout> where(p, p.where, place.where);
        auto load = [&](int64 column) -> Pair<T> {
            return {dy.load(column, where, narrow<T>(A(0))),
                    y.load(column, where, narrow<T>(Gradient::absent()))};
        };

        CompensatedSum<A> total;
        A occupied = 0;  // 1 once a y is seen that an empty row has not
        if (active) {
            if constexpr (kHolds)
                for_each_chunk<T, kChunks>(p, team,
                                           [&](int i, int64 column) { held[i] = load(column); });
            for_each_chunk<T, kChunks>(p, team, [&](int i, int64 column) {
                Pair<T> pair = kHolds ? held[i] : load(column);
                A sum = 0;
#pragma unroll
                for (int v = 0; v < kVector<T>; ++v) {
                    A value = widen(pair.y.element[v]);
                    sum = Gradient::term(widen(pair.dy.element[v]), value, sum);
                    if (value != Gradient::absent()) occupied = 1;
                }
                total.push(sum);
            });
        }
        Gradient gradient{team.all_reduce(total.sum, scratch, Plus{})};
        occupied = team.all_reduce(occupied, scratch, Maximum{});
        if (!active) continue;

        Row<T, kLayout> dx(p, p.output[0], place.output[0]);
        bool poisoned = is_nan(gradient.value(A(0), Gradient::absent()));
        for_each_chunk<T, kChunks>(p, team, [&](int i, int64 column) {
            Pair<T> pair = kHolds ? held[i] : load(column);
            Vector<T> result;
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v) {
                A value = gradient.value(widen(pair.dy.element[v]), widen(pair.y.element[v]));
                result.element[v] = narrow<T>(occupied == A(0) ? A(0) : value);
            }
            if (poisoned) where.hide(column, result, narrow<T>(A(0)));
            dx.store(column, result);
        });
    }
}

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    logsumexp_vjp(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    const Team team(p);
    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        int64 row = first + team.slot;
        if (row >= p.rows) continue;
        Place place(p, row);
        A dlse = read_entry<T>(p.input[0], place.input[0]);
        A lse = read_entry<T>(p.input[2], place.input[2]);
        Row<T, kLayout> x(p, p.input[1], place.input[1]), dx(p, p.output[0], place.output[0]);
        WhereRow<kLayout> where(p, p.where, place.where);
        auto value = [&](A score) {
            return lse == -infinity<A>() ? A(0) : multiply(dlse, exponential(score - lse));
        };
        bool poisoned = is_nan(value(-infinity<A>()));
        for_each_chunk<T>(p, team, [&](int, int64 column) {
            Vector<T> chunk = x.load(column, where, lowest<T>()), result;
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v)
                result.element[v] = narrow<T>(value(widen(chunk.element[v])));
            if (poisoned) where.hide(column, result, narrow<T>(A(0)));
            dx.store(column, result);
        });
    }
}

}  // namespace cuflash

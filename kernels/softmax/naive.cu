// Softmax in three kernels, as the formula reads: maximum, sum of exponentials, division.
//
// Four trips to memory for each element: three reads and a write. The baseline that the other
// methods are held against, and the right choice for nothing but that. `apply` also serves states
// that the caller brings.
//
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: what a team's reductions need.
// input[0] is x (rows, columns); input[1] and input[2] are the row's maximum and normalizer.
#include "softmax/result.cuh"

namespace cuflash {

// input[1][row] = max over columns of x; NaN does not count.
template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    naive_maximum(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Team<kLayout> team(p, memory);
    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        int64 row = first + team.slot;
        Place place(p, row < p.rows ? row : 0);
        A m = -infinity<A>();
        if (row < p.rows) {
            Row<T, kLayout> x(p, p.input[0], place.input[0]);
            WhereRow<kLayout> where(p, p.where, place.where);
            for_each_batch<T, kBatch<T>>(
                p, team, [&](int64 column) { return x.load(column, where, lowest<T>()); },
                [&](const Vector<T>* chunks, int64) {
#pragma unroll
                    for (int j = 0; j < kBatch<T>; ++j) m = largest(m, Wide<T>(chunks[j]));
                });
        }
        m = team.reduce(m, Maximum{});
        if (row < p.rows && team.lane == 0) write_entry<T>(p.input[1], place.input[1], m);
    }
}

// input[2][row] = sum over columns of exp(x - m); both become the state as merges take it.
template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    naive_normalizer(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Team<kLayout> team(p, memory);
    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        int64 row = first + team.slot;
        Place place(p, row < p.rows ? row : 0);
        OnlineSoftmax<A> state = OnlineSoftmax<A>::identity();
        if (row < p.rows) {
            Row<T, kLayout> x(p, p.input[0], place.input[0]);
            WhereRow<kLayout> where(p, p.where, place.where);
            state.m = read_entry<T>(p.input[1], place.input[1]);
            CompensatedSum<A> l;
            for_each_batch<T, kBatch<T>>(
                p, team, [&](int64 column) { return x.load(column, where, lowest<T>()); },
                [&](const Vector<T>* chunks, int64) { l.push(sum_of_weights(state, chunks)); });
            state.l = l.sum;
        }
        state.l = team.reduce(state.l, Plus{});
        if (row < p.rows && team.lane == 0) {
            write_entry<T>(p.input[1], place.input[1], state.maximum());
            write_entry<T>(p.input[2], place.input[2], state.normalizer());
        }
    }
}

// output = Operation of x and the row's state.
template <typename T, typename Operation, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    apply(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    const Team<kLayout, Parts> team(p, nullptr);
    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        int64 row = first + team.slot;
        Place place(p, row < p.rows ? row : 0);
        if (row >= p.rows) continue;
        A m = read_entry<T>(p.input[1], place.input[1]);
        A l = read_entry<T>(p.input[2], place.input[2]);
        write_result<T, kLayout>(p, team, place, Operation(OnlineSoftmax<A>::from(m, l)));
    }
}

}  // namespace cuflash

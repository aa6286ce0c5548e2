// Softmax with the online update: one pass that finds maximum and normalizer together, one that
// normalises (Milakov and Gimelshein 2018, algorithm 3). Three trips to memory, rows of any length.
//
// x (rows, columns) -> output[0] (rows, columns), or one or two entries a row.
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: one OnlineSoftmax a thread (across) or a warp, for the merge.
#include "softmax/result.cuh"

namespace cuflash {

template <typename T, typename Operation, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    online(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    CUFLASH_DYNAMIC_SHARED(OnlineSoftmax<A>, scratch);
    const Team team(p);
    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        int64 row = first + team.slot;
        Place place(p, row < p.rows ? row : 0);
        OnlineSoftmax<A> state = OnlineSoftmax<A>::identity();
        if (row < p.rows) {
            Row<T, kLayout> x(p, p.input[0], place.input[0]);
            WhereRow<kLayout> where(p, p.where, place.where);
            CompensatedSum<A> l;
            for_each_chunk<T>(p, team, [&](int, int64 column) {
                Vector<T> chunk = x.load(column, where, lowest<T>());
                A top = largest(state.m, chunk);
                if (top > state.m) l.scale(state.raise(top));
                l.push(sum_weights(state, chunk));
            });
            state.l = l.sum;
        }
        state = team.all_reduce(state, scratch, Merge{});
        if (row < p.rows) write_result<T, kLayout>(p, team, place, Operation(state));
    }
}

}  // namespace cuflash

// Softmax with the online update: one pass that finds maximum and normalizer together, one that
// normalises (Milakov and Gimelshein 2018, algorithm 3). Three trips to memory, rows of any length.
//
// x (rows, columns) -> output[0] (rows, columns), or one or two entries a row.
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: what a team's reductions need.
#include "softmax/result.cuh"

namespace cuflash {

template <typename T, typename Operation, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    online(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Team<kLayout> team(p, memory);
    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        const int64 row = first + team.slot;
        const Place place(p, row < p.rows ? row : 0);
        OnlineSoftmax<A> lane = OnlineSoftmax<A>::identity();
        if (row < p.rows) {
            Row<T, kLayout> x(p, p.input[0], place.input[0]);
            WhereRow<kLayout> where(p, p.where, place.where);
            CompensatedSum<A> l;
            for_each_batch<T, kBatch<T>>(
                p, team, [&](int64 column) { return x.load(column, where, lowest<T>()); },
                [&](const Vector<T>* chunks, int64) {
                    A top = lane.m;
#pragma unroll
                    for (int j = 0; j < kBatch<T>; ++j) top = largest(top, Wide<T>(chunks[j]));
                    if (top > lane.m) l.scale(lane.raise(top));
                    l.push(sum_of_weights(lane, chunks));
                });
            lane.l = l.sum;
        }
        const OnlineSoftmax<A> state = team.unite_lanes(lane);
        if (row < p.rows) write_result<T, kLayout>(p, team, place, Operation(state));
    }
}

}  // namespace cuflash

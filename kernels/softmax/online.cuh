// The online update over the columns of one lane (Milakov and Gimelshein 2018, algorithm 3).
#pragma once

#include "softmax/result.cuh"

namespace cuflash {

// The state of the columns of a row that belong to this lane.
template <typename T, Layout kLayout, typename Blocks>
__device__ __forceinline__ OnlineSoftmax<Accumulator<T>> state_of_lane(
    const SoftmaxParameters& p, const Team<kLayout, Blocks>& team, const Place& place) {
    using A = Accumulator<T>;
    const Row<T, kLayout> x(p, p.input[0], place.input[0]);
    const WhereRow<kLayout> where(p, p.where, place.where);
    OnlineSoftmax<A> lane = OnlineSoftmax<A>::identity();
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
    return lane;
}

}  // namespace cuflash

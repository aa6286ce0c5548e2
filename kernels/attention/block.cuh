// What all threads of a block of an attention kernel know.
#pragma once

#include "attention/parameters.cuh"
#include "lib/scheduler.cuh"
#include "lib/score.cuh"

namespace cuflash {

// It lies in shared memory: registers are for the accumulators.
template <typename T, typename Score>
struct BlockWork {
    BatchIndex index;
    Work work;
    Matrix<const T> q, k, v;
    Score score;
    int64 first_row, end_row;      // query rows of the block
    int64 first_value, end_value;  // columns of v and out
    KeyRange any, all;             // keys that at least one row sees, that all rows see
    TileRange tiles;
    int redo;  // a row met a non-finite value

    // To be called by all threads, of at least three warps: each sets up a part.
    __device__ __forceinline__ void begin(const AttentionParameters& p, int rows, int columns,
                                          int keys) {
        const Work decoded = Work::of(p.grid, blockIdx.x);
        decode_batch(p.batch, decoded.entry, index);
        __syncthreads();
        const int64 first = decoded.row_tile * rows, end = min(first + rows, p.score.queries);
        if (threadIdx.x == 0) {
            work = decoded;
            q = Matrix<const T>::of(p.q, p.batch, index);
            first_row = first;
            end_row = end;
            first_value = int64(decoded.column_tile) * columns;
            end_value = min(first_value + columns, p.values);
            redo = 0;
        } else if (threadIdx.x == 32) {
            k = Matrix<const T>::of(p.k, p.batch, index);
            v = Matrix<const T>::of(p.v, p.batch, index);
        } else if (threadIdx.x == 64) {
            score.load(p.score, p.batch, index);
            any = score.range_of_any(first, end);
            all = score.range_of_all(first, end);
            tiles = TileRange::of(any, keys, decoded.split, p.grid.splits);
        }
        __syncthreads();
    }
};

}  // namespace cuflash

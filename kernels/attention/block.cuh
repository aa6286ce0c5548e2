// What all threads of a block of an attention kernel know.
#pragma once

#include "attention/parameters.cuh"
#include "lib/scheduler.cuh"
#include "lib/score.cuh"
#include "lib/sequences.cuh"

namespace cuflash {

// It lies in shared memory: registers are for the accumulators.
template <typename T, typename Score>
struct BlockWork {
    BatchIndex index;
    Work work;
    Segment segment;
    Matrix<const T> q, k, v;
    Score score;
    int64 first_row, end_row;      // query rows of the block
    int64 first_value, end_value;  // columns of v and out
    KeyRange any, all;             // keys that at least one row sees, that all rows see
    TileRange tiles;
    int redo;  // a row met a non-finite value

    // To be called by all threads, of at least three warps: each sets up a part. False, for all of
    // them, if there is no row.
    __device__ __forceinline__ bool begin(const AttentionParameters& p, int rows, int columns,
                                          int keys) {
        return begin_by_warps<int64>(p, blockIdx.x, rows, columns, keys, threadIdx.x,
                                     [] { __syncthreads(); });
    }

    // The same by some warps, three at least, for tile `tile` of the grid: `thread` is the number
    // among their threads, `barrier` waits for them. Index holds the numbers of tokens.
    template <typename Index, typename Barrier>
    __device__ __forceinline__ bool begin_by_warps(const AttentionParameters& p, int64 tile,
                                                   int rows, int columns, int keys, int thread,
                                                   Barrier barrier) {
        return set_up<Index>(p, tile, rows, columns, keys, thread,
                             thread % 32 == 0 ? thread / 32 : kNoPart, barrier);
    }

    // The same by one warp.
    template <typename Index>
    __device__ __forceinline__ bool begin_by_warp(const AttentionParameters& p, int64 tile,
                                                  int rows, int columns, int keys) {
        const int lane = threadIdx.x % 32;
        return set_up<Index>(p, tile, rows, columns, keys, lane, lane, [] { __syncwarp(); });
    }

  private:
    static constexpr int kNoPart = -1;

    template <typename Index, typename Barrier>
    __device__ __forceinline__ bool set_up(const AttentionParameters& p, int64 tile, int rows,
                                           int columns, int keys, int thread, int part,
                                           Barrier barrier) {
        const Work decoded = Work::of(p.grid, tile);
        decode_batch(p.batch, decoded.entry, index, thread);
        if (part == 0) {
            work = decoded;
            const int64 queries = p.score.queries, all_keys = p.score.keys;
            int64 row_tile = decoded.row_tile;
            segment = {0, queries, queries, 0, all_keys, 0};
            if (p.sequences.queries.data) {
                segment = Segment::find_in_order<Index>(p.sequences, Index(queries),
                                                        Index(all_keys), row_tile, rows);
                index.on_axis[0] = min(segment.index, max(p.sequences.count - 1, 0LL));
            }
            first_row = segment.row_of(row_tile, rows);
            end_row = min(first_row + rows, segment.end);
        }
        barrier();
        if (first_row >= end_row) return false;
        if (part == 0) {
            q = Matrix<const T>::of(p.q, p.batch, index);
            first_value = int64(decoded.column_tile) * columns;
            end_value = min(first_value + columns, p.values);
            redo = 0;
        } else if (part == 1) {
            k = Matrix<const T>::of(p.k, p.batch, index);
            v = Matrix<const T>::of(p.v, p.batch, index);
            k.data += segment.first_key * k.row_stride;
            v.data += segment.first_key * v.row_stride;
        } else if (part == 2) {
            score.load(p.score, p.batch, index, segment);
            any = score.range_of_any(first_row, end_row);
            all = score.range_of_all(first_row, end_row);
            tiles = TileRange::of(any, keys, decoded.split, p.grid.splits);
        }
        barrier();
        return true;
    }
};

}  // namespace cuflash

// What all threads of a block know that has the rows of several batch entries.
//
// Entries that share their keys and values, such as the query heads of a group, differ on the
// innermost batch axis alone, the group's. A block takes `members` of its `group` entries, and of
// each as many queries as there is room for: rows are numbered query by query, within it member by
// member, so that a row's position among the keys rises. Every row has a score pipeline of its own:
// whatever option differs between members, its row knows.
#pragma once

#include "attention/parameters.cuh"
#include "lib/scheduler.cuh"
#include "lib/score.cuh"
#include "lib/sequences.cuh"

namespace cuflash {

// It lies in shared memory: registers are for the accumulators.
template <typename T, typename Score, int kRows>
struct PackedRows {
    using Element = T;
    struct Row {
        const T* q;  // its first feature
        int64 number;
        int64 out, lse;  // where its entry's results begin
        BatchIndex index;
        Score score;
    } rows[kRows];  // those past the last one are like it
    int count;
    Work work;
    BatchIndex index;  // of the group's first entry
    Segment segment;
    Matrix<const T> k, v;
    KeyRange any, all;  // keys that at least one row sees, that all rows see which are used
    TileRange tiles;
    int redo;  // a row met a non-finite value

    // To be called by all threads, of at least three warps: each sets up a part. False, for all of
    // them, if there is no row.
    __device__ __forceinline__ bool begin(const AttentionParameters& p, int keys,
                                          const Work& decoded) {
        static_assert(kRows <= 32, "a lane for each");
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const unsigned member_tiles = unsigned(p.group + p.members - 1) / unsigned(p.members);
        const unsigned query_tile = unsigned(decoded.row_tile) / member_tiles;
        const int first_member = int(unsigned(decoded.row_tile) % member_tiles) * p.members;
        const int members = min(p.members, p.group - first_member);
        const int queries = kRows / p.members;
        decode_batch(p.batch, decoded.entry * p.group, index, threadIdx.x);
        if (threadIdx.x == 0) {
            work = decoded;
            const int64 all_queries = p.score.queries, all_keys = p.score.keys;
            segment = {0, all_queries, all_queries, 0, all_keys, 0};
            if (p.sequences.queries.data) {
                segment = Segment::find(p.sequences, all_queries, all_keys, query_tile, queries);
                index.on_axis[0] = min(segment.index, max(p.sequences.count - 1, 0LL));
            }
            redo = 0;
        }
        __syncthreads();
        const int64 first_row = segment.row_of(query_tile, queries);
        const int used_queries = int(clamp(segment.end - first_row, 0, queries));
        if (used_queries == 0) return false;

        const int own = min(lane, used_queries * members - 1);
        Row& row = rows[lane < kRows ? lane : 0];
        const int64 number = first_row + own / members;
        const int member = first_member + own % members;
        // With a group, its axis is the last one: without, there may be none.
        auto start_of = [&](const BatchedArray& array) {
            const int64 step = p.group > 1 ? array.batch_stride[p.batch.count - 1] : 0;
            return entry_offset(array.batch_stride, p.batch, index) + member * step;
        };
        if (warp == 0 && lane < kRows) {
            row.q = static_cast<const T*>(p.q.data) + start_of(p.q) + number * p.q.row_stride;
            row.number = number;
            row.out = start_of(p.out) + decoded.split * p.out_split;
            row.lse = start_of(p.lse) + decoded.split * p.lse_split;
            if (lane == 0) count = used_queries * members;
        } else if (warp == 1 && lane == 0) {
            k = Matrix<const T>::of(p.k, p.batch, index);
            v = Matrix<const T>::of(p.v, p.batch, index);
            k.data += segment.first_key * k.row_stride;
            v.data += segment.first_key * v.row_stride;
        } else if (warp == 2) {
            KeyRange seen{0, -1};
            bool used = false;
            if (lane < kRows) {
                row.index = index;
                if (p.group > 1) row.index.on_axis[p.batch.count - 1] = member;
                row.score.load(p.score, p.batch, row.index, segment);
                used = row.score.is_used(number);
                if (used) seen = row.score.range(number);
            }
            const bool sees = seen.first <= seen.last;
            unite(sees ? seen.first : kFarthest, sees ? seen.last : -1, used ? seen.first : 0,
                  used ? seen.last : kFarthest);
            if (lane == 0) {
                // Not all queries of a sequence may be here: what they see must not tell.
                const KeyRange shared{0, row.score.bounds.keys - 1};
                tiles = TileRange::of(p.sequences.queries.data ? shared : any, keys, decoded.split,
                                      p.grid.splits);
            }
        }
        __syncthreads();
        return true;
    }

    __device__ __forceinline__ Output<T> output_of(const AttentionParameters& p, int row) const {
        return {p, rows[row].out, rows[row].lse};
    }

  private:
    // The ranges of all lanes' rows.
    __device__ __forceinline__ void unite(int64 any_first, int64 any_last, int64 all_first,
                                          int64 all_last) {
        for (int bit = 1; bit < 32; bit *= 2) {
            any_first = min(any_first, __shfl_xor_sync(kFullWarp, any_first, bit));
            any_last = max(any_last, __shfl_xor_sync(kFullWarp, any_last, bit));
            all_first = max(all_first, __shfl_xor_sync(kFullWarp, all_first, bit));
            all_last = min(all_last, __shfl_xor_sync(kFullWarp, all_last, bit));
        }
        if (threadIdx.x % 32) return;
        any = {any_last < 0 ? 0 : any_first, any_last};
        all = {all_first, any_last < 0 ? -1 : all_last};
    }
};

}  // namespace cuflash

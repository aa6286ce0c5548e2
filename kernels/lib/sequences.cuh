// Sequences that lie end to end on the token axes, and which of them a tile of rows belongs to.
#pragma once

#include "lib/numeric.cuh"
#include "lib/runtime_dtype.cuh"

namespace cuflash {

// Where sequences begin and end on a token axis (cu_seqlens): count + 1 integers.
struct SequenceEnds {
    const void* data;
    int64 stride;  // in elements
    int type;      // IntegerType
};

// Without `queries.data`, each batch entry is one sequence of all its tokens.
struct Sequences {
    SequenceEnds queries, keys;
    int64 count;
};

// A sequence: rows start..end - 1 of the query axis, of which `rows` are used, and the keys that
// are numbered from `first_key` on. Its tiles of `size` rows are numbered from start / size + index
// on, which leaves room for all of them and rises with the index; numbers that no row is left for
// make empty tiles.
struct Segment {
    int64 start, end, rows;
    int64 first_key, keys;
    int64 index;

    // The first row of a tile.
    __device__ __forceinline__ int64 row_of(int64 tile, int size) const {
        return start + (tile - start / size - index) * size;
    }

    // The segment of a tile. Rows past the last sequence are one more, of no key.
    static __device__ __forceinline__ Segment find(const Sequences& sequences, int64 queries,
                                                   int64 keys, int64 tile, int size) {
        return bisect(sequences, queries, keys,
                      [&](int64 row, int64 index) { return row / size + index <= tile; });
    }

    // The same by the tile's place in an order that has those which may be empty last, of each
    // sequence one: the places before are as many as if all tokens were one sequence, and of equal
    // sequences of whole tiles they have all rows. `tile` is the place, and becomes the number.
    // Index holds numbers of tokens, of up to a tile more than there are.
    template <typename Index>
    static __device__ __forceinline__ Segment find_in_order(const Sequences& sequences,
                                                            Index queries, Index keys, int64& tile,
                                                            int size) {
        const Index place = Index(tile), last = place - (queries + size - 1) / size;
        const bool by_rows = last < 0;
        // The last that begins before this row, or the one of this index.
        const Index end = by_rows ? (place + 1) * size : last + 1;
        const Segment found = bisect(sequences, queries, keys, [&](Index row, Index index) {
            return (by_rows ? row : index) < end;
        });
        tile = found.index + (by_rows ? place : Index(found.end) / size);
        return found;
    }

    // The same with rows and keys in each other's place: to find a segment by a tile of its keys.
    __device__ __forceinline__ Segment transposed() const {
        return {first_key, first_key + keys, keys, start, rows, index};
    }

  private:
    // The last segment that is not behind a tile: `before(row, index)` tells of one that begins at
    // a row whether it is.
    //
    // Ends come from memory that nobody checked. Each is held between the two that the bisection
    // has between its hands: that leaves good ones as they are and makes of any others, the same
    // way for all tiles, a list that rises from 0 to no more than the tokens there are.
    template <typename Index, typename Before>
    static __device__ __forceinline__ Segment bisect(const Sequences& sequences, Index queries,
                                                     Index keys, const Before& before) {
        Index low = 0, high = Index(sequences.count), row = 0, key = 0;
        Index end_row = read<Index>(sequences.queries, high, 0, queries);
        Index end_key = read<Index>(sequences.keys, high, 0, keys);
        if (high == 0) end_row = 0;
        if (before(end_row, high)) return {end_row, queries, 0, 0, 0, high};
        while (high - low > 1) {
            const Index middle = (low + high) / 2;
            const Index middle_row = read<Index>(sequences.queries, middle, row, end_row);
            const Index middle_key = read<Index>(sequences.keys, middle, key, end_key);
            const bool passed = before(middle_row, middle);
            (passed ? low : high) = middle;
            (passed ? row : end_row) = middle_row;
            (passed ? key : end_key) = middle_key;
        }
        return {row, end_row, end_row - row, key, end_key - key, low};
    }

    template <typename Index>
    static __device__ __forceinline__ Index read(const SequenceEnds& ends, Index index, Index low,
                                                 Index high) {
        const int64 at = index * ends.stride;
        const int64 end = ends.type == kInt32 ? static_cast<const int*>(ends.data)[at]
                                              : static_cast<const int64*>(ends.data)[at];
        return Index(clamp(end, low, high));
    }
};

}  // namespace cuflash

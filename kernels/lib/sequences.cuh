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

    // The segment of a tile, by bisection. Rows past the last sequence are one more, of no key.
    //
    // Ends come from memory that nobody checked. Each is held between the two that the bisection
    // has between its hands: that leaves good ones as they are and makes of any others, the same
    // way for all tiles, a list that rises from 0 to no more than the tokens there are.
    static __device__ __forceinline__ Segment find(const Sequences& sequences, int64 queries,
                                                   int64 keys, int64 tile, int size) {
        int64 low = 0, high = sequences.count, row = 0, key = 0;
        int64 end_row = read(sequences.queries, high, 0, queries);
        int64 end_key = read(sequences.keys, high, 0, keys);
        if (high == 0) end_row = 0;
        if (tile >= end_row / size + high) return {end_row, queries, 0, 0, 0, high};
        while (high - low > 1) {
            const int64 middle = (low + high) / 2;
            const int64 middle_row = read(sequences.queries, middle, row, end_row);
            const int64 middle_key = read(sequences.keys, middle, key, end_key);
            const bool before = middle_row / size + middle <= tile;
            (before ? low : high) = middle;
            (before ? row : end_row) = middle_row;
            (before ? key : end_key) = middle_key;
        }
        return {row, end_row, end_row - row, key, end_key - key, low};
    }

    // The same with rows and keys in each other's place: to find a segment by a tile of its keys.
    __device__ __forceinline__ Segment transposed() const {
        return {first_key, first_key + keys, keys, start, rows, index};
    }

  private:
    static __device__ __forceinline__ int64 read(const SequenceEnds& ends, int64 index, int64 low,
                                                 int64 high) {
        return clamp(read_integer(ends.data, index * ends.stride, ends.type), low, high);
    }
};

}  // namespace cuflash

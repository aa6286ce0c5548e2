// Which part of an attention problem a thread block works on, and where its operands lie.
//
// The grid is one-dimensional. From the fastest to the slowest: tile of rows, tile of value
// columns, share of the keys, batch entry; so neighbouring blocks read the same keys. The last rows
// come first, because a causal mask gives them the most keys and the longest blocks should not
// start last.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

constexpr int kBatchAxes = 8;

struct BatchAxes {
    int64 size[kBatchAxes];
    int count;
};

// A matrix, vector or number for each entry of the batch. Strides are in elements, 0 where an axis
// broadcasts.
struct BatchedArray {
    void* data;  // null if absent
    int64 batch_stride[kBatchAxes];
    int64 row_stride, column_stride;
    int type;  // FloatType, read where it is not a template argument
};

// The index of a batch entry on every batch axis; lies in shared memory.
struct BatchIndex {
    int64 on_axis[kBatchAxes];
};

// To be called by the whole block; the index can be read after the next barrier.
__device__ __forceinline__ void decode_batch(const BatchAxes& axes, int64 entry,
                                             BatchIndex& index) {
    int axis = threadIdx.x;
    if (axis >= axes.count) return;
    for (int inner = axes.count - 1; inner > axis; --inner) entry /= axes.size[inner];
    index.on_axis[axis] = entry % axes.size[axis];
}

__device__ __forceinline__ int64 entry_offset(const int64* batch_stride, const BatchAxes& axes,
                                              const BatchIndex& index) {
    int64 offset = 0;
    for (int axis = 0; axis < axes.count; ++axis)
        offset += index.on_axis[axis] * batch_stride[axis];
    return offset;
}

// One entry's matrix.
template <typename T>
struct Matrix {
    T* data;
    int64 row_stride, column_stride;

    static __device__ __forceinline__ Matrix of(const BatchedArray& array, const BatchAxes& axes,
                                                const BatchIndex& index) {
        return {static_cast<T*>(array.data) + entry_offset(array.batch_stride, axes, index),
                array.row_stride, array.column_stride};
    }

    __device__ __forceinline__ T& at(int64 row, int64 column) const {
        return data[row * row_stride + column * column_stride];
    }
};

struct Grid {
    int64 row_tiles;
    int column_tiles, splits;
};

struct Work {
    int64 row_tile, entry;
    int column_tile, split;

    static __device__ __forceinline__ Work of(const Grid& grid, int64 block) {
        int64 rows = block / grid.row_tiles, columns = rows / grid.column_tiles;
        return {grid.row_tiles - 1 - block % grid.row_tiles, columns / grid.splits,
                int(rows % grid.column_tiles), int(columns % grid.splits)};
    }
};

// The keys first..last, both included; empty if last < first.
struct KeyRange {
    int64 first, last;

    __device__ __forceinline__ bool has(int64 key) const { return key >= first && key <= last; }
};

// The key tiles begin..end - 1 that a block walks over.
struct TileRange {
    int64 begin, end;

    // The share `split` of those tiles of `tile` keys that meet the range. Tiles begin at multiples
    // of their size wherever the range does, so that a row's arithmetic does not depend on other
    // rows.
    static __device__ __forceinline__ TileRange of(const KeyRange& keys, int tile, int split,
                                                   int splits) {
        if (keys.last < keys.first) return {0, 0};
        int64 begin = keys.first / tile, count = keys.last / tile + 1 - begin;
        return {begin + count * split / splits, begin + count * (split + 1) / splits};
    }
};

}  // namespace cuflash

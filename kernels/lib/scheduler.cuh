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

// To be called by threads numbered from 0; the index can be read after their next barrier. A grid
// has fewer than 2^31 blocks, hence no more entries: 64-bit divisions take ten times as long.
__device__ __forceinline__ void decode_batch(const BatchAxes& axes, int64 entry, BatchIndex& index,
                                             int axis) {
    if (axis >= axes.count) return;
    unsigned left = unsigned(entry);
#pragma unroll 1
    for (int inner = axes.count - 1; inner > axis; --inner) left /= unsigned(axes.size[inner]);
    index.on_axis[axis] = left % unsigned(axes.size[axis]);
}

__device__ __forceinline__ int64 entry_offset(const int64* batch_stride, const BatchAxes& axes,
                                              const BatchIndex& index) {
    int64 offset = 0;
#pragma unroll 1
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

    static __device__ __forceinline__ Work of(const Grid& grid, unsigned block) {
        const unsigned row_tiles = unsigned(grid.row_tiles), column_tiles = grid.column_tiles;
        const unsigned rows = block / row_tiles, columns = rows / column_tiles;
        return {row_tiles - 1 - block % row_tiles, columns / grid.splits, int(rows % column_tiles),
                int(columns % grid.splits)};
    }
};

// The keys first..last, both included; empty if last < first.
struct KeyRange {
    int64 first, last;

    __device__ __forceinline__ bool has(int64 key) const { return key >= first && key <= last; }
};

// The same of rows.
using RowRange = KeyRange;

// The tiles, of keys or of rows, begin..end - 1 that a block walks over.
struct TileRange {
    int64 begin, end;

    // The share `split` of those tiles of `tile` keys that meet the range. Tiles begin at multiples
    // of their size wherever the range does, so that a row's arithmetic does not depend on other
    // rows.
    static __device__ __forceinline__ TileRange of(const KeyRange& keys, int tile, int split,
                                                   int splits) {
        if (keys.last < keys.first) return {0, 0};
        int64 begin = keys.first / tile, count = keys.last / tile + 1 - begin;
        if (splits == 1) return {begin, begin + count};  // without slow divisions
        return {begin + count * split / splits, begin + count * (split + 1) / splits};
    }
};

// ------------------------------------------------------------------- blocks that take many tiles

constexpr int kNoTile = -1, kNoMoreTiles = -2;

// How the row tiles of a grid, `rows` of one entry and `tiles` of all, are dealt out to `blocks`.
//
// Blocks take pairs: of the row tiles of an entry the longest under a causal mask with the
// shortest, and so on, so that all pairs are equally long whatever the mask; neighbouring blocks
// read the same keys. Pairs that are too few for all blocks are divided among two as far as they
// go.
struct Deal {
    unsigned rows, in_entry, blocks, whole, left;  // pairs of an entry, for every block, left over

    __device__ __forceinline__ Deal(unsigned rows, unsigned tiles, unsigned blocks)
        : rows(rows), in_entry((rows + 1) / 2), blocks(blocks) {
        const unsigned pairs = tiles / rows * in_entry;
        whole = pairs / blocks;
        left = pairs % blocks;
    }

    // Rounds in which a block takes a tile, or none.
    __device__ __forceinline__ unsigned rounds(unsigned block) const {
        const unsigned more = block >= left ? block < 2 * left : block + left < blocks ? 1 : 2;
        return 2 * whole + more;
    }

    // The tile that a block takes in one of its rounds, or kNoTile.
    __device__ __forceinline__ int tile(unsigned block, unsigned round) const {
        unsigned pair = round / 2 * blocks + block, member = round % 2;
        if (round >= 2 * whole && block >= left) {  // the second of another block's pair
            pair -= left;
            member = 1;
        }
        const unsigned row = pair % in_entry, other = rows - 1 - row;
        if (member && row == other) return kNoTile;
        return int(pair / in_entry * rows + (member ? other : row));
    }
};

// The tile that block `block` of `blocks` takes in round `round`; kNoTile if it has none in this
// round. Of the `rows` row tiles of an entry the first `single` may be empty: they are in no pair,
// and come when all pairs are dealt out, first to the last blocks, which had the fewest. A grid has
// fewer than 2^31 tiles.
__device__ __forceinline__ int tile_of_round(unsigned rows, unsigned single, unsigned tiles,
                                             unsigned blocks, unsigned block, unsigned round) {
    const unsigned entries = tiles / rows, paired = rows - single;
    const Deal pairs(paired, entries * paired, blocks);
    const unsigned before = pairs.rounds(block);
    if (round < before) {
        const int tile = pairs.tile(block, round);
        return single == 0 || tile < 0 ? tile : tile + (unsigned(tile) / paired + 1) * single;
    }
    const unsigned tile = (round - before) * blocks + (blocks - 1 - block);
    if (tile >= entries * single) return kNoMoreTiles;
    return int(tile + tile / single * paired);
}

}  // namespace cuflash

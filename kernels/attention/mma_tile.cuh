// The tile of an attention kernel on 16-bit tensor cores, and its ways between global and shared
// memory.
#pragma once

#include "lib/nonfinite.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/scheduler.cuh"
#include "lib/swizzle.cuh"

namespace cuflash {

// 16-row tiles of a warp, warps of a block, keys of a tile, padded features and columns of v,
// whether a warp holds its queries in registers, blocks that a multiprocessor should hold.
// `device/attention_plans_mma.py` says which tiles there are, and why.
template <int kRowTiles_, int kWarps, int kKeys_, int kFeatures, int kValues, bool kQueriesHeld_,
          int kBlocks_>
struct MmaTile {
    static constexpr int kRowTiles = kRowTiles_, kKeys = kKeys_, kBlocks = kBlocks_;
    static constexpr bool kQueriesHeld = kQueriesHeld_;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles;
    static constexpr int kQueries = kWarpRows * kWarps;
    static constexpr int kRows = 2 * kRowTiles;      // rows that a thread has a part of
    static constexpr int kKeyTiles = kKeys / 8;      // 8 keys each
    static constexpr int kValueTiles = kValues / 8;  // 8 columns each
    static constexpr int kFeatureSteps = kFeatures / 16;
    using Features = SwizzledTile<kFeatures>;
    using Values = SwizzledTile<kValues>;
    static constexpr int kQueryBytes = kQueries * Features::kPitch;
    static constexpr int kKeyBytes = kKeys * Features::kPitch;
    static constexpr int kValueBytes = kKeys * Values::kPitch;
    static_assert(kKeys % 16 == 0, "a matrix instruction takes 16 keys");
    static_assert(2 * kQueries * Values::kPitch <= kQueryBytes + 2 * (kKeyBytes + kValueBytes),
                  "results leave by way of shared memory");
};

// Which of a block's key tiles begin..end - 1 some row of a warp sees, and all rows see; counted
// from the block's first tile.
struct alignas(16) WarpTiles {
    int begin, end, whole_begin, whole_end;
    bool again;  // in the second turn over the keys

    template <typename Score>
    static __device__ __forceinline__ WarpTiles of(const Score& score, int64 first_row, int rows,
                                                   const TileRange& tiles, int keys) {
        const KeyRange any = score.range_of_any(first_row, first_row + rows);
        const KeyRange all = score.range_of_all(first_row, first_row + rows);
        const int begin = relative(any.first / keys, tiles);
        return {begin, any.last < any.first ? begin : relative(any.last / keys + 1, tiles),
                relative((all.first + keys - 1) / keys, tiles),
                relative((all.last + 1) / keys, tiles), false};
    }

    __device__ __forceinline__ bool has(int tile) const { return tile >= begin && tile < end; }
    __device__ __forceinline__ bool has_whole(int tile) const {
        return tile >= whole_begin && tile < whole_end;
    }

  private:
    static __device__ __forceinline__ int relative(int64 tile, const TileRange& tiles) {
        return int(clamp(tile, tiles.begin, tiles.end) - tiles.begin);
    }
};

// ------------------------------------------------------------------------------------------ loads

// Whether rows can be copied by 16 bytes.
template <typename T>
__device__ __forceinline__ bool has_aligned_rows(const Matrix<T>& matrix) {
    return matrix.column_stride == 1 && matrix.row_stride % kVector<T> == 0 &&
           is_vector_aligned(matrix.data);
}

// A thread's part in copying tiles of kRows rows, one after the other, of a matrix with aligned
// rows: 16-byte chunks, the same ones of each tile. A block shares the work, or each warp does all
// of its own.
template <int kRows, int kColumns, int kThreads, typename T>
struct RowCopies {
    using Layout = SwizzledTile<kColumns>;
    static constexpr int kNeighbours = Layout::kPeriod, kStep = kThreads / kNeighbours;
    // Threads keep their place in the pattern of 8 rows, or have two by turns.
    static constexpr int kOtherPlace = kStep % 8 ? kStep * Layout::kChunkBytes : 0;
    static_assert(kStep % 4 == 0 && kRows % kStep == 0, "whole patterns, or halves");

    const T* source;  // the first chunk in the tile to come
    unsigned place;   // where in shared memory it goes

    __device__ __forceinline__ RowCopies(unsigned tile, const Matrix<const T>& matrix,
                                         int64 first_row) {
        const int thread = threadIdx.x % kThreads;
        const int row = thread / kNeighbours, chunk = thread % kNeighbours;
        source = &matrix.at(first_row + row, chunk * kVector<T>);
        place = tile + Layout::at(row, chunk);
    }

    __device__ __forceinline__ void advance(int64 row_stride, int tiles) {
        source += tiles * kRows * row_stride;
    }

    // Starts to copy a whole tile, `shift` bytes further.
    __device__ __forceinline__ void start(unsigned shift, int64 row_stride) const {
        const T* from = source;
#pragma unroll
        for (int r = 0; r < kRows; r += kStep, from += kStep * row_stride)
#pragma unroll
            for (int c = 0; c < Layout::kChunks; c += kNeighbours)
                copy_async(place_of(r, c) + shift, from + c * kVector<T>);
    }

    // Rows outside begin..end - 1 and columns from `columns` on become 0: what lies there may be
    // NaN.
    __device__ __forceinline__ void start_part(unsigned shift, int64 row_stride, int begin, int end,
                                               int columns) const {
        const int thread = thread_here() % kThreads, row = thread / kNeighbours;
        int left = columns - thread % kNeighbours * kVector<T>;
#pragma unroll
        for (int c = 0; c < Layout::kChunks; c += kNeighbours) {
            const int bytes = min(max(left, 0), kVector<T>) * int(sizeof(T));
            const T* from = source + c * kVector<T>;
#pragma unroll 1
            for (int r = 0; r < kRows; r += kStep, from += kStep * row_stride)
                copy_async(place_of(r, c) + shift, from,
                           row + r >= begin && row + r < end ? bytes : 0);
            left -= kNeighbours * kVector<T>;
        }
    }

  private:
    // Of the chunk that lies so many rows and chunks after the thread's first one.
    __device__ __forceinline__ unsigned place_of(int rows, int chunks) const {
        const unsigned other = rows / kStep % 2 * kOtherPlace;
        return (place ^ other) + rows * Layout::kPitch + chunks * Layout::kChunkBytes;
    }
};

// Elements as they are.
struct Unchanged {
    template <typename T>
    __device__ __forceinline__ T operator()(T x) const {
        return x;
    }
};

// The same for any strides, and at once; elements may change their type.
template <int kRows, int kColumns, int kThreads, typename T, typename Convert = Unchanged,
          typename Layout = SwizzledTile<kColumns>>
__device__ __forceinline__ void copy_elements(unsigned char* tile, const Matrix<const T>& matrix,
                                              int64 first_row, int begin, int end, int columns,
                                              Convert convert = {}) {
    using Stored = decltype(convert(T()));
    const T* const source = &matrix.at(first_row, 0);
    // Neighbouring threads take neighbours in memory, be they in a row or in a column.
    const bool by_column = llabs(matrix.row_stride) < llabs(matrix.column_stride);
#pragma unroll 1
    for (int i = thread_here() % kThreads; i < kRows * kColumns; i += kThreads) {
        const int r = by_column ? i % kRows : i / kColumns;
        const int c = by_column ? i / kRows : i % kColumns;
        Stored x = narrow<Stored>(0);
        if (r >= begin && r < end && c < columns)
            x = convert(source[r * matrix.row_stride + c * matrix.column_stride]);
        *reinterpret_cast<Stored*>(tile + Layout::at(r, c / kVector<Stored>) +
                                   c % kVector<Stored> * int(sizeof(Stored))) = x;
    }
}

// Turns NaN and inf into 0 in a tile that has arrived.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void keep_finite(unsigned char* tile) {
#pragma unroll 1
    for (int i = thread_here() % kThreads; i < kRows * kColumns; i += kThreads) {
        T& x = reinterpret_cast<T*>(tile)[i];
        if (!is_finite(widen(x))) x = narrow<T>(0);
    }
}

// ----------------------------------------------------------------------------------------- stores

// Two neighbours of a row as R, in one write.
template <typename R>
__device__ __forceinline__ void store_pair(unsigned char* to, float first, float second) {
    *reinterpret_cast<unsigned*>(to) = pack<R>(first, second);
}
template <>
__device__ __forceinline__ void store_pair<float>(unsigned char* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
}

// Stores the results of a warp's rows, `rows` of them from `first_row` on, by way of shared memory:
// a thread has two neighbours of a row at a time, memory wants 16 bytes.
template <typename Tile, typename R>
__device__ __forceinline__ void store_rows(
    unsigned char* shared, const float (&out)[Tile::kRowTiles][Tile::kValueTiles][4],
    const Matrix<R>& to, int64 first_row, int rows, int64 columns) {
    constexpr int kColumns = 8 * Tile::kValueTiles, kWide = kVector<R>;
    using Layout = SwizzledTile<kColumns* int(sizeof(R)) / 2>;
    const int lane = threadIdx.x % 32;
    unsigned char* const own = shared + threadIdx.x / 32 * Tile::kWarpRows * Layout::kPitch;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Tile::kValueTiles; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            const float* x = &out[i / 2][j][i % 2 * 2];
            store_pair<R>(own + Layout::at(8 * i + lane / 4, column / kWide) +
                              column % kWide * int(sizeof(R)),
                          x[0], x[1]);
        }
    __syncwarp();

    if (has_aligned_rows(to) && columns % kWide == 0) {
        constexpr int kVectors = Tile::kWarpRows * Layout::kChunks / 32;  // of a lane
        // So many hide the latency of shared memory.
        constexpr int kAtOnce = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : kVectors;
#pragma unroll 1
        for (int start = lane; start < 32 * kVectors; start += 32 * kAtOnce) {
            uint4 words[kAtOnce];  // elements would move one by one
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                const int i = start + 32 * n;
                words[n] = *reinterpret_cast<const uint4*>(
                    own + Layout::at(i / Layout::kChunks, i % Layout::kChunks));
            }
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                const int r = (start + 32 * n) / Layout::kChunks;
                const int column = (start + 32 * n) % Layout::kChunks * kWide;
                if (r < rows && column < columns)
                    __stcs(reinterpret_cast<uint4*>(&to.at(first_row + r, column)), words[n]);
            }
        }
        return;
    }
#pragma unroll 1
    for (int i = lane; i < rows * kColumns; i += 32) {
        const int r = i / kColumns, column = i % kColumns;
        if (column < columns)
            to.at(first_row + r, column) = *reinterpret_cast<const R*>(
                own + Layout::at(r, column / kWide) + column % kWide * int(sizeof(R)));
    }
}

}  // namespace cuflash

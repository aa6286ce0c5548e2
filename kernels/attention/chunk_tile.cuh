// Tiles of float64 or float32 in shared memory, in chunks of 16 bytes, and the ways to fill them.
//
// No instruction loads matrices of such elements as tensor cores take them. What a product
// contracts, features or keys, may come in any order, as long as both operands come in the same:
// here it is the order in which a lane reads 16 bytes at a time.
#pragma once

#include "attention/mma_tile.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/scheduler.cuh"

namespace cuflash {

// Rows that are read along themselves: lane (g, t) takes chunk t, or t + 4, of row g. Two rows at a
// time, kApart from each other, share the banks: the halves of every other one are exchanged.
template <typename T, int kColumns_, int kApart = 1>
struct FeatureChunks {
    static constexpr int kColumns = kColumns_, kChunks = kColumns / kVector<T>;
    static constexpr int kPitch = int(sizeof(T)) * kColumns;

    // What the bytes of a row's chunks are permuted by: an exclusive or.
    static __device__ __forceinline__ constexpr int swap(int row) { return row / kApart % 2 * 64; }
    static __device__ __forceinline__ int at(int row, int chunk) {
        return row * kPitch + (chunk * 16 ^ swap(row));
    }
};

// The same for what is read down the columns: of 8 rows, lane (g, t) takes 2t and 2t + 1. Rows 2
// apart are permuted by two chunks, so that four of them share the banks.
template <typename T, int kColumns_>
struct ValueChunks {
    static constexpr int kColumns = kColumns_, kChunks = kColumns / kVector<T>;
    static constexpr int kPitch = int(sizeof(T)) * kColumns;

    static __device__ __forceinline__ constexpr int swap(int row) { return row / 2 % 4 * 32; }
    static __device__ __forceinline__ int at(int row, int chunk) {
        return row * kPitch + (chunk * 16 ^ swap(row));
    }
};

// A chunk of shared memory.
template <typename T>
__device__ __forceinline__ Vector<T> chunk_at(const unsigned char* from) {
    return *reinterpret_cast<const Vector<T>*>(from);
}

// Copies kRows rows of a matrix of any strides into a tile, as `copy_elements` does.
template <typename Layout, int kRows, int kThreads, typename T>
__device__ __forceinline__ void copy_to_chunks(unsigned char* tile, const Matrix<const T>& matrix,
                                               int64 first_row, int begin, int end, int columns) {
    copy_elements<kRows, Layout::kColumns, kThreads, T, Unchanged, Layout>(tile, matrix, first_row,
                                                                           begin, end, columns);
}

// A thread's part in copying tiles of kRows rows, one after the other, of a matrix of aligned
// rows, in the background.
template <typename Layout, int kRows, int kThreads, typename T>
struct ChunkCopies {
    static constexpr int kStep = kThreads / Layout::kChunks;
    static_assert(kThreads % Layout::kChunks == 0 && kRows % kStep == 0, "all have the same part");
    // Rows that a thread copies differ in bits that are 0 in its first one.
    static_assert((kStep & kStep - 1) == 0, "exclusive ors of rows add up");

    const T* source;  // the first chunk in the tile to come
    unsigned place;   // where in shared memory it goes

    __device__ __forceinline__ ChunkCopies(const unsigned char* tile, const Matrix<const T>& matrix,
                                           int64 first_row) {
        const int row = threadIdx.x / Layout::kChunks, chunk = threadIdx.x % Layout::kChunks;
        source = &matrix.at(first_row + row, chunk * kVector<T>);
        place = shared_address(tile) + Layout::at(row, chunk);
    }

    __device__ __forceinline__ void advance(int64 row_stride, int tiles) {
        source += tiles * kRows * row_stride;
    }

    // Starts to copy a whole tile of aligned rows, `shift` bytes further.
    __device__ __forceinline__ void start(int shift, int64 row_stride) const {
        const T* from = source;
#pragma unroll
        for (int r = 0; r < kRows; r += kStep, from += kStep * row_stride)
            copy_async(place_of(r) + shift, from);
    }

    // Rows outside begin..end - 1 and columns from `columns` on become 0: what lies there may be no
    // memory, or NaN.
    __device__ __forceinline__ void start_part(int shift, int64 row_stride, int begin, int end,
                                               int columns) const {
        const int thread = thread_here(), row = thread / Layout::kChunks;
        const int left = columns - thread % Layout::kChunks * kVector<T>;
        const int bytes = min(max(left, 0), kVector<T>) * int(sizeof(T));
        const T* from = source;
#pragma unroll 1
        for (int r = 0; r < kRows; r += kStep, from += kStep * row_stride)
            copy_async(place_of(r) + shift, from, row + r >= begin && row + r < end ? bytes : 0);
    }

  private:
    __device__ __forceinline__ unsigned place_of(int rows) const {
        return (place ^ Layout::swap(rows)) + rows * Layout::kPitch;
    }
};

}  // namespace cuflash

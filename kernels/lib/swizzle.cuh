// Tiles of 16-bit elements in shared memory whose rows and columns are both read by matrix
// instructions without bank conflicts.
//
// ldmatrix reads 16-byte chunks of 8 neighbouring rows at once; in row-major order they would share
// banks. Here the chunks of each row are permuted by an exclusive or with the row's number.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

template <int kColumns>
struct SwizzledTile {
    static constexpr int kChunkBytes = 16;
    static constexpr int kChunks = kColumns / 8;
    static constexpr int kPitch = 2 * kColumns;  // bytes from one row to the next
    // Chunks are permuted within groups of this many; where they are fewer than 8, the pitch moves
    // neighbouring rows to other banks already.
    static constexpr int kPeriod = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    static constexpr int kGroupBytes = kPeriod * kChunkBytes;
    static_assert(kColumns % 16 == 0, "a matrix instruction takes 16 elements of a row");

    // Byte at which a chunk lies.
    static __device__ __forceinline__ int at(int row, int chunk) {
        return row * kPitch + (chunk ^ (row / (8 / kPeriod) % kPeriod)) * kChunkBytes;
    }

    // at(row, chunk + 2 * pairs) from the address of (row, chunk), chunk < 2, in a tile that begins
    // at a multiple of the group.
    static __device__ __forceinline__ unsigned advance(unsigned address, int pairs) {
        return (address ^ (2 * pairs % kPeriod * kChunkBytes)) + 2 * pairs / kPeriod * kGroupBytes;
    }
};

}  // namespace cuflash

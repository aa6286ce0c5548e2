// The tile of attention on float64 tensor cores, and its ways between global and shared memory.
//
// No instruction loads matrices of doubles. What a product contracts, features or keys, may come in
// any order, as long as both operands come in the same: here it is the order in which a lane reads
// 16 bytes, two neighbours, at a time, and in which weights are left operands as they are.
#pragma once

#include "attention/mma_tile.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/scheduler.cuh"

namespace cuflash {

// Rows of doubles by chunks of two. Of 16 features, lane (g, t) takes chunks t and t + 4 of row g:
// its operands at t, t + 4, t + 8 and t + 12. Two rows at a time share the banks: the halves of the
// odd ones are exchanged.
template <int kColumns_>
struct FeatureRows {
    static constexpr int kColumns = kColumns_, kChunks = kColumns / 2, kPitch = 8 * kColumns;

    // What the bytes of a row's chunks are permuted by: an exclusive or.
    static __device__ __forceinline__ constexpr int swap(int row) { return row % 2 * 64; }
    static __device__ __forceinline__ int at(int row, int chunk) {
        return row * kPitch + (chunk * 16 ^ swap(row));
    }
};

// The same for what is read down the columns. Of 16 rows, lane (g, t) takes column g of 2t, 2t + 1,
// 2t + 8 and 2t + 9. Rows 2 apart are permuted by two chunks, so that four of them share the banks.
template <int kColumns_>
struct ValueRows {
    static constexpr int kColumns = kColumns_, kChunks = kColumns / 2, kPitch = 8 * kColumns;

    static __device__ __forceinline__ constexpr int swap(int row) { return row / 2 % 4 * 32; }
    static __device__ __forceinline__ int at(int row, int chunk) {
        return row * kPitch + (chunk * 16 ^ swap(row));
    }
};

// Warps of a block, of 16 query rows each, keys of a tile, padded features, columns of v that a
// block takes, whether a warp holds its queries in registers, blocks that a multiprocessor should
// hold. `device/attention_plans_dmma.py` says which tiles there are, and why.
template <int kWarps, int kKeys_, int kFeatures_, int kValues_, bool kQueriesHeld_, int kBlocks_>
struct DmmaTile {
    static constexpr int kThreads = 32 * kWarps, kWarpRows = 16, kQueries = kWarpRows * kWarps;
    static constexpr int kKeys = kKeys_, kFeatures = kFeatures_, kValues = kValues_;
    static constexpr bool kQueriesHeld = kQueriesHeld_;
    static constexpr int kBlocks = kBlocks_;
    static constexpr int kRowTiles = 1, kRows = 2;   // rows that a thread has a part of
    static constexpr int kKeyTiles = kKeys / 8;      // 8 keys each
    static constexpr int kValueTiles = kValues / 8;  // 8 columns each
    static constexpr int kFeatureSteps = kFeatures / 16;
    static constexpr int kKeySteps = kKeys / 16;
    using Features = FeatureRows<kFeatures>;
    using Values = ValueRows<kValues>;
    static constexpr int kQueryBytes = kQueriesHeld ? 0 : kQueries * Features::kPitch;
    static constexpr int kKeyBytes = kKeys * Features::kPitch;
    static constexpr int kValueBytes = kKeys * Values::kPitch;
};

// Two doubles of shared memory.
__device__ __forceinline__ Vector<double> chunk_at(const unsigned char* from) {
    return *reinterpret_cast<const Vector<double>*>(from);
}

// Copies kRows rows of a matrix of any strides into a tile, as `copy_elements` does.
template <typename Layout, int kRows, int kThreads>
__device__ __forceinline__ void copy_doubles(unsigned char* tile,
                                             const Matrix<const double>& matrix, int64 first_row,
                                             int begin, int end, int columns) {
    copy_elements<kRows, Layout::kColumns, kThreads, double, Unchanged, Layout>(
        tile, matrix, first_row, begin, end, columns);
}

// A thread's part in copying tiles of kRows rows, one after the other, of a matrix of aligned
// rows, in the background.
template <typename Layout, int kRows, int kThreads>
struct DoubleCopies {
    static constexpr int kStep = kThreads / Layout::kChunks;
    static_assert(kThreads % Layout::kChunks == 0 && kRows % kStep == 0, "all have the same part");
    // Rows that a thread copies differ in bits that are 0 in its first one.
    static_assert((kStep & kStep - 1) == 0, "exclusive ors of rows add up");

    const double* source;  // the first chunk in the tile to come
    unsigned place;        // where in shared memory it goes

    __device__ __forceinline__ DoubleCopies(const unsigned char* tile,
                                            const Matrix<const double>& matrix, int64 first_row) {
        const int row = threadIdx.x / Layout::kChunks, chunk = threadIdx.x % Layout::kChunks;
        source = &matrix.at(first_row + row, 2 * chunk);
        place = shared_address(tile) + Layout::at(row, chunk);
    }

    __device__ __forceinline__ void advance(int64 row_stride, int tiles) {
        source += tiles * kRows * row_stride;
    }

    // Starts to copy a whole tile of aligned rows, `shift` bytes further.
    __device__ __forceinline__ void start(int shift, int64 row_stride) const {
        const double* from = source;
#pragma unroll
        for (int r = 0; r < kRows; r += kStep, from += kStep * row_stride)
            copy_async(place_of(r) + shift, from);
    }

    // Rows outside begin..end - 1 and columns from `columns` on become 0: what lies there may be no
    // memory, or NaN.
    __device__ __forceinline__ void start_part(int shift, int64 row_stride, int begin, int end,
                                               int columns) const {
        const int thread = thread_here(), row = thread / Layout::kChunks;
        const int bytes = min(max(columns - thread % Layout::kChunks * 2, 0), 2) * 8;
        const double* from = source;
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

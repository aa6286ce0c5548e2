// What the kernels of `backward_wgmma` share: parameters, the tile's shape, shared memory, where a
// block works, and the slow path by single pairs.
#pragma once

#include "attention/backward.cuh"
#include "attention/fragments.cuh"
#include "lib/ptx_barrier.cuh"
#include "lib/ptx_tma.cuh"

namespace cuflash {

// Mirrored by `cuflash/device/attention_vjp_plans_wgmma.py`.
struct alignas(64) BackwardWgmmaParameters {
    TensorMap q, k, v, dout;
    VjpParameters vjp;
    // For each row: -lse in base 2, -inf where no key has weight, and -delta. In the order that
    // lanes read them: see `place_of_exponent` and `place_of_delta`.
    float *exponents, *deltas;
    float* sums;  // dq but for the scale, a tile after the other in the order of registers
    // Of each tile of keys, whether it holds a value that is not finite; then whether any does.
    int* damaged;
    unsigned* turns;  // of 16 rows each, how many tiles of keys were added; null if in any order
    int64 row_tiles, key_tiles;  // of an entry: of queries, and, in that of dk and dv, of keys
    int64 damaged_count;         // tiles of keys
    int64 together;              // entries whose longest blocks come first
};

// kGroups warpgroups of 64 keys, kWidth that the heads are padded to, stages of queries, parts that
// the columns of dq are computed in. With kEarly the sum for dv starts beside the product for dS.
// `device/attention_vjp_plans_wgmma.py` says which tiles there are, and why.
template <int kGroups_, int kWidth_, int kStages_, int kParts_, bool kEarly_>
struct BackwardTile {
    static constexpr int kGroups = kGroups_, kWidth = kWidth_, kStages = kStages_;
    static constexpr int kParts = kParts_;
    static constexpr bool kEarly = kEarly_;
    static constexpr int kRows = 64;  // queries a step
    static constexpr int kKeys = 64 * kGroups;
    static constexpr int kWarps = 4 * kGroups;  // of the keys' warpgroups
    static constexpr int kThreads = 128 * (kGroups + 1);
    static constexpr int kRowThreads = 4 * kWidth;  // two rows and 8 columns a thread
    static constexpr int kPanels = kWidth / 64;
    static constexpr int kSlopeStages = 2;
    static constexpr int kRowBytes = kRows * kWidth * 2, kKeyBytes = kKeys * kWidth * 2;
    static constexpr int kSlopeBytes = kRows * kKeys * 2, kSumBytes = kRows * kWidth * 4;
    static constexpr int kExponentBytes = kRows * 4, kDeltaBytes = 2 * kRows * 4;
    static constexpr int kTileBytes = 2 * kKeyBytes +
                                      kStages * (2 * kRowBytes + kExponentBytes + kDeltaBytes) +
                                      kSlopeStages * kSlopeBytes + kSumBytes;
    // What a block starts with, 65536 / kThreads a thread rounded down to 8, moves to the keys.
    static constexpr int kQueryRegisters = kGroups == 2 ? 72 : 80;
    static constexpr int kKeyRegisters = kGroups == 2 ? 216 : 144;
    static_assert(kGroups == 2 || kGroups == 3, "registers are shared out for these");
};

// Four lanes read the 16 exponents of a fragment's columns as four vectors: lane q finds 2q, 2q +
// 1, 2q + 8, 2q + 9 side by side.
__device__ __forceinline__ int place_of_exponent(int row) {
    return (row & ~15) + (row >> 1 & 3) * 4 + (row >> 3 & 1) * 2 + (row & 1);
}
// Deltas are there twice, so that a vector is what the sums of dP in a thread's two rows of 8
// columns begin with. The second place is two further.
__device__ __forceinline__ int place_of_delta(int row) {
    return 2 * (row & ~7) + (row >> 1 & 3) * 4 + (row & 1);
}

// ------------------------------------------------------------------------------- rows of queries

// Where a block of the kernels that go by rows of queries works. Lies in shared memory.
template <typename Score>
struct RowTile {
    BatchIndex index;
    Segment segment;
    Score score;
    int64 entry;
    int64 first, end;                       // rows
    int64 dout, out, lse, dlse, delta, dq;  // where the entry's begin, in elements

    // To be called by all threads. False, for all of them, if there is no row.
    __device__ __forceinline__ bool begin(const VjpParameters& p, unsigned tiles, int size) {
        if (threadIdx.x < 32) {
            const unsigned tile = blockIdx.x % tiles;
            decode_batch(p.batch, blockIdx.x / tiles, index, threadIdx.x);
            __syncwarp();
            if (threadIdx.x == 0) {
                entry = blockIdx.x / tiles;
                segment = {0, p.score.queries, p.score.queries, 0, p.score.keys, 0};
                if (p.sequences.queries.data) {
                    segment = Segment::find(p.sequences, p.score.queries, p.score.keys, tile, size);
                    index.on_axis[0] = min(segment.index, max(p.sequences.count - 1, 0LL));
                }
                first = segment.row_of(tile, size);
                end = min(first + size, segment.end);
                score.load(p.score, p.batch, index, segment);
            } else if (threadIdx.x <= 6) {
                // None of them has a stride along the axis of sequences.
                const int lane = threadIdx.x;
                const BatchedArray& array = lane == 1   ? p.dout
                                            : lane == 2 ? p.out
                                            : lane == 3 ? p.lse
                                            : lane == 4 ? p.dlse
                                            : lane == 5 ? p.delta
                                                        : p.dq;
                (&dout)[lane - 1] = entry_offset(array.batch_stride, p.batch, index);
            }
        }
        __syncthreads();
        return first < end;
    }
};

// ------------------------------------------------------------------------------ results of a warp

// Stores 16 rows of sums, times `factor`: those from `first` on and before `end`.
template <typename T, int kColumnTiles>
__device__ __forceinline__ void store_sums(const Matrix<T>& to, int64 first, int64 end,
                                           int64 columns, const float (&sum)[kColumnTiles][4],
                                           float factor) {
    const int lane = threadIdx.x % 32;
    struct alignas(4) Pair {
        T first, second;
    };
    const bool by_vectors =
        to.column_stride == 1 && to.row_stride % kVector<T> == 0 && is_vector_aligned(to.data);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int64 row = first + 8 * i + lane / 4;
        const bool present = row < end;
#pragma unroll
        for (int j = 0; j < kColumnTiles; j += 4) {
            unsigned pairs[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                pairs[k] = pack<T>(sum[j + k][2 * i] * factor, sum[j + k][2 * i + 1] * factor);
            transpose_quad(pairs);
            const int column = 8 * (j + lane % 4);
            if (!present || column >= columns) continue;
            if (by_vectors && column + kVector<T> <= columns) {
                *reinterpret_cast<uint4*>(&to.at(row, column)) = {pairs[0], pairs[1], pairs[2],
                                                                  pairs[3]};
                continue;
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const auto pair = bytes_as<Pair>(pairs[k]);
                if (column + 2 * k < columns) to.at(row, column + 2 * k) = pair.first;
                if (column + 2 * k + 1 < columns) to.at(row, column + 2 * k + 1) = pair.second;
            }
        }
    }
}

template <int kColumnTiles>
__device__ __forceinline__ bool all_finite(const float (&sum)[kColumnTiles][4]) {
    float probe[4] = {};  // NaN after one that is not: 0 * x, added up, in one instruction
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) probe[e] = multiply_add(sum[j][e], 0.0f, probe[e]);
    return probe[0] + probe[1] + (probe[2] + probe[3]) == 0;
}

// Of a warp's 16 rows of sums, those that are not finite in one of their lanes, as bits.
template <int kColumnTiles>
__device__ __forceinline__ unsigned rows_not_finite(const float (&sum)[kColumnTiles][4]) {
    unsigned rows = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        bool finite = true;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
            finite &= is_finite(sum[j][2 * i]) && is_finite(sum[j][2 * i + 1]);
        const unsigned lanes = __ballot_sync(kFullWarp, !finite);
#pragma unroll
        for (int row = 0; row < 8; ++row)
            if (lanes >> 4 * row & 15) rows |= 1u << (8 * i + row);
    }
    return rows;
}

// ------------------------------------------------------------------------------- pair by pair

// A row of dq, or of dk and dv, by a warp alone, from pairs that see each other and no others: what
// a row is that sees something that is not finite.
template <typename T, int kWidth>
struct SinglePairs {
    static constexpr int kOwn = kWidth / 32;  // columns of a lane, 32 apart

    Matrix<const T> q, k, v, dout;
    RowNumbers<const float> lse, delta;
    int features, values;
    float scale;
    float first[kOwn] = {}, second[kOwn] = {};  // dq, or dk, but for the scale; dv
    bool met = false;                           // something that is not finite

    __device__ __forceinline__ void begin(const VjpParameters& p, const BatchIndex& index,
                                          const Segment& segment) {
        q = Matrix<const T>::of(p.q, p.batch, index);
        k = Matrix<const T>::of(p.k, p.batch, index);
        v = Matrix<const T>::of(p.v, p.batch, index);
        dout = Matrix<const T>::of(p.dout, p.batch, index);
        k.data += segment.first_key * k.row_stride;
        v.data += segment.first_key * v.row_stride;
        lse = RowNumbers<const float>::of(p.lse, p.batch, index);
        delta = RowNumbers<const float>::of(p.delta, p.batch, index);
        features = int(p.features);
        values = int(p.values);
        scale = float(p.score.scale);
    }

    template <bool kOfKeys>
    __device__ __forceinline__ void add(int64 row, int64 key) {
        float top = lse.at(row);
        // Of scores that are all -inf, none has a gradient.
        if (top == -infinity<float>()) return;
        // What has a score of +inf has none that is a number.
        if (top == infinity<float>()) top = not_a_number<float>();
        const float below = delta.at(row);
        met |= !is_finite(top) || !is_finite(below);
        const float score = product(q, row, k, key, features) * scale;
        const float flow = product(dout, row, v, key, values);
        const float weight = quick_exponential(score - top);
        const float slope = weight * (flow - below);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int column = lane + 32 * i;
            if (column < features)
                first[i] += slope * widen(kOfKeys ? q.at(row, column) : k.at(key, column));
            if (kOfKeys && column < values) second[i] += weight * widen(dout.at(row, column));
        }
    }

    static __device__ __forceinline__ void store(const Matrix<T>& to, int64 row, int columns,
                                                 const float (&sum)[kOwn], float factor) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (lane + 32 * i < columns) to.at(row, lane + 32 * i) = narrow<T>(sum[i] * factor);
    }

  private:
    __device__ __forceinline__ float product(const Matrix<const T>& a, int64 i,
                                             const Matrix<const T>& b, int64 j, int size) {
        float sum = 0;
        bool finite = true;
#pragma unroll 1
        for (int column = threadIdx.x % 32; column < size; column += 32) {
            const float x = widen(a.at(i, column)), y = widen(b.at(j, column));
            finite &= is_finite(x) && is_finite(y);
            sum += x * y;
        }
        for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(kFullWarp, sum, bit);
        met |= !__all_sync(kFullWarp, finite);
        return sum;
    }
};

}  // namespace cuflash

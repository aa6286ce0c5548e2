// How the softmax kernels see their arrays: as rows to be normalised, each of so many columns.
//
// The axes that are kept number the rows, those that are reduced the columns, the last axis given
// fastest. Every operand has strides of its own for both, so that any view is read where it lies. A
// team of lanes owns a row; chunk c of a row, kVector<T> columns, belongs to lane c % lanes. Each
// lane adds up its chunks from left to right and the lanes then merge pairwise: the sum of a row
// depends on its values and on the number of lanes alone, not on strides, neighbours or the mapping
// of lanes to threads.
#pragma once

#include "lib/numeric.cuh"
#include "lib/online_softmax.cuh"

namespace cuflash {

// kPacked: rows of whole, aligned chunks, and no `where`: moved 16 bytes at a time.
// kStrided: one reduced axis of any stride. kScattered: several.
enum Layout { kPacked, kStrided, kScattered };

// Of a block: leaves each thread 128 registers, of which 8 chunks take 32.
constexpr int kMaxThreads = 512;
constexpr int kKeptAxes = 6;
constexpr int kReducedAxes = 4;

struct Operand {
    void* data;                          // null if absent
    int64 kept_stride[kKeptAxes];        // in elements
    int64 reduced_stride[kReducedAxes];  // in elements
    int wide;                            // elements are of the accumulator's type
};

// Division of n < 2^31 by `size` as a multiplication (Granlund and Montgomery 1994).
struct Divisor {
    unsigned size, multiplier, shift;

    __device__ __forceinline__ unsigned divide(unsigned n) const {
        return (__umulhi(n, multiplier) + n) >> shift;
    }
};

struct SoftmaxParameters {
    int64 rows, columns;  // products of the sizes
    int64 kept_size[kKeptAxes];
    Divisor reduced[kReducedAxes];
    int kept_axes, reduced_axes;  // at least 1
    int lanes;                    // of a team: a power of two
    int across;  // neighbouring threads belong to neighbouring rows, not to one row
    Operand input[3];
    Operand where;  // bytes; a column takes part where it is not 0
    Operand output[2];
};

// Where a row begins in each operand.
struct Place {
    int64 input[3] = {}, where = 0, output[2] = {};

    __device__ __forceinline__ Place(const SoftmaxParameters& p, int64 row) {
#pragma unroll 1
        for (int axis = p.kept_axes - 1; axis > 0; --axis) {
            int64 quotient = row / p.kept_size[axis];
            move(p, axis, row - quotient * p.kept_size[axis]);
            row = quotient;
        }
        move(p, 0, row);
    }

  private:
    __device__ __forceinline__ void move(const SoftmaxParameters& p, int axis, int64 steps) {
#pragma unroll
        for (int i = 0; i < 3; ++i) input[i] += steps * p.input[i].kept_stride[axis];
        where += steps * p.where.kept_stride[axis];
#pragma unroll
        for (int i = 0; i < 2; ++i) output[i] += steps * p.output[i].kept_stride[axis];
    }
};

// One row of an operand with columns.
template <typename T, Layout kLayout>
struct Row {
    const SoftmaxParameters& p;
    const Operand& operand;
    T* data;

    __device__ __forceinline__ Row(const SoftmaxParameters& p, const Operand& operand, int64 start)
        : p(p), operand(operand), data(static_cast<T*>(operand.data)) {
        if (data) data += start;
    }

    __device__ __forceinline__ T& at(int64 column) const {
        if (kLayout != kScattered) return data[column * operand.reduced_stride[0]];
        unsigned rest = static_cast<unsigned>(column);
        int64 offset = 0;
        for (int axis = p.reduced_axes - 1; axis > 0; --axis) {
            unsigned quotient = p.reduced[axis].divide(rest);
            offset += int64(rest - quotient * p.reduced[axis].size) * operand.reduced_stride[axis];
            rest = quotient;
        }
        return data[offset + int64(rest) * operand.reduced_stride[0]];
    }

    // Reads a chunk. Columns past the end, and those that `where` hides, become `fill`.
    __device__ __forceinline__ Vector<T> load(int64 column,
                                              const Row<unsigned char, kLayout>& where,
                                              T fill) const {
        Vector<T> chunk;
        if constexpr (kLayout == kPacked) {
            if (column < p.columns) {
                chunk = *reinterpret_cast<const Vector<T>*>(data + column);
            } else {
#pragma unroll
                for (int v = 0; v < kVector<T>; ++v) chunk.element[v] = fill;
            }
        } else {
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v)
                chunk.element[v] = column + v < p.columns ? at(column + v) : fill;
            where.hide(column, chunk, fill);
        }
        return chunk;
    }

    __device__ __forceinline__ void store(int64 column, const Vector<T>& chunk) const {
        if constexpr (kLayout == kPacked) {
            if (column < p.columns) *reinterpret_cast<Vector<T>*>(data + column) = chunk;
        } else {
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v)
                if (column + v < p.columns) at(column + v) = chunk.element[v];
        }
    }

    // Replaces the columns of a chunk where this row, a `where`, is 0; an absent one hides nothing.
    template <typename V>
    __device__ __forceinline__ void hide(int64 column, Vector<V>& chunk, V fill) const {
        if (kLayout == kPacked || !data) return;
#pragma unroll
        for (int v = 0; v < kVector<V>; ++v)
            if (column + v < p.columns && !at(column + v)) chunk.element[v] = fill;
    }
};

template <Layout kLayout>
using WhereRow = Row<unsigned char, kLayout>;

// An entry of an operand without columns.
template <typename T>
__device__ __forceinline__ Accumulator<T> read_entry(const Operand& operand, int64 at) {
    return operand.wide ? static_cast<const Accumulator<T>*>(operand.data)[at]
                        : widen(static_cast<const T*>(operand.data)[at]);
}

template <typename T>
__device__ __forceinline__ void write_entry(const Operand& operand, int64 at,
                                            Accumulator<T> value) {
    if (operand.wide)
        static_cast<Accumulator<T>*>(operand.data)[at] = value;
    else
        static_cast<T*>(operand.data)[at] = narrow<T>(value);
}

// ------------------------------------------------------------------------------------- teams

template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int bits) {
    return __shfl_xor_sync(kFullWarp, value, bits);
}
template <typename A>
__device__ __forceinline__ OnlineSoftmax<A> shuffle_xor(OnlineSoftmax<A> value, int bits) {
    return {shuffle_xor(value.m, bits), shuffle_xor(value.l, bits)};
}

// The threads of a block in teams of `lanes`: lane and slot (the team's number) of this thread.
// With `across`, the threads of a warp belong to different rows, whose elements are neighbours in
// memory.
struct Team {
    int lanes, slots, lane, slot;
    bool across;

    __device__ __forceinline__ explicit Team(const SoftmaxParameters& p)
        : lanes(p.lanes), slots(blockDim.x / p.lanes), across(p.across) {
        int thread = threadIdx.x;
        lane = across ? thread / slots : thread % lanes;
        slot = across ? thread % slots : thread / lanes;
    }

    // Bytes that reductions of V need: a value a thread, or a warp.
    template <typename V>
    __device__ __forceinline__ int scratch_bytes() const {
        int values = across ? blockDim.x : blockDim.x / 32;
        return (values * int(sizeof(V)) + 127) / 128 * 128;
    }

    // Combines the values of a team's lanes, bit 0 of their numbers first, and gives all of them
    // the result. To be called by all threads of the block.
    template <typename V, typename Combine>
    __device__ __forceinline__ V all_reduce(V value, V* scratch, Combine combine) const {
        if (across) return across_warps(value, scratch, combine);
#pragma unroll 1
        for (int bit = 1; bit < lanes && bit < 32; bit *= 2)
            value = combine(value, shuffle_xor(value, bit));
        if (lanes <= 32) return value;

        int warp = threadIdx.x / 32, warps = lanes / 32;
        __syncthreads();  // scratch may still be read by an earlier reduction
        if (threadIdx.x % 32 == 0) scratch[warp] = value;
        __syncthreads();
        value = scratch[warp / warps * warps + threadIdx.x % warps];
#pragma unroll 1
        for (int bit = 1; bit < warps; bit *= 2) value = combine(value, shuffle_xor(value, bit));
        return value;
    }

  private:
    template <typename V, typename Combine>
    __device__ __forceinline__ V across_warps(V value, V* scratch, Combine combine) const {
#pragma unroll 1
        for (int bit = 1; bit < lanes; bit *= 2) {
            __syncthreads();
            scratch[threadIdx.x] = value;
            __syncthreads();
            value = combine(value, scratch[threadIdx.x ^ (bit * slots)]);
        }
        return value;
    }
};

struct Maximum {
    template <typename A>
    __device__ __forceinline__ A operator()(A a, A b) const {
        return maximum(a, b);
    }
};
struct Plus {
    template <typename A>
    __device__ __forceinline__ A operator()(A a, A b) const {
        return add(a, b);
    }
};
struct Merge {
    template <typename A>
    __device__ __forceinline__ OnlineSoftmax<A> operator()(const OnlineSoftmax<A>& a,
                                                           const OnlineSoftmax<A>& b) const {
        return a.merge(b);
    }
};

// The first row of this block, and the step to its next: rows may outnumber the grid's threads.
// Every thread of a block takes the same number of turns, because reductions are barriers.
__device__ __forceinline__ int64 first_row(const Team& team) {
    return int64(blockIdx.x) * team.slots;
}
__device__ __forceinline__ int64 row_step(const Team& team) {
    return int64(gridDim.x) * team.slots;
}

// Calls visit(i, column) for the chunks of this lane from left to right. kChunks > 0: for so many,
// unrolled, so that i can index registers; they may lie past the end.
template <typename T, int kChunks = 0, typename Visit>
__device__ __forceinline__ void for_each_chunk(const SoftmaxParameters& p, const Team& team,
                                               Visit visit) {
    if constexpr (kChunks > 0) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) visit(i, (i * team.lanes + team.lane) * kVector<T>);
    } else {
        int i = 0;
        int64 step = int64(team.lanes) * kVector<T>;
#pragma unroll 1
        for (int64 column = team.lane * kVector<T>; column < p.columns; column += step)
            visit(i++, column);
    }
}

// The sum of exp(x - m) over a chunk.
template <typename T, typename A>
__device__ __forceinline__ A sum_weights(const OnlineSoftmax<A>& state, const Vector<T>& chunk) {
    A sum = 0;
#pragma unroll
    for (int v = 0; v < kVector<T>; ++v) sum = add(sum, state.weight(widen(chunk.element[v])));
    return sum;
}

template <typename T, typename A>
__device__ __forceinline__ A largest(A m, const Vector<T>& chunk) {
#pragma unroll
    for (int v = 0; v < kVector<T>; ++v) m = maximum(m, widen(chunk.element[v]));
    return m;
}

}  // namespace cuflash

// How the softmax kernels see their arrays: as rows to be normalised, each of so many columns.
//
// The axes that are kept number the rows, those that are reduced the columns, the last axis given
// fastest. Every operand has strides of its own for both, so that any view is read where it lies. A
// team of lanes owns a row; chunk c of a row, kVector<T> columns, belongs to lane c % lanes. Each
// lane adds up its chunks from left to right, the lanes of a group of 32 merge pairwise and so do
// the groups: the sum of a row depends on its values and on the number of lanes alone, not on
// strides, neighbours or the mapping of lanes to threads.
#pragma once

#include "lib/numeric.cuh"
#include "lib/online_softmax.cuh"

namespace cuflash {

// kPacked: rows of whole, aligned chunks, and no `where`: moved 16 bytes at a time.
// kStrided: one reduced axis of any stride. kScattered: several.
enum Layout { kPacked, kStrided, kScattered };

// Of a block: leaves each thread 128 registers, of which 16 chunks take 64.
constexpr int kMaxThreads = 512;
// Blocks of so many threads that share a multiprocessor, so that one computes while the other waits
// for memory: with 64 registers a thread, of which 8 chunks take 32. What the compiler makes of 4
// chunks and more from sm_100 on leaves no room for that, nor do two operands of double with an
// exponential.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kMostShared = 2;
#else
constexpr int kMostShared = 8;
#endif
template <int kChunks>
constexpr int kMinBlocks = 0 < kChunks && kChunks <= kMostShared ? 2 : 1;
template <typename T, int kChunks>
constexpr int kMinBlocksOfPairs = sizeof(T) < 8 ? kMinBlocks<2 * kChunks> : 1;
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
    int log2_lanes;               // of a team in one block: a power of two
    int across;    // neighbouring threads belong to neighbouring rows, not to one row
    int parts;     // of a row, each of one block, where blocks do not hear from each other
    int stages;    // of the ring through which rows are streamed, see `Feed`
    int64 ahead;   // rows from one to the one that takes its place on the chip; 0: not to prefetch
    void* states;  // (rows, parts): of the parts
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
    // `Index`, here and below, is int where columns are few.
    template <typename Index>
    __device__ __forceinline__ Vector<T> load(Index column,
                                              const Row<unsigned char, kLayout>& where,
                                              T fill) const {
        Vector<T> chunk;
        if constexpr (kLayout == kPacked) {
            chunk = load_streaming(data + column, column < Index(p.columns), fill);
        } else {
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v)
                chunk.element[v] = column + v < Index(p.columns) ? at(column + v) : fill;
            where.hide(column, chunk, fill);
        }
        return chunk;
    }

    template <typename Index>
    __device__ __forceinline__ void store(Index column, const Vector<T>& chunk) const {
        if constexpr (kLayout == kPacked) {
            if (column < Index(p.columns)) store_streaming(data + column, chunk);
        } else {
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v)
                if (column + v < Index(p.columns)) at(column + v) = chunk.element[v];
        }
    }

    // Replaces the columns of a chunk where this row, a `where`, is 0; an absent one hides nothing.
    template <typename Index, typename V>
    __device__ __forceinline__ void hide(Index column, Vector<V>& chunk, V fill) const {
        if constexpr (kLayout != kPacked) {
            if (!data) return;
#pragma unroll
            for (int v = 0; v < kVector<V>; ++v)
                if (column + v < Index(p.columns) && !at(column + v)) chunk.element[v] = fill;
        }
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

template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int bits) {
    return __shfl_xor_sync(kFullWarp, value, bits);
}

// Combines the values of `count` neighbouring lanes of a warp, bit 0 of their numbers first.
template <typename V, typename Combine>
__device__ __forceinline__ V butterfly(V value, int count, Combine combine) {
#pragma unroll 1
    for (int bit = 1; bit < count; bit *= 2) value = combine(value, shuffle_xor(value, bit));
    return value;
}

// A team within one block: there are no other blocks to hear from.
struct OneBlock {
    static constexpr bool kGather = false;

    __device__ __forceinline__ explicit OneBlock(const SoftmaxParameters&) {}
    __device__ __forceinline__ int count() const { return 1; }
    __device__ __forceinline__ int rank() const { return 0; }
};

// The blocks of a row that share its columns and do not hear from each other.
class Parts {
  public:
    static constexpr bool kGather = false;

    __device__ __forceinline__ explicit Parts(const SoftmaxParameters& p) : count_(p.parts) {}
    __device__ __forceinline__ int count() const { return count_; }
    __device__ __forceinline__ int rank() const { return blockIdx.x % count_; }

  private:
    int count_;
};

// Bytes that a thread or warp gives to the others of its team at a time: two accumulators.
constexpr int kExchange = 16;

// The threads of a block in teams of `lanes`: lane and slot (the team's number) of this thread.
// With `across`, the threads of a warp belong to different rows, whose elements are neighbours in
// memory. A team may span all threads of several blocks, see `Blocks`: all_lanes() counts them all.
// What reduces is to be called by all threads of the block.
template <Layout kLayout, typename Blocks = OneBlock>
struct Team {
  private:
    Blocks blocks_;

  public:
    int lanes, slots, lane, slot;
    bool across;

    // `memory` is shared memory of 2 * kExchange bytes a thread (across) or a warp.
    __device__ __forceinline__ Team(const SoftmaxParameters& p, unsigned char* memory)
        : blocks_(p),
          lanes(1 << p.log2_lanes),
          across(kLayout != kPacked && p.across),
          memory_(memory) {
        const int thread = threadIdx.x;
        slots = blockDim.x >> p.log2_lanes;
        // Both are powers of two.
        lane = across ? thread >> (31 - __clz(slots)) : thread & (lanes - 1);
        slot = across ? thread & (slots - 1) : thread >> p.log2_lanes;
    }

    __device__ __forceinline__ const Blocks& blocks() const { return blocks_; }
    // Lanes of the team, and the number of this one, in all its blocks.
    __device__ __forceinline__ int all_lanes() const { return lanes * blocks_.count(); }
    __device__ __forceinline__ int lane_of_all() const { return lane + blocks_.rank() * lanes; }

    // Where the memory that reductions need ends.
    __device__ __forceinline__ unsigned char* memory_end() const {
        return memory_ + (2 * exchange_bytes() + 127) / 128 * 128;
    }

    // Combines the values of a group: up to 32 lanes.
    template <typename V, typename Combine>
    __device__ __forceinline__ V reduce_group(V value, Combine combine) {
        int count = lanes < 32 ? lanes : 32;
        return across ? exchange(value, 1, count, combine) : butterfly(value, count, combine);
    }

    // Unites the states of the groups of a team, each known to all lanes of the group.
    template <typename A>
    __device__ __forceinline__ OnlineSoftmax<A> unite(OnlineSoftmax<A> state) {
        if (lanes > 32) {
            if (across) {
                A m = exchange(state.m, 32, lanes, Maximum{});
                state = {m, exchange(state.relative_to(m), 32, lanes, Plus{})};
            } else {
                state = merge(gather_groups(state), lanes / 32);
            }
        }
        if constexpr (Blocks::kGather) state = merge(blocks_.gather(state), blocks_.count());
        return state;
    }

    // Unites the states of all lanes.
    template <typename A>
    __device__ __forceinline__ OnlineSoftmax<A> unite_lanes(const OnlineSoftmax<A>& state) {
        const A m = reduce_group(state.m, Maximum{});
        return unite(OnlineSoftmax<A>{m, reduce_group(state.relative_to(m), Plus{})});
    }

    // Combines the values of all lanes.
    template <typename V, typename Combine>
    __device__ __forceinline__ V reduce(V value, Combine combine) {
        value = reduce_group(value, combine);
        if (lanes > 32) {
            value = across ? exchange(value, 32, lanes, combine)
                           : butterfly(gather_groups(value), lanes / 32, combine);
        }
        if constexpr (Blocks::kGather)
            value = butterfly(blocks_.gather(value), blocks_.count(), combine);
        return value;
    }

  private:
    unsigned char* memory_;
    int turn_ = 0;

    __device__ __forceinline__ int exchange_bytes() const {
        return (across ? blockDim.x : blockDim.x / 32) * kExchange;
    }

    // Memory for one exchange. Two take turns, so that one barrier an exchange will do: who writes
    // for the next but one has passed the next one's barrier, and all have read by then.
    template <typename V>
    __device__ __forceinline__ V* buffer() {
        static_assert(sizeof(V) <= kExchange, "more than an exchange can move");
        turn_ ^= 1;
        return reinterpret_cast<V*>(memory_ + turn_ * exchange_bytes());
    }

    // Gives each lane the value of the group whose number in the team is that lane's in its warp.
    template <typename V>
    __device__ __forceinline__ V gather_groups(const V& value) {
        V* values = buffer<V>();
        const int warp = threadIdx.x / 32, groups = lanes / 32;
        if (threadIdx.x % 32 == 0) values[warp] = value;
        __syncthreads();
        return values[(warp & -groups) + (threadIdx.x & (groups - 1))];
    }

    // Combines across warps, over the bits first <= bit < last of the lanes' numbers.
    template <typename V, typename Combine>
    __device__ __forceinline__ V exchange(V value, int first, int last, Combine combine) {
#pragma unroll 1
        for (int bit = first; bit < last; bit *= 2) {
            V* values = buffer<V>();
            values[threadIdx.x] = value;
            __syncthreads();
            value = combine(value, values[threadIdx.x ^ (bit * slots)]);
        }
        return value;
    }

    template <typename A>
    static __device__ __forceinline__ OnlineSoftmax<A> merge(const OnlineSoftmax<A>& state,
                                                             int count) {
        A m = butterfly(state.m, count, Maximum{});
        return {m, butterfly(state.relative_to(m), count, Plus{})};
    }
};

// The first row of this block, and the step to its next: rows may outnumber the grid's threads.
// Every thread of a block takes the same number of turns, because reductions are barriers.
template <typename Team>
__device__ __forceinline__ int64 first_row(const Team& team) {
    return int64(blockIdx.x / team.blocks().count()) * team.slots;
}
template <typename Team>
__device__ __forceinline__ int64 row_step(const Team& team) {
    return int64(gridDim.x / team.blocks().count()) * team.slots;
}

// Calls visit(i, column) for the chunks of this lane from left to right. kChunks > 0: for so many,
// unrolled, so that i can index registers; they may lie past the end.
template <typename T, int kChunks, typename Team, typename Visit>
__device__ __forceinline__ void for_each_chunk(const SoftmaxParameters& p, const Team& team,
                                               Visit visit) {
    const int step = team.all_lanes() * kVector<T>, start = team.lane_of_all() * kVector<T>;
    if constexpr (kChunks > 0) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) visit(i, start + i * step);
    } else {
        int i = 0;
#pragma unroll 1
        for (int64 column = start; column < p.columns; column += step) visit(i++, column);
    }
}

// From one chunk of a lane to its next, in columns.
template <typename T, typename Team>
__device__ __forceinline__ int64 chunk_step(const Team& team) {
    return int64(team.all_lanes()) * kVector<T>;
}

// Chunks that a lane reads at a time where it does not hold its row: 16 or more elements in flight.
template <typename T>
constexpr int kBatch = sizeof(T) == 2 ? 2 : 4;

// Calls visit(chunks, column) for the chunks of this lane from left to right, kCount at a time:
// chunk j of them is load(column + j * chunk_step(team)). The last ones may lie past the end.
template <typename T, int kCount, typename Team, typename Load, typename Visit>
__device__ __forceinline__ void for_each_batch(const SoftmaxParameters& p, const Team& team,
                                               Load load, Visit visit) {
    const int64 step = chunk_step<T>(team);
#pragma unroll 1
    for (int64 column = team.lane_of_all() * kVector<T>; column < p.columns;
         column += kCount * step) {
        decltype(load(column)) chunks[kCount];
#pragma unroll
        for (int j = 0; j < kCount; ++j) chunks[j] = load(column + j * step);
        visit(chunks, column);
    }
}

// ------------------------------------------------------------------------------------ chunks

template <bool kFirst, typename First, typename Second>
struct Either {
    using type = First;
};
template <typename First, typename Second>
struct Either<false, First, Second> {
    using type = Second;
};

// Combines the elements pairwise: in the same order by every method, and in few dependent steps.
template <typename T, typename Combine>
__device__ __forceinline__ Accumulator<T> fold(Wide<T> chunk, Combine combine) {
#pragma unroll
    for (int width = kVector<T> / 2; width > 0; width /= 2) {
#pragma unroll
        for (int v = 0; v < width; ++v)
            chunk.element[v] = combine(chunk.element[v], chunk.element[v + width]);
    }
    return chunk.element[0];
}

template <typename T>
__device__ __forceinline__ Accumulator<T> sum(const Wide<T>& chunk) {
    return fold(chunk, Plus{});
}
template <typename T>
__device__ __forceinline__ Accumulator<T> largest(Accumulator<T> m, const Wide<T>& chunk) {
    return maximum(m, fold(chunk, Maximum{}));
}

// weight(x) for each element.
template <typename T, typename Weight>
__device__ __forceinline__ Wide<T> weights(const Weight& weight, Wide<T> chunk) {
#pragma unroll
    for (int v = 0; v < kVector<T>; ++v) chunk.element[v] = weight(chunk.element[v]);
    return chunk;
}

// The sum of exp(x - m) over a batch of chunks.
template <typename T>
__device__ __forceinline__ Accumulator<T> sum_of_weights(const OnlineSoftmax<Accumulator<T>>& state,
                                                         const Vector<T>* chunks) {
    using A = Accumulator<T>;
    A total = 0;
#pragma unroll
    for (int j = 0; j < kBatch<T>; ++j)
        total = add(total, sum(weights([&](A x) { return state.weight(x); }, Wide<T>(chunks[j]))));
    return total;
}

}  // namespace cuflash

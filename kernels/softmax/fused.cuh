// Softmax of rows that are held on chip: two trips to memory, one read and one write.
//
// The lanes of a group share one maximum, m of the group: weights exp(x - m) are made once, before
// the team has united its groups' states, and one factor a group, exp(m - m of the row) / l,
// normalises them. That leaves one exchange between the warps, or blocks, of a team.
#pragma once

#include "lib/ptx_prefetch.cuh"
#include "softmax/result.cuh"

namespace cuflash {

// exp(x - m) for scores of a row with maximum m.
template <typename T, bool kShort>
class Exponential {
    using A = Accumulator<T>;

  public:
    static constexpr bool kOfNear = false;

    __device__ __forceinline__ explicit Exponential(A m) : m_(reference(m)) {}
    __device__ __forceinline__ A operator()(A x) const { return quick_exponential(x - m_); }

  private:
    A m_;
};
// Of scores near 0 by fewer instructions, up to a factor near 1 that all weights relative to m
// share: 2^(x * log2(e) - m * log2(e)), where the first product is exact and the second is rounded.
//
// Of 16-bit scores two in place of three. Large ones are so far apart that the others weigh nothing
// beside m, in any base; there it is 2, in which nothing overflows.
template <typename T>
class Exponential<T, true> {
  public:
    static constexpr bool kOfNear = false;

    __device__ __forceinline__ explicit Exponential(float m) {
        m = reference(m);
        slope_ = fabsf(m) < 1048576.0f ? 1.44269504f : 1.0f;
        shift_ = -multiply(m, slope_);
    }
    __device__ __forceinline__ float operator()(float x) const {
        return exp2f(multiply_add(x, slope_, shift_));
    }

  private:
    float slope_, shift_;
};
// Of double 15 in place of 20. The factor's error, |m| * 2^-53, is 2^-47 at the most: other scores
// are to be made relative to m before, by a caller that asks `is_far`. Where m is +inf the weight
// of +inf is NaN.
template <>
class Exponential<double, true> {
  public:
    static constexpr bool kOfNear = true;
    static __device__ __forceinline__ bool is_far(double m) {
        return fabs(m) >= kNear && m != -infinity<double>();
    }

    __device__ __forceinline__ explicit Exponential(double m)
        : shift_(fabs(m) < kNear ? -multiply(m, kLog2OfE) : 0.0) {}
    __device__ __forceinline__ double operator()(double x) const {
        return quick_exp2(multiply_add(x, kLog2OfE, shift_));
    }

  private:
    static constexpr double kNear = 64, kLog2OfE = 1.4426950408889634;
    double shift_;
};
// The factor cancels where weights are normalised by their own sum, and nowhere else.
template <typename T, typename Operation>
using Weight = Exponential<T, sizeof(T) == 2 && Operation::kOfWeights>;
// The same for kernels with the registers that far scores take.
template <typename T, typename Operation>
using QuickWeight = Exponential<T, sizeof(T) != 4 && Operation::kOfWeights>;

// The result of a score, or with kWeight of its weight, where the operation's base is its group's.
template <typename T, bool kWeight, typename Operation>
__device__ __forceinline__ Accumulator<T> result_of_held(const Operation& operation,
                                                         Accumulator<T> x) {
    if constexpr (Operation::kOfWeights && !kWeight)
        return operation.of_weight(Weight<T, Operation>(operation.base.m)(x));
    else
        return result_of<kWeight>(operation, x);
}

// The largest of many scores; of 16-bit ones two at a time, without widening them.
template <typename T>
struct Largest {
    T m = lowest<T>();

    template <typename Chunk>
    __device__ __forceinline__ void push(const Chunk& chunk) {
        m = largest(m, Wide<T>(chunk));
    }
    __device__ __forceinline__ Accumulator<T> value() const { return m; }
};
template <typename T, typename Two>
struct LargestOfPairs {
    Two m{lowest<T>(), lowest<T>()};
    float of_wide = -infinity<float>();

    __device__ __forceinline__ void push(const Wide<T>& chunk) {
        of_wide = largest<T>(of_wide, chunk);
    }

    __device__ __forceinline__ void push(const Vector<T>& chunk) {
        struct Pairs {
            Two pair[4];
        };
        const Pairs pairs = bytes_as<Pairs>(chunk);
        m = __hmax2(m, __hmax2(__hmax2(pairs.pair[0], pairs.pair[1]),
                               __hmax2(pairs.pair[2], pairs.pair[3])));
    }
    __device__ __forceinline__ float value() const {
        return maximum(of_wide, maximum(widen(m.x), widen(m.y)));
    }
};
template <>
struct Largest<__half> : LargestOfPairs<__half, __half2> {};
template <>
struct Largest<__nv_bfloat16> : LargestOfPairs<__nv_bfloat16, __nv_bfloat162> {};

// A chunk's scores relative to m.
template <typename A>
__device__ __forceinline__ Wide<A> relative(Wide<A> chunk, A m) {
#pragma unroll
    for (int v = 0; v < kVector<A>; ++v) chunk.element[v] = add(chunk.element[v], -m);
    return chunk;
}

// The chunks of a row that one thread holds, in registers or in its own places of shared memory:
// scores, then their weights where the place is wide enough for them and the operation wants them:
// in registers, kMostWeights.
template <typename T, typename Operation, int kChunks, int kMostWeights = 32>
class Held {
    using A = Accumulator<T>;
    static constexpr bool kRegisters = kChunks > 0;
    // 32 accumulators leave room for as many threads as hide the latency of memory.
    static constexpr bool kWeights =
        Operation::kOfWeights &&
        (sizeof(T) == sizeof(A) || (kRegisters && kChunks * kVector<T> <= kMostWeights));
    using Chunk = typename Either<kWeights, Wide<T>, Vector<T>>::type;

  public:
    __device__ __forceinline__ explicit Held(unsigned char* memory)
        : shared_(reinterpret_cast<Chunk*>(memory)) {}

    __device__ __forceinline__ void put(int i, const Vector<T>& scores) { at(i) = Chunk(scores); }
    // As they are held: Vector<T>, or Wide<T>.
    __device__ __forceinline__ const Chunk& scores(int i) { return at(i); }

    // Makes scores relative to m.
    __device__ __forceinline__ void subtract(A m) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) registers_[i] = relative(registers_[i], m);
    }
    // The weights; the scores of put() are replaced by them where they fit.
    template <typename Weight>
    __device__ __forceinline__ Wide<T> weigh(int i, const Weight& weight) {
        Wide<T> result = weights(weight, Wide<T>(at(i)));
        if constexpr (kWeights) at(i) = result;
        return result;
    }

    // Has the compiler compute weights again that do not fit, instead of keeping them.
    __device__ __forceinline__ void forget_weights() {
        if constexpr (!kWeights && kRegisters) {
#pragma unroll
            for (int i = 0; i < kChunks; ++i) registers_[i] = words_here(registers_[i]);
        }
    }

    __device__ __forceinline__ Vector<T> result(int i, const Operation& operation) {
        const Wide<T> chunk(at(i));
        Vector<T> result;
#pragma unroll
        for (int v = 0; v < kVector<T>; ++v)
            result.element[v] = narrow<T>(result_of_held<T, kWeights>(operation, chunk.element[v]));
        return result;
    }

  private:
    Chunk registers_[kRegisters ? kChunks : 1];
    Chunk* shared_;

    __device__ __forceinline__ Chunk& at(int i) {
        return kRegisters ? registers_[i] : shared_[i * blockDim.x + threadIdx.x];
    }
};

// Prefetching takes registers, of which 16 chunks of double leave none from sm_100 on.
template <typename T, int kChunks>
constexpr bool kPrefetches = sizeof(T) < 8 || kChunks <= 8 || kMostShared == 8;

// Has the chunks that this block will hold of a row brought to L2, so that memory has work while an
// earlier row is reduced and written: one run of neighbouring chunks a thread. For blocks of one
// team.
template <typename T, int kChunks, typename Team>
__device__ __forceinline__ void prefetch_row(const SoftmaxParameters& p, const Team& team,
                                             int64 row) {
    const int run = threadIdx.x;
    if (run >= kChunks || row >= p.rows) return;
    const int64 first = int64(run) * team.all_lanes() + team.blocks().rank() * team.lanes;
    const int64 column = first * kVector<T>, left = p.columns - column;
    if (left <= 0) return;
    const int count = left < team.lanes * kVector<T> ? int(left) : team.lanes * kVector<T>;
    const T* x = static_cast<const T*>(p.input[0].data) + Place(p, row).input[0];
    prefetch_to_l2(x + column, count * int(sizeof(T)));
}

// output = Operation of x, row by row. `memory` is the block's dynamic shared memory.
template <typename T, typename Operation, Layout kLayout, int kChunks, typename Blocks = OneBlock>
__device__ __forceinline__ void softmax_of_held(const SoftmaxParameters& p, unsigned char* memory) {
    using A = Accumulator<T>;
    Team<kLayout, Blocks> team(p, memory);
    Held<T, Operation, kChunks> held(team.memory_end());

    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        const int64 row = first + team.slot;
        const bool active = row < p.rows;
        const Place place(p, active ? row : 0);
        const WhereRow<kLayout> where(p, p.where, place.where);

        OnlineSoftmax<A> group = OnlineSoftmax<A>::identity();
        if (active) {
            Row<T, kLayout> x(p, p.input[0], place.input[0]);
            for_each_chunk<T, kChunks>(p, team, [&](int i, auto column) {
                held.put(i, x.load(column, where, lowest<T>()));
            });
            if constexpr (kLayout == kPacked && kChunks > 0 && kPrefetches<T, kChunks>) {
                if (p.ahead) prefetch_row<T, kChunks>(p, team, row + p.ahead);
            }
            Largest<T> top;
            for_each_chunk<T, kChunks>(p, team, [&](int i, auto) { top.push(held.scores(i)); });
            group.m = top.value();
        }
        group.m = team.reduce_group(group.m, Maximum{});
        if (active) {
            const Weight<T, Operation> weight(group.m);
            for_each_chunk<T, kChunks>(
                p, team, [&](int i, auto) { group.l = add(group.l, sum(held.weigh(i, weight))); });
        }
        group.l = team.reduce_group(group.l, Plus{});
        const OnlineSoftmax<A> state = team.unite(group);
        if (!active) continue;

        Operation operation(state, group);
        if constexpr (Operation::kColumns) {
            Row<T, kLayout> y(p, p.output[0], place.output[0]);
            const bool poisoned = is_nan(operation.value(-infinity<A>()));
            for_each_chunk<T, kChunks>(p, team, [&](int i, auto column) {
                Vector<T> result = held.result(i, operation);
                if (poisoned) where.hide(column, result, narrow<T>(operation.hidden()));
                y.store(column, result);
            });
        } else if (team.lane == 0) {
            operation.template write<T>(p, place);
        }
    }
}

}  // namespace cuflash

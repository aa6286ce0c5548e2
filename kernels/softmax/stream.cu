// Softmax and its gradients of many long contiguous rows (sm_90): two trips to memory and three,
// which never pause. The blocks of a cluster hold a row in registers while the next ones come to
// shared memory.
//
// x (rows, columns) -> output[0] (rows, columns); gradients as in backward.cu. Every lane holds
// kChunks chunks of its row in registers (of each operand), and of softmax the rest of them where
// they were copied to.
// Grid: clusters of kBlocks blocks of one team, as many as fit on the GPU at a time, each cluster
// row by row; any number of them is right. Dynamic shared memory: [what a team's reductions
// need][`Feed`], with stages for a lane's chunks in registers and for its others.
#include "softmax/cluster.cuh"
#include "softmax/feed.cuh"
#include "softmax/fused.cuh"

namespace cuflash {

// The largest of many scores; of 16-bit ones two at a time, without widening them.
template <typename T>
struct Largest {
    T m = lowest<T>();

    __device__ __forceinline__ void push(const Vector<T>& chunk) { m = largest(m, Wide<T>(chunk)); }
    __device__ __forceinline__ Accumulator<T> value() const { return m; }
};
template <typename T, typename Two>
struct LargestOfPairs {
    Two m{lowest<T>(), lowest<T>()};

    __device__ __forceinline__ void push(const Vector<T>& chunk) {
        struct Pairs {
            Two pair[4];
        };
        const Pairs pairs = bytes_as<Pairs>(chunk);
        m = __hmax2(m, __hmax2(__hmax2(pairs.pair[0], pairs.pair[1]),
                               __hmax2(pairs.pair[2], pairs.pair[3])));
    }
    __device__ __forceinline__ float value() const { return maximum(widen(m.x), widen(m.y)); }
};
template <>
struct Largest<__half> : LargestOfPairs<__half, __half2> {};
template <>
struct Largest<__nv_bfloat16> : LargestOfPairs<__nv_bfloat16, __nv_bfloat162> {};

template <int kBlocks>
struct BlocksOf {
    using type = Cluster<kBlocks>;
};
template <>
struct BlocksOf<1> {
    using type = OneBlock;
};

template <typename T, typename Operation, int kChunks, int kBlocks>
__global__ void CUFLASH_CLUSTERS(kBlocks) __launch_bounds__(kMaxThreads, 1)
    stream(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    // The weights take the place of what was copied, if they fit there.
    constexpr bool kWeights = Operation::kOfWeights && sizeof(T) == sizeof(A);
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Team<kPacked, typename BlocksOf<kBlocks>::type> team(p, memory);
    Feed<T, 1, decltype(team)> feed(p, team, team.memory_end());
    const int runs = feed.runs(), columns = int(p.columns);
    const int step = team.all_lanes() * kVector<T>, start = team.lane_of_all() * kVector<T>;
    auto chunk_of = [&](int stage, int i) {
        return feed.chunk(stage, start + i * step < columns, lowest<T>());
    };

    for (int64 row = first_row(team); row < p.rows; row += row_step(team)) {
        Held<T, Operation, kChunks> held(nullptr);
        Largest<T> top;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int stage = i < runs ? feed.take() : 0;
            const Vector<T> scores = chunk_of(stage, i);
            held.put(i, scores);
            top.push(scores);
        }
        __syncthreads();
        feed.fetch(runs < kChunks ? runs : kChunks);
        int first_stage = 0;
#pragma unroll 1
        for (int i = kChunks; i < runs; ++i) {
            const int stage = feed.take();
            if (i == kChunks) first_stage = stage;
            top.push(chunk_of(stage, i));
        }
        OnlineSoftmax<A> group{team.reduce_group(top.value(), Maximum{}), A(0)};

        auto for_each_rest = [&](auto visit) {
            int stage = first_stage;
#pragma unroll 2
            for (int i = kChunks; i < runs; ++i) {
                visit(stage, i);
                if (++stage == p.stages) stage = 0;
            }
        };
#pragma unroll
        for (int i = 0; i < kChunks; ++i) group.l = add(group.l, sum(held.weigh(i, group)));
        for_each_rest([&](int stage, int i) {
            const Wide<T> ws = weights(group, Wide<T>(chunk_of(stage, i)));
            if constexpr (kWeights) feed.replace(stage, ws);
            group.l = add(group.l, sum(ws));
        });
        group.l = team.reduce_group(group.l, Plus{});
        const OnlineSoftmax<A> state = team.unite(group);
        held.forget_weights();

        const Operation operation(state, group);
        const Place place(p, row);
        const Row<T, kPacked> y(p, p.output[0], place.output[0]);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) y.store(start + i * step, held.result(i, operation));
        for_each_rest([&](int stage, int i) {
            const Wide<T> scores(chunk_of(stage, i));
            Vector<T> result;
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v)
                result.element[v] = narrow<T>(result_of<kWeights>(operation, scores.element[v]));
            y.store(start + i * step, result);
        });
        if (runs > kChunks) {
            if constexpr (kWeights) fence_shared_for_copies();
            __syncthreads();
            feed.fetch(runs - kChunks);
        }
    }
}

template <typename T, typename Gradient, int kChunks, int kBlocks>
__global__ void CUFLASH_CLUSTERS(kBlocks) __launch_bounds__(kMaxThreads, 1)
    stream_vjp(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Team<kPacked, typename BlocksOf<kBlocks>::type> team(p, memory);
    Feed<T, 2, decltype(team)> feed(p, team, team.memory_end());
    const int runs = feed.runs(), columns = int(p.columns);
    const int step = team.all_lanes() * kVector<T>, start = team.lane_of_all() * kVector<T>;
    for (int64 row = first_row(team); row < p.rows; row += row_step(team)) {
        Pair<T> held[kChunks];
        Sum<A> sum{A(0), A(0)};
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int dy = i < runs ? feed.take() : 0, y = i < runs ? feed.take() : 0;
            const bool present = start + i * step < columns;
            held[i] = {feed.chunk(dy, present, narrow<T>(A(0))),
                       feed.chunk(y, present, narrow<T>(Gradient::absent()))};
            const Wide<T> dys(held[i].dy), ys(held[i].y);
            Wide<T> terms;
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v) {
                terms.element[v] = Gradient::term(dys.element[v], ys.element[v]);
                if (ys.element[v] != Gradient::absent()) sum.occupied = 1;
            }
            sum.total = add(sum.total, cuflash::sum(terms));
        }
        __syncthreads();
        feed.fetch(2 * runs);
        sum = team.reduce(sum, Sum<A>{});

        if constexpr (sizeof(T) < sizeof(A)) {  // has the compiler widen again what would not fit
#pragma unroll
            for (int i = 0; i < kChunks; ++i) held[i] = words_here(held[i]);
        }
        const Place place(p, row);
        const Row<T, kPacked> dx(p, p.output[0], place.output[0]);
        const Gradient gradient{sum.total};
        const bool empty = sum.occupied == A(0);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const Wide<T> dys(held[i].dy), ys(held[i].y);
            Vector<T> result;
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v) {
                const A value = gradient.value(dys.element[v], ys.element[v]);
                result.element[v] = narrow<T>(empty ? A(0) : value);
            }
            dx.store(start + i * step, result);
        }
    }
}

}  // namespace cuflash

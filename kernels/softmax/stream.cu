// Softmax and its gradients of many long contiguous rows (sm_90): two trips to memory and three,
// which never pause. The blocks of a cluster hold a row in registers while the next ones come to
// shared memory.
//
// x (rows, columns) -> output[0] (rows, columns); gradients as in backward.cu. Every lane holds
// kChunks chunks of its row in registers (of each operand), and of softmax the rest of them where
// they were copied to.
// Rows have one kept axis. Each warp works on its own part of them: it waits for what it copied
// itself, and once a row for what the others have to say.
// Grid: clusters of kBlocks blocks of kWarps warps, as many as fit on the GPU at a time, each
// cluster row by row, as they are dealt out by p.states, an int that `begin_dealing` clears; any
// number of them is right. Dynamic shared memory: [`Exchange`][`Feed`], with more stages than a
// warp keeps of a row.
#include "softmax/exchange.cuh"
#include "softmax/feed.cuh"
#include "softmax/fused.cuh"

namespace cuflash {

// Weights that a lane keeps: of rows of float as many as it holds, of 16-bit ones half.
constexpr int kStreamWeights = 64;

__global__ void begin_dealing(const __grid_constant__ SoftmaxParameters p) {
    *static_cast<int*>(p.states) = 0;
}

// The states of all warps of a cluster's row i as one.
template <typename A, typename Exchange>
__device__ __forceinline__ OnlineSoftmax<A> unite_warps(Exchange& exchange,
                                                        const OnlineSoftmax<A>& state, int i) {
    const OnlineSoftmax<A>* states = exchange.gather(state, i);
    A m = -infinity<A>(), l = 0;
    exchange.for_each(states, [&](const OnlineSoftmax<A>& other) { m = maximum(m, other.m); });
    m = of_warp(m, Maximum{});
    exchange.for_each(states,
                      [&](const OnlineSoftmax<A>& other) { l = add(l, other.relative_to(m)); });
    return {m, of_warp(l, Plus{})};
}

// Blocks that share a multiprocessor: two that take turns where they are small and hold little.
template <int kChunks, int kWarps>
constexpr int kStreamBlocks = kWarps * kChunks <= 64 ? 2 : 1;

template <typename T, typename Operation, int kChunks, int kWarps, int kBlocks>
__global__ void CUFLASH_CLUSTERS(kBlocks)
    __launch_bounds__(32 * kWarps, (kStreamBlocks<kChunks, kWarps>))
        stream(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    using State = OnlineSoftmax<A>;
    // The weights take the place of what was copied, if they fit there.
    constexpr bool kReplaces = Operation::kOfWeights && sizeof(T) == sizeof(A);
    constexpr int kStages = kChunks / kRun<1>;  // of a row, in registers
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Exchange<State, kWarps, kBlocks> exchange(memory, static_cast<int*>(p.states));
    const WarpPart<T, 1> part(int(p.columns / kVector<T>), exchange.number(), exchange.kCount);
    Feed<WarpPart<T, 1>, decltype(exchange)> feed(p, exchange, exchange.memory_end(), part);
    const int lane = threadIdx.x % 32, stages = feed.stages();

    for (int row; (row = exchange.row(feed.number())) < p.rows;) {
        T* y = static_cast<T*>(p.output[0].data) + row * p.output[0].kept_stride[0] +
               (part.first + lane) * kVector<T>;
        Held<T, Operation, kChunks, kStreamWeights> held(nullptr);
        Largest<T> top;
        feed.template take_first<kStages>([&](int s, auto chunk) {
#pragma unroll
            for (int j = 0; j < kRun<1>; ++j) {
                const Vector<T> scores = chunk(j, lowest<T>());
                held.put(s * kRun<1> + j, scores);
                top.push(scores);
            }
        });
        // What is left of the part stays in its stages.
        int first_stage = 0;
#pragma unroll 1
        for (int s = kStages; s < stages; ++s) {
            const int stage = feed.take();
            if (s == kStages) first_stage = stage;
#pragma unroll
            for (int j = 0; j < kRun<1>; ++j) top.push(feed.chunk(stage, s, j, lowest<T>()));
        }
        auto for_each_rest = [&](auto visit) {
            int stage = first_stage;
#pragma unroll 1
            for (int s = kStages; s < stages; ++s, stage = feed.next(stage)) visit(stage, s);
        };

        State group{of_warp(top.value(), Maximum{}), A(0)};
        A m = group.m;
        if constexpr (QuickWeight<T, Operation>::kOfNear) {
            if (QuickWeight<T, Operation>::is_far(m)) {
                held.subtract(m);
                for_each_rest([&](int stage, int) {
#pragma unroll
                    for (int j = 0; j < kRun<1>; ++j)
                        feed.at(stage, j) =
                            bytes_as<uint4>(relative(bytes_as<Wide<T>>(feed.at(stage, j)), m));
                });
                m = 0;
            }
        }
        const QuickWeight<T, Operation> weight(m);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) group.l = add(group.l, sum(held.weigh(i, weight)));
        for_each_rest([&](int stage, int s) {
#pragma unroll
            for (int j = 0; j < kRun<1>; ++j) {
                const Wide<T> ws = weights(weight, Wide<T>(feed.chunk(stage, s, j, lowest<T>())));
                if constexpr (kReplaces) feed.at(stage, j) = bytes_as<uint4>(ws);
                group.l = add(group.l, sum(ws));
            }
        });
        group.l = of_warp(group.l, Plus{});
        const State state = unite_warps(exchange, group, feed.number());
        feed.learn();
        held.forget_weights();

        const Operation operation(state, group);
        // First what keeps the ring from filling.
        for_each_rest([&](int stage, int s) {
#pragma unroll
            for (int j = 0; j < kRun<1>; ++j) {
                if (!feed.has(s, j)) continue;
                const Wide<T> scores(bytes_as<Vector<T>>(feed.at(stage, j)));
                Vector<T> result;
#pragma unroll
                for (int v = 0; v < kVector<T>; ++v)
                    result.element[v] =
                        narrow<T>(result_of_held<T, kReplaces>(operation, scores.element[v]));
                store_streaming(y + (s * kRun<1> + j) * 32 * kVector<T>, result);
            }
            if constexpr (kReplaces) fence_shared_for_copies();
            feed.fetch(1);
        });
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const Vector<T> result = held.result(i, operation);
            if (i * 32 + lane < part.count) store_streaming(y + i * 32 * kVector<T>, result);
        }
    }
}

template <typename T, typename Gradient, int kChunks, int kWarps, int kBlocks>
__global__ void CUFLASH_CLUSTERS(kBlocks) __launch_bounds__(32 * kWarps, 1)
    stream_vjp(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Exchange<Sum<A>, kWarps, kBlocks> exchange(memory, static_cast<int*>(p.states));
    const WarpPart<T, 2> part(int(p.columns / kVector<T>), exchange.number(), exchange.kCount);
    Feed<WarpPart<T, 2>, decltype(exchange)> feed(p, exchange, exchange.memory_end(), part);
    const int lane = threadIdx.x % 32;

    for (int row; (row = exchange.row(feed.number())) < p.rows;) {
        T* dx = static_cast<T*>(p.output[0].data) + row * p.output[0].kept_stride[0] +
                (part.first + lane) * kVector<T>;
        Pair<T> held[kChunks];
        Sum<A> sum{A(0), A(0)};
        feed.template take_first<kChunks / kRun<2>>([&](int s, auto chunk) {
#pragma unroll
            for (int j = 0; j < kRun<2>; ++j) {
                const Pair<T> pair{chunk(j, narrow<T>(A(0)), 0),
                                   chunk(j, narrow<T>(Gradient::absent()), 1)};
                held[s * kRun<2> + j] = pair;
                const Wide<T> dys(pair.dy), ys(pair.y);
                Wide<T> terms;
#pragma unroll
                for (int v = 0; v < kVector<T>; ++v) {
                    terms.element[v] = Gradient::term(dys.element[v], ys.element[v]);
                    if (ys.element[v] != Gradient::absent()) sum.occupied = 1;
                }
                sum.total = add(sum.total, cuflash::sum(terms));
            }
        });
        sum = of_warp(sum, Sum<A>{});
        const Sum<A>* sums = exchange.gather(sum, feed.number());
        feed.learn();
        sum = {A(0), A(0)};
        exchange.for_each(sums, [&](const Sum<A>& other) { sum = Sum<A>{}(sum, other); });
        sum = of_warp(sum, Sum<A>{});

        // Has the compiler compute again what would not fit the registers.
#pragma unroll
        for (int i = 0; i < kChunks; ++i) held[i] = words_here(held[i]);
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
            if (i * 32 + lane < part.count) store_streaming(dx + i * 32 * kVector<T>, result);
        }
    }
}

}  // namespace cuflash

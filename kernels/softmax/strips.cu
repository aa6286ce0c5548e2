// Softmax of many rows that lie side by side in memory, such as the columns of a C-order matrix, as
// `stream` takes contiguous ones (sm_90): two trips to memory, which never pause.
//
// A strip is kRows * 32 neighbouring rows, kRows of them a lane. The columns are shared out to the
// warps of a cluster, runs of neighbours, whose lanes hold up to kHeld of them in registers while
// those of the next strips come to shared memory. Each lane has a state for each of its rows; the
// warps of a block unite theirs, then the blocks, some rows by each warp.
//
// x (rows, columns) -> output[0] (rows, columns). One kept axis of stride 1 and a multiple of 16
// bytes, one reduced axis of such a stride.
// Grid: clusters of kBlocks blocks of kWarps warps, as many as fit on the GPU at a time, each
// cluster strip by strip, as they are dealt out by p.states, see stream.cu; any number of them is
// right. Dynamic shared memory: [`Exchange`][states, united ones][`Feed`].
#include "softmax/columns.cuh"
#include "softmax/exchange.cuh"
#include "softmax/feed.cuh"
#include "softmax/fused.cuh"

namespace cuflash {

// The columns of a strip that belong to one of its warps. Each is a piece of memory by itself.
template <typename T, int kRows>
struct StripPart {
    using Element = T;
    static constexpr int kWidth = 32 * kRows, kPiece = kWidth * int(sizeof(T));
    static constexpr int kUnits = kStageBytes / kPiece;

    int first, count;

    __device__ __forceinline__ StripPart(int columns, int part, int parts) {
        const int each = (columns + parts - 1) / parts;
        first = part * each;
        count = columns - first < each ? columns - first : each;
        if (count < 0) count = 0;
    }
    // Strips, the last one perhaps narrower.
    static __device__ __forceinline__ int64 rows(const SoftmaxParameters& p) {
        return (p.rows + kWidth - 1) / kWidth;
    }

    // As `WarpPart::fetch`, a piece a lane.
    __device__ __forceinline__ void fetch(const SoftmaxParameters& p, int strip, int left,
                                          unsigned to, unsigned barrier) const {
        const int lane = threadIdx.x % 32, units = left < kUnits ? left : kUnits;
        const int64 row = int64(strip) * kWidth, beyond = p.rows - row;
        const int bytes = beyond < kWidth ? int(beyond) * int(sizeof(T)) : kPiece;
        if (lane == 0) barrier_arrive_expecting(barrier, units * bytes);
        if (lane < units) {
            const int64 column = first + count - left + lane;
            copy_bytes(to + lane * kPiece,
                       static_cast<const T*>(p.input[0].data) + row +
                           column * p.input[0].reduced_stride[0],
                       bytes, barrier);
        }
    }
};

// States of neighbouring rows.
template <typename A, int kCount>
struct States {
    OnlineSoftmax<A> of[kCount];
};

// The union of the states of kLanes neighbouring lanes.
template <int kLanes, typename A>
__device__ __forceinline__ OnlineSoftmax<A> unite_lanes(const OnlineSoftmax<A>& state) {
    A m = state.m;
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) m = maximum(m, shuffle_xor(m, bit));
    A l = state.relative_to(m);
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) l = add(l, shuffle_xor(l, bit));
    return {m, l};
}

// A multiprocessor has 16 warps: in two blocks of 8 one computes while the other waits.
template <typename T, typename Operation, int kRows, int kHeld, int kWarps, int kBlocks>
__global__ void CUFLASH_CLUSTERS(kBlocks) __launch_bounds__(32 * kWarps, 16 / kWarps)
    strips(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    using State = OnlineSoftmax<A>;
    using Few = Bundle<T, kRows>;
    using Part = StripPart<T, kRows>;
    constexpr bool kWeights = Operation::kOfWeights && sizeof(T) == sizeof(A);
    constexpr int kWidth = Part::kWidth, kUnits = Part::kUnits;
    constexpr int kEach = kWidth / kWarps;  // rows whose states a warp unites
    constexpr int kPitch =
        kWidth + 1;  // so that the warps' states of a row have banks of their own
    static_assert(kWidth % kWarps == 0 && kHeld % kUnits == 0, "a strip that cannot be shared out");
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Exchange<States<A, kEach>, kWarps, kBlocks> exchange(memory, static_cast<int*>(p.states));
    State* const states = reinterpret_cast<State*>(exchange.memory_end());
    State* const united = states + kWarps * kPitch;
    constexpr int kStates = (kWarps * kPitch + kWidth) * int(sizeof(State));
    const Part part(int(p.columns), exchange.number(), exchange.kCount);
    Feed<Part, decltype(exchange)> feed(p, exchange,
                                        exchange.memory_end() + (kStates + 127) / 128 * 128, part);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 y_step = p.output[0].reduced_stride[0];

    for (int strip; (strip = exchange.row(feed.number())) < Part::rows(p);) {
        Few held[kHeld];
#pragma unroll
        for (int s = 0; s < kHeld / kUnits; ++s) {
            const int left = part.count - s * kUnits;
            const T* const stage =
                reinterpret_cast<const T*>(left > 0 ? &feed.stage(feed.take()) : &feed.stage(0));
#pragma unroll
            for (int j = 0; j < kUnits; ++j)
                held[s * kUnits + j] = load_bundle<T, kRows, false>(stage + (j * 32 + lane) * kRows,
                                                                    j < left, lowest<T>());
            if (left > 0) feed.fetch(1);
        }

        const Few top = largest_of(held);
        State base[kRows];
#pragma unroll
        for (int v = 0; v < kRows; ++v) {
            base[v] = {widened(top, v), A(0)};
            A m = base[v].m;
            if constexpr (QuickWeight<T, Operation>::kOfNear) {
                if (QuickWeight<T, Operation>::is_far(m)) {
#pragma unroll
                    for (int i = 0; i < kHeld; ++i)
                        held[i].element[v] = add(held[i].element[v], -m);
                    m = 0;
                }
            }
            const QuickWeight<T, Operation> weight(m);
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                const A w = weight(widened(held[i], v));
                if constexpr (kWeights) held[i].element[v] = w;
                base[v].l = add(base[v].l, w);
            }
            states[warp * kPitch + lane * kRows + v] = base[v];
            // Has the compiler widen again what would not fit the registers.
            if constexpr (sizeof(T) < sizeof(A)) {
#pragma unroll
                for (int i = 0; i < kHeld; ++i) held[i] = words_here(held[i]);
            }
        }

        __syncthreads();
        // Lanes that have the same row tell different blocks.
        const auto* const of_blocks = exchange.gather_by(
            feed.number(), [&](States<A, kEach>* values, unsigned char* barrier) {
#pragma unroll
                for (int j = lane / kWarps; j - lane / kWarps < kEach; j += 32 / kWarps) {
                    const State state =
                        unite_lanes<kWarps>(states[lane % kWarps * kPitch + warp * kEach + j]);
                    for (int block = lane % kWarps; block < kBlocks; block += kWarps)
                        send(state, cluster_address(&values->of[j], block),
                             cluster_address(barrier, block));
                }
            });
        feed.learn();
#pragma unroll
        for (int j = lane / kBlocks; j - lane / kBlocks < kEach; j += 32 / kBlocks) {
            State state = State::identity();
            if (j < kEach) state = of_blocks[lane % kBlocks * kWarps + warp].of[j];
            state = unite_lanes<kBlocks>(state);
            if (lane % kBlocks == 0 && j < kEach) united[warp * kEach + j] = state;
        }
        __syncthreads();

        const int64 row = int64(strip) * kWidth + lane * kRows;
        T* to = static_cast<T*>(p.output[0].data) + row + part.first * y_step;
        Operation operation[kRows];
#pragma unroll
        for (int v = 0; v < kRows; ++v) operation[v] = Operation(united[lane * kRows + v], base[v]);
#pragma unroll
        for (int i = 0; i < kHeld; ++i, to += y_step) {
            Few result;
#pragma unroll
            for (int v = 0; v < kRows; ++v)
                result.element[v] =
                    narrow<T>(result_of_held<T, kWeights>(operation[v], widened(held[i], v)));
            if (i < part.count && row < p.rows) store_bundle<T, kRows>(to, result);
        }
    }
}

}  // namespace cuflash

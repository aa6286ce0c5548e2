// Softmax of rows that lie side by side in memory, such as the columns of a C-order matrix.
//
// A thread moves 16 bytes at a time, one column of kVector<T> neighbouring rows, and keeps a state
// for each of them. A block takes a tile of kWidth such bundles of rows; its lanes share their
// columns: column c belongs to lane c % lanes.
//
// kHeld > 0: every lane holds that many columns in registers, so that rows of up to lanes * kHeld
// columns make two trips to memory. kHeld = 0: the online update and a second read, any length.
//
// x (rows, columns) -> output[0] (rows, columns), or one or two entries a row. The last of the kept
// axes has stride 1 and a multiple of kVector<T> rows; all other strides are such multiples, too.
// Grid: blocks of kWidth * lanes threads, tile by tile; any number of blocks is right. Dynamic
// shared memory: an OnlineSoftmax for each row of the tile and each warp and one more.
#include "softmax/result.cuh"

namespace cuflash {

// The states of the rows of one bundle.
template <typename T>
struct Bundle {
    using A = Accumulator<T>;
    static constexpr int kRows = kVector<T>;
    OnlineSoftmax<A> row[kRows];

    __device__ __forceinline__ Bundle() {
#pragma unroll
        for (int v = 0; v < kRows; ++v) row[v] = OnlineSoftmax<A>::identity();
    }
    __device__ __forceinline__ void raise(const Wide<T>& scores) {
#pragma unroll
        for (int v = 0; v < kRows; ++v) row[v].m = maximum(row[v].m, scores.element[v]);
    }
    __device__ __forceinline__ Wide<T> weights(Wide<T> scores) const {
#pragma unroll
        for (int v = 0; v < kRows; ++v) scores.element[v] = row[v].weight(scores.element[v]);
        return scores;
    }
    __device__ __forceinline__ void add(const Wide<T>& weights) {
#pragma unroll
        for (int v = 0; v < kRows; ++v) row[v].l = cuflash::add(row[v].l, weights.element[v]);
    }

    // Unites the lanes of this warp, which lie `width` threads apart, first by their maxima.
    __device__ __forceinline__ void share_maxima(int width) {
#pragma unroll 1
        for (int bit = width; bit < 32; bit *= 2)
#pragma unroll
            for (int v = 0; v < kRows; ++v)
                row[v].m = maximum(row[v].m, shuffle_xor(row[v].m, bit));
    }
    // Then by their sums, relative to these.
    __device__ __forceinline__ void share_sums(int width) {
#pragma unroll 1
        for (int bit = width; bit < 32; bit *= 2)
#pragma unroll
            for (int v = 0; v < kRows; ++v)
                row[v].l = cuflash::add(row[v].l, shuffle_xor(row[v].l, bit));
    }
};

// What an operation makes of the columns of a bundle.
template <typename T, typename Operation>
struct BundleResult {
    Operation row[kVector<T>];

    __device__ __forceinline__ BundleResult(const Bundle<T>& state, const Bundle<T>& base) {
#pragma unroll
        for (int v = 0; v < kVector<T>; ++v) row[v] = Operation(state.row[v], base.row[v]);
    }
    // Of weights if so told, else of scores.
    template <bool kWeights>
    __device__ __forceinline__ Vector<T> of(const Wide<T>& chunk) const {
        Vector<T> result;
#pragma unroll
        for (int v = 0; v < kVector<T>; ++v)
            result.element[v] = narrow<T>(result_of<kWeights>(row[v], chunk.element[v]));
        return result;
    }
};

// Unites the states of a bundle over all lanes of the block: of `states`, one row of the tile after
// the other for each warp, and one set more for the results. To be called by all threads.
template <typename T, int kWidth>
__device__ __forceinline__ Bundle<T> unite(const Bundle<T>& bundle,
                                           OnlineSoftmax<Accumulator<T>>* states) {
    using A = Accumulator<T>;
    constexpr int kTile = kWidth * kVector<T>;
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (warps == 1) return bundle;
    __syncthreads();  // the states of an earlier tile have been read
    if (lane < kWidth) {
#pragma unroll
        for (int v = 0; v < kVector<T>; ++v)
            states[warp * kTile + lane * kVector<T> + v] = bundle.row[v];
    }
    __syncthreads();
    OnlineSoftmax<A>* results = states + warps * kTile;
    for (int r = threadIdx.x; r < kTile; r += blockDim.x) {
        OnlineSoftmax<A> state = OnlineSoftmax<A>::identity();
        for (int w = 0; w < warps; ++w) state.m = maximum(state.m, states[w * kTile + r].m);
        for (int w = 0; w < warps; ++w)
            state.l = add(state.l, states[w * kTile + r].relative_to(state.m));
        results[r] = state;
    }
    __syncthreads();
    Bundle<T> united;
#pragma unroll
    for (int v = 0; v < kVector<T>; ++v)
        united.row[v] = results[threadIdx.x % kWidth * kVector<T> + v];
    return united;
}

template <typename T, typename Operation, int kWidth, int kHeld>
__global__ void __launch_bounds__(kMaxThreads, 1)
    columns(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    constexpr int kRows = kVector<T>;
    constexpr bool kWeights = Operation::kOfWeights && sizeof(T) == sizeof(A);
    CUFLASH_DYNAMIC_SHARED(OnlineSoftmax<A>, states);
    const int lane = threadIdx.x / kWidth, lanes = blockDim.x / kWidth;
    const int64 bundles = p.rows / kRows, tiles = (bundles + kWidth - 1) / kWidth;

    for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64 bundle = tile * kWidth + threadIdx.x % kWidth;
        const bool active = bundle < bundles;
        const int64 row = active ? bundle * kRows : 0;
        const Place place(p, row);
        const T* x = static_cast<const T*>(p.input[0].data) + place.input[0];
        T* y = static_cast<T*>(p.output[0].data) + place.output[0];
        auto load = [&](auto column) {
            return load_streaming(x + column * p.input[0].reduced_stride[0],
                                  active && column < decltype(column)(p.columns), lowest<T>());
        };
        auto store = [&](auto column, const Vector<T>& result) {
            if (active && column < decltype(column)(p.columns))
                store_streaming(y + column * p.output[0].reduced_stride[0], result);
        };
        auto write_rows = [&](const Bundle<T>& state) {
            if constexpr (!Operation::kColumns) {
                if (!active || lane != 0) return;
#pragma unroll
                for (int v = 0; v < kRows; ++v)
                    Operation(state.row[v]).template write<T>(p, Place(p, row + v));
            }
        };

        Bundle<T> base;
        if constexpr (kHeld > 0) {
            using Chunk = typename Either<kWeights, Wide<T>, Vector<T>>::type;
            Chunk held[kHeld];
#pragma unroll
            for (int i = 0; i < kHeld; ++i) held[i] = Chunk(load(lane + i * lanes));
#pragma unroll
            for (int i = 0; i < kHeld; ++i) base.raise(Wide<T>(held[i]));
            base.share_maxima(kWidth);
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                const Wide<T> weights = base.weights(Wide<T>(held[i]));
                if constexpr (kWeights) held[i] = weights;
                base.add(weights);
            }
            base.share_sums(kWidth);
            const Bundle<T> state = unite<T, kWidth>(base, states);
            write_rows(state);
            if constexpr (Operation::kColumns) {
                const BundleResult<T, Operation> result(state, base);
#pragma unroll
                for (int i = 0; i < kHeld; ++i)
                    store(lane + i * lanes, result.template of<kWeights>(Wide<T>(held[i])));
            }
        } else {
            constexpr int kTogether = 4;  // columns in flight: 64 bytes a thread
            CompensatedSum<A> l[kRows];
#pragma unroll 1
            for (int64 column = lane; column < p.columns; column += kTogether * lanes) {
                Vector<T> scores[kTogether];
#pragma unroll
                for (int i = 0; i < kTogether; ++i) scores[i] = load(column + i * lanes);
                Bundle<T> raised = base;
#pragma unroll
                for (int i = 0; i < kTogether; ++i) raised.raise(Wide<T>(scores[i]));
#pragma unroll
                for (int v = 0; v < kRows; ++v)
                    if (raised.row[v].m > base.row[v].m)
                        l[v].scale(base.row[v].raise(raised.row[v].m));
                Bundle<T> batch = base;
#pragma unroll
                for (int v = 0; v < kRows; ++v) batch.row[v].l = 0;
#pragma unroll
                for (int i = 0; i < kTogether; ++i) batch.add(base.weights(Wide<T>(scores[i])));
#pragma unroll
                for (int v = 0; v < kRows; ++v) l[v].push(batch.row[v].l);
            }
            Bundle<T> warp = base;
            warp.share_maxima(kWidth);
#pragma unroll
            for (int v = 0; v < kRows; ++v) {
                base.row[v].l = l[v].sum;
                warp.row[v].l = base.row[v].relative_to(warp.row[v].m);
            }
            warp.share_sums(kWidth);
            const Bundle<T> state = unite<T, kWidth>(warp, states);
            write_rows(state);
            if constexpr (Operation::kColumns) {
                const BundleResult<T, Operation> result(state, state);
#pragma unroll 1
                for (int64 column = lane; column < p.columns; column += kTogether * lanes) {
                    Vector<T> scores[kTogether];
#pragma unroll
                    for (int i = 0; i < kTogether; ++i) scores[i] = load(column + i * lanes);
#pragma unroll
                    for (int i = 0; i < kTogether; ++i)
                        store(column + i * lanes, result.template of<false>(Wide<T>(scores[i])));
                }
            }
        }
    }
}

}  // namespace cuflash

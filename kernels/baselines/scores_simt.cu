// The first two operations of attention in one kernel, in plain CUDA: P = softmax(q @ k^T), all of
// it written, by every dtype. See scores_mma.cu.
//
// A warp owns 4 x kRows rows, and a row never leaves its 8 lanes. out (batch, Tq, Tk) is P; lse
// (batch, Tq). Grid: a block for each tile of rows of each entry (lib/scheduler.cuh). Static shared
// memory: a chunk of the features of a tile of keys and of the block's queries.
#include "attention/block.cuh"
#include "attention/parameters.cuh"
#include "lib/online_softmax.cuh"
#include "lib/tile.cuh"

namespace cuflash {

template <typename T>
struct ScoresTile {
    static constexpr int kRows = 4, kColumns = 4, kWarps = 4, kFeatures = 32;
    static constexpr int kThreads = 32 * kWarps, kWarpRows = kLaneRows * kRows;
    static constexpr int kQueries = kWarpRows * kWarps, kKeys = kLaneColumns * kColumns;
    static constexpr int kStride = kRowReadStride<Accumulator<T>, kFeatures>;
};

template <typename T, typename Score>
__global__ void __launch_bounds__(ScoresTile<T>::kThreads)
    scores_simt(const __grid_constant__ AttentionParameters p) {
    using A = Accumulator<T>;
    using Tile = ScoresTile<T>;
    __shared__ __align__(16) A keys[Tile::kKeys * Tile::kStride];
    __shared__ __align__(16) A queries[Tile::kQueries * Tile::kStride];
    __shared__ BlockWork<T, Score> block;
    if (!block.begin(p, Tile::kQueries, Tile::kFeatures, Tile::kKeys)) return;

    const LanePosition lane;
    const int warp_row = threadIdx.x / 32 * Tile::kWarpRows;
    auto row_of = [&](int i) { return block.first_row + warp_row + kLaneRows * i + lane.row; };
    const int64 all_keys = p.score.keys;
    const int rows = int(block.end_row - block.first_row);

    // Calls work(key, s, i): the score of a row of this thread with a key.
    auto for_each_score = [&](auto work) {
        for (int64 first_key = 0; first_key < all_keys; first_key += Tile::kKeys) {
            const int end = int(min(all_keys - first_key, int64(Tile::kKeys)));
            A s[Tile::kRows][Tile::kColumns] = {};
            for (int64 chunk = 0; chunk < p.features; chunk += Tile::kFeatures) {
                const int64 features = min(p.features - chunk, int64(Tile::kFeatures));
                __syncthreads();
                load_tile<T, Tile::kKeys, Tile::kFeatures, Tile::kStride, Tile::kThreads>(
                    keys, block.k, first_key, chunk, 0, end, features);
                load_tile<T, Tile::kQueries, Tile::kFeatures, Tile::kStride, Tile::kThreads>(
                    queries, block.q, block.first_row, chunk, 0, rows, features);
                __syncthreads();
                add_inner_products<Tile::kFeatures, Tile::kStride, Tile::kStride>(
                    s, queries + (warp_row + lane.row) * Tile::kStride,
                    keys + lane.column * Tile::kStride, int(features));
            }
#pragma unroll
            for (int i = 0; i < Tile::kRows; ++i) {
                const KeyRange seen = block.score.range(row_of(i));
#pragma unroll
                for (int j = 0; j < Tile::kColumns; ++j) {
                    const int64 key = first_key + kLaneColumns * j + lane.column;
                    s[i][j] = seen.has(key) ? block.score(s[i][j], row_of(i), key) : -infinity<A>();
                }
                work(i, first_key, s[i]);
            }
        }
    };

    // Each lane has the maximum and the normalizer of its own keys, then of all.
    OnlineSoftmax<A> state[Tile::kRows];
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        state[i] = OnlineSoftmax<A>::identity();
        if (lane.column == 0 && block.score.sink != -infinity<A>())
            state[i] = OnlineSoftmax<A>{block.score.sink, A(1)};
    }
    for_each_score([&](int i, int64, const A(&s)[Tile::kColumns]) {
#pragma unroll
        for (int j = 0; j < Tile::kColumns; ++j) state[i].push(s[j]);
    });
    const Output<T> output(p, block.index, 0);
    const Matrix<T> weights = output.template matrix<T>();
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
#pragma unroll
        for (int bit = 2; bit <= 8; bit *= 2) {
            const OnlineSoftmax<A> other{__shfl_xor_sync(kFullWarp, state[i].m, bit),
                                         __shfl_xor_sync(kFullWarp, state[i].l, bit)};
            state[i] = state[i].merge(other);
        }
        if (!block.score.is_used(row_of(i))) state[i] = OnlineSoftmax<A>::identity();
        if (lane.column == 0 && row_of(i) < block.end_row)
            output.store_lse(
                row_of(i), state[i].m == infinity<A>() ? not_a_number<A>() : state[i].logsumexp());
    }
    for_each_score([&](int i, int64 first_key, const A(&s)[Tile::kColumns]) {
        if (row_of(i) >= block.end_row) return;
#pragma unroll
        for (int j = 0; j < Tile::kColumns; ++j) {
            const int64 key = first_key + kLaneColumns * j + lane.column;
            const A inverse = state[i].scale();
            if (key < all_keys)
                weights.at(row_of(i), key) =
                    narrow<T>(inverse == A(0) ? A(0) : state[i].weight(s[j]) * inverse);
        }
    });
}

}  // namespace cuflash

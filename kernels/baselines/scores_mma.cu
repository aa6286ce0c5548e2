// The first two operations of attention in one kernel, on tensor cores: P = softmax(q @ k^T), all
// of it written. What `attention/forward_mma.cu` does not need any more, to be measured against.
//
// A warp owns kWarpRows rows and walks over all keys twice: for the sums, and to write what it then
// knows. out (batch, Tq, Tk) is P, its rows at multiples of 16 bytes; lse (batch, Tq).
// Grid: a block for each tile of rows of each entry (lib/scheduler.cuh). Dynamic shared memory, as
// swizzled tiles: queries (kQueries x kFeatures), two stages of keys (kKeys x kFeatures).
#include "attention/block.cuh"
#include "attention/mma_steps.cuh"
#include "attention/mma_tile.cuh"
#include "attention/parameters.cuh"

namespace cuflash {

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    scores_mma(const __grid_constant__ AttentionParameters p) {
    using Features = typename Tile::Features;
    constexpr int kRowTiles = Tile::kRowTiles, kRows = Tile::kRows, kKeys = Tile::kKeys;
    constexpr int kThreads = Tile::kThreads, kFeatures = Features::kPitch / 2;

    CUFLASH_DYNAMIC_SHARED(unsigned char, queries);
    unsigned char* const keys = queries + Tile::kQueryBytes;
    __shared__ BlockWork<T, Score> block;
    if (!block.begin(p, Tile::kQueries, kFeatures, kKeys)) return;

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * Tile::kWarpRows;
    auto row_of = [&](int i) { return block.first_row + warp_row + 8 * i + lane / 4; };
    const int64 all_keys = p.score.keys;
    const int tiles = int((all_keys + kKeys - 1) / kKeys);
    const float unit = Score::kPerPair ? kLog2OfE : block.score.scale * kLog2OfE;
    const int features = int(p.features);

    const unsigned own_query =
        shared_address(queries) + Features::at(warp_row + lane % 16, lane / 16);
    const unsigned own_key = own_key_row<Tile>(shared_address(keys));
    auto load_tile = [&](int tile) {
        const int end = int(min(all_keys - int64(tile) * kKeys, int64(kKeys)));
        const unsigned shift = (tile & 1) * Tile::kKeyBytes;
        if (has_aligned_rows(block.k))
            RowCopies<kKeys, kFeatures, kThreads, T>(shared_address(keys), block.k,
                                                     int64(tile) * kKeys)
                .start_part(shift, p.k.row_stride, 0, end, features);
        else
            copy_elements<kKeys, kFeatures, kThreads>(keys + shift, block.k, int64(tile) * kKeys, 0,
                                                      end, features);
    };
    const int rows = int(block.end_row - block.first_row);
    if (has_aligned_rows(block.q))
        RowCopies<Tile::kQueries, kFeatures, kThreads, T>(shared_address(queries), block.q,
                                                          block.first_row)
            .start_part(0, p.q.row_stride, 0, rows, features);
    else
        copy_elements<Tile::kQueries, kFeatures, kThreads>(queries, block.q, block.first_row, 0,
                                                           rows, features);

    // Calls work(tile, s) with the scores of each tile of keys.
    auto for_each_tile = [&](auto work) {
        if (tiles > 0) load_tile(0);
        commit_copies();
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            wait_for_copies<0>();
            __syncthreads();  // the tile is there, and everyone is done with the one before
            if (tile + 1 < tiles) load_tile(tile + 1);
            commit_copies();
            ScoreFragments<Tile> s = {};
            add_scores<T, Tile>(s, own_key + (tile & 1) * Tile::kKeyBytes,
                                [&](unsigned (&read)[kRowTiles][4], int step) -> const auto& {
#pragma unroll
                                    for (int m = 0; m < kRowTiles; ++m)
                                        load_matrices(read[m], Features::advance(own_query, step) +
                                                                   m * 16 * Features::kPitch);
                                    return read;
                                });
            const int64 first_key = int64(tile) * kKeys;
            const bool whole = block.all.has(first_key) && block.all.has(first_key + kKeys - 1);
            change_scores<Tile, Score>(
                s, first_key, whole, [&](int) -> const Score& { return block.score; }, row_of);
            work(tile, s);
        }
        wait_for_copies<0>();
        __syncthreads();
    };

    FragmentRow state[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) state[i].begin(block.score.sink, lane % 4 == 0);
    for_each_tile([&](int, ScoreFragments<Tile>& s) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float top = -infinity<float>();
#pragma unroll
            for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) top = maximum(top, s[i / 2][j][i % 2 * 2 + e]);
            top = reduce_quad(top, [](float a, float b) { return maximum(a, b); });
            state[i].raise(top, unit);
            float sum = 0;
#pragma unroll
            for (int j = 0; j < Tile::kKeyTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    sum += state[i].weight(s[i / 2][j][i % 2 * 2 + e], unit);
            state[i].l += sum;
        }
    });

    const Output<T> output(p, block.index, 0);
    const Matrix<T> weights = output.template matrix<T>();
    float inverse[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        float l = reduce_quad(state[i].l, [](float a, float b) { return add(a, b); });
        if (!block.score.is_used(row_of(i))) l = 0;
        inverse[i] = l == 0 ? 0 : 1 / l;
        if (lane % 4 == 0 && row_of(i) < block.end_row)
            output.store_lse(row_of(i),
                             l == 0 ? -infinity<float>()
                                    : multiply_add(state[i].reference, kLogOf2, logarithm(l)));
    }
    for_each_tile([&](int tile, ScoreFragments<Tile>& s) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (row_of(i) >= block.end_row) continue;
            T* const to = &weights.at(row_of(i), int64(tile) * kKeys);
            const int left = int(min(all_keys - int64(tile) * kKeys, int64(kKeys)));
#pragma unroll
            for (int j = 0; j < Tile::kKeyTiles; ++j) {
                const int key = 8 * j + lane % 4 * 2;
                const float* x = &s[i / 2][j][i % 2 * 2];
                auto weight = [&](float score) {
                    return inverse[i] == 0 ? 0 : state[i].weight(score, unit) * inverse[i];
                };
                if (key < left)
                    *reinterpret_cast<unsigned*>(to + key) = pack<T>(weight(x[0]), weight(x[1]));
            }
        }
    });
}

}  // namespace cuflash

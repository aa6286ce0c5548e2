// Attention forward in float32 on TF32 tensor cores, for inputs of any shape and stride (sm_80 and
// later).
//
// FlashAttention-2 (Dao 2023, algorithm 1), as in forward_mma.cu: a warp owns kWarpRows query rows,
// keeps their scores and sums in registers, and uses the weights as the left operand of the second
// product as they are. Keys and values come by background copies, one tile ahead of the products.
// Each product is three, of the parts of its operands: see tf32_tile.cuh.
//
// An infinite operand makes such a product NaN, whatever it should be. The second turn over the
// keys that all kernels have after values that are not finite (lib/nonfinite.cuh) is therefore for
// scores too: those that are not finite are computed again, without tensor cores.
//
// The grid is that of lib/scheduler.cuh. Dynamic shared memory: queries (kQueries x kFeatures),
// then two stages of keys (kKeys x kFeatures) and of values (kKeys x kValues).
#include "attention/block.cuh"
#include "attention/fragments.cuh"
#include "attention/mma_steps.cuh"
#include "attention/parameters.cuh"
#include "attention/tf32_tile.cuh"
#include "lib/nonfinite.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/score.cuh"

namespace cuflash {

// What a warp knows of its tiles, and before which of them all are copied whole.
struct CopiedTiles : WarpTiles {
    int copied_end;
};

template <typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    forward_tf32(const __grid_constant__ AttentionParameters p) {
    using Features = typename Tile::Features;
    using Values = typename Tile::Values;
    constexpr int kRowTiles = Tile::kRowTiles, kRows = Tile::kRows, kKeys = Tile::kKeys;
    constexpr int kValueTiles = Tile::kValueTiles, kThreads = Tile::kThreads;

    CUFLASH_DYNAMIC_SHARED(unsigned char, shared);
    unsigned char* const queries = shared;
    unsigned char* const keys = queries + Tile::kQueryBytes;
    unsigned char* const values = keys + 2 * Tile::kKeyBytes;
    __shared__ BlockWork<float, Score> block;
    if (!block.begin(p, Tile::kQueries, Tile::kValues, kKeys)) return;

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_row = threadIdx.x / 32 * Tile::kWarpRows;
    auto row_of = [&](int i) { return block.first_row + warp_row + 8 * i + g; };
    const int tiles = int(block.tiles.end - block.tiles.begin);
    // What the loop seldom needs lies in shared memory: registers are few.
    __shared__ CopiedTiles tiles_of_warp[kThreads / 32];
    __shared__ unsigned damaged_rows[kThreads];  // bit i: NaN or inf in columns of row i
    __shared__ float references[Tile::kQueries];
    __shared__ float normalizers[kRows][kThreads];
    CopiedTiles& seen = tiles_of_warp[threadIdx.x / 32];
    if (lane == 0)
        static_cast<WarpTiles&>(seen) = WarpTiles::of(block.score, block.first_row + warp_row,
                                                      Tile::kWarpRows, block.tiles, kKeys);
    __syncwarp();
    auto values_here = [&] {
        return Matrix<const float>{&block.v.at(0, block.first_value), block.v.row_stride,
                                   block.v.column_stride};
    };
    auto columns_here = [&] { return int(block.end_value - block.first_value); };
    auto are_aligned = [&] { return has_aligned_rows(block.k) && has_aligned_rows(values_here()); };
    // Tiles before this one are copied whole. What no row sees in the first of them is a key, and a
    // value that is not finite there is found in the end.
    if (lane == 0) {
        const bool filled = are_aligned() && p.features == Tile::kFeatures &&
                            (columns_here() == Tile::kValues || columns_here() == 0);
        seen.copied_end = filled ? tiles - (block.any.last + 1 < block.tiles.end * kKeys) : 0;
    }
    __syncwarp();
    ChunkCopies<Features, kKeys, kThreads, float> key_copies(keys, block.k,
                                                             block.tiles.begin * kKeys);
    ChunkCopies<Values, kKeys, kThreads, float> value_copies(values, values_here(),
                                                             block.tiles.begin * kKeys);
    auto load_tile = [&](int tile) {
        const int key_shift = (tile & 1) * Tile::kKeyBytes;
        const int value_shift = (tile & 1) * Tile::kValueBytes;
        if (__builtin_expect(tile < seen.copied_end, 1)) {
            key_copies.start(key_shift, p.k.row_stride);
            if (columns_here() > 0) value_copies.start(value_shift, p.v.row_stride);
            return;
        }
        const int64 first_key = (block.tiles.begin + tile) * kKeys;
        const int begin = int(clamp(block.any.first - first_key, 0, kKeys));
        const int end = int(clamp(block.any.last + 1 - first_key, 0, kKeys));
        const int columns = columns_here();
        if (are_aligned()) {
            key_copies.start_part(key_shift, p.k.row_stride, begin, end, int(p.features));
            value_copies.start_part(value_shift, p.v.row_stride, begin, end, columns);
        } else {
            copy_to_chunks<Features, kKeys, kThreads>(keys + key_shift, block.k, first_key, begin,
                                                      end, int(p.features));
            copy_to_chunks<Values, kKeys, kThreads>(values + value_shift, values_here(), first_key,
                                                    begin, end, columns);
        }
    };
    if (tiles > 0) {
        const int rows = int(block.end_row - block.first_row);
        if (has_aligned_rows(block.q))
            ChunkCopies<Features, Tile::kQueries, kThreads, float>(queries, block.q,
                                                                   block.first_row)
                .start_part(0, p.q.row_stride, 0, rows, int(p.features));
        else
            copy_to_chunks<Features, Tile::kQueries, kThreads>(queries, block.q, block.first_row, 0,
                                                               rows, int(p.features));
    }

    // Where a lane's chunks begin, and how far from there those of the next 16 features are.
    const int own_row = Features::at(g, t), other = g % 2 ? -64 : 64;
    const unsigned char* const own_query = queries + warp_row * Features::kPitch + own_row;
    const unsigned char* const own_value = values + Values::at(2 * t, g);

    FragmentRow state[kRows];
    ValueFragments<Tile> out;
    // The sums of a long row lie among the results while others are made: the error of n terms that
    // are alike, added one by one, grows like n. `normalizers` has theirs, and `references` what
    // all of them are relative to.
    constexpr int kTilesApart = 1024 / kKeys;
    auto own_results = [&] {
        const Output<float> output(p, block.index, block.work.split);
        const int thread = thread_here(), row = thread / 32 * Tile::kWarpRows + thread % 32 / 4;
        return OwnResults(output.template matrix<float>(), block.first_row + row, block.end_row,
                          block.first_value + thread % 4 * 8, block.end_value);
    };
    auto factor_of = [&](int i) {
        return exp2_approximate(references[warp_row + 8 * i + g] - state[i].reference);
    };
    auto add_stored_normalizer = [&](int i) {
        state[i].l = multiply_add(normalizers[i][threadIdx.x], factor_of(i), state[i].l);
    };
    auto add_stored_sums = [&](const OwnResults& from, int i, int column, Vector<float>& x) {
        const float factor = factor_of(i);
        const Vector<float> stored = from.load(8 * i, column);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            x.element[n] = multiply_add(stored.element[n], factor, x.element[n]);
    };

    // A second turn only after NaN and inf.
#pragma unroll 1
    for (;;) {
        const float sink = block.work.split == 0 ? block.score.sink : -infinity<float>();
#pragma unroll
        for (int i = 0; i < kRows; ++i) state[i].begin(sink, t == 0);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][j][e] = 0;

#pragma unroll 1
        for (int tile = -1; tile < tiles; ++tile) {
            const int stage = tile & 1;
            if (tile >= 0) {
                wait_for_copies<0>();
                if (seen.again) {
                    __syncthreads();
                    keep_divisible<kKeys * Tile::kValues, kThreads>(values +
                                                                    stage * Tile::kValueBytes);
                }
                __syncthreads();  // the tile is there, and everyone is done with the one before
            }
            if (tile + 1 < tiles) {
                load_tile(tile + 1);
                key_copies.advance(p.k.row_stride, 1);
                value_copies.advance(p.v.row_stride, 1);
            }
            commit_copies();
            if (tile > 0 && tile % kTilesApart == 0) {
                const OwnResults to = own_results();
                visit_sums<Tile>(out, [&](int i, int column, Vector<float>& x) {
                    if (to.has(8 * i)) {
                        if (tile > kTilesApart) add_stored_sums(to, i, column, x);
                        to.store(8 * i, column, x);
                    }
                    x = {};
                });
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    if (tile > kTilesApart) add_stored_normalizer(i);
                    normalizers[i][threadIdx.x] = state[i].l;
                    state[i].l = 0;
                }
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kRows; ++i)
                    references[warp_row + 8 * i + g] = state[i].reference;
            }
            if (!seen.has(tile)) continue;

            ScoreFragments<Tile> s = {};
            const unsigned char* const own_key = keys + stage * Tile::kKeyBytes + own_row;
            add_tf32_scores<Tile>(s, own_query, own_key, other, int(p.features));
            if (seen.again)
                replace_nonfinite_scores<Tile>(s, queries + warp_row * Features::kPitch,
                                               keys + stage * Tile::kKeyBytes);
            const bool whole = seen.has_whole(tile);
            if (Score::kPerPair || !whole)
                change_scores<Tile, Score>(
                    s, (block.tiles.begin + tile) * kKeys, whole,
                    [&](int) -> const Score& { return block.score; }, row_of);
            const float unit = Score::kScales ? kLog2OfE : block.score.scale * kLog2OfE;
            weigh_rounded_scores<Tile>(s, state, out, unit);
            const int64 end = block.any.last + 1 - (block.tiles.begin + tile) * kKeys;
            add_tf32_values<Tile>(out, s, own_value + stage * Tile::kValueBytes,
                                  columns_here() == 0 ? 0 : int(min(end, int64(kKeys))));
        }

        if (tiles > kTilesApart) {
            const OwnResults from = own_results();
            visit_sums<Tile>(out, [&](int i, int column, Vector<float>& x) {
                if (from.has(8 * i)) add_stored_sums(from, i, column, x);
            });
#pragma unroll
            for (int i = 0; i < kRows; ++i) add_stored_normalizer(i);
        }

#pragma unroll
        for (int i = 0; i < kRows; ++i)
            state[i].l = reduce_quad(state[i].l, [](float a, float b) { return add(a, b); });
        if (seen.again) {
            // A row of NaN has them in all columns.
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                if (!is_finite(state[i].l)) damaged_rows[threadIdx.x] &= ~(1u << i);
            break;
        }
        unsigned damaged = 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float zero = 0 * state[i].l;  // times NaN or inf it is NaN
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    zero = multiply_add(out[i / 2][j][i % 2 * 2 + e], 0, zero);
            if (zero != 0 && block.score.is_used(row_of(i))) damaged |= 1u << i;
        }
        damaged_rows[threadIdx.x] = damaged;
        if (damaged) block.redo = 1;
        __syncthreads();
        if (!block.redo) break;
        if (lane == 0) seen.again = true;
        __syncwarp();
        key_copies.advance(p.k.row_stride, -tiles);
        value_copies.advance(p.v.row_stride, -tiles);
    }

    const Output<float> output(p, block.index, block.work.split);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        references[warp_row + 8 * i + g] = state[i].reference;
        if (!block.score.is_used(row_of(i))) state[i].l = 0;
        if (block.work.column_tile == 0 && t == 0 && row_of(i) < block.end_row)
            output.store_lse(row_of(i), state[i].l == 0 ? -infinity<float>()
                                                        : multiply_add(state[i].reference, kLogOf2,
                                                                       logarithm(state[i].l)));
    }
    const OwnResults to = own_results();
    visit_sums<Tile>(out, [&](int i, int column, Vector<float>& x) {
        const float l = state[i].l, inverse = 1 / l;
#pragma unroll
        for (int n = 0; n < 4; ++n) x.element[n] = l == 0 ? 0 : x.element[n] * inverse;
        if (to.has(8 * i)) to.store(8 * i, column, x);
    });
    if (!block.redo) return;

    __syncwarp();  // add_nonfinite overwrites what other lanes wrote
#pragma unroll 1
    for (int own = 0; own < Tile::kWarpRows; ++own) {
        const bool met = own % 8 == g && (damaged_rows[threadIdx.x] >> own / 8 & 1);
        if (!__any_sync(kFullWarp, met)) continue;
        const float reference = references[warp_row + own];
        const int64 row = block.first_row + warp_row + own;
        KeyRange keys_seen = block.score.range(row);
        keys_seen.first = max(keys_seen.first, block.tiles.begin * kKeys);
        keys_seen.last = min(keys_seen.last, block.tiles.end * kKeys - 1);
        add_nonfinite(
            block.q, block.k, block.v, p.features, block.first_value, block.end_value, row,
            keys_seen, block.score,
            [&](float s) { return exp2_approximate(multiply_add(s, kLog2OfE, -reference)); },
            [&](int64 column, float x) { output.store(row, column, x); });
    }
}

}  // namespace cuflash

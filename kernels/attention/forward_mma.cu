// Attention forward on tensor cores, for 16-bit inputs of any shape and stride (sm_80 and later).
//
// FlashAttention-2 (Dao 2023, algorithm 1): a warp owns kWarpRows query rows, keeps their scores
// and sums in registers, and uses the weights as the left operand of the second product as they
// are. Keys and values come by background copies, one tile ahead of the products.
//
// The grid is that of lib/scheduler.cuh, all columns of v in one block. Dynamic shared memory, as
// swizzled tiles: queries (kQueries x kFeatures), then two stages of keys (kKeys x kFeatures) and
// of values (kKeys x kValues); in the end the results (kQueries x kValues) on
// their way out.
#include "attention/block.cuh"
#include "attention/fragments.cuh"
#include "attention/mma_steps.cuh"
#include "attention/mma_tile.cuh"
#include "attention/parameters.cuh"
#include "lib/nonfinite.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/score.cuh"

namespace cuflash {

// Which tiles options have elements for, and where they lie; counted from the block's first tile.
struct alignas(16) OptionTiles {
    int inside_end;              // before it there are elements for all pairs
    int past_end, future_begin;  // before, no key comes after a row; from then on, none before one
    int whole_end;               // before it tiles are copied whole

    // Positions and distances below this are exact as floats, and so are their sums with columns.
    static constexpr int64 kNear = 1 << 22;
    static constexpr int kNever = 0x7fffffff;

    template <typename Score>
    static __device__ __forceinline__ OptionTiles of(const Score& score, int64 first_row, int rows,
                                                     int64 end_row, const TileRange& tiles,
                                                     int keys, int64 all_keys, int whole_end) {
        const int64 first = score.position(first_row), last = first + rows - 1;
        const bool inside =
            score.has_tiles() && first_row + rows <= end_row && max(llabs(first), all_keys) < kNear;
        auto relative = [&](int64 tile) {
            return int(clamp(tile, tiles.begin, tiles.end) - tiles.begin);
        };
        // In a window distances may be as large as the scores that a row sees are small.
        const bool left = score.bounds.left >= kUnlimited, right = score.bounds.right >= kUnlimited;
        return {inside ? relative(all_keys / keys) : 0, left ? relative((first + 1) / keys) : 0,
                right ? relative((last + keys - 1) / keys) : kNever, whole_end};
    }

    // Of keys and rows, as `change_pairs` has it.
    __device__ __forceinline__ int side(int tile) const {
        return tile < past_end ? 1 : tile >= future_begin ? -1 : 0;
    }
};

// ----------------------------------------------------------------------------------------- kernel

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    forward_mma(const __grid_constant__ AttentionParameters p) {
    using Features = typename Tile::Features;
    using Values = typename Tile::Values;
    constexpr int kRowTiles = Tile::kRowTiles, kRows = Tile::kRows, kKeys = Tile::kKeys;
    constexpr int kValueTiles = Tile::kValueTiles;
    constexpr int kThreads = Tile::kThreads;
    constexpr int kFeatures = Features::kPitch / 2, kValues = Values::kPitch / 2;

    CUFLASH_DYNAMIC_SHARED(unsigned char, shared);
    unsigned char* const queries = shared;
    unsigned char* const keys = queries + Tile::kQueryBytes;
    unsigned char* const values = keys + 2 * Tile::kKeyBytes;
    __shared__ BlockWork<T, Score> block;
    if (!block.begin(p, Tile::kQueries, kValues, kKeys)) return;

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * Tile::kWarpRows;
    auto row_of = [&](int i) { return block.first_row + warp_row + 8 * i + lane / 4; };
    const int tiles = int(block.tiles.end - block.tiles.begin);
    // Tiles before this one are copied whole. What no row sees in the first of them is a key, and a
    // value that is not finite there is found in the end.
    const bool filled = has_aligned_rows(block.k) && has_aligned_rows(block.v) &&
                        p.features == kFeatures && p.values == kValues;
    const int whole_end = filled ? tiles - (block.any.last + 1 < block.tiles.end * kKeys) : 0;
    // What the loop seldom needs lies in shared memory: registers are few.
    __shared__ WarpTiles tiles_of_warp[kThreads / 32];
    __shared__ OptionTiles options_of_warp[kThreads / 32];
    __shared__ unsigned damaged_rows[kThreads];  // bit i: NaN or inf in columns of row i
    WarpTiles& seen = tiles_of_warp[threadIdx.x / 32];
    OptionTiles& options = options_of_warp[threadIdx.x / 32];
    if (lane == 0) {
        const int64 first = block.first_row + warp_row;
        seen = WarpTiles::of(block.score, first, Tile::kWarpRows, block.tiles, kKeys);
        options = OptionTiles::of(block.score, first, Tile::kWarpRows, block.end_row, block.tiles,
                                  kKeys, p.score.keys, whole_end);
    }
    __syncwarp();
    const float unit = Score::kScales ? kLog2OfE : block.score.scale * kLog2OfE;

    // Where a lane's rows of 8 x 8 matrices begin.
    const unsigned keys_at = here(shared_address(keys));
    const unsigned values_at = keys_at + 2 * Tile::kKeyBytes;
    auto own_query_at = [&] {
        const int thread = thread_here(), row = thread / 32 * Tile::kWarpRows + thread % 16;
        return here(shared_address(queries) + Features::at(row, thread % 32 / 16));
    };
    const unsigned own_query = Tile::kQueriesHeld ? 0 : own_query_at();
    // Those of keys and of values, in units of 16 bytes, share a register if options take many.
    constexpr unsigned kHigh = 1 << 16;
    const unsigned own_key_at = here(own_key_row<Tile>(keys_at));
    const unsigned own_value_at = here(own_value_row<Tile>(values_at));
    const unsigned own_rows = here(own_key_at / 16 + own_value_at / 16 * kHigh);
    auto own_key = [&] { return Score::kSingle ? here(own_rows) % kHigh * 16 : own_key_at; };
    auto own_value = [&] { return Score::kSingle ? here(own_rows) / kHigh * 16 : own_value_at; };

    RowCopies<kKeys, kFeatures, kThreads, T> key_copies(keys_at, block.k,
                                                        block.tiles.begin * kKeys);
    RowCopies<kKeys, kValues, kThreads, T> value_copies(values_at, block.v,
                                                        block.tiles.begin * kKeys);
    auto load_tile = [&](int tile) {
        const unsigned key_shift = (tile & 1) * Tile::kKeyBytes;
        const unsigned value_shift = (tile & 1) * Tile::kValueBytes;
        // Where options are read, it comes with them.
        if (__builtin_expect(tile < (Score::kSingle ? options.whole_end : whole_end), 1)) {
            key_copies.start(key_shift, p.k.row_stride);
            value_copies.start(value_shift, p.v.row_stride);
            return;
        }
        const int64 first_key = (block.tiles.begin + tile) * kKeys;
        const int begin = int(clamp(block.any.first - first_key, 0, kKeys));
        const int end = int(clamp(block.any.last + 1 - first_key, 0, kKeys));
        if (has_aligned_rows(block.k) && has_aligned_rows(block.v)) {
            key_copies.start_part(key_shift, p.k.row_stride, begin, end, int(p.features));
            value_copies.start_part(value_shift, p.v.row_stride, begin, end, int(p.values));
        } else {
            copy_elements<kKeys, kFeatures, kThreads>(keys + key_shift, block.k, first_key, begin,
                                                      end, int(p.features));
            copy_elements<kKeys, kValues, kThreads>(values + value_shift, block.v, first_key, begin,
                                                    end, int(p.values));
        }
    };
    auto load_query_step = [&](unsigned (&a)[kRowTiles][4], unsigned first, int step) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
            load_matrices(a[m], Features::advance(first, step) + m * 16 * Features::kPitch);
    };

    unsigned held[Tile::kQueriesHeld ? Tile::kFeatureSteps : 1][kRowTiles][4];
    if (tiles > 0) {
        const int rows = int(block.end_row - block.first_row);
        RowCopies<Tile::kQueries, kFeatures, kThreads, T> copies(shared_address(queries), block.q,
                                                                 block.first_row);
        if (!has_aligned_rows(block.q))
            copy_elements<Tile::kQueries, kFeatures, kThreads>(queries, block.q, block.first_row, 0,
                                                               rows, int(p.features));
        else if (rows == Tile::kQueries && p.features == kFeatures)
            copies.start(0, p.q.row_stride);
        else
            copies.start_part(0, p.q.row_stride, 0, rows, int(p.features));
    }

    MaskTile<Tile> mask;
    auto start_mask = [&](int tile) {
        if constexpr (Score::kSingle && Score::kHides)
            if (tile < options.inside_end)
                mask.start(block.score.mask(), block.first_row + warp_row,
                           (block.tiles.begin + tile) * kKeys);
    };

    FragmentRow state[kRows];
    ValueFragments<Tile> out;

    // A second turn only after non-finite values: see lib/nonfinite.cuh.
#pragma unroll 1
    for (;;) {
        const float sink = block.work.split == 0 ? block.score.sink : -infinity<float>();
#pragma unroll
        for (int i = 0; i < kRows; ++i) state[i].begin(sink, lane % 4 == 0);
        bool large = have_large(state);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][j][e] = 0;

#pragma unroll 1
        for (int tile = -1; tile < tiles; ++tile) {
            bool shown = seen.has(tile);
            const bool whole = seen.has_whole(tile), again = seen.again;
            const bool inside = Score::kSingle && tile >= 0 && tile < options.inside_end;
            bool masked = Score::kHides && inside;
            if (masked) {
                mask.finish();
                shown &= mask.has_any();
                masked = !mask.has_all();
            }
            start_mask(tile + 1);
            if (tile >= 0) {
                wait_for_copies<0>();
                if (again) {
                    __syncthreads();
                    keep_finite<kKeys, kValues, kThreads, T>(values +
                                                             (tile & 1) * Tile::kValueBytes);
                }
                __syncthreads();  // the tile is there, and everyone is done with the one before
            }
            if (tile + 1 < tiles) {
                load_tile(tile + 1);
                key_copies.advance(p.k.row_stride, 1);
                value_copies.advance(p.v.row_stride, 1);
            }
            commit_copies();
            if constexpr (Tile::kQueriesHeld) {
                if (tile == 0) {
                    const unsigned first = own_query_at();
#pragma unroll
                    for (int step = 0; step < Tile::kFeatureSteps; ++step)
                        load_query_step(held[step], first, step);
                }
            }
            if (!shown) continue;

            ScoreFragments<Tile> s = {};
            add_scores<T, Tile>(s, own_key() + (tile & 1) * Tile::kKeyBytes,
                                [&](unsigned (&read)[kRowTiles][4], int step) -> const auto& {
                                    if constexpr (Tile::kQueriesHeld) return held[step];
                                    load_query_step(read, own_query, step);
                                    return read;
                                });
            const int64 first_key = (block.tiles.begin + tile) * kKeys;
            float shift[kRows] = {};
            if constexpr (Score::kSingle) {
                if (inside) {
                    const int64 own_row = row_of(0), first_own_key = first_key + lane % 4 * 2;
                    FragmentPairs<Tile> pairs{s,
                                              shift,
                                              own_row,
                                              first_own_key,
                                              int(block.score.position(own_row) - first_own_key),
                                              options.side(tile)};
                    block.score.change_tile(pairs);
                    hide_unseen<Tile>(s, first_key, whole, block.score, masked, mask, row_of);
                }
            }
            if (!inside && (Score::kPerPair || !whole))
                change_scores<Tile, Score>(
                    s, first_key, whole, [&](int) -> const Score& { return block.score; }, row_of);
            weigh_scores<Tile>(s, state, out, unit, large, shift);
            add_values<T, Tile>(out, s, own_value() + (tile & 1) * Tile::kValueBytes);
        }

#pragma unroll
        for (int i = 0; i < kRows; ++i)
            state[i].l = reduce_quad(state[i].l, [](float a, float b) { return add(a, b); });
        if (seen.again) break;
        unsigned damaged = 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float zero = 0;  // times NaN or inf it is NaN
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    zero = multiply_add(out[i / 2][j][i % 2 * 2 + e], 0, zero);
            if (zero != 0 && is_finite(state[i].l) && block.score.is_used(row_of(i)))
                damaged |= 1u << i;
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
    if (block.redo) __syncthreads();  // everyone is done with shared memory

    const Output<T> output(p, block.index, block.work.split);
    // Of its quad's rows, a lane finishes one.
    const int own = lane % 4;
    FragmentRow finished = state[0];
#pragma unroll
    for (int i = 1; i < kRows; ++i)
        if (own == i) finished = state[i];
    const int64 own_row = row_of(own);
    const float l = block.score.is_used(own_row) ? finished.l : 0;
    const float inverse = l == 0 ? 0 : 1 / l;
    if (own < kRows && own_row < block.end_row)
        output.store_lse(own_row, l == 0 ? -infinity<float>()
                                         : multiply_add(finished.reference, kLogOf2, logarithm(l)));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const float factor = __shfl_sync(kFullWarp, inverse, lane / 4 * 4 + i);
#pragma unroll
        for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = out[i / 2][j][i % 2 * 2 + e];
                x = factor == 0 ? 0 : x * factor;
            }
    }
    const int64 first_row = block.first_row + warp_row;
    const int rows = int(clamp(block.end_row - first_row, 0, Tile::kWarpRows));
    if (p.out_is_wide)
        store_rows<Tile>(shared, out, output.template matrix<float>(), first_row, rows, p.values);
    else
        store_rows<Tile>(shared, out, output.template matrix<T>(), first_row, rows, p.values);
    if (!block.redo) return;

    __syncwarp();  // add_nonfinite overwrites what other lanes wrote
#pragma unroll 1
    for (int own = 0; own < Tile::kWarpRows; ++own) {
        const int i = own / 8;
        const bool met = own % 8 == lane / 4 && (damaged_rows[threadIdx.x] >> i & 1);
        const unsigned owners = __ballot_sync(kFullWarp, met);
        if (!owners) continue;
        float reference = 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            if (r == i) reference = state[r].reference;
        reference = __shfl_sync(kFullWarp, reference, __ffs(owners) - 1);
        const int64 row = block.first_row + warp_row + own;
        KeyRange keys_seen = block.score.range(row);
        keys_seen.first = max(keys_seen.first, block.tiles.begin * kKeys);
        keys_seen.last = min(keys_seen.last, block.tiles.end * kKeys - 1);
        add_nonfinite(
            block.q, block.k, block.v, p.features, 0, p.values, row, keys_seen, block.score,
            [&](float s) { return exp2_approximate(multiply_add(s, kLog2OfE, -reference)); },
            [&](int64 column, float x) { output.store(row, column, x); });
    }
}

}  // namespace cuflash

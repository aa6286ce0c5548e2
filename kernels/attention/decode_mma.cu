// Attention forward of few queries and many keys on tensor cores, for 16-bit inputs of any shape
// and stride (sm_80 and later).
//
// What such a call does is read keys and values. A block has up to 16 rows, of one batch entry or
// of several that share their keys and values (packed_rows.cuh), so that these are read once for
// all of them. Each of its warps has all of the rows and every kWarps-th slice of kKeys keys, which
// come by background copies of its own, kStages - 1 slices ahead: until its keys are done no warp
// waits for another. In the end the warps' sums are merged in shared memory, always in the same
// order.
//
// `decode_mma`: the grid is that of lib/scheduler.cuh, all columns of v in one block; its tiles of
// keys are one slice of every warp. `decode_mma_cluster` (sm_90): shares of the keys are the blocks
// of a cluster, hence the fastest in the grid. They read each other's sums when all are done, each
// for some of the results: no second launch merges them, and no workspace holds them. Dynamic
// shared memory, as swizzled tiles: queries (16 x kFeatures); then for each warp kStages stages of
// keys (kKeys x kFeatures) and values (kKeys x kValues), and in the end its sums (16 x kValues
// float32).
#include "attention/fragments.cuh"
#include "attention/mma_steps.cuh"
#include "attention/mma_tile.cuh"
#include "attention/packed_rows.cuh"
#include "attention/parameters.cuh"
#include "lib/nonfinite.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_cluster.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/score.cuh"

namespace cuflash {

// Warps of a block, keys of a slice, padded features and columns of v, slices in shared memory,
// whether a warp holds the queries in registers, blocks that a multiprocessor should hold.
// `device/attention_plans_decode.py` says which tiles there are, and why.
template <int kWarps_, int kKeys_, int kFeatures, int kValues, int kStages_, bool kQueriesHeld_,
          int kBlocks_>
struct DecodeTile {
    static constexpr int kWarps = kWarps_, kKeys = kKeys_, kStages = kStages_, kBlocks = kBlocks_;
    static constexpr bool kQueriesHeld = kQueriesHeld_;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kRowTiles = 1, kRows = 2, kQueries = 16;
    static constexpr int kKeyTiles = kKeys / 8, kValueTiles = kValues / 8;
    static constexpr int kFeatureSteps = kFeatures / 16;
    using Features = SwizzledTile<kFeatures>;
    using Values = SwizzledTile<kValues>;
    using Sums = SwizzledTile<2 * kValues>;  // 32 bits each
    static constexpr int kBlockKeys = kWarps * kKeys;
    static constexpr int kQueryBytes = kQueries * Features::kPitch;
    static constexpr int kKeyBytes = kKeys * Features::kPitch;
    static constexpr int kStageBytes = kKeyBytes + kKeys * Values::kPitch;
    static constexpr int kWarpBytes = kStages * kStageBytes;
    static_assert(kWarps >= 3, "each sets up a part");
    static_assert(kKeys % 16 == 0, "a matrix instruction takes 16 keys");
    static_assert(kQueries * Sums::kPitch <= kWarpBytes, "sums lie where keys and values did");
};

// The slices of one warp, numbered from 0: slice n has the keys first + n * step ..., kKeys of
// them.
template <typename Tile>
struct Slices {
    int64 first;
    int count;

    // How many of them end at `end` or before.
    __device__ __forceinline__ int until(int64 end) const {
        const int64 room = end - first - Tile::kKeys;
        return room < 0 ? 0 : int(min(room / Tile::kBlockKeys + 1, int64(count)));
    }
    // How many of them begin before `begin`.
    __device__ __forceinline__ int before(int64 begin) const {
        return until(begin - 1 + Tile::kKeys);
    }
    __device__ __forceinline__ int64 key(int slice) const {
        return first + int64(slice) * Tile::kBlockKeys;
    }
};

// Queries to shared memory, a chunk a thread.
template <typename Tile, typename Rows>
__device__ __forceinline__ void load_queries(unsigned char* to, const Rows& block,
                                             const AttentionParameters& p) {
    using Features = typename Tile::Features;
    using T = typename Rows::Element;
#pragma unroll 1
    for (int i = threadIdx.x; i < Tile::kQueries * Features::kChunks; i += Tile::kThreads) {
        const int r = i / Features::kChunks, chunk = i % Features::kChunks;
        const T* const from = block.rows[r].q;
        Vector<T> x;
#pragma unroll
        for (int e = 0; e < kVector<T>; ++e) {
            const int column = chunk * kVector<T> + e;
            x.element[e] = column < p.features ? from[column * p.q.column_stride] : narrow<T>(0);
        }
        *reinterpret_cast<uint4*>(to + Features::at(r, chunk)) = bytes_as<uint4>(x);
    }
}

template <typename V>
__device__ __forceinline__ bool is_multiple(const V* pointer) {
    return reinterpret_cast<unsigned long long>(pointer) % sizeof(V) == 0;
}

// Four neighbours of a row of the results, by one write where that can be.
template <typename T>
__device__ __forceinline__ void store_four(const Output<T>& output, const AttentionParameters& p,
                                           int64 row, int column, const float (&x)[4]) {
    const int64 first = output.out_start + row * p.out.row_stride + column;
    if (p.out.column_stride == 1 && column + 4 <= p.values) {
        float4* const wide = reinterpret_cast<float4*>(static_cast<float*>(p.out.data) + first);
        uint2* const narrow = reinterpret_cast<uint2*>(static_cast<T*>(p.out.data) + first);
        if (p.out_is_wide && is_multiple(wide)) {
            *wide = make_float4(x[0], x[1], x[2], x[3]);
            return;
        }
        if (!p.out_is_wide && is_multiple(narrow)) {
            *narrow = make_uint2(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]));
            return;
        }
    }
    for (int e = 0; e < 4; ++e)
        if (column + e < p.values) output.store(row, column + e, x[e]);
}

// Four columns of a row's sums, relative to a reference, and the normalizer.
struct RowSums {
    float reference, l, x[4];
};

// The sums of `kParts` parts as one: `state(i)` is a part's reference and normalizer, `columns(i)`
// are its sums.
template <int kParts, typename State, typename Part>
__device__ __forceinline__ RowSums merge_parts(State state, Part columns) {
    float2 states[kParts];
    float4 parts[kParts];
    RowSums sums{kNoReference, 0, {}};
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        states[i] = state(i);
        parts[i] = columns(i);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) sums.reference = maximum(sums.reference, states[i].x);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        const float factor = exp2_approximate(states[i].x - sums.reference);
        sums.l = multiply_add(states[i].y, factor, sums.l);
        sums.x[0] = multiply_add(parts[i].x, factor, sums.x[0]);
        sums.x[1] = multiply_add(parts[i].y, factor, sums.x[1]);
        sums.x[2] = multiply_add(parts[i].z, factor, sums.x[2]);
        sums.x[3] = multiply_add(parts[i].w, factor, sums.x[3]);
    }
    return sums;
}

// The results of four columns of row r.
template <typename Rows>
__device__ __forceinline__ void store_results(RowSums sums, const Rows& block, int r, int chunk,
                                              const AttentionParameters& p) {
    const auto& row = block.rows[r];
    const bool used = row.score.is_used(row.number);
    if (!used) sums.l = 0;
    const float inverse = sums.l == 0 ? 0 : 1 / sums.l;
#pragma unroll
    for (int e = 0; e < 4; ++e)  // with a weight of 0 too a value that is not finite tells
        sums.x[e] = used && (inverse != 0 || is_nan(sums.x[e])) ? sums.x[e] * inverse : 0;
    const auto output = block.output_of(p, r);
    store_four(output, p, row.number, 4 * chunk, sums.x);
    if (chunk == 0)
        output.store_lse(row.number,
                         sums.l == 0 ? -infinity<float>()
                                     : multiply_add(sums.reference, kLogOf2, logarithm(sums.l)));
}

// `kShares`: the blocks of a cluster; 1 where there is none, and a share's results are its own.
template <typename T, typename Score, typename Tile, int kShares>
__device__ __forceinline__ void decode(const AttentionParameters& p) {
    using Features = typename Tile::Features;
    using Values = typename Tile::Values;
    using Sums = typename Tile::Sums;
    constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kStages = Tile::kStages;
    constexpr int kFeatures = Features::kPitch / 2, kValues = Values::kPitch / 2;
    constexpr int kWarps = Tile::kWarps, kThreads = Tile::kThreads;

    CUFLASH_DYNAMIC_SHARED(unsigned char, shared);
    __shared__ PackedRows<T, Score, Tile::kQueries> block;
    __shared__ float2 states[kWarps][Tile::kQueries];  // reference and normalizer
    __shared__ int damaged[Tile::kQueries];            // NaN or inf in a column of the row
    __shared__ float2 merged[Tile::kQueries];          // of all warps, if there is a cluster
    Work work = Work::of(p.grid, blockIdx.x);
    if constexpr (kShares > 1) {
        work = Work::of({p.grid.row_tiles, p.grid.column_tiles, 1}, blockIdx.x / kShares);
        work.split = cluster_rank();
    }
    if (!block.begin(p, Tile::kBlockKeys, work)) return;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* const own_stages = shared + Tile::kQueryBytes + warp * Tile::kWarpBytes;
    const Slices<Tile> slices{block.tiles.begin * Tile::kBlockKeys + warp * kKeys,
                              int(block.tiles.end - block.tiles.begin)};
    const int begin = slices.until(block.any.first), end = slices.before(block.any.last + 1);
    const int whole_begin = slices.before(block.all.first);
    const int whole_end = slices.until(block.all.last + 1);
    const bool aligned = has_aligned_rows(block.k) && has_aligned_rows(block.v);
    // Slices before this one are copied whole. What no row sees in the first of them is a key, and
    // a value that is not finite there is found in the end.
    const int copied_end = aligned && p.features == kFeatures && p.values == kValues
                               ? slices.until(block.any.last + 1)
                               : 0;
    const float unit = Score::kPerPair ? kLog2OfE : block.rows[0].score.scale * kLog2OfE;

    const unsigned stages_at = here(shared_address(own_stages));
    const unsigned own_key = own_key_row<Tile>(stages_at);
    const unsigned own_value = own_value_row<Tile>(stages_at + Tile::kKeyBytes);
    const unsigned own_query = shared_address(shared) + Features::at(lane % 16, lane / 16);
    RowCopies<kKeys, kFeatures, 32, T> key_copies(stages_at, block.k, slices.key(begin));
    RowCopies<kKeys, kValues, 32, T> value_copies(stages_at + Tile::kKeyBytes, block.v,
                                                  slices.key(begin));
    auto load_slice = [&](int slice, unsigned stage) {
        if (__builtin_expect(slice < copied_end, 1)) {
            key_copies.start(stage, p.k.row_stride);
            value_copies.start(stage, p.v.row_stride);
        } else {
            const int64 first_key = slices.key(slice);
            const int from = int(clamp(block.any.first - first_key, 0, kKeys));
            const int to = int(clamp(block.any.last + 1 - first_key, 0, kKeys));
            if (aligned) {
                key_copies.start_part(stage, p.k.row_stride, from, to, int(p.features));
                value_copies.start_part(stage, p.v.row_stride, from, to, int(p.values));
            } else {
                copy_elements<kKeys, kFeatures, 32>(own_stages + stage, block.k, first_key, from,
                                                    to, int(p.features));
                copy_elements<kKeys, kValues, 32>(own_stages + stage + Tile::kKeyBytes, block.v,
                                                  first_key, from, to, int(p.values));
            }
        }
        key_copies.advance(p.k.row_stride, kWarps);
        value_copies.advance(p.v.row_stride, kWarps);
    };
    auto next = [](unsigned stage) {
        return stage == (kStages - 1) * Tile::kStageBytes ? 0 : stage + Tile::kStageBytes;
    };
    auto query_step = [&](unsigned (&a)[1][4], int step) {
        load_matrices(a[0], Features::advance(own_query, step));
    };
    auto score_of = [&](int i) -> const Score& { return block.rows[lane / 4 + 8 * i].score; };
    auto row_of = [&](int i) { return block.rows[lane / 4 + 8 * i].number; };

    unsigned held[Tile::kQueriesHeld ? Tile::kFeatureSteps : 1][1][4];
    FragmentRow state[kRows];
    ValueFragments<Tile> out;
    // A second turn only after non-finite values: see lib/nonfinite.cuh.
    bool again = false;
#pragma unroll 1
    for (;;) {
        const bool has_sink = block.work.split == 0 && warp == 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            state[i].begin(has_sink ? score_of(i).sink : -infinity<float>(), lane % 4 == 0);
        bool large = have_large(state);
#pragma unroll
        for (int j = 0; j < Tile::kValueTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[0][j][e] = 0;

        unsigned loading = 0, stage = 0;
#pragma unroll
        for (int ahead = 0; ahead < kStages - 1; ++ahead) {
            if (begin + ahead < end) load_slice(begin + ahead, loading);
            commit_copies();
            loading = next(loading);
        }
        if (!again) {
            load_queries<Tile>(shared, block, p);
            __syncthreads();
            if constexpr (Tile::kQueriesHeld) {
#pragma unroll
                for (int step = 0; step < Tile::kFeatureSteps; ++step) query_step(held[step], step);
            }
        }

#pragma unroll 1
        for (int slice = begin; slice < end; ++slice) {
            wait_for_copies<kStages - 2>();
            __syncwarp();  // the slice is there, and all lanes are done with the one before
            if (again) {
                keep_finite<kKeys, kValues, 32, T>(own_stages + stage + Tile::kKeyBytes);
                __syncwarp();
            }
            if (slice + kStages - 1 < end) load_slice(slice + kStages - 1, loading);
            commit_copies();
            loading = next(loading);

            ScoreFragments<Tile> s = {};
            add_scores<T, Tile>(s, own_key + stage,
                                [&](unsigned (&read)[1][4], int step) -> const auto& {
                                    if constexpr (Tile::kQueriesHeld) return held[step];
                                    query_step(read, step);
                                    return read;
                                });
            const bool whole = slice >= whole_begin && slice < whole_end;
            if (Score::kPerPair || !whole)
                change_scores<Tile, Score>(s, slices.key(slice), whole, score_of, row_of);
            weigh_scores<Tile>(s, state, out, unit, large);
            add_values<T, Tile>(out, s, own_value + stage);
            stage = next(stage);
        }

        __syncwarp();  // all lanes are done with the stages
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = lane / 4 + 8 * i;
            state[i].l = reduce_quad(state[i].l, [](float a, float b) { return add(a, b); });
            if (lane % 4 == 0) states[warp][row] = make_float2(state[i].reference, state[i].l);
#pragma unroll
            for (int j = 0; j < Tile::kValueTiles; ++j) {
                const int column = 8 * j + lane % 4 * 2;
                store_pair<float>(own_stages + Sums::at(row, column / 4) + column % 4 * 4,
                                  out[0][j][2 * i], out[0][j][2 * i + 1]);
            }
        }
        if (threadIdx.x < Tile::kQueries && !again) damaged[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < block.count * Sums::kChunks; i += kThreads) {
            const int r = i / Sums::kChunks, chunk = i % Sums::kChunks;
            unsigned char* const first = shared + Tile::kQueryBytes + Sums::at(r, chunk);
            const RowSums sums = merge_parts<kWarps>(
                [&](int w) { return states[w][r]; },
                [&](int w) {
                    return *reinterpret_cast<const float4*>(first + w * Tile::kWarpBytes);
                });
            float zero = 0;  // times NaN or inf it is NaN
            for (int e = 0; e < 4; ++e) zero = multiply_add(sums.x[e], 0, zero);
            const auto& row = block.rows[r];
            if (zero != 0 && is_finite(sums.l) && row.score.is_used(row.number))
                damaged[r] = block.redo = 1;
            if constexpr (kShares > 1) {
                *reinterpret_cast<float4*>(first) =
                    make_float4(sums.x[0], sums.x[1], sums.x[2], sums.x[3]);
                if (chunk == 0) merged[r] = make_float2(sums.reference, sums.l);
            } else {
                store_results(sums, block, r, chunk, p);
            }
        }
        __syncthreads();
        if (again || !block.redo) break;
        again = true;
        key_copies.advance(p.k.row_stride, -kWarps * max(end - begin, 0));
        value_copies.advance(p.v.row_stride, -kWarps * max(end - begin, 0));
    }
    if (block.redo) {
#pragma unroll 1
        for (int r = warp; r < block.count; r += kWarps) {
            if (!damaged[r]) continue;
            const auto& row = block.rows[r];
            float reference = kNoReference;
            for (int w = 0; w < kWarps; ++w) reference = maximum(reference, states[w][r].x);
            KeyRange seen = row.score.range(row.number);
            seen.first = max(seen.first, block.tiles.begin * Tile::kBlockKeys);
            seen.last = min(seen.last, block.tiles.end * Tile::kBlockKeys - 1);
            const Matrix<const T> q{row.q - row.number * p.q.row_stride, p.q.row_stride,
                                    p.q.column_stride};
            const Output<T> output = block.output_of(p, r);
            add_nonfinite(
                q, block.k, block.v, p.features, 0, p.values, row.number, seen, row.score,
                [&](float s) { return exp2_approximate(multiply_add(s, kLog2OfE, -reference)); },
                [&](int64 column, float x) {
                    if constexpr (kShares > 1)
                        *reinterpret_cast<float*>(shared + Tile::kQueryBytes +
                                                  Sums::at(r, int(column) / 4) + column % 4 * 4) =
                            x;
                    else
                        output.store(row.number, column, x);
                });
        }
    }
    if constexpr (kShares > 1) {
        cluster_arrive();
        cluster_wait();
        // Each block has its part of the results, and reads the sums of all.
        const int count = block.count * Sums::kChunks, part = (count + kShares - 1) / kShares;
        const int end = min(part * (block.work.split + 1), count);
#pragma unroll 1
        for (int i = part * block.work.split + threadIdx.x; i < end; i += kThreads) {
            const int r = i / Sums::kChunks, chunk = i % Sums::kChunks;
            const unsigned char* const own = shared + Tile::kQueryBytes + Sums::at(r, chunk);
            const RowSums sums = merge_parts<kShares>(
                [&](int share) { return cluster_load_pair(cluster_address(&merged[r], share)); },
                [&](int share) { return cluster_load_four(cluster_address(own, share)); });
            store_results(sums, block, r, chunk, p);
        }
        cluster_arrive();  // nobody leaves before all have read
        cluster_wait();
    }
}

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    decode_mma(const __grid_constant__ AttentionParameters p) {
    decode<T, Score, Tile, 1>(p);
}

template <typename T, typename Score, typename Tile, int kShares>
__global__ void CUFLASH_CLUSTERS(kShares) __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    decode_mma_cluster(const __grid_constant__ AttentionParameters p) {
    decode<T, Score, Tile, kShares>(p);
}

}  // namespace cuflash

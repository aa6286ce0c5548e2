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
#include "attention/parameters.cuh"
#include "lib/nonfinite.cuh"
#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/score.cuh"
#include "lib/swizzle.cuh"

namespace cuflash {

// 16-row tiles of a warp, warps of a block, keys of a tile, padded features and columns of v,
// whether a warp holds its queries in registers, blocks that a multiprocessor should hold.
// `device/attention_plans_mma.py` says which tiles there are, and why.
template <int kRowTiles_, int kWarps, int kKeys_, int kFeatures, int kValues, bool kQueriesHeld_,
          int kBlocks_>
struct MmaTile {
    static constexpr int kRowTiles = kRowTiles_, kKeys = kKeys_, kBlocks = kBlocks_;
    static constexpr bool kQueriesHeld = kQueriesHeld_;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles;
    static constexpr int kQueries = kWarpRows * kWarps;
    static constexpr int kRows = 2 * kRowTiles;      // rows that a thread has a part of
    static constexpr int kKeyTiles = kKeys / 8;      // 8 keys each
    static constexpr int kValueTiles = kValues / 8;  // 8 columns each
    static constexpr int kFeatureSteps = kFeatures / 16;
    using Features = SwizzledTile<kFeatures>;
    using Values = SwizzledTile<kValues>;
    static constexpr int kQueryBytes = kQueries * Features::kPitch;
    static constexpr int kKeyBytes = kKeys * Features::kPitch;
    static constexpr int kValueBytes = kKeys * Values::kPitch;
    static_assert(kKeys % 16 == 0, "a matrix instruction takes 16 keys");
    static_assert(2 * kQueries * Values::kPitch <= kQueryBytes + 2 * (kKeyBytes + kValueBytes),
                  "results leave by way of shared memory");
};

// ------------------------------------------------------------------------------------------ loads

// Whether rows can be copied by 16 bytes.
template <typename T>
__device__ __forceinline__ bool has_aligned_rows(const Matrix<T>& matrix) {
    return matrix.column_stride == 1 && matrix.row_stride % kVector<T> == 0 &&
           is_vector_aligned(matrix.data);
}

// Starts to copy kRows rows, from `first_row` on, of a matrix with aligned rows. Tile rows outside
// begin..end - 1 and columns from `columns` on become 0: what lies there may be NaN.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void copy_rows(unsigned tile, const Matrix<const T>& matrix,
                                          int64 first_row, int begin, int end, int columns) {
    using Layout = SwizzledTile<kColumns>;
    constexpr int kNeighbours = Layout::kPeriod, kStep = kThreads / kNeighbours;
    static_assert(kStep % 8 == 0 && kRows % kStep == 0, "threads keep their place in the pattern");
    const int row = threadIdx.x / kNeighbours, chunk = threadIdx.x % kNeighbours;
    const int64 step = kStep * matrix.row_stride;
    const T* source = &matrix.at(first_row + row, chunk * kVector<T>);
    const unsigned target = tile + Layout::at(row, chunk);
    const bool whole = begin == 0 && end == kRows && columns == kColumns;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep, source += step) {
#pragma unroll
        for (int c = 0; c < Layout::kChunks; c += kNeighbours) {
            const unsigned to = target + r * Layout::kPitch + c * Layout::kChunkBytes;
            if (whole) {
                copy_async(to, source + c * kVector<T>);
            } else {
                const int left = columns - (chunk + c) * kVector<T>;
                const int elements = min(max(left, 0), kVector<T>);
                const bool seen = row + r >= begin && row + r < end && elements > 0;
                copy_async(to, seen ? source + c * kVector<T> : matrix.data,
                           seen ? elements * int(sizeof(T)) : 0);
            }
        }
    }
}

// The same for any strides, and at once. With `finite_only`, NaN and inf become 0 too.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void copy_elements(unsigned char* tile, const Matrix<const T>& matrix,
                                              int64 first_row, int begin, int end, int columns,
                                              bool finite_only) {
    using Layout = SwizzledTile<kColumns>;
    const T* const source = &matrix.at(first_row, 0);
    // Neighbouring threads take neighbours in memory, be they in a row or in a column.
    const bool by_column = llabs(matrix.row_stride) < llabs(matrix.column_stride);
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
        const int r = by_column ? i % kRows : i / kColumns;
        const int c = by_column ? i / kRows : i % kColumns;
        T x = narrow<T>(0);
        if (r >= begin && r < end && c < columns)
            x = source[r * matrix.row_stride + c * matrix.column_stride];
        if (finite_only && !is_finite(widen(x))) x = narrow<T>(0);
        *reinterpret_cast<T*>(tile + Layout::at(r, c / kVector<T>) +
                              c % kVector<T> * int(sizeof(T))) = x;
    }
}

template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void load_rows(unsigned char* tile, const Matrix<const T>& matrix,
                                          int64 first_row, int begin, int end, int64 columns,
                                          bool finite_only = false) {
    if (!finite_only && has_aligned_rows(matrix))
        copy_rows<kRows, kColumns, kThreads>(shared_address(tile), matrix, first_row, begin, end,
                                             int(columns));
    else
        copy_elements<kRows, kColumns, kThreads>(tile, matrix, first_row, begin, end, int(columns),
                                                 finite_only);
}

// ----------------------------------------------------------------------------------------- stores

// Two neighbours of a row as R, in one write.
template <typename R>
__device__ __forceinline__ void store_pair(unsigned char* to, float first, float second) {
    *reinterpret_cast<unsigned*>(to) = pack<R>(first, second);
}
template <>
__device__ __forceinline__ void store_pair<float>(unsigned char* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
}

// Stores the results of a warp's rows, `rows` of them from `first_row` on, by way of shared memory:
// a thread has two neighbours of a row at a time, memory wants 16 bytes.
template <typename Tile, typename R>
__device__ __forceinline__ void store_rows(
    unsigned char* shared, const float (&out)[Tile::kRowTiles][Tile::kValueTiles][4],
    const Matrix<R>& to, int64 first_row, int rows, int64 columns) {
    constexpr int kColumns = 8 * Tile::kValueTiles, kWide = kVector<R>;
    using Layout = SwizzledTile<kColumns* int(sizeof(R)) / 2>;
    const int lane = threadIdx.x % 32;
    unsigned char* const own = shared + threadIdx.x / 32 * Tile::kWarpRows * Layout::kPitch;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Tile::kValueTiles; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            const float* x = &out[i / 2][j][i % 2 * 2];
            store_pair<R>(own + Layout::at(8 * i + lane / 4, column / kWide) +
                              column % kWide * int(sizeof(R)),
                          x[0], x[1]);
        }
    __syncwarp();

    if (has_aligned_rows(to) && columns % kWide == 0) {
        constexpr int kVectors = Tile::kWarpRows * Layout::kChunks / 32;  // of a lane
        // So many hide the latency of shared memory.
        constexpr int kAtOnce = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : kVectors;
#pragma unroll 1
        for (int start = lane; start < 32 * kVectors; start += 32 * kAtOnce) {
            uint4 words[kAtOnce];  // elements would move one by one
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                const int i = start + 32 * n;
                words[n] = *reinterpret_cast<const uint4*>(
                    own + Layout::at(i / Layout::kChunks, i % Layout::kChunks));
            }
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                const int r = (start + 32 * n) / Layout::kChunks;
                const int column = (start + 32 * n) % Layout::kChunks * kWide;
                if (r < rows && column < columns)
                    __stcs(reinterpret_cast<uint4*>(&to.at(first_row + r, column)), words[n]);
            }
        }
        return;
    }
#pragma unroll 1
    for (int i = lane; i < rows * kColumns; i += 32) {
        const int r = i / kColumns, column = i % kColumns;
        if (column < columns)
            to.at(first_row + r, column) = *reinterpret_cast<const R*>(
                own + Layout::at(r, column / kWide) + column % kWide * int(sizeof(R)));
    }
}

// ---------------------------------------------------------------------------------------- softmax

constexpr float kLog2OfE = 1.44269504f;
constexpr float kLogOf2 = 0.693147181f;
// A row's weights may grow to 2^kSlack before its sums are made relative to a larger score: that
// seldom happens after the first keys, and the weights are as exact either way. Each row decides
// by its own scores alone.
constexpr float kSlack = 8;

// The online softmax of one row in base 2. Scores come times 1 / unit; each lane has the normalizer
// of its own keys.
struct MmaRow {
    float reference;  // exponents are relative to it; 0 while no key was seen
    float limit;      // scores above it raise the reference
    float l;

    // A sink is a logit before all keys that has no value; it counts in one lane. +inf, like NaN,
    // makes l NaN.
    __device__ __forceinline__ void begin(float sink, bool counts, float unit, float slack) {
        const bool present = sink != -infinity<float>();
        reference = present ? sink * kLog2OfE : 0;
        limit = present ? sink * kLog2OfE / unit + slack : sink;
        l = present && counts ? 1 + (sink - sink) : 0;
    }

    // Returns the factor of sums relative to the reference before.
    __device__ __forceinline__ float raise(float score, float unit, float slack) {
        if (!(score > limit)) return 1;
        const float before = reference;
        reference = score * unit;
        const float factor = limit == -infinity<float>() ? 0 : exp2_approximate(before - reference);
        limit = score + slack;
        l *= factor;
        return factor;
    }

    __device__ __forceinline__ float weight(float score, float unit) const {
        return exp2_approximate(multiply_add(score, unit, -reference));
    }
};

// Reduces over the 4 lanes of a row; all of them get the result, of the same bits.
template <typename Combine>
__device__ __forceinline__ float reduce_quad(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, 1));
    return combine(x, __shfl_xor_sync(kFullWarp, x, 2));
}

// Which of a block's key tiles some row of a warp sees, and all rows see; counted from the block's
// first tile.
struct WarpTiles {
    int begin, end, whole_begin, whole_end;

    template <typename Score>
    __device__ __forceinline__ WarpTiles(const Score& score, int64 first_row, int rows,
                                         const TileRange& tiles, int keys) {
        const KeyRange any = score.range_of_any(first_row, first_row + rows);
        const KeyRange all = score.range_of_all(first_row, first_row + rows);
        const bool empty = any.last < any.first;
        begin = relative(any.first / keys, tiles);
        end = empty ? begin : relative(any.last / keys + 1, tiles);
        whole_begin = relative((all.first + keys - 1) / keys, tiles);
        whole_end = relative((all.last + 1) / keys, tiles);
    }

  private:
    static __device__ __forceinline__ int relative(int64 tile, const TileRange& tiles) {
        return int(clamp(tile, tiles.begin, tiles.end) - tiles.begin);
    }
};

// Turns a thread's dot products with the keys of a tile into scores, -inf where unseen; without
// steps the scale is left to `MmaRow`.
template <typename Tile, typename T, typename Score, typename RowOf>
__device__ __forceinline__ void change_scores(float (&s)[Tile::kRowTiles][Tile::kKeyTiles][4],
                                              const BlockWork<T, Score>& block, int64 first_key,
                                              bool whole, RowOf row_of) {
    if (!Score::kPerPair && whole) return;
    const int own_key = 2 * (threadIdx.x % 4);
    auto column_of = [](int j) { return 8 * (j / 2) + j % 2; };
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        const KeyRange seen = block.score.range(row_of(i));
        const RowPairs pairs{row_of(i), first_key + own_key,
                             int(clamp(seen.first - first_key, 0, Tile::kKeys)) - own_key,
                             int(clamp(seen.last + 1 - first_key, 0, Tile::kKeys)) - own_key};
        float row[2 * Tile::kKeyTiles];
#pragma unroll
        for (int j = 0; j < 2 * Tile::kKeyTiles; ++j) row[j] = s[i / 2][j / 2][i % 2 * 2 + j % 2];
        if constexpr (Score::kPerPair) {
            block.score.change_row(row, pairs, column_of);
        } else {
#pragma unroll
            for (int j = 0; j < 2 * Tile::kKeyTiles; ++j)
                if (!pairs.has(column_of(j))) row[j] = -infinity<float>();
        }
#pragma unroll
        for (int j = 0; j < 2 * Tile::kKeyTiles; ++j) s[i / 2][j / 2][i % 2 * 2 + j % 2] = row[j];
    }
}

// ----------------------------------------------------------------------------------------- kernel

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    forward_mma(const __grid_constant__ AttentionParameters p) {
    using Product = MatrixProduct<T>;
    using Features = typename Tile::Features;
    using Values = typename Tile::Values;
    constexpr int kRowTiles = Tile::kRowTiles, kRows = Tile::kRows, kKeys = Tile::kKeys;
    constexpr int kKeyTiles = Tile::kKeyTiles, kValueTiles = Tile::kValueTiles;
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
    const WarpTiles mine(block.score, block.first_row + warp_row, Tile::kWarpRows, block.tiles,
                         kKeys);
    const float unit = Score::kPerPair ? kLog2OfE : block.score.scale * kLog2OfE;
    const float slack = kSlack / unit;

    // Where a lane's rows of 8x8 matrices begin.
    const unsigned own_queries =
        shared_address(queries) + Features::at(warp_row + lane % 16, lane / 16);
    const unsigned own_keys =
        shared_address(keys) + Features::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const unsigned own_values = shared_address(values) + Values::at(lane % 16, lane / 16);

    auto load_tile = [&](int tile, bool finite_only) {
        const int64 first_key = (block.tiles.begin + tile) * kKeys;
        const int begin = int(clamp(block.any.first - first_key, 0, kKeys));
        const int end = int(clamp(block.any.last + 1 - first_key, 0, kKeys));
        load_rows<kKeys, kFeatures, kThreads>(keys + tile % 2 * Tile::kKeyBytes, block.k, first_key,
                                              begin, end, p.features);
        load_rows<kKeys, kValues, kThreads>(values + tile % 2 * Tile::kValueBytes, block.v,
                                            first_key, begin, end, p.values, finite_only);
    };
    auto load_query_step = [&](unsigned (&a)[kRowTiles][4], int step) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
            load_matrices(a[m], Features::advance(own_queries, step) + m * 16 * Features::kPitch);
    };

    unsigned held[Tile::kQueriesHeld ? Tile::kFeatureSteps : 1][kRowTiles][4];
    if (tiles > 0) {
        load_rows<Tile::kQueries, kFeatures, kThreads>(
            queries, block.q, block.first_row, 0, int(block.end_row - block.first_row), p.features);
        commit_copies();
        if constexpr (Tile::kQueriesHeld) {
            wait_for_copies<0>();
            __syncthreads();
#pragma unroll
            for (int step = 0; step < Tile::kFeatureSteps; ++step)
                load_query_step(held[step], step);
        }
    }

    MmaRow state[kRows];
    float out[kRowTiles][kValueTiles][4];
    unsigned damaged = 0;  // bit i: row i met a non-finite value in a column of this thread

    // A second turn only after non-finite values: see lib/nonfinite.cuh.
    for (int turn = 0; turn < 2; ++turn) {
        const float sink = block.work.split == 0 ? block.score.sink : -infinity<float>();
#pragma unroll
        for (int i = 0; i < kRows; ++i) state[i].begin(sink, lane % 4 == 0, unit, slack);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][j][e] = 0;

        if (tiles > 0) load_tile(0, turn > 0);
        commit_copies();
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            wait_for_copies<0>();
            __syncthreads();  // the tile is there, and everyone is done with the one before
            if (tile + 1 < tiles) load_tile(tile + 1, turn > 0);
            commit_copies();
            if (tile < mine.begin || tile >= mine.end) continue;

            float s[kRowTiles][kKeyTiles][4] = {};
            const unsigned tile_keys = own_keys + tile % 2 * Tile::kKeyBytes;
#pragma unroll
            for (int step = 0; step < Tile::kFeatureSteps; ++step) {
                unsigned read[kRowTiles][4];
                if constexpr (!Tile::kQueriesHeld) load_query_step(read, step);
                const auto& a = Tile::kQueriesHeld ? held[step] : read;
#pragma unroll
                for (int j = 0; j < kKeyTiles; j += 2) {
                    unsigned b[4];
                    load_matrices(b, Features::advance(tile_keys, step) + j * 8 * Features::kPitch);
#pragma unroll
                    for (int m = 0; m < kRowTiles; ++m) {
                        Product::add(s[m][j], a[m], b[0], b[1]);
                        Product::add(s[m][j + 1], a[m], b[2], b[3]);
                    }
                }
            }

            const int64 first_key = (block.tiles.begin + tile) * kKeys;
            const bool whole = tile >= mine.whole_begin && tile < mine.whole_end;
            change_scores<Tile>(s, block, first_key, whole, row_of);

            float top[kRows];
            bool rises = false;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                top[i] = -infinity<float>();
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        top[i] = maximum(top[i], s[i / 2][j][i % 2 * 2 + e]);
                rises |= top[i] > state[i].limit;
            }
            if (__any_sync(kFullWarp, rises)) {
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    top[i] = reduce_quad(top[i], [](float a, float b) { return maximum(a, b); });
                    const float factor = state[i].raise(top[i], unit, slack);
#pragma unroll
                    for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                        for (int e = 0; e < 2; ++e) out[i / 2][j][i % 2 * 2 + e] *= factor;
                }
            }
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = s[i / 2][j][i % 2 * 2 + e];
                        x = state[i].weight(x, unit);
                        state[i].l += x;
                    }

            const unsigned tile_values = own_values + tile % 2 * Tile::kValueBytes;
#pragma unroll
            for (int step = 0; step < kKeyTiles / 2; ++step) {
                unsigned a[kRowTiles][4];
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                    for (int part = 0; part < 4; ++part) {
                        const float* pair = &s[m][2 * step + part / 2][part % 2 * 2];
                        a[m][part] = pack<T>(pair[0], pair[1]);
                    }
#pragma unroll
                for (int j = 0; j < kValueTiles; j += 2) {
                    unsigned b[4];
                    load_transposed_matrices(
                        b, Values::advance(tile_values, j / 2) + step * 16 * Values::kPitch);
#pragma unroll
                    for (int m = 0; m < kRowTiles; ++m) {
                        Product::add(out[m][j], a[m], b[0], b[1]);
                        Product::add(out[m][j + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }

#pragma unroll
        for (int i = 0; i < kRows; ++i)
            state[i].l = reduce_quad(state[i].l, [](float a, float b) { return add(a, b); });
        if (turn > 0) break;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            bool finite = true;
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) finite &= is_finite(out[i / 2][j][i % 2 * 2 + e]);
            if (!finite && is_finite(state[i].l) && block.score.is_used(row_of(i)))
                damaged |= 1u << i;
        }
        if (damaged) block.redo = 1;
        __syncthreads();
        if (!block.redo) break;
    }
    if (block.redo) __syncthreads();  // everyone is done with shared memory

    const Output<T> output(p, block.index, block.work.split);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int64 row = row_of(i);
        const float l = block.score.is_used(row) ? state[i].l : 0;
        const float inverse = 1 / l;
#pragma unroll
        for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = out[i / 2][j][i % 2 * 2 + e];
                x = l == 0 ? 0 : x * inverse;
            }
        if (lane % 4 == 0 && row < block.end_row)
            output.store_lse(row, l == 0 ? -infinity<float>()
                                         : multiply_add(state[i].reference, kLogOf2, logarithm(l)));
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
        const bool met = own % 8 == lane / 4 && (damaged >> i & 1);
        const unsigned owners = __ballot_sync(kFullWarp, met);
        if (!owners) continue;
        float reference = 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            if (r == i) reference = state[r].reference;
        reference = __shfl_sync(kFullWarp, reference, __ffs(owners) - 1);
        const int64 row = block.first_row + warp_row + own;
        KeyRange seen = block.score.range(row);
        seen.first = max(seen.first, block.tiles.begin * kKeys);
        seen.last = min(seen.last, block.tiles.end * kKeys - 1);
        add_nonfinite(
            block.q, block.k, block.v, p.features, 0, p.values, row, seen, block.score,
            [&](float s) { return exp2_approximate(multiply_add(s, kLog2OfE, -reference)); },
            [&](int64 column, float x) { output.store(row, column, x); });
    }
}

}  // namespace cuflash

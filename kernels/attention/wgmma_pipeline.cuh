// What producer and consumers of `forward_wgmma` share: parameters, the tile's shape, slots, rings
// of stages, and where all of it lies in shared memory.
#pragma once

#include "attention/block.cuh"
#include "attention/parameters.cuh"
#include "lib/ptx_barrier.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/ptx_tma.cuh"

namespace cuflash {

struct alignas(64) WgmmaParameters {
    TensorMap q, k, v, out;
    AttentionParameters attention;
    int64 tiles;     // of the grid: row tiles x shares x entries
    int out_by_map;  // results leave by TMA, but those of a tile whose last rows are another's
};

// Consumer warpgroups, keys of a tile, padded width of the heads, stages of keys and of values, of
// queries; whether warpgroups take turns at the tensor cores, and whether whole tiles go without a
// maximum. `device/attention_plans_wgmma.py` says which
// tiles there are, and why.
template <int kGroups_, int kKeys_, int kWidth_, int kStages_, int kQueryStages_, bool kTurns_,
          bool kTopless_>
struct WgmmaTile {
    static constexpr int kGroups = kGroups_, kKeys = kKeys_, kWidth = kWidth_;
    static constexpr int kStages = kStages_, kQueryStages = kQueryStages_;
    static constexpr bool kTurns = kTurns_, kTopless = kTopless_;
    // Queries of the next tile come before this one is done.
    static constexpr bool kAhead = kQueryStages_ > kGroups_;
    static constexpr int kWarps = 4 * kGroups;  // of the consumers
    static constexpr int kThreads = 128 * (kGroups + 1);
    static constexpr int kQueries = 64 * kGroups;
    // Named barriers: a warpgroup's turn is 1 + its number.
    static constexpr int kCleanBarrier = 1 + kGroups, kDescriberBarrier = 2 + kGroups;
    static constexpr int kPanels = kWidth / 64;
    static constexpr int kKeyTiles = kKeys / 8, kValueTiles = kWidth / 8;
    static constexpr int kFeatureSteps = kWidth / 16, kKeySteps = kKeys / 16;
    static constexpr int kQueryBytes = 64 * kWidth * 2;  // a stage: a warpgroup's
    static constexpr int kKeyBytes = kKeys * kWidth * 2;
    // Of the results of a warp's 16 rows, what is in shared memory at a time.
    static constexpr int kOutPanels = kPanels < 2 ? kPanels : 2;
    static constexpr int kOutWarpBytes = kOutPanels * 16 * 128;
    static constexpr int kTileBytes =
        kQueryStages * kQueryBytes + 2 * kStages * kKeyBytes + kWarps * kOutWarpBytes;
    // What a block starts with, 65536 / kThreads a thread rounded down to 8, moves to the
    // consumers.
    static constexpr int kProducerRegisters = kGroups == 4 ? 32 : 56;
    static constexpr int kConsumerRegisters = kGroups == 2 ? 224 : kGroups == 3 ? 152 : 112;
    static_assert(kKeys % 16 == 0 && kWidth % 64 == 0, "panels of whole groups of rows");
};

enum Token {
    kWork,   // a tile
    kPause,  // no tile for now: finish what is under way
    kEnd,
};

constexpr int kSlots = 4;

// What the producer hands to the consumers with a stage of queries.
template <typename T, typename Score, int kGroups>
struct Slot {
    // Positions and distances below kNear are exact as floats, and so are their sums with columns.
    static constexpr int64 kNear = 1 << 22;
    static constexpr int kFar = 1 << 30;
    BlockWork<T, Score> block;
    Token token;
    int tile;       // in the grid
    int clean;      // the tile is taken again with non-finite values as 0: see lib/nonfinite.cuh
    int tiles;      // of keys, at least one
    int first_key;  // of the first of them; others are counted from it
    int key_end;    // keys from here on nobody sees
    Band band;      // what the tile's rows see by their position
    int distance;   // from the first key to the first row's position, or kFar
    int rows;       // that are used
    int flipped;    // the last warpgroup has the first rows
    // By 64 rows: tiles that all of them see whole, and the end of those that any of them sees.
    int whole_begin[kGroups], whole_end[kGroups], seen_end[kGroups];
    int64 out_start, lse_start;  // of the results: see Output
    int out_by_map;              // whether they leave by it
    int out_batch[3];            // where they are by the map
};

// The tiles that were taken again; if they are more than it holds, any tile of the block may be.
struct DirtyTiles {
    static constexpr int kMost = 32;
    int count;
    int tile[kMost];

    __device__ __forceinline__ void add(int index) {
        if (count < kMost) tile[count] = index;
        ++count;
    }
};

// Shared memory as addresses.
template <typename Tile, typename SlotType>
struct Rooms {
    // Room that a launch leaves behind the tiles.
    static constexpr int kBytes = 2816;
    unsigned char* memory;
    unsigned queries, keys, values, out;
    unsigned queries_full, queries_free, keys_full, keys_free, values_full, values_free;
    unsigned slot_full, slot_free;
    SlotType* slots;
    DirtyTiles* dirty;

    __device__ __forceinline__ explicit Rooms(unsigned char* memory) : memory(memory) {
        queries = shared_address(memory);
        keys = queries + Tile::kQueryStages * Tile::kQueryBytes;
        values = keys + Tile::kStages * Tile::kKeyBytes;
        out = values + Tile::kStages * Tile::kKeyBytes;
        queries_full = queries + Tile::kTileBytes;
        queries_free = queries_full + 8 * Tile::kQueryStages;
        keys_full = queries_free + 8 * Tile::kQueryStages;
        keys_free = keys_full + 8 * Tile::kStages;
        values_full = keys_free + 8 * Tile::kStages;
        values_free = values_full + 8 * Tile::kStages;
        slot_full = values_free + 8 * Tile::kStages;
        slot_free = slot_full + 8 * kSlots;
        slots = reinterpret_cast<SlotType*>(memory + Tile::kTileBytes + kBarrierBytes);
        dirty = reinterpret_cast<DirtyTiles*>(slots + kSlots);
    }

    static constexpr int kBarrierBytes =
        (8 * (2 * Tile::kQueryStages + 4 * Tile::kStages + 2 * kSlots) + 15) / 16 * 16;

    // By one thread.
    __device__ __forceinline__ void begin() const {
        static_assert(kBarrierBytes + kSlots * sizeof(SlotType) + sizeof(DirtyTiles) <= kBytes,
                      "slots take more room than there is");
        dirty->count = 0;
        for (int i = 0; i < Tile::kQueryStages; ++i) {
            barrier_begin(queries_full + 8 * i, 1);
            barrier_begin(queries_free + 8 * i, 4);
        }
        for (int i = 0; i < Tile::kStages; ++i) {
            barrier_begin(keys_full + 8 * i, 1);
            barrier_begin(keys_free + 8 * i, Tile::kWarps);
            barrier_begin(values_full + 8 * i, 1);
            barrier_begin(values_free + 8 * i, Tile::kWarps);
        }
        for (int i = 0; i < kSlots; ++i) {
            barrier_begin(slot_full + 8 * i, 1);
            barrier_begin(slot_free + 8 * i, Tile::kWarps);
        }
        fence_barriers();
        fence_shared_for_copies();
    }
};

// Which 64 rows of a tile a warpgroup has.
template <typename Tile>
__device__ __forceinline__ int part_of(int flipped, int group) {
    return Tile::kAhead && flipped ? Tile::kGroups - 1 - group : group;
}

// A grid has fewer than 2^31 tiles. Those of sequences that may be empty have the last rows.
__device__ __forceinline__ int tile_of_round(const WgmmaParameters& p, unsigned round) {
    const AttentionParameters& a = p.attention;
    return tile_of_round(unsigned(a.grid.row_tiles), unsigned(a.sequences.count), unsigned(p.tiles),
                         gridDim.x, blockIdx.x, round);
}

// Whether a tile is the second of a pair.
__device__ __forceinline__ bool is_second(const AttentionParameters& p, int tile) {
    const unsigned rows = unsigned(p.grid.row_tiles), single = unsigned(p.sequences.count);
    return unsigned(tile) % rows >= single + (rows - single + 1) / 2;
}

}  // namespace cuflash

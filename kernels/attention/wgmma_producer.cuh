// The producer of `forward_wgmma`: three warps find the tiles of a block, which takes divisions and
// looks into memory, and one fetches what they need, which must never wait for that.
#pragma once

#include "attention/wgmma_pipeline.cuh"

namespace cuflash {

// Where a row of an entry is by an array's map, which has no steps along axes that it has not.
__device__ __forceinline__ BoxStart start_of(const AttentionParameters& p,
                                             const BatchedArray& array, const BatchIndex& index,
                                             int64 row) {
    BoxStart at{0, int(row), {}};
#pragma unroll
    for (int axis = 0; axis < 3; ++axis)
        if (axis < p.batch.count && array.batch_stride[axis])
            at.batch[axis] = int(index.on_axis[axis]);
    return at;
}

// Three warps: find the tiles of the block and describe them in slots, as far ahead as slots are
// free.
template <typename T, typename Score, typename Tile>
struct Describer {
    using SlotType = Slot<T, Score, Tile::kGroups>;
    using RoomsType = Rooms<Tile, SlotType>;
    static constexpr int kThreads = 96;
    const WgmmaParameters& p;
    const RoomsType& rooms;
    unsigned issued = 0, settled = 0;  // slots so far, of which the consumers are done with these

    __device__ __forceinline__ Describer(const WgmmaParameters& p, const RoomsType& rooms)
        : p(p), rooms(rooms) {}

    __device__ __forceinline__ void run() {
        unsigned round = 0;
        while (true) {
            // A slot's last tile may have to be taken again.
            int tile = issued - settled == kSlots ? settle() : kNoTile;
            bool again = tile != kNoTile;
            if (!again) tile = tile_of_round(p, round++);
            if (tile == kNoMoreTiles) {
                // The end, unless one of the tiles under way has to be taken again.
                hand_over(kPause, false);
                tile = kNoTile;
                while (settled != issued && tile == kNoTile) tile = settle();
                if (tile == kNoTile) return hand_over(kEnd, false);
                again = true;
            }
            if (tile != kNoTile && describe(tile, again)) hand_over(kWork, again);
        }
    }

  private:
    __device__ __forceinline__ static void synchronise() {
        named_barrier_wait(Tile::kDescriberBarrier, kThreads);
    }

    __device__ __forceinline__ static int thread() { return threadIdx.x - 32; }

    // Waits until the consumers are done with the oldest slot under way. Returns its tile if that
    // has to be taken again, else kNoTile.
    __device__ __forceinline__ int settle() {
        const unsigned which = settled % kSlots;
        barrier_wait(rooms.slot_free + 8 * which, settled / kSlots % 2);
        ++settled;
        const SlotType& done = rooms.slots[which];
        const int tile =
            done.token == kWork && done.block.redo && !done.clean ? done.tile : kNoTile;
        synchronise();
        return tile;
    }

    // False if the tile has no row. `again` it is walked as a whole by all warpgroups.
    __device__ __forceinline__ bool describe(int tile, bool again) {
        SlotType& current = rooms.slots[issued % kSlots];
        BlockWork<T, Score>& block = current.block;
        if (!block.template begin_by_warps<int>(p.attention, tile, Tile::kQueries, Tile::kWidth,
                                                Tile::kKeys, thread(), synchronise)) {
            synchronise();  // all have read that
            return false;
        }
        const TileRange tiles = block.tiles;
        const bool none = tiles.begin == tiles.end;
        const int warp = thread() / 32, lane = thread() % 32;
        if (warp == 0 && lane < Tile::kGroups) {
            const int64 row = block.first_row + 64 * lane;
            const KeyRange all = block.score.range_of_all(row, row + 64);
            auto relative = [&](int64 key_tile) {
                return int(clamp(key_tile, tiles.begin, tiles.end) - tiles.begin);
            };
            current.whole_begin[lane] = relative((all.first + Tile::kKeys - 1) / Tile::kKeys);
            current.whole_end[lane] = relative((all.last + 1) / Tile::kKeys);
            const KeyRange any = block.score.range_of_any(row, row + 64);
            const int seen_end = any.first > any.last ? 1 : relative(any.last / Tile::kKeys + 1);
            const int count = none ? 1 : int(tiles.end - tiles.begin);
            // While a warpgroup lets keys pass, its last values of the rows before wait in their
            // ring, and others, which need those that follow, may have to pass it the turn. So one
            // stage must be left to them. And where all meet to clean values, none may be ahead.
            const int most = Tile::kAhead && !again ? Tile::kStages - 1 : 0;
            current.seen_end[lane] = max(max(seen_end, 1), count - most);
        } else if (warp == 1 && lane == 0) {
            current.tile = tile;
            // A share without keys walks over a tile that it does not see.
            current.tiles = none ? 1 : int(tiles.end - tiles.begin);
            current.first_key = int(tiles.begin) * Tile::kKeys;
            const int64 keys = min(block.score.bounds.keys, tiles.end * Tile::kKeys);
            current.key_end = none ? 0 : int(keys - current.first_key);
            current.band = block.score.band(block.first_row, current.first_key);
            const int64 position = block.score.position(block.first_row);
            current.distance = max(llabs(position), p.attention.score.keys) < SlotType::kNear
                                   ? int(position - current.first_key)
                                   : SlotType::kFar;
            current.rows =
                int(clamp(block.score.bounds.queries - block.first_row, 0, Tile::kQueries));
            current.flipped = is_second(p.attention, tile);
        } else if (warp == 2 && lane == 0) {
            const Output<T> output(p.attention, block.index, block.work.split);
            current.out_start = output.out_start;
            current.lse_start = output.lse_start;
            const int64 end = block.segment.end;
            current.out_by_map = p.out_by_map && (end - block.first_row >= Tile::kQueries ||
                                                  end == p.attention.score.queries);
            const BoxStart at = start_of(p.attention, p.attention.out, block.index, 0);
#pragma unroll
            for (int axis = 0; axis < 3; ++axis) current.out_batch[axis] = at.batch[axis];
        }
        return true;
    }

    __device__ __forceinline__ void hand_over(Token token, bool again) {
        synchronise();
        if (thread() == 0) {
            SlotType& current = rooms.slots[issued % kSlots];
            if (again) rooms.dirty->add(current.tile);
            current.clean = again;
            current.token = token;
            barrier_arrive(rooms.slot_full + 8 * (issued % kSlots));
        }
        ++issued;
    }
};

// One warp: fetches what the tiles in the slots need.
template <typename T, typename Score, typename Tile>
struct Fetcher {
    using SlotType = Slot<T, Score, Tile::kGroups>;
    using RoomsType = Rooms<Tile, SlotType>;
    const WgmmaParameters& p;
    const RoomsType& rooms;
    const bool leads;  // one lane starts all copies
    Ring<kSlots> slots{0};
    // All stages are free at first: the phase before the first has the other parity.
    Ring<Tile::kQueryStages> queries{Tile::kQueryStages};
    Ring<Tile::kStages> keys{Tile::kStages}, values{Tile::kStages};
    // Values are fetched one tile of keys late, as they are used.
    bool waiting = false;
    BoxStart waiting_values;

    __device__ __forceinline__ Fetcher(const WgmmaParameters& p, const RoomsType& rooms)
        : p(p), rooms(rooms), leads(threadIdx.x % 32 == 0) {}

    __device__ __forceinline__ void run() {
        while (true) {
            barrier_wait(rooms.slot_full + 8 * slots.stage(), slots.parity());
            const SlotType& current = rooms.slots[slots.stage()];
            const Token token = current.token;
            slots.advance();
            if (token == kWork) {
                fetch(current);
                continue;
            }
            fetch_waiting_values();
            for (int group = 0; group < Tile::kGroups; ++group) {
                barrier_wait(rooms.queries_free + 8 * queries.stage(), queries.parity());
                if (leads) barrier_arrive(rooms.queries_full + 8 * queries.stage());
                queries.advance();
            }
            if (token == kEnd) return;
        }
    }

  private:
    __device__ __forceinline__ BoxStart start_of(const BatchedArray& array, const SlotType& current,
                                                 int64 row) const {
        return cuflash::start_of(p.attention, array, current.block.index, row);
    }

    // A tile of `rows` rows, panel by panel.
    __device__ __forceinline__ void copy(unsigned to, const TensorMap& from, BoxStart at, int rows,
                                         unsigned barrier) const {
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
            at.element = 64 * panel;
            copy_box(to + panel * rows * 128, &from, at, barrier);
        }
    }

    __device__ __forceinline__ void fetch(const SlotType& current) {
        const AttentionParameters& a = p.attention;
        fetch_queries(current, 0, kEarly);
        BoxStart key = start_of(a.k, current, 0), value = start_of(a.v, current, 0);
        const int tiles = current.tiles;
        const int first_row = int(current.block.segment.first_key) + current.first_key;
#pragma unroll 1
        for (int tile = tiles - 1; tile >= 0; --tile) {
            key.row = value.row = first_row + tile * Tile::kKeys;
            barrier_wait(rooms.keys_free + 8 * keys.stage(), keys.parity());
            if (leads) {
                const unsigned full = rooms.keys_full + 8 * keys.stage();
                barrier_arrive_expecting(full, Tile::kKeyBytes);
                copy(rooms.keys + keys.stage() * Tile::kKeyBytes, p.k, key, Tile::kKeys, full);
            }
            keys.advance();
            fetch_waiting_values();
            waiting = true;
            waiting_values = value;
            // Other stages are free only after the last products with the tile before: what that
            // tile still needs comes first.
            if (tile == tiles - 1) fetch_queries(current, kEarly, Tile::kGroups);
        }
    }

    // Stages that are free while the tile before is under way.
    static constexpr int kEarly = Tile::kQueryStages >= 2 * Tile::kGroups
                                      ? Tile::kGroups
                                      : Tile::kQueryStages - Tile::kGroups;

    // Those of the warpgroups begin..end - 1.
    __device__ __forceinline__ void fetch_queries(const SlotType& current, int begin, int end) {
        BoxStart at = start_of(p.attention.q, current, 0);
        for (int group = begin; group < end; ++group) {
            at.row = int(current.block.first_row) + 64 * part_of<Tile>(current.flipped, group);
            barrier_wait(rooms.queries_free + 8 * queries.stage(), queries.parity());
            if (leads) {
                const unsigned full = rooms.queries_full + 8 * queries.stage();
                barrier_arrive_expecting(full, Tile::kQueryBytes);
                copy(rooms.queries + queries.stage() * Tile::kQueryBytes, p.q, at, 64, full);
            }
            queries.advance();
        }
    }

    __device__ __forceinline__ void fetch_waiting_values() {
        if (!waiting) return;
        waiting = false;
        barrier_wait(rooms.values_free + 8 * values.stage(), values.parity());
        if (leads) {
            const unsigned full = rooms.values_full + 8 * values.stage();
            barrier_arrive_expecting(full, Tile::kKeyBytes);
            copy(rooms.values + values.stage() * Tile::kKeyBytes, p.v, waiting_values, Tile::kKeys,
                 full);
        }
        values.advance();
    }
};

}  // namespace cuflash

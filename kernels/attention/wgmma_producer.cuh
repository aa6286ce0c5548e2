// The producer of `forward_wgmma`: finds the tiles of a block and fetches what they need.
#pragma once

#include "attention/wgmma_pipeline.cuh"

namespace cuflash {

// One warp: finds the tiles of the block, describes them in slots and fetches what they need.
template <typename T, typename Score, typename Tile>
struct Producer {
    using SlotType = Slot<T, Score, Tile::kGroups>;
    using RoomsType = Rooms<Tile, SlotType>;
    const WgmmaParameters& p;
    const RoomsType& rooms;
    const bool leads;  // one lane starts all copies
    // All stages are free at first: the phase before the first has the other parity.
    Ring<Tile::kQueryStages> queries{Tile::kQueryStages};
    Ring<Tile::kStages> keys{Tile::kStages}, values{Tile::kStages};
    int slot = 0;
    unsigned issued = 0, parities = 0;  // bits of slots
    int64 round = 0;
    bool ready, again;  // the slot has a tile; that is taken again
    // Values are fetched one tile of keys late, as they are used.
    bool waiting = false;
    BoxStart waiting_values;

    __device__ __forceinline__ Producer(const WgmmaParameters& p, const RoomsType& rooms)
        : p(p), rooms(rooms), leads(threadIdx.x % 32 == 0) {}

    __device__ __forceinline__ void run() {
        prepare();
        while (true) {
            if (!ready) {
                // The end, unless one of the tiles under way has to be taken again.
                fetch_waiting_values();
                send(kPause);
                int64 tile = -1;
                for (int i = 0; i < kSlots && tile < 0; ++i) tile = settle((slot + i) % kSlots);
                if (tile < 0) return send(kEnd);
                again = true;
                describe(tile);
            }
            fetch();
        }
    }

  private:
    // Describes the next tile, if there is one, in the next slot: the oldest, whose own tile may
    // have to be taken again.
    __device__ __forceinline__ void prepare() {
        const int64 tile = settle(slot);
        again = tile >= 0;
        ready = again && describe(tile);
        while (!ready && tile_of_round(round) < p.tiles)
            ready = describe(in_grid(p, tile_of_round(round++)));
    }

    // Waits until the consumers are done with a slot. Returns its tile if that has to be taken
    // again, else -1.
    __device__ __forceinline__ int64 settle(int which) {
        if (!(issued >> which & 1)) return -1;
        barrier_wait(rooms.slot_free + 8 * which, parities >> which & 1);
        parities ^= 1u << which;
        issued ^= 1u << which;
        const SlotType& done = rooms.slots[which];
        const int64 tile = done.token == kWork && done.block.redo && !done.clean ? done.tile : -1;
        __syncwarp();
        return tile;
    }

    // False if the tile has no row.
    __device__ __forceinline__ bool describe(int64 tile) {
        SlotType& current = rooms.slots[slot];
        BlockWork<T, Score>& block = current.block;
        if (!block.begin_by_warp(p.attention, tile, Tile::kQueries, Tile::kWidth, Tile::kKeys))
            return false;
        const int group = threadIdx.x % 32;
        const TileRange tiles = block.tiles;
        const bool none = tiles.begin == tiles.end;
        if (leads) {
            current.tile = tile;
            // A share without keys walks over a tile that it does not see.
            current.tiles = none ? 1 : int(tiles.end - tiles.begin);
            current.first_key = int(tiles.begin) * Tile::kKeys;
            current.seen_first = none ? 0 : current.first_key;
            current.seen_last = none ? -1 : int(tiles.end) * Tile::kKeys - 1;
        }
        if (group < Tile::kGroups) {
            const int64 row = block.first_row + 64 * group;
            const KeyRange all = block.score.range_of_all(row, row + 64);
            auto relative = [&](int64 key_tile) {
                return int(clamp(key_tile, tiles.begin, tiles.end) - tiles.begin);
            };
            current.whole_begin[group] = relative((all.first + Tile::kKeys - 1) / Tile::kKeys);
            current.whole_end[group] = relative((all.last + 1) / Tile::kKeys);
        }
        __syncwarp();
        return true;
    }

    __device__ __forceinline__ BoxStart start_of(const BatchedArray& array, const SlotType& current,
                                                 int64 row) const {
        BoxStart at{0, int(row), {}};
#pragma unroll
        for (int axis = 0; axis < 3; ++axis)
            if (axis < p.attention.batch.count && array.batch_stride[axis])
                at.batch[axis] = int(current.block.index.on_axis[axis]);
        return at;
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

    // Hands the tile that was prepared over, fetches it, and prepares the next one meanwhile.
    __device__ __forceinline__ void fetch() {
        SlotType& current = rooms.slots[slot];
        barrier_wait(rooms.queries_free + 8 * queries.stage(), queries.parity());
        const AttentionParameters& a = p.attention;
        if (leads) {
            if (again) rooms.dirty->add(current.tile);
            current.clean = again;
            current.token = kWork;
            const unsigned full = rooms.queries_full + 8 * queries.stage();
            barrier_arrive_expecting(full, Tile::kQueryBytes);
            copy(rooms.queries + queries.stage() * Tile::kQueryBytes, p.q,
                 start_of(a.q, current, current.block.first_row), Tile::kQueries, full);
        }
        queries.advance();
        issued |= 1u << slot;
        slot = (slot + 1) % kSlots;
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
            if (tile == tiles - 1) prepare();
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

    __device__ __forceinline__ void send(Token token) {
        barrier_wait(rooms.queries_free + 8 * queries.stage(), queries.parity());
        if (leads) {
            rooms.slots[slot].token = token;
            barrier_arrive(rooms.queries_full + 8 * queries.stage());
        }
        queries.advance();
        issued |= 1u << slot;
        slot = (slot + 1) % kSlots;
    }
};

}  // namespace cuflash

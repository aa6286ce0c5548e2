// What the threads of a block of `backward_wgmma` know, and where it lies.
#pragma once

#include "attention/backward_wgmma.cuh"

namespace cuflash {

// What all threads of a block of `backward_wgmma` know. Keys and tiles of rows are numbered from
// the first ones of the sequence.
template <typename Score>
struct KeyWork {
    BatchIndex index;  // of the first entry that the gradients are summed over
    Segment segment;
    Score score;
    int64 entry, number;  // of the gradients; of the tile of keys among all
    int first, keys;      // the first key, and those that are used
    int end;              // keys that have a gradient
    int low, high;        // the rows that see the first key, if the range goes on as it does
    int begin_tile, tiles;
    int64 first_tile;  // of rows, among those of an entry
    int steps;         // tiles of rows, in all entries
    int redo, damaged;
    int key_batch[3], value_batch[3];
    // What is fetched next, for the thread that does: `left` tiles of an entry.
    int turn, left;
    int64 row_entry;
    BatchIndex row_index;  // of the entry, but for the first
    int query_batch[3], dout_batch[3];

    // Tiles are walked from the last to the first: all rows of a causal mask see the first keys, so
    // that blocks which have to add to dq in the order of their keys all can begin at once.
    __device__ __forceinline__ int next_tile() const { return begin_tile + left - 1; }

    // Where maps have the entry along a batch axis.
    __device__ __forceinline__ void place_keys(const VjpParameters& p, int axis) {
        key_batch[axis] = place(p, p.k, index, axis);
        value_batch[axis] = place(p, p.v, index, axis);
    }
    __device__ __forceinline__ void place_rows(const VjpParameters& p, const BatchIndex& at,
                                               int axis) {
        query_batch[axis] = place(p, p.q, at, axis);
        dout_batch[axis] = place(p, p.dout, at, axis);
    }

  private:
    static __device__ __forceinline__ int place(const VjpParameters& p, const BatchedArray& array,
                                                const BatchIndex& at, int axis) {
        return axis < p.batch.count && array.batch_stride[axis] ? int(at.on_axis[axis]) : 0;
    }
};

// Shared memory as addresses.
template <typename Score, typename Tile>
struct KeyRooms {
    unsigned char* memory;
    unsigned keys, values, queries, douts, slopes, sums, exponents, deltas;
    unsigned keys_full, values_full, queries_full, douts_full, rows_free, slopes_full, slopes_free;
    KeyWork<Score>* work;

    static constexpr int kBarrierBytes =
        (8 * (2 + 3 * Tile::kStages + 2 * Tile::kSlopeStages) + 15) / 16 * 16;
    // Room that a launch leaves behind the tiles.
    static constexpr int kBytes = 640;

    __device__ __forceinline__ explicit KeyRooms(unsigned char* memory) : memory(memory) {
        keys = shared_address(memory);
        values = keys + Tile::kKeyBytes;
        queries = values + Tile::kKeyBytes;
        douts = queries + Tile::kStages * Tile::kRowBytes;
        slopes = douts + Tile::kStages * Tile::kRowBytes;
        sums = slopes + Tile::kSlopeStages * Tile::kSlopeBytes;
        exponents = sums + Tile::kSumBytes;
        deltas = exponents + Tile::kStages * Tile::kExponentBytes;
        keys_full = keys + Tile::kTileBytes;
        values_full = keys_full + 8;
        queries_full = values_full + 8;
        douts_full = queries_full + 8 * Tile::kStages;
        rows_free = douts_full + 8 * Tile::kStages;
        slopes_full = rows_free + 8 * Tile::kStages;
        slopes_free = slopes_full + 8 * Tile::kSlopeStages;
        work = reinterpret_cast<KeyWork<Score>*>(memory + Tile::kTileBytes + kBarrierBytes);
    }

    // By one thread.
    __device__ __forceinline__ void begin() const {
        static_assert(kBarrierBytes + sizeof(KeyWork<Score>) <= kBytes, "there is less room");
        barrier_begin(values_full, 1);
        for (int i = 0; i < Tile::kStages; ++i) {
            barrier_begin(queries_full + 8 * i, 1);
            barrier_begin(douts_full + 8 * i, 1);
            barrier_begin(rows_free + 8 * i, Tile::kWarps);
        }
        for (int i = 0; i < Tile::kSlopeStages; ++i) {
            barrier_begin(slopes_full + 8 * i, Tile::kWarps);
            barrier_begin(slopes_free + 8 * i, 4);
        }
        fence_barriers();
        fence_shared_for_copies();
    }
};

// The rows that see a key, as a number of 32 bits that keys and rows can be added to.
__device__ __forceinline__ int bounded(int64 row) {
    return int(clamp(row, -(1LL << 30), 1LL << 30));
}

// Starts to copy a tile of `rows` rows, panel by panel.
template <typename Tile>
__device__ __forceinline__ void copy_tile(unsigned to, const TensorMap& from, int row, int rows,
                                          const int (&batch)[3], unsigned barrier) {
    BoxStart at{0, row, {batch[0], batch[1], batch[2]}};
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
        at.element = 64 * panel;
        copy_box(to + panel * rows * 128, &from, at, barrier);
    }
}

// By one warp: finds out where the block works, and starts to fetch its keys as soon as it can.
template <typename Score, typename Tile>
__device__ __forceinline__ void begin_keys(const KeyRooms<Score, Tile>& rooms,
                                           const BackwardWgmmaParameters& p) {
    const VjpParameters& vjp = p.vjp;
    KeyWork<Score>& work = *rooms.work;
    const unsigned tiles = unsigned(p.key_tiles), together = unsigned(p.together);
    const unsigned entries = gridDim.x / tiles, lane = threadIdx.x % 32;
    // Blocks of some entries at a time, those with the first keys, which most rows see, first.
    const unsigned set = blockIdx.x / (together * tiles), in_set = blockIdx.x % (together * tiles);
    const unsigned size = min(together, entries - set * together);
    const unsigned tile = in_set / size, entry = set * together + in_set % size;
    const int64 summed = max(vjp.summed, 1LL);
    decode_batch(vjp.batch, entry * summed, work.index, lane);
    __syncwarp();
    if (lane < 3) {
        work.place_keys(vjp, lane);
        work.place_rows(vjp, work.index, lane);
    }
    __syncwarp();
    if (lane > 0) return;
    barrier_begin(rooms.keys_full, 1);
    fence_barriers();
    const int64 queries = vjp.score.queries, keys = vjp.score.keys;
    Segment segment{0, queries, queries, 0, keys, 0};
    int64 first = int64(tile) * Tile::kKeys, end = min(first + Tile::kKeys, keys);
    int64 first_tile = 0;
    if (vjp.sequences.queries.data) {
        const Sequences by_keys{vjp.sequences.keys, vjp.sequences.queries, vjp.sequences.count};
        const Segment own = Segment::find(by_keys, keys, queries, tile, Tile::kKeys);
        first = own.row_of(tile, Tile::kKeys) - own.start;
        end = min(first + Tile::kKeys, own.end - own.start);
        segment = own.transposed();
        first_tile = segment.start / Tile::kRows + segment.index;
        work.index.on_axis[0] = min(segment.index, max(vjp.sequences.count - 1, 0LL));
    }
    barrier_arrive_expecting(rooms.keys_full, Tile::kKeyBytes);
    copy_tile<Tile>(rooms.keys, p.k, int(segment.first_key + first), Tile::kKeys, work.key_batch,
                    rooms.keys_full);
    work.segment = segment;
    work.score.load(vjp.score, vjp.batch, work.index, segment);
    const EntryBounds& bounds = work.score.bounds;
    const RowRange rows = bounds.rows_that_see(first, end);
    const bool none = rows.last < rows.first;
    const int64 shift = bounds.offset + bounds.first;
    work.entry = entry;
    work.number = entry * int64(tiles) + tile;
    work.first = int(first);
    work.end = int(end - first);
    work.keys = int(clamp(bounds.keys - first, 0, Tile::kKeys));
    work.low = bounded(first - bounds.right - shift);
    work.high = bounded(first + bounds.left - shift);
    work.begin_tile = none ? 0 : int(rows.first / Tile::kRows);
    work.tiles = none ? 0 : int(rows.last / Tile::kRows) + 1 - work.begin_tile;
    work.first_tile = first_tile;
    work.steps = work.tiles * int(vjp.summed);
    work.redo = work.damaged = 0;
    work.turn = Tile::kStages;  // all stages are free: the phase before the first
    work.row_entry = entry * summed;
    work.left = work.tiles;
}

// Clears what is not finite in two elements; tells whether there was any.
template <typename T>
__device__ __forceinline__ bool clean(unsigned& pair) {
    struct alignas(4) Pair {
        T element[2];
    };
    auto x = bytes_as<Pair>(pair);
    bool found = false;
#pragma unroll
    for (int e = 0; e < 2; ++e)
        if (!is_finite(widen(x.element[e]))) {
            x.element[e] = narrow<T>(0);
            found = true;
        }
    pair = bytes_as<unsigned>(x);
    return found;
}
template <typename T>
__device__ __forceinline__ bool clean(uint4& x) {
    // One after the other, whatever the ones before held.
    bool found = clean<T>(x.x);
    found |= clean<T>(x.y);
    found |= clean<T>(x.z);
    return found |= clean<T>(x.w);
}

// Adds 0 * x to the sums of two elements: NaN after one that is not finite.
template <typename T>
__device__ __forceinline__ unsigned add_zeros(unsigned x, unsigned sum);
template <>
__device__ __forceinline__ unsigned add_zeros<__half>(unsigned x, unsigned sum) {
    return bytes_as<unsigned>(__hfma2(bytes_as<__half2>(x), __half2(0, 0), bytes_as<__half2>(sum)));
}
template <>
__device__ __forceinline__ unsigned add_zeros<__nv_bfloat16>(unsigned x, unsigned sum) {
    return bytes_as<unsigned>(
        __hfma2(bytes_as<__nv_bfloat162>(x), __nv_bfloat162(0, 0), bytes_as<__nv_bfloat162>(sum)));
}

}  // namespace cuflash

// The warpgroup of `backward_wgmma` that fetches all tiles, and sums up dq.
#pragma once

#include "attention/backward_wgmma_keys.cuh"
#include "lib/ptx_wgmma.cuh"

namespace cuflash {

// With kOrdered, blocks add to a tile of dq in the order of their keys.
template <typename T, typename Score, typename Tile, bool kOrdered>
struct QueryGroup {
    static constexpr int kColumns = Tile::kWidth / Tile::kParts, kColumnTiles = kColumns / 8;
    const BackwardWgmmaParameters& p;
    const KeyRooms<Score, Tile>& rooms;
    KeyWork<Score>& work;
    Ring<Tile::kSlopeStages> slopes{0};

    __device__ __forceinline__ QueryGroup(const BackwardWgmmaParameters& p,
                                          const KeyRooms<Score, Tile>& rooms)
        : p(p), rooms(rooms), work(*rooms.work) {}

    __device__ __forceinline__ void run() {
        const int steps = work.steps;
        if (threadIdx.x == 0 && steps > 0) {
            fetch_rows(true);
#pragma unroll 1
            for (int i = 1; i < min(steps, Tile::kStages); ++i) fetch_rows(false);
        }
        __syncwarp();
        barrier_wait(rooms.keys_full, 0);
        add_queries(steps);
        __syncthreads();
        if (uniform(work.redo)) {
            walk_again(steps);
            __syncthreads();
        }
    }

  private:
    __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }

    __device__ __forceinline__ void add_queries(int steps) {
        float dq[kColumnTiles][4];
        const unsigned staging = rooms.sums + threadIdx.x / 32 * (16 * Tile::kWidth * 4);
        constexpr int64 kTileFloats = Tile::kRows * Tile::kWidth;
        // The warp's sums of the step.
        float* to = p.sums + threadIdx.x / 32 * (16 * Tile::kWidth) +
                    (work.entry * p.vjp.summed * p.row_tiles + work.first_tile + work.begin_tile +
                     work.tiles - 1) *
                        kTileFloats;
        int left = work.tiles;
        unsigned* before = nullptr;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            unsigned* const turns = p.turns + (to - p.sums) / (16 * Tile::kWidth);
            unsigned turn = 0;
            // Read ahead of its use: it takes as long as a product.
            if (kOrdered && lane() == 0) turn = read_turn(turns);
            // So that descriptors are in uniform registers, whatever one thread has just done.
            const unsigned tile = uniform(rooms.slopes + slopes.stage() * Tile::kSlopeBytes);
            const MatrixDescriptor keys = columns_of_terms(uniform(rooms.keys), Tile::kKeys);
            barrier_wait(rooms.slopes_full + 8 * slopes.stage(), slopes.parity());
#pragma unroll
            for (int part = 0; part < Tile::kParts; ++part) {
                begin_products();
                ColumnsProduct<T, kColumns, Tile::kKeys / 16>::start(
                    dq, columns_of_terms(tile, Tile::kKeys),
                    keys + part * (kColumns / 64) * Tile::kKeys * 8);
                commit_products();
                // The stage of the step before is free before slopes of this one are there.
                if (part == 0 && step > 0 && step + Tile::kStages - 1 < steps && threadIdx.x == 0)
                    fetch_rows(false);
                if (lane() == 0) {
                    wait_for_boxes_read<Tile::kParts - 1>();
                    // What was added in the step before has arrived by now.
                    if (kOrdered && part == Tile::kParts - 1 && step > 0) {
                        wait_for_boxes<Tile::kParts - 1>();
                        pass_turn(before);
                    }
                }
                __syncwarp();
                wait_for_products<0>();
                pin(dq);
                if (part == Tile::kParts - 1) {
                    if (lane() == 0) barrier_arrive(rooms.slopes_free + 8 * slopes.stage());
                    slopes.advance();
                }
                constexpr int kPartFloats = 16 * kColumns;
                float4* const own =
                    reinterpret_cast<float4*>(rooms.memory + (staging - rooms.keys)) + lane() +
                    part * (kPartFloats / 4);
#pragma unroll
                for (int j = 0; j < kColumnTiles; ++j)
                    own[32 * j] = make_float4(dq[j][0], dq[j][1], dq[j][2], dq[j][3]);
                fence_shared_for_copies();
                __syncwarp();
                if (lane() == 0) {
                    if (kOrdered && part == 0) wait_for_turn(turns, turn, left - 1);
                    add_floats(to + part * kPartFloats, staging + part * kPartFloats * 4,
                               kPartFloats * 4);
                    commit_boxes();
                }
            }
            before = turns;
            to -= kTileFloats;
            if (--left == 0) {
                left = work.tiles;
                to += (p.row_tiles + left) * kTileFloats;
            }
        }
        if (lane() == 0) {
            wait_for_boxes();
            if (kOrdered && steps > 0) pass_turn(before);
        }
    }

    // Waits until all tiles of keys before this one have been added to a tile of rows, the
    // `number`th of those that see these keys. Their blocks were started before.
    __device__ __forceinline__ void wait_for_turn(const unsigned* turns, unsigned turn,
                                                  int number) const {
        const EntryBounds& bounds = work.score.bounds;
        const int first_seen = bounded(bounds.offset + bounds.first - bounds.left) +
                               (work.begin_tile + number) * Tile::kRows;
        const unsigned mine = work.first / Tile::kKeys - max(first_seen, 0) / Tile::kKeys;
        while (turn != mine) turn = read_turn(turns);
    }

    // ------------------------------------------------------------------------------ by TMA

    // The next tile of queries and of dout, by one thread. Where it stands lies in shared memory:
    // registers are for the sums.
    __device__ __forceinline__ void fetch_rows(bool first) const {
        const Ring<Tile::kStages> ring{work.turn};
        const int stage = ring.stage(), tile = work.next_tile();
        const int row = int(work.segment.start) + tile * Tile::kRows;
        const int64 number = work.row_entry * p.row_tiles + work.first_tile + tile;
        barrier_wait(rooms.rows_free + 8 * stage, ring.parity());
        unsigned full = rooms.queries_full + 8 * stage;
        barrier_arrive_expecting(full, Tile::kRowBytes + Tile::kExponentBytes);
        copy_tile<Tile>(rooms.queries + stage * Tile::kRowBytes, p.q, row, Tile::kRows,
                        work.query_batch, full);
        copy_shared_bytes(rooms.exponents + stage * Tile::kExponentBytes,
                          p.exponents + number * Tile::kRows, Tile::kExponentBytes, full);
        if (first) {
            barrier_arrive_expecting(rooms.values_full, Tile::kKeyBytes);
            copy_tile<Tile>(rooms.values, p.v, int(work.segment.first_key) + work.first,
                            Tile::kKeys, work.value_batch, rooms.values_full);
        }
        full = rooms.douts_full + 8 * stage;
        barrier_arrive_expecting(full, Tile::kRowBytes + Tile::kDeltaBytes);
        copy_tile<Tile>(rooms.douts + stage * Tile::kRowBytes, p.dout, row, Tile::kRows,
                        work.dout_batch, full);
        copy_shared_bytes(rooms.deltas + stage * Tile::kDeltaBytes,
                          p.deltas + number * 2 * Tile::kRows, Tile::kDeltaBytes, full);
        advance();
    }

    // Turns to the next tile, of the next entry that the gradients are summed over after the last.
    __device__ __forceinline__ void advance() const {
        Ring<Tile::kStages> ring{work.turn};
        ring.advance();
        work.turn = ring.turn;
        if (--work.left == 0) enter(work.row_entry + 1);
    }

    __device__ __forceinline__ void enter(int64 entry) const {
        work.row_entry = entry;
        work.left = work.tiles;
#pragma unroll 1
        for (int axis = 0; axis < p.vjp.batch.count; ++axis)
            decode_batch(p.vjp.batch, entry, work.row_index, axis);
        if (p.vjp.sequences.queries.data) work.row_index.on_axis[0] = work.index.on_axis[0];
        for (int axis = 0; axis < 3; ++axis) work.place_rows(p.vjp, work.row_index, axis);
    }

    // ------------------------------------------------------------------------- the second turn

    // Gives the warpgroups of keys all tiles once more, without what is not finite.
    __device__ __forceinline__ void walk_again(int steps) {
        if (threadIdx.x == 0) enter(work.entry * p.vjp.summed);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            named_barrier_wait(1, 128);
            const Ring<Tile::kStages> ring{work.turn};
            const int stage = ring.stage();
            barrier_wait(rooms.rows_free + 8 * stage, ring.parity());
            fill(stage);
            fence_shared_for_copies();
            named_barrier_wait(1, 128);
            if (threadIdx.x == 0) {
                barrier_arrive(rooms.queries_full + 8 * stage);
                barrier_arrive(rooms.douts_full + 8 * stage);
                advance();
            }
            barrier_wait(rooms.slopes_full + 8 * slopes.stage(), slopes.parity());
            if (lane() == 0) barrier_arrive(rooms.slopes_free + 8 * slopes.stage());
            slopes.advance();
        }
    }

    __device__ __forceinline__ void fill(int stage) const {
        const BatchIndex& index = work.row_index;
        const int tile = work.next_tile();
        const int64 first = work.segment.start + int64(tile) * Tile::kRows;
        const int rows = int(clamp(work.score.bounds.queries - first, 0, Tile::kRows));
        fill_tile(rooms.queries + stage * Tile::kRowBytes,
                  Matrix<const T>::of(p.vjp.q, p.vjp.batch, index), first, rows,
                  int(p.vjp.features));
        fill_tile(rooms.douts + stage * Tile::kRowBytes,
                  Matrix<const T>::of(p.vjp.dout, p.vjp.batch, index), first, rows,
                  int(p.vjp.values));
        const int64 number = work.row_entry * p.row_tiles + work.first_tile + tile;
        const float* const exponents = p.exponents + number * Tile::kRows;
        const float* const deltas = p.deltas + number * 2 * Tile::kRows;
        float* const to_exponents = reinterpret_cast<float*>(
            rooms.memory + (rooms.exponents - rooms.keys) + stage * Tile::kExponentBytes);
        float* const to_deltas = reinterpret_cast<float*>(
            rooms.memory + (rooms.deltas - rooms.keys) + stage * Tile::kDeltaBytes);
#pragma unroll 1
        for (int i = threadIdx.x; i < Tile::kRows; i += 128)
            to_exponents[i] = is_finite(exponents[i]) ? exponents[i] : -infinity<float>();
#pragma unroll 1
        for (int i = threadIdx.x; i < 2 * Tile::kRows; i += 128)
            to_deltas[i] = finite_or_zero(deltas[i]);
    }

    __device__ __forceinline__ void fill_tile(unsigned to, const Matrix<const T>& from, int64 first,
                                              int rows, int columns) const {
        constexpr int kChunks = Tile::kWidth / 8;
        unsigned char* const tile = rooms.memory + (to - rooms.keys);
#pragma unroll 1
        for (int i = threadIdx.x; i < Tile::kRows * kChunks; i += 128) {
            const int row = i / kChunks, chunk = i % kChunks;
            uint4 x = make_uint4(0, 0, 0, 0);
            if (row < rows && 8 * chunk < columns) {
                // The last columns of a row are not a whole vector, and may be the last in memory.
                Vector<T> elements{};
                for (int e = 0; e < min(8, columns - 8 * chunk); ++e)
                    elements.element[e] = from.at(first + row, 8 * chunk + e);
                x = bytes_as<uint4>(elements);
            }
            clean<T>(x);
            *reinterpret_cast<uint4*>(tile + chunk / 8 * (Tile::kRows * 128) + row * 128 +
                                      (chunk % 8 ^ row % 8) * 16) = x;
        }
    }
};

}  // namespace cuflash

// How the results of `forward_wgmma` leave: by way of shared memory, from there by TMA where the
// copy engine can write them, by words of 16 bytes or element by element elsewhere.
#pragma once

#include "attention/fragments.cuh"
#include "attention/wgmma_pipeline.cuh"
#include "lib/nonfinite.cuh"
#include "lib/ptx_wgmma.cuh"

namespace cuflash {

// A warp of a consumer warpgroup: which rows it has, and their results.
template <typename T, typename Score, typename Tile>
struct WarpResults {
    using SlotType = Slot<T, Score, Tile::kGroups>;
    using RoomsType = Rooms<Tile, SlotType>;
    static constexpr int kValueTiles = Tile::kValueTiles;
    using Sums = float[kValueTiles][4];

    const WgmmaParameters& p;
    const RoomsType& rooms;
    const int group;

    struct Inverses {
        float of_row[2];  // 1 / l; 0 if nothing was seen
    };

    // With more than two warpgroups no register is left to keep it in.
    __device__ __forceinline__ static int lane() {
        return Tile::kGroups > 2 ? lane_index() : threadIdx.x % 32;
    }
    // The number of the warp.
    __device__ __forceinline__ int warp() const { return threadIdx.x / 32 - 4; }
    __device__ __forceinline__ int part_of(const SlotType& current) const {
        return cuflash::part_of<Tile>(current.flipped, group);
    }
    // The first row of the warp in a tile.
    __device__ __forceinline__ int warp_row(int part) const { return 64 * part + warp() % 4 * 16; }
    // Row i of the thread in the tile.
    __device__ __forceinline__ int own_row(int part, int i) const {
        return warp_row(part) + 8 * i + lane() / 4;
    }

    __device__ __forceinline__ void finish(const SlotType& current, Sums& out,
                                           const Inverses& inverses) const {
        bool damaged = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float inverse = inverses.of_row[i];
            float probe = 0;  // NaN after a non-finite result: 0 * x, added up, in one instruction
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = out[j][2 * i + e];
                    x *= inverse;
                    probe = multiply_add(x, 0.0f, probe);
                }
            damaged |= probe != 0 && inverse == inverse;
        }
        if (damaged) const_cast<SlotType&>(current).block.redo = 1;
        if (uniform(current.out_by_map))
            store_by_map(current, out);
        else
            store_directly(current, out);
    }

    // What the warp's rows of a tile see of non-finite values, after their results without them.
    // After all products: the compiler runs them one by one if loops that threads may leave apart
    // come between.
    __device__ __forceinline__ void put_back(int tile) const {
        __syncwarp();
        auto& block = reinterpret_cast<BlockWork<T, Score>*>(rooms.memory)[threadIdx.x / 32];
        if (!block.template begin_by_warp<int>(p.attention, tile, Tile::kQueries, Tile::kWidth,
                                               Tile::kKeys))
            return;
        const Output<T> output(p.attention, block.index, block.work.split);
        for (int own = 0; own < 16; ++own) {
            const int64 row = block.first_row + 16 * warp() + own;
            if (row >= block.end_row) break;
            KeyRange seen = block.score.range(row);
            seen.first = max(seen.first, block.tiles.begin * Tile::kKeys);
            seen.last = min(seen.last, block.tiles.end * Tile::kKeys - 1);
            // Any weight but 0 makes an infinite value what it is.
            add_nonfinite(
                block.q, block.k, block.v, p.attention.features, 0, p.attention.values, row, seen,
                block.score,
                [](float score) { return score == -infinity<float>() ? 0 : 1 + (score - score); },
                [&](int64 column, float x) { output.store(row, column, x); });
        }
    }

  private:
    // By way of shared memory and TMA, each warp its rows.
    __device__ __forceinline__ void store_by_map(const SlotType& current, const Sums& out) const {
        constexpr int kPanelBytes = 16 * 128;
        const unsigned own = rooms.out + warp() * Tile::kOutWarpBytes;
        // What the first turn wrote must not come later.
        if (current.clean && lane() == 0) wait_for_boxes();
#pragma unroll
        for (int first = 0; first < Tile::kPanels; first += Tile::kOutPanels) {
            if (lane() == 0) wait_for_boxes_read();
            __syncwarp();
#pragma unroll
            for (int panel = 0; panel < Tile::kOutPanels; ++panel)
#pragma unroll
                for (int k = 0; k < 8; k += 2) {
                    const int j = 8 * (first + panel) + k, chunk = k + lane() / 16;
                    const unsigned pairs[4] = {pack<T>(out[j][0], out[j][1]),
                                               pack<T>(out[j][2], out[j][3]),
                                               pack<T>(out[j + 1][0], out[j + 1][1]),
                                               pack<T>(out[j + 1][2], out[j + 1][3])};
                    store_matrices(
                        own + panel * kPanelBytes + lane() % 16 * 128 + (chunk ^ lane() % 8) * 16,
                        pairs);
                }
            fence_shared_for_copies();
            __syncwarp();
            if (lane() == 0) {
                BoxStart at{0, int(current.block.first_row) + warp_row(part_of(current)), {}};
#pragma unroll
                for (int axis = 0; axis < 3; ++axis) at.batch[axis] = current.out_batch[axis];
#pragma unroll
                for (int panel = 0; panel < Tile::kOutPanels; ++panel) {
                    at.element = 64 * (first + panel);
                    copy_box(&p.out, at, own + panel * kPanelBytes);
                }
                commit_boxes();
            }
        }
    }

    // By way of shared memory too, so that a row's results lie together and one copy of the
    // stores serves all registers.
    __device__ __forceinline__ void store_directly(const SlotType& current, const Sums& out) const {
        // A warp's 16 rows by as many columns of floats as there is room for, eight together; which
        // eight where, depends on the row, so that few meet in a bank.
        constexpr int kColumns = Tile::kOutWarpBytes / 64, kEights = kColumns / 8;
        float* const own = reinterpret_cast<float*>(rooms.memory + (rooms.out - rooms.queries) +
                                                    warp() * Tile::kOutWarpBytes);
        const auto place = [&](int row, int eight) {
            return own + row * kColumns + (eight ^ row) % kEights * 8;
        };
        const Output<T> output(p.attention, current.out_start, current.lse_start);
        const Matrix<T> rounded = output.template matrix<T>();
        const int values = int(p.attention.values);
        const bool by_vectors = !p.attention.out_is_wide && rounded.column_stride == 1 &&
                                rounded.row_stride % kVector<T> == 0 && values % kVector<T> == 0 &&
                                is_vector_aligned(rounded.data);
        const int64 first_row = current.block.first_row + warp_row(part_of(current));
        const int rows = int(min(current.block.end_row - first_row, 16LL));
#pragma unroll
        for (int first = 0; first < Tile::kWidth; first += kColumns) {
            __syncwarp();
            const int own_row = lane() / 4, pair_column = lane() % 4 * 2;
#pragma unroll
            for (int eight = 0; eight < kEights; ++eight)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float* pair = &out[first / 8 + eight][2 * i];
                    *reinterpret_cast<float2*>(place(own_row + 8 * i, eight) + pair_column) = {
                        pair[0], pair[1]};
                }
            __syncwarp();
            const int columns = min(values - first, kColumns);
            if (by_vectors) {
#pragma unroll 1
                for (int i = lane(); i < 16 * kEights; i += 32) {
                    const int row = i / kEights, eight = i % kEights;
                    if (row >= rows || 8 * eight >= columns) continue;
                    const float* from = place(row, eight);
                    *reinterpret_cast<uint4*>(&rounded.at(first_row + row, first + 8 * eight)) = {
                        pack<T>(from[0], from[1]), pack<T>(from[2], from[3]),
                        pack<T>(from[4], from[5]), pack<T>(from[6], from[7])};
                }
            } else {
#pragma unroll 1
                for (int i = lane(); i < 16 * kColumns; i += 32) {
                    const int row = i / kColumns, column = i % kColumns;
                    if (row < rows && column < columns)
                        output.store(first_row + row, first + column,
                                     place(row, column / 8)[column % 8]);
                }
            }
        }
    }
};

}  // namespace cuflash

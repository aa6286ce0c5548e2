// out = activation(a @ b + bias) on Hopper's tensor cores (sm_90a), for operands that TMA can read.
//
// Blocks stay and walk over tiles of kRows x kColumns results. A producer fetches operands, 64
// terms at a time, into a ring of kStages stages; warpgroups own 64 rows each and keep one product
// under way while they release the stage of the one before. The ring runs on from tile to tile, so
// that the next tile's first operands arrive while results leave, by shared memory and TMA.
//
// a (rows, depth), b (depth, columns), bias (columns,) -> out (rows, columns). Rows of a hold the
// terms, and so do rows of b (kTermsInRows) or its columns.
// Grid: as many blocks as run at once. Dynamic shared memory: stages of a (kRows x 64), stages of b
// (kColumns x 64) as panels of 64 columns; kPanels of 16 rows for each consumer warp; barriers.
#include "fused/matmul.cuh"
#include "lib/ptx_barrier.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/ptx_tma.cuh"
#include "lib/ptx_wgmma.cuh"

namespace cuflash {

struct alignas(64) MatmulMaps {
    TensorMap a, b, out;
    MatmulParameters matmul;
    int64 tiles;
};

// Consumer warpgroups, columns of a tile, stages under way, panels of results that a warp has on
// their way out; `device/fused_plans.py` says which there are, and why.
template <int kGroups_, int kColumns_, int kStages_, int kPanels_, bool kTermsInRows_>
struct WgmmaProduct {
    static constexpr int kColumns = kColumns_, kStages = kStages_, kPanels = kPanels_;
    static constexpr bool kTermsInRows = kTermsInRows_;
    static constexpr int kGroups = kGroups_, kRows = 64 * kGroups, kDepth = 64;
    static constexpr int kWarps = 4 * kGroups, kThreads = 128 * (kGroups + 1);
    static constexpr int kLeftBytes = kRows * kDepth * 2, kRightBytes = kColumns * kDepth * 2;
    static_assert(kColumns / 64 % kPanels == 0, "a tile begins with a warp's first panel");
    static constexpr int kPanelBytes = 16 * 128, kOutBytes = kWarps * kPanels * kPanelBytes;
    static constexpr int kTileBytes = kStages * (kLeftBytes + kRightBytes);
    // What a block starts with, 65536 / kThreads a thread rounded down to 8, moves to the
    // consumers.
    static constexpr int kProducerRegisters = kGroups == 4 ? 32 : 40;
    static constexpr int kConsumerRegisters = kGroups == 4 ? 112 : 232;
    static constexpr unsigned kBand = 2048 / kRows;
};

// Where a tile and the boxes of its entry begin.
struct TilePlace {
    int64 row, column;
    int batch[3];

    __device__ __forceinline__ TilePlace(const MatmulParameters& p, unsigned number, unsigned band,
                                         int rows, int columns) {
        const MatmulTile tile(p, number, band);
        row = int64(tile.row) * rows;
        column = int64(tile.column) * columns;
        unsigned left = tile.entry;
#pragma unroll
        for (int axis = 2; axis >= 0; --axis) {
            batch[axis] = 0;
            if (axis >= p.batch.count) continue;
            const unsigned size = unsigned(p.batch.size[axis]);
            batch[axis] = int(left % size);
            left /= size;
        }
    }

    // An operand that broadcasts along an axis has one entry there.
    __device__ __forceinline__ BoxStart box(const MatmulParameters& p, const BatchedArray& array,
                                            int element, int at_row) const {
        BoxStart at{element, at_row, {}};
#pragma unroll
        for (int axis = 0; axis < 3; ++axis)
            if (axis < p.batch.count && array.batch_stride[axis]) at.batch[axis] = batch[axis];
        return at;
    }
};

template <typename T>
struct alignas(4) Pair {
    T first, second;
};

// Eight elements from `at` on of a vector at a multiple of 16 bytes, 0 past its end.
template <typename T>
__device__ __forceinline__ uint4 load_columns(const T* vector, int64 at, int64 size) {
    if (at + 8 <= size) return __ldg(reinterpret_cast<const uint4*>(vector + at));
    Vector<T> columns;
#pragma unroll
    for (int e = 0; e < 8; ++e) columns.element[e] = at + e < size ? vector[at + e] : narrow<T>(0);
    return bytes_as<uint4>(columns);
}

template <int kStages>
struct ProductRing {
    int stage = 0;
    unsigned parity;

    __device__ __forceinline__ void advance() {
        if (++stage < kStages) return;
        stage = 0;
        parity ^= 1;
    }
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    matmul_wgmma(const __grid_constant__ MatmulMaps p) {
    extern __shared__ __align__(1024) unsigned char product_shared[];
    const unsigned left = shared_address(product_shared);
    const unsigned right = left + Shape::kStages * Shape::kLeftBytes;
    const unsigned staged = left + Shape::kTileBytes;
    const unsigned full = staged + Shape::kOutBytes, free = full + 8 * Shape::kStages;
    const MatmulParameters& m = p.matmul;
    const int steps = int((m.depth + Shape::kDepth - 1) / Shape::kDepth);
    const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        prefetch_map(&p.a);
        prefetch_map(&p.b);
        prefetch_map(&p.out);
        for (int i = 0; i < Shape::kStages; ++i) {
            barrier_begin(full + 8 * i, 1);
            barrier_begin(free + 8 * i, Shape::kWarps);
        }
        fence_barriers();
        fence_shared_for_copies();
    }
    __syncthreads();

    if (group == 0) {
        give_back_registers<Shape::kProducerRegisters>();
        if (threadIdx.x > 0) return;
        ProductRing<Shape::kStages> ring{0, 1};  // all stages are free at first
        for (unsigned number = blockIdx.x; number < p.tiles; number += gridDim.x) {
            const TilePlace place(m, number, Shape::kBand, Shape::kRows, Shape::kColumns);
            BoxStart from_a = place.box(m, m.a, 0, int(place.row));
            BoxStart from_b = place.box(m, m.b, 0, 0);
            for (int step = 0; step < steps; ++step) {
                const int term = step * Shape::kDepth;
                barrier_wait(free + 8 * ring.stage, ring.parity);
                const unsigned barrier = full + 8 * ring.stage;
                barrier_arrive_expecting(barrier, Shape::kLeftBytes + Shape::kRightBytes);
                from_a.element = term;
                copy_box(left + ring.stage * Shape::kLeftBytes, &p.a, from_a, barrier);
                const unsigned to = right + ring.stage * Shape::kRightBytes;
                if constexpr (Shape::kTermsInRows) {
                    from_b.element = term;
                    from_b.row = int(place.column);
                    copy_box(to, &p.b, from_b, barrier);
                } else {
                    from_b.row = term;
#pragma unroll
                    for (int panel = 0; panel < Shape::kColumns / 64; ++panel) {
                        from_b.element = int(place.column) + 64 * panel;
                        copy_box(to + panel * Shape::kDepth * 128, &p.b, from_b, barrier);
                    }
                }
                ring.advance();
            }
        }
        return;
    }

    take_registers<Shape::kConsumerRegisters>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    const unsigned own_panels = staged + warp * Shape::kPanels * Shape::kPanelBytes;
    uint4* const shared_words = reinterpret_cast<uint4*>(
        product_shared + Shape::kTileBytes + warp * Shape::kPanels * Shape::kPanelBytes);
    ProductRing<Shape::kStages> ring{0, 0};
    auto release = [&](int stage) {
        if (lane == 0) barrier_arrive(free + 8 * stage);
    };
    for (unsigned number = blockIdx.x; number < p.tiles; number += gridDim.x) {
        float sum[Shape::kColumns / 8][4];
        const TilePlace place(m, number, Shape::kBand, Shape::kRows, Shape::kColumns);
        // On its way while the tile is computed: eight columns of bias for each lane.
        uint4 bias = {0, 0, 0, 0};
        if (lane < Shape::kColumns / 8)
            bias = load_columns(static_cast<const T*>(m.bias), place.column + 8 * lane, m.columns);
        int before = -1;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full + 8 * ring.stage, ring.parity);
            const unsigned rows =
                left + ring.stage * Shape::kLeftBytes + (group - 1) * 64 * Shape::kDepth * 2;
            const unsigned columns = right + ring.stage * Shape::kRightBytes;
            begin_products();
            PanelProduct<T, Shape::kColumns, Shape::kTermsInRows>::add(
                sum, rows_of_terms(rows),
                Shape::kTermsInRows ? rows_of_terms(columns)
                                    : columns_of_terms(columns, Shape::kDepth),
                step > 0);
            commit_products();
            wait_for_products<1>();
            if (before >= 0) release(before);
            before = ring.stage;
            ring.advance();
        }
        wait_for_products<0>();
        pin(sum);
        release(before);

        // A thread has pairs of columns 8 apart: they come by way of the warp's first panel.
        if (lane == 0) wait_for_boxes_read<Shape::kPanels - 1>();
        __syncwarp();
        if (lane < Shape::kColumns / 8) shared_words[lane] = bias;
        __syncwarp();
        unsigned shift[Shape::kColumns / 8];
#pragma unroll
        for (int j = 0; j < Shape::kColumns / 8; ++j)
            shift[j] = reinterpret_cast<const unsigned*>(shared_words)[4 * j + lane % 4];
        with_activation(m.activation, [&](auto activation) {
#pragma unroll
            for (int j = 0; j < Shape::kColumns / 8; ++j) {
                const auto pair = bytes_as<Pair<T>>(shift[j]);
                const float both[2] = {widen(pair.first), widen(pair.second)};
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[j][e] = activation(add(sum[j][e], both[e % 2]));
            }
        });
        BoxStart to = place.box(m, m.out, 0, int(place.row) + 16 * warp);
#pragma unroll
        for (int panel = 0; panel < Shape::kColumns / 64; ++panel) {
            const unsigned own = own_panels + panel % Shape::kPanels * Shape::kPanelBytes;
            if (lane == 0) wait_for_boxes_read<Shape::kPanels - 1>();  // that panel has left
            __syncwarp();
#pragma unroll
            for (int chunk = 0; chunk < 8; chunk += 2) {
                unsigned pairs[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float* x = &sum[8 * panel + chunk + k / 2][k % 2 * 2];
                    pairs[k] = pack<T>(x[0], x[1]);
                }
                store_matrices(own + lane % 16 * 128 + ((chunk + lane / 16) ^ lane % 8) * 16,
                               pairs);
            }
            fence_shared_for_copies();
            __syncwarp();
            if (lane == 0) {
                to.element = int(place.column) + 64 * panel;
                copy_box(&p.out, to, own);
                commit_boxes();
            }
        }
    }
    if (lane == 0) wait_for_boxes();
}

}  // namespace cuflash

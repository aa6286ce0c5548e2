// Gradients of attention on the tensor cores of Hopper, for 16-bit inputs that TMA can read
// (sm_90a): dk and dv of a tile of keys, and what the tile adds to dq. FlashAttention-2's backward
// (Dao 2023, algorithm 2) between the kernels of backward_wgmma_rows.cu.
//
// A warpgroup owns 64 keys. It computes S^T = k q^T and dP^T = v dout^T, so that P^T and dS^T are
// in registers as the left operands of dv += P^T dout and dk += dS^T q. dS^T goes to shared memory,
// too, where one more warpgroup, which fetches all tiles, turns it into dq += dS k: float32 sums
// that bulk copies add up in memory.
//
// Grid: a block for each tile of keys and entry of dk and dv. Dynamic shared memory, tiles as
// panels of 64 columns: keys and values (kKeys x kWidth), stages of queries and of dout (64 x
// kWidth), two stages of dS^T (kKeys x 64), sums on their way out (64 x kWidth floats), stages of
// exponents and of deltas; then the barriers and `KeyWork`.
#include "attention/backward_wgmma_queries.cuh"

namespace cuflash {

// dS^T = P^T o (dP^T - delta) of two neighbours, rounded, from P^T rounded.
template <typename T>
__device__ __forceinline__ unsigned slope_of(float flow, float next, unsigned weights);
template <>
__device__ __forceinline__ unsigned slope_of<__nv_bfloat16>(float flow, float next,
                                                            unsigned weights) {
    // One rounding more than in float32, for a third of the instructions.
    return bytes_as<unsigned>(__hmul2(bytes_as<__nv_bfloat162>(pack<__nv_bfloat16>(flow, next)),
                                      bytes_as<__nv_bfloat162>(weights)));
}
template <>
__device__ __forceinline__ unsigned slope_of<__half>(float flow, float next, unsigned weights) {
    const float2 x = __half22float2(bytes_as<__half2>(weights));  // `flow` may be past float16
    return pack<__half>(flow * x.x, next * x.y);
}

// A warpgroup of 64 keys.
template <typename T, typename Score, typename Tile>
struct KeyGroup {
    static constexpr int kColumnTiles = Tile::kWidth / 8;
    const BackwardWgmmaParameters& p;
    const KeyRooms<Score, Tile>& rooms;
    KeyWork<Score>& work;
    const int group;
    const float unit;
    Ring<Tile::kStages> rows{0};
    Ring<Tile::kSlopeStages> slots{Tile::kSlopeStages};  // all are free at first

    float dk[kColumnTiles][4], dv[kColumnTiles][4];
    float s[8][4], flow[8][4];
    unsigned weights[4][4], slopes[4][4];

    __device__ __forceinline__ KeyGroup(const BackwardWgmmaParameters& p,
                                        const KeyRooms<Score, Tile>& rooms, int group)
        : p(p),
          rooms(rooms),
          work(*rooms.work),
          group(group),
          unit(float(p.vjp.score.scale) * kLog2OfE) {
        static_assert(!Score::kPerPair, "scores are not changed pair by pair");
    }

    __device__ __forceinline__ void run() {
        const int steps = uniform(work.steps);
        if (steps > 0) {
            barrier_wait(rooms.keys_full, 0);
            barrier_wait(rooms.values_full, 0);
            clean_keys();
        }
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) dk[j][e] = dv[j][e] = 0;
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
            walk(steps);
            if (turn == 0 && !(all_finite(dk) && all_finite(dv))) work.redo = 1;
            store();
            __syncthreads();
            if (!uniform(work.redo)) break;
        }
        if (work.redo | work.damaged) put_back();
    }

  private:
    __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
    // The first key of the warp in the tile.
    __device__ __forceinline__ int warp_key() const { return threadIdx.x / 32 * 16 - 64; }

    __device__ __forceinline__ void walk(int steps) {
        const MatrixDescriptor keys = rows_of_terms(rooms.keys + group * 64 * 128);
        const MatrixDescriptor values = rows_of_terms(rooms.values + group * 64 * 128);
        // Tiles of rows that see all of the warpgroup's keys.
        const int first = 64 * group, low = work.low + first + 63, high = work.high + first - 63;
        const bool whole = first + 64 <= work.keys;
        const int whole_begin = uniform(whole ? (max(low, 0) + 63) / 64 : 1 << 30);
        const int whole_end = uniform(high < 0 ? 0 : high / 64 + 1);
        const int begin = uniform(work.begin_tile), end = begin + uniform(work.tiles);
        int tile = end - 1;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const int stage = rows.stage();
            barrier_wait(rooms.queries_full + 8 * stage, rows.parity());
            begin_products();
            SharedProduct<T, 64>::template start<Tile::kPanels, Tile::kKeys, Tile::kRows>(
                s, keys, rows_of_terms(rooms.queries + stage * Tile::kRowBytes));
            commit_products();
            wait_for_products<0>();
            pin(s);
            weigh(stage);
            if (tile < whole_begin || tile >= whole_end) hide_unseen(tile);
            pack_weights();

            barrier_wait(rooms.douts_full + 8 * stage, rows.parity());
            begin_flow(stage);
            begin_products();
            SharedProduct<T, 64>::template add<Tile::kPanels, Tile::kKeys, Tile::kRows>(
                flow, values, rows_of_terms(rooms.douts + stage * Tile::kRowBytes));
            commit_products();
            if (Tile::kEarly) {
                add_values(stage, step);
                wait_for_products<1>();
                pin(flow);
                make_slopes();
            } else {
                wait_for_products<0>();
                pin(flow);
                make_slopes();
                begin_products();
                add_values(stage, step);
            }
            hand_over_slopes();
            begin_products();
            HeldProduct<T, Tile::kWidth, 4>::add(
                dk, slopes, columns_of_terms(rooms.queries + stage * Tile::kRowBytes, Tile::kRows),
                step > 0);
            commit_products();
            wait_for_products<0>();
            pin(dv);
            pin(dk);
            if (lane() == 0) barrier_arrive(rooms.rows_free + 8 * stage);
            rows.advance();
            if (--tile < begin) tile = end - 1;
        }
    }

    __device__ __forceinline__ void add_values(int stage, int step) {
        HeldProduct<T, Tile::kWidth, 4>::add(
            dv, weights, columns_of_terms(rooms.douts + stage * Tile::kRowBytes, Tile::kRows),
            step > 0);
        commit_products();
    }

    // Dot products become weights. A lane's columns are two neighbours of each 8.
    __device__ __forceinline__ void weigh(int stage) {
        const float4* const exponents = reinterpret_cast<const float4*>(
            rooms.memory + (rooms.exponents - rooms.keys) + stage * Tile::kExponentBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 x = exponents[4 * i + lane() % 4];
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& y = s[2 * i + half][e];
                    const float shift = half ? (e % 2 ? x.w : x.z) : (e % 2 ? x.y : x.x);
                    y = exp2_approximate(multiply_add(y, unit, shift));
                }
        }
    }

    // Weights of pairs that do not see each other become 0.
    __device__ __forceinline__ void hide_unseen(int tile) {
        const int first_key = warp_key() + lane() / 4;
        const int own_row = tile * Tile::kRows + lane() % 4 * 2;
        int low[2], high[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = first_key + 8 * i;
            low[i] = key < work.keys ? work.low + key - own_row : Tile::kRows;
            high[i] = work.high + key - own_row;
        }
        hide_if([&](int row, int i) { return row < low[i]; });
        // The condition is one of the launch, so that it is no divergence.
        if (p.vjp.score.left < kUnlimited) hide_if([&](int row, int i) { return row > high[i]; });
    }

    template <typename Unseen>
    __device__ __forceinline__ void hide_if(Unseen unseen) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (unseen(8 * j + e % 2, e / 2)) s[j][e] = 0;
    }

    __device__ __forceinline__ void pack_weights() {
        unsigned all = 0;
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const float* pair = &s[2 * step + part / 2][part % 2 * 2];
                all |= weights[step][part] = pack<T>(pair[0], pair[1]);
            }
        finish_before_wait(all, rooms.sums);
    }

    // The products for dS begin with -delta.
    __device__ __forceinline__ void begin_flow(int stage) {
        const float4* const deltas = reinterpret_cast<const float4*>(
            rooms.memory + (rooms.deltas - rooms.keys) + stage * Tile::kDeltaBytes);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float4 x = deltas[4 * j + lane() % 4];
            flow[j][0] = x.x, flow[j][1] = x.y, flow[j][2] = x.z, flow[j][3] = x.w;
        }
    }

    __device__ __forceinline__ void make_slopes() {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const float* pair = &flow[2 * step + part / 2][part % 2 * 2];
                slopes[step][part] = slope_of<T>(pair[0], pair[1], weights[step][part]);
            }
    }

    __device__ __forceinline__ void hand_over_slopes() {
        const int slot = slots.stage();
        barrier_wait(rooms.slopes_free + 8 * slot, slots.parity());
        const unsigned row =
            rooms.slopes + slot * Tile::kSlopeBytes + (warp_key() + lane() % 16) * 128;
#pragma unroll
        for (int step = 0; step < 4; ++step)
            store_matrices(row + ((2 * step + lane() / 16) ^ lane() % 8) * 16, slopes[step]);
        fence_shared_for_copies();
        __syncwarp();
        if (lane() == 0) barrier_arrive(rooms.slopes_full + 8 * slot);
        slots.advance();
    }

    // Keys past the end, and what is not finite, become 0: rows that do not see them multiply them
    // by 0 all the same.
    __device__ __forceinline__ void clean_keys() {
        // Most tiles need no more than a look: 0 * x, added up.
        unsigned probe = 0;
        for_chunks([&](uint4& place, int) {
            const uint4 x = place;
            probe =
                add_zeros<T>(x.x, add_zeros<T>(x.y, add_zeros<T>(x.z, add_zeros<T>(x.w, probe))));
        });
        bool found = clean<T>(probe);
        if (found || work.keys < 64 * (group + 1)) {
            found = false;
            for_chunks([&](uint4& place, int row) {
                uint4 x = place;
                if (64 * group + row >= work.keys)
                    place = make_uint4(0, 0, 0, 0);
                else if (clean<T>(x)) {
                    place = x;
                    found = true;
                }
            });
            if (found) work.damaged = p.damaged[work.number] = p.damaged[p.damaged_count] = 1;
            fence_shared_for_copies();
        }
        named_barrier_wait(2 + group, 128);
    }

    // The thread's 16-byte chunks of the keys and values of the warpgroup.
    template <typename Use>
    __device__ __forceinline__ void for_chunks(Use use) {
        constexpr int kPanelChunks = 64 * 8;
#pragma unroll
        for (unsigned tile : {rooms.keys, rooms.values}) {
            unsigned char* const own = rooms.memory + (tile - rooms.keys) + group * 64 * 128;
#pragma unroll 4
            for (int i = threadIdx.x % 128; i < kPanelChunks * Tile::kPanels; i += 128)
                use(*reinterpret_cast<uint4*>(own + i / kPanelChunks * (Tile::kKeys * 128) +
                                              i % kPanelChunks * 16),
                    i % kPanelChunks / 8);
        }
    }

    // ----------------------------------------------------------------------------- results

    __device__ __forceinline__ Matrix<T> matrix(const BatchedArray& gradient) const {
        auto to = Matrix<T>::of(gradient, p.vjp.batch, work.index);
        to.data += (work.segment.first_key + work.first) * to.row_stride;
        return to;
    }

    __device__ __forceinline__ void store() const {
        if (p.vjp.dv.data)
            store_sums(matrix(p.vjp.dv), warp_key(), work.end, p.vjp.values, dv, 1.0f);
        if (p.vjp.dk.data)
            store_sums(matrix(p.vjp.dk), warp_key(), work.end, p.vjp.features, dk,
                       float(p.vjp.score.scale));
    }

    // The rows of the warp that see something that is not finite, or have a sum that is not.
    __device__ __forceinline__ void put_back() const {
        const unsigned damaged = rows_not_finite(dk) | rows_not_finite(dv);
        BatchIndex& index = reinterpret_cast<BatchIndex*>(rooms.memory)[threadIdx.x / 32];
#pragma unroll 1
        for (int own = 0; own < 16 && warp_key() + own < work.keys; ++own) {
            const int64 key = work.first + warp_key() + own;
            const RowRange seen = work.score.bounds.rows_that_see(key, key + 1);
            SinglePairs<T, Tile::kWidth> pairs;
#pragma unroll 1
            for (int64 entry = 0; entry < p.vjp.summed; ++entry) {
                __syncwarp();
                if (lane() < kBatchAxes) index.on_axis[lane()] = work.index.on_axis[lane()];
                __syncwarp();
                if (lane() > 0 || !p.vjp.sequences.queries.data)
                    decode_batch(p.vjp.batch, work.entry * p.vjp.summed + entry, index, lane());
                __syncwarp();
                pairs.begin(p.vjp, index, work.segment);
#pragma unroll 1
                for (int64 row = seen.first; row <= seen.last; ++row)
                    pairs.template add<true>(work.segment.start + row, key);
            }
            if (!pairs.met && !(damaged >> own & 1)) continue;
            if (p.vjp.dv.data)
                pairs.store(matrix(p.vjp.dv), warp_key() + own, pairs.values, pairs.second, 1.0f);
            if (p.vjp.dk.data)
                pairs.store(matrix(p.vjp.dk), warp_key() + own, pairs.features, pairs.first,
                            pairs.scale);
        }
    }
};

template <typename T, typename Score, typename Tile, bool kOrdered>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_wgmma(const __grid_constant__ BackwardWgmmaParameters p) {
    extern __shared__ __align__(1024) unsigned char backward_shared[];
    const KeyRooms<Score, Tile> rooms(backward_shared);
    const int group = uniform(threadIdx.x / 128);
    if (threadIdx.x < 32) {
        begin_keys(rooms, p);
    } else if (threadIdx.x == 32) {
        prefetch_map(&p.q);
        prefetch_map(&p.k);
        prefetch_map(&p.v);
        prefetch_map(&p.dout);
        rooms.begin();
    }
    __syncthreads();
    if (group == 0) {
        give_back_registers<Tile::kQueryRegisters>();
        QueryGroup<T, Score, Tile, kOrdered>(p, rooms).run();
    } else {
        take_registers<Tile::kKeyRegisters>();
        KeyGroup<T, Score, Tile>(p, rooms, group - 1).run();
    }
}

}  // namespace cuflash

// What goes by rows of queries in the gradients of attention on Hopper (sm_90a): the kernels before
// and after `backward_wgmma`.
//
//   backward_wgmma_rows     what is known of each row, from out, dout, lse and dlse; dq becomes 0
//   backward_wgmma_queries  dq, rounded
//
// Grid: a block for each tile of 64 queries and entry. No dynamic shared memory.
#include "attention/backward_wgmma.cuh"

namespace cuflash {

// kByVectors: out has rows of whole 16-byte vectors of T, as dout has, which TMA reads.
template <typename T, typename Score, typename Tile, bool kByVectors>
__global__ void __launch_bounds__(Tile::kRowThreads, 1536 / Tile::kRowThreads)
    backward_wgmma_rows(const __grid_constant__ BackwardWgmmaParameters p) {
    constexpr int kThreads = Tile::kRowThreads, kLanes = Tile::kWidth / 8;
    constexpr int kAtOnce = kThreads / kLanes, kTurns = Tile::kRows / kAtOnce;
    __shared__ RowTile<Score> block;
    const int64 start = int64(blockIdx.x) * Tile::kRows;
    const bool present = block.begin(p.vjp, unsigned(p.row_tiles), Tile::kRows);
    const int own = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int values = int(p.vjp.values);
    const int64 first = block.first + own;
    const T* const dout = static_cast<const T*>(p.vjp.dout.data) + block.dout;

    Vector<T> x[kTurns], y[kTurns];
    float top[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        const int64 row = first + i * kAtOnce;
        x[i] = y[i] = Vector<T>{};
        top[i] = -infinity<float>();
        if (!present || row >= block.end || !block.score.is_used(row)) continue;
        top[i] = static_cast<const float*>(p.vjp.lse.data)[block.lse + row * p.vjp.lse.row_stride];
        if (!kByVectors || 8 * lane >= values) continue;
        const T* const out = static_cast<const T*>(p.vjp.out.data) + block.out;
        x[i] = *reinterpret_cast<const Vector<T>*>(dout + row * p.vjp.dout.row_stride + 8 * lane);
        y[i] = *reinterpret_cast<const Vector<T>*>(out + row * p.vjp.out.row_stride + 8 * lane);
    }
    // While these are under way, what other kernels begin with.
    float4* const sums = reinterpret_cast<float4*>(p.sums) + start * (Tile::kWidth / 4);
#pragma unroll
    for (int i = 0; i < Tile::kRows * Tile::kWidth / 4 / kThreads; ++i)
        sums[threadIdx.x + i * kThreads] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int64 i = int64(blockIdx.x) * kThreads + threadIdx.x; i <= p.damaged_count;
         i += int64(gridDim.x) * kThreads)
        p.damaged[i] = 0;
    if (p.turns && threadIdx.x < 4) p.turns[int64(blockIdx.x) * 4 + threadIdx.x] = 0;

#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        const int tile_row = own + i * kAtOnce;
        const int64 row = block.first + tile_row;
        const bool counts = top[i] != -infinity<float>();
        // A row that only the sink gives weight has an out of 0, whatever dout is.
        const bool sink_alone = top[i] == block.score.sink;
        float sum = 0;
        auto add = [&](float of_dout, float of_out) {
            if (!sink_alone || of_out != 0) sum += of_dout * of_out;
        };
        if (kByVectors) {
            // One turn after the other: all elements at once do not fit the registers.
            x[i] = words_here(x[i]), y[i] = words_here(y[i]);
#pragma unroll
            for (int e = 0; e < kVector<T>; ++e)
                add(widen(x[i].element[e]), widen(y[i].element[e]));
        } else if (counts) {
#pragma unroll 1
            for (int column = lane; column < values; column += kLanes) {
                const int64 element = row * p.vjp.out.row_stride + column * p.vjp.out.column_stride;
                add(widen(dout[row * p.vjp.dout.row_stride + column]),
                    read_float<float>(p.vjp.out.data, block.out + element, p.vjp.out.type));
            }
        }
#pragma unroll
        for (int bit = kLanes / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(kFullWarp, sum, bit);
        if (lane > 0) continue;
        if (!counts) sum = 0;
        if (present && row < block.end) {
            const BatchedArray &dlse = p.vjp.dlse, &delta = p.vjp.delta;
            if (counts && dlse.data)
                sum -= static_cast<const float*>(dlse.data)[block.dlse + row * dlse.row_stride];
            static_cast<float*>(delta.data)[block.delta + row * delta.row_stride] = sum;
        }
        // What has a score of +inf has none that is a number.
        if (top[i] == infinity<float>()) top[i] = not_a_number<float>();
        p.exponents[start + place_of_exponent(tile_row)] =
            counts ? -top[i] * kLog2OfE : -infinity<float>();
        float* const deltas = p.deltas + 2 * start + place_of_delta(tile_row);
        deltas[0] = deltas[2] = -sum;
    }
}

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(128)
    backward_wgmma_queries(const __grid_constant__ BackwardWgmmaParameters p) {
    constexpr int kColumnTiles = Tile::kWidth / 8;
    __shared__ RowTile<Score> block;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float4* const sums = reinterpret_cast<const float4*>(p.sums) +
                               (int64(blockIdx.x) * 4 + warp) * (4 * Tile::kWidth) + lane;
    float dq[kColumnTiles][4];
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
        const float4 x = sums[32 * j];
        dq[j][0] = x.x, dq[j][1] = x.y, dq[j][2] = x.z, dq[j][3] = x.w;
    }
    const int any_damaged = p.damaged[p.damaged_count];
    if (!block.begin(p.vjp, unsigned(p.row_tiles), Tile::kRows)) return;
    const Matrix<T> to{static_cast<T*>(p.vjp.dq.data) + block.dq, p.vjp.dq.row_stride,
                       p.vjp.dq.column_stride};
    const float scale = float(p.vjp.score.scale);
    const int64 first = block.first + 16 * warp;
    store_sums(to, first, block.end, p.vjp.features, dq, scale);
    if (!__any_sync(kFullWarp, any_damaged || !all_finite(dq))) return;

    // Keys that are not finite counted as 0: what they are to the rows that see them.
    const int64 first_tile = block.segment.first_key / Tile::kKeys +
                             (p.vjp.sequences.queries.data ? block.segment.index : 0);
    const int* const damaged =
        p.damaged + block.entry / max(p.vjp.summed, 1LL) * p.key_tiles + first_tile;
    const int own_tiles = int((block.segment.keys + Tile::kKeys - 1) / Tile::kKeys);
    bool found = false;
    for (int i = lane; i < own_tiles; i += 32) found |= damaged[i] != 0;
    found = __any_sync(kFullWarp, found);
    const unsigned rows = rows_not_finite(dq);
#pragma unroll 1
    for (int own = 0; own < 16 && first + own < block.end; ++own) {
        if (!found && !(rows >> own & 1)) continue;
        SinglePairs<T, Tile::kWidth> pairs;
        pairs.begin(p.vjp, block.index, block.segment);
        const KeyRange seen = block.score.range(first + own);
#pragma unroll 1
        for (int64 key = seen.first; key <= seen.last; ++key)
            pairs.template add<false>(first + own, key);
        if (pairs.met || (rows >> own & 1))
            pairs.store(to, first + own, pairs.features, pairs.first, scale);
    }
}

}  // namespace cuflash

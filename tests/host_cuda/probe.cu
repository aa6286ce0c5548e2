// Kernels that ask the shim one question each; `data` in, `result` out.
#include "lib/numeric.cuh"
#include "lib/online_softmax.cuh"
#include "lib/scheduler.cuh"

namespace probe {

using namespace cuflash;

struct Parameters {
    const void* data;
    void* result;
    int64 count;
};

template <typename T>
__device__ const T* data(const Parameters& p) {
    return static_cast<const T*>(p.data);
}
template <typename T>
__device__ T* result(const Parameters& p) {
    return static_cast<T*>(p.result);
}

// Number of this thread in the grid, blocks and threads in x, y, z.
__global__ void number(const __grid_constant__ Parameters p) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int i = block * blockDim.x * blockDim.y * blockDim.z + thread;
    result<int>(p)[i] += i;
}

// Five numbers a lane: xor, down, up, broadcast within 8 lanes, ballot of odd lanes.
__global__ void collectives(const __grid_constant__ Parameters p) {
    int lane = threadIdx.x, *to = result<int>(p) + 5 * lane;
    to[0] = __shfl_xor_sync(kFullWarp, lane, 5);
    to[1] = __shfl_down_sync(kFullWarp, lane, 3);
    to[2] = __shfl_up_sync(kFullWarp, lane, 3);
    to[3] = __shfl_sync(kFullWarp, lane, 2, 8);
    to[4] = __ballot_sync(kFullWarp, lane % 2);
    if (!__any_sync(kFullWarp, lane == 7) || __all_sync(kFullWarp, lane == 7)) to[4] = -1;
}

// Sums of 8 lanes, each group with a mask and a number of rounds of its own.
__global__ void groups(const __grid_constant__ Parameters p) {
    int lane = threadIdx.x, group = lane / 8;
    unsigned mask = 0xffu << (8 * group);
    double sum = lane;
    for (int round = 0; round <= group; ++round)
        for (int bit = 1; bit < 8; bit *= 2) sum += __shfl_xor_sync(mask, sum, bit);
    result<double>(p)[lane] = sum;
}

// What shared memory holds before anyone has written to it; then spoils it for the next block.
__global__ void uninitialised(const __grid_constant__ Parameters p) {
    __shared__ float fixed[64];
    CUFLASH_DYNAMIC_SHARED(float, dynamic);
    int i = threadIdx.x, *to = result<int>(p) + 2 * (blockIdx.x * blockDim.x + i);
    to[0] = is_nan(fixed[i]);
    to[1] = is_nan(dynamic[i]);
    fixed[i] = dynamic[i] = 0;
}

// Reverses `count` numbers through shared memory. kBarrier = false forgets to wait for them.
template <bool kBarrier>
__global__ void reverse(const __grid_constant__ Parameters p) {
    CUFLASH_DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = data<float>(p)[threadIdx.x];
    if (kBarrier) __syncthreads();
    result<float>(p)[threadIdx.x] = shared[p.count - 1 - threadIdx.x];
}

// Ways to part at a barrier or a collective.
enum Divergence { kReturn, kBranch, kTwoBarriers, kShuffle, kMask };
template <Divergence kKind>
__global__ void diverge(const __grid_constant__ Parameters p) {
    bool half = threadIdx.x < 16;
    if (kKind == kReturn && half) return;
    if (kKind == kReturn) __syncthreads();
    if (kKind == kBranch && half) __syncthreads();
    if (kKind == kTwoBarriers) {
        if (half)
            __syncthreads();
        else
            __syncthreads();
    }
    int lane = threadIdx.x;
    if (kKind == kShuffle && half) lane = __shfl_xor_sync(kFullWarp, lane, 1);
    if (kKind == kMask) lane = __shfl_xor_sync(half ? 0x0000ffffu : 0xffff0000u, lane, 16);
    result<int>(p)[threadIdx.x] = lane;
}

// Reads element `count` of the dynamic shared memory.
__global__ void read_shared(const __grid_constant__ Parameters p) {
    CUFLASH_DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = 1;
    __syncthreads();
    result<float>(p)[threadIdx.x] = shared[p.count];
}

template <typename T>
__global__ void widen_all(const __grid_constant__ Parameters p) {
    int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.count) result<Accumulator<T>>(p)[i] = widen(data<T>(p)[i]);
}
template <typename T>
__global__ void narrow_all(const __grid_constant__ Parameters p) {
    int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.count) result<T>(p)[i] = narrow<T>(data<Accumulator<T>>(p)[i]);
}

template <typename A>
__global__ void exponentials(const __grid_constant__ Parameters p) {
    int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.count) result<A>(p)[i] = quick_exponential(data<A>(p)[i]);
}

// Pairs (m, l): data[i] and data[count + i] merged. As a kernel sees them: read and given back.
template <typename A>
__global__ void merge(const __grid_constant__ Parameters p) {
    int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.count) return;
    const A* part = data<A>(p);
    auto a = OnlineSoftmax<A>::from(part[2 * i], part[2 * i + 1]);
    auto b = OnlineSoftmax<A>::from(part[2 * (p.count + i)], part[2 * (p.count + i) + 1]);
    auto united = a.merge(b);
    result<A>(p)[2 * i] = united.maximum();
    result<A>(p)[2 * i + 1] = united.normalizer();
}

// One row of `count` scores pushed one after another; (m, l), their logsumexp, and then the
// softmax.
template <typename A>
__global__ void push(const __grid_constant__ Parameters p) {
    auto state = OnlineSoftmax<A>::identity();
    for (int64 i = 0; i < p.count; ++i) state.push(data<A>(p)[i]);
    A* to = result<A>(p);
    to[0] = state.maximum();
    to[1] = state.normalizer();
    to[2] = state.logsumexp();
    for (int64 i = 0; i < p.count; ++i) to[3 + i] = state.weight(data<A>(p)[i]) * state.scale();
}

// Of data[0] row tiles an entry, the first data[2] of which are single, and data[1] tiles:
// result[t] counts how often tile t is taken, result[tiles + b] how long block b works if the tiles
// of an entry take rows, ..., 2, 1, and single ones nothing.
__global__ void deal(const __grid_constant__ Parameters p) {
    const unsigned rows = data<int>(p)[0], tiles = data<int>(p)[1], single = data<int>(p)[2];
    int* const to = result<int>(p);
    for (unsigned round = 0;; ++round) {
        const int tile = tile_of_round(rows, single, tiles, gridDim.x, blockIdx.x, round);
        if (tile == kNoMoreTiles) break;
        if (tile == kNoTile) continue;
        to[tile] += 1;
        if (tile % rows >= single) to[tiles + blockIdx.x] += int(rows - tile % rows);
    }
}

}  // namespace probe

// Softmax in one kernel that holds each row on chip: two trips to memory, one read and one write.
//
// kChunks > 0: every lane holds that many 16-byte chunks in registers, so that a row of up to
// lanes * kChunks * kVector<T> columns fits. kChunks = 0: the row lies in dynamic shared memory.
//
// x (rows, columns) -> output[0] (rows, columns), or one or two entries a row.
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: [what a team's reductions need][kChunks = 0: chunk i of thread t at
// i * blockDim.x + t; a block of one team has memory for the chunks of the row only].
#include "softmax/fused.cuh"

namespace cuflash {

template <typename T, typename Operation, Layout kLayout, int kChunks>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<kChunks>)
    fused(const __grid_constant__ SoftmaxParameters p) {
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    softmax_of_held<T, Operation, kLayout, kChunks>(p, memory);
}

}  // namespace cuflash

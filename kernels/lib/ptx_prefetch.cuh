// Prefetches of global memory.
#pragma once

namespace cuflash {

// Has whole chunks of 16 bytes brought to L2. Below sm_90, which has no such instruction, nothing.
__device__ __forceinline__ void prefetch_to_l2(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
                 "r"(bytes)
                 : "memory");
#endif
}

}  // namespace cuflash

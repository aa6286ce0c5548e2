// Loads of global memory by addresses of which the compiler does not know that they are such, in
// the order they are written in.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

// 16 bytes.
__device__ __forceinline__ uint4 load_global(const void* from) {
    uint4 x;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(__cvta_generic_to_global(from)));
    return x;
}

}  // namespace cuflash

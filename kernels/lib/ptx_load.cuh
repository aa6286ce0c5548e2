// Loads of global memory by addresses of which the compiler does not know that they are such, in
// the order they are written in.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

template <typename Words>
__device__ __forceinline__ Words load_global(const void* from);
template <>
__device__ __forceinline__ unsigned load_global<unsigned>(const void* from) {
    unsigned x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(from)));
    return x;
}
template <>
__device__ __forceinline__ uint2 load_global<uint2>(const void* from) {
    uint2 x;
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(__cvta_generic_to_global(from)));
    return x;
}
template <>
__device__ __forceinline__ uint4 load_global<uint4>(const void* from) {
    uint4 x;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(__cvta_generic_to_global(from)));
    return x;
}

}  // namespace cuflash

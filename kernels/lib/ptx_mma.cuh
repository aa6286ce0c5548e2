// One function for each instruction of the sm_80 matrix path that CUDA C++ has no name for.
//
// Addresses of shared memory are 32-bit, in the shared window.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return unsigned(__cvta_generic_to_shared(pointer));
}

// ------------------------------------------------------------------------------ copies (cp.async)

// Copies `bytes` <= 16 bytes to shared memory in the background, past L1, and zeros behind them.
// Both addresses are multiples of 16; nothing is read if `bytes` is 0.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
// The same of 16 bytes; below sm_80, which has no such copies, at once.
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    const uint4 words = *static_cast<const uint4*>(from);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
#endif
}

// Closes a group of copies of this thread.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `kPending` groups of this thread are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// ----------------------------------------------------------------------------- matrices (ldmatrix)

// Four 8x8 matrices of 16-bit elements. Lanes 8i..8i + 7 give the addresses of the rows of matrix
// i; of each matrix, lane l gets the elements 2 * (l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// The same of the transposed matrices: lane l gets elements of column l / 4.
__device__ __forceinline__ void load_transposed_matrices(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// --------------------------------------------------------------------------------- products (mma)

// c += a @ b with a 16 x 16, b 16 x 8. With g = lane / 4 and t = 2 * (lane % 4), a lane holds, in
// pairs of neighbours, a at (g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8); b at (t, g), (t + 8,
// g), the pairs along the first axis; and c at (g, t), (g + 8, t).
template <typename T>
struct MatrixProduct;
template <>
struct MatrixProduct<__nv_bfloat16> {
    static __device__ __forceinline__ void add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
template <>
struct MatrixProduct<__half> {
    static __device__ __forceinline__ void add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// ------------------------------------------------------------------------------ additions (red)

// Adds to two neighbours in global memory, at a multiple of 8 bytes, each atomically.
__device__ __forceinline__ void add_pair(float* to, float first, float second) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first),
                 "f"(second)
                 : "memory");
#else
    atomicAdd(to, first);
    atomicAdd(to + 1, second);
#endif
}

// --------------------------------------------------------------------------------------- exp2,
// pack

// 2^x to 2 units in the last place; 2^-inf = 0, and results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two numbers rounded to T, the first in the lower half.
template <typename T>
__device__ __forceinline__ unsigned pack(float low, float high);
template <>
__device__ __forceinline__ unsigned pack<__nv_bfloat16>(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
template <>
__device__ __forceinline__ unsigned pack<__half>(float low, float high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

}  // namespace cuflash

// One function for each instruction of the sm_80 matrix path that CUDA C++ has no name for.
//
// Addresses of shared memory are 32-bit, in the shared window.
//
// sm_75 has products of half the depth, in float16 alone, and no background copies. What it has
// instead runs everywhere: a kernel file that defines CUFLASH_SM75 takes it on any device.
#pragma once

#include "lib/numeric.cuh"

#if __CUDA_ARCH__ < 800 && !defined(CUFLASH_SM75)
#define CUFLASH_SM75
#endif

namespace cuflash {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return unsigned(__cvta_generic_to_shared(pointer));
}

// ------------------------------------------------------------------------------ copies (cp.async)

#ifdef CUFLASH_SM75
__device__ __forceinline__ void store_words(unsigned to, const unsigned (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}
#endif

// Copies 16 bytes to shared memory in the background, past L1; both addresses are multiples of 16.
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
#ifdef CUFLASH_SM75
    const uint4 words = *static_cast<const uint4*>(from);
    store_words(to, {words.x, words.y, words.z, words.w});
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}
// The same of `bytes` <= 16 bytes, an even number, and zeros behind them; no more is read.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, int bytes) {
#ifdef CUFLASH_SM75
    if (bytes == 16) return copy_async(to, from);
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (2 * i < bytes)
            words[i / 2] |= unsigned(static_cast<const unsigned short*>(from)[i]) << i % 2 * 16;
    store_words(to, words);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
#endif
}

// Closes a group of copies of this thread.
__device__ __forceinline__ void commit_copies() {
#ifndef CUFLASH_SM75
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `kPending` groups of this thread are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#ifndef CUFLASH_SM75
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// ------------------------------------------------------------------------------ where a warp runs

// The warp's number on its multiprocessor, whose quarters take turns. It is good for sharing work
// out, not for what a result may depend on.
__device__ __forceinline__ unsigned hardware_warp() {
    unsigned warp;
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
    return warp;
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
#ifdef CUFLASH_SM75
// The same with a 16 x 8, b 8 x 8.
__device__ __forceinline__ void add_shallow_product(float (&c)[4], unsigned a0, unsigned a1,
                                                    unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
#endif
template <>
struct MatrixProduct<__half> {
    static __device__ __forceinline__ void add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1) {
#ifdef CUFLASH_SM75
        add_shallow_product(c, a[0], a[1], b0);
        add_shallow_product(c, a[2], a[3], b1);
#else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
    }
};

// The same in double, with g = lane / 4 and t = lane % 4: a at (g, t), (g + 8, t), (g, t + 4), (g +
// 8, t + 4) and so on to t + 12; b at (t, g), (t + 4, g) and so on; c as above. Before sm_90 the
// instruction is for 8 x 8 x 4, the parts of which lie in the same registers.
template <>
struct MatrixProduct<double> {
    static __device__ __forceinline__ void add(double (&c)[4], const double (&a)[8],
                                               const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
        asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, "
            "{%0, %1, %2, %3};"
            : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
            : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]),
              "d"(a[7]), "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
#else
#pragma unroll
        for (int part = 0; part < 8; ++part)
            asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+d"(c[part % 2 * 2]), "+d"(c[part % 2 * 2 + 1])
                : "d"(a[part]), "d"(b[part / 2]));
#endif
    }

    // The same of half the depth.
    static __device__ __forceinline__ void add(double (&c)[4], const double (&a)[4],
                                               const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900
        asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
            : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
        for (int part = 0; part < 4; ++part)
            asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+d"(c[part % 2 * 2]), "+d"(c[part % 2 * 2 + 1])
                : "d"(a[part]), "d"(b[part / 2]));
#endif
    }
};

// The same by products of a quarter of the depth, of which a warp alone issues more in a time.
__device__ __forceinline__ void add_by_quarters(double (&c)[4], const double (&a)[8],
                                                const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int part = 0; part < 4; ++part)
        asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 "
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
            : "d"(a[2 * part]), "d"(a[2 * part + 1]), "d"(b[part]));
#else
    MatrixProduct<double>::add(c, a, b);
#endif
}

// The same in TF32, the upper 19 bits of a float, with g = lane / 4 and t = lane % 4: a 16 x 8 at
// (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b 8 x 8 at (t, g), (t + 4, g); c as above. Lower
// bits of a and b are ignored, and sums are cut off, not rounded.
template <>
struct MatrixProduct<float> {
    static __device__ __forceinline__ void add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
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

// The same of four neighbours, at a multiple of 16 bytes.
__device__ __forceinline__ void add_chunk(float* to, const Vector<float>& x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
                 "f"(x.element[0]), "f"(x.element[1]), "f"(x.element[2]), "f"(x.element[3])
                 : "memory");
#else
#pragma unroll
    for (int n = 0; n < 4; ++n) atomicAdd(to + n, x.element[n]);
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

// The smaller of two numbers; NaN if one is.
__device__ __forceinline__ float minimum_or_nan(float x, float y) {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
}

// 1 / x to 1 unit in the last place.
__device__ __forceinline__ float reciprocal_approximate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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
#ifdef CUFLASH_SM75
    return bytes_as<unsigned>(__floats2half2_rn(low, high));
#else
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}

}  // namespace cuflash

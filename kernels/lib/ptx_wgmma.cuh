// Matrix products of a warpgroup (wgmma, sm_90a): 64 rows, N columns, 16 terms an instruction.
//
// The products run in the background. What they read and write must not be touched between
// `begin_products` and `wait_for_products`; `pin` tells the compiler so. An accumulator of 64 x N
// lies in the threads as N / 8 quadruples: warp w of the group has the rows 16w..16w + 15 in the
// layout of mma.sync (lib/ptx_mma.cuh).
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

// Tells the compiler that all threads of a warp agree, so that branches on it are no divergence:
// products behind a branch that may diverge are run one by one.
__device__ __forceinline__ int uniform(int x) {
    return __shfl_sync(kFullWarp, x, 0);
}

// The number of the thread in its warp, asked for anew wherever it is used: no register keeps it.
__device__ __forceinline__ int lane_index() {
    int x;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(x));
    return x;
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `kPending` committed groups are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(x[i][e])::"memory");
}

// Makes sure that what `x` comes from is done before a wait that follows: ptxas moves waits up over
// arithmetic, but not over a store, which this, as a float or two that are not negative never make
// such a word, never is. (A comparison as floats ptxas sees through.)
__device__ __forceinline__ void finish_before_wait(unsigned x, unsigned address) {
    asm volatile(
        "{\n.reg .pred never;\nsetp.eq.u32 never, %0, 0xfffffffe;\n"
        "@never st.shared.u32 [%1], %1;\n}" ::"r"(x),
        "r"(address)
        : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory: `load_matrices` the other way.
__device__ __forceinline__ void store_matrices(unsigned row, const unsigned (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

// ----------------------------------------------------------------------------- descriptors
//
// Tiles of 16-bit elements lie as panels of 64 columns, rows of 128 bytes, whose 16-byte chunks TMA
// permutes within groups of 8 rows; panels begin at multiples of 1024 bytes. Units are 16 bytes.

using MatrixDescriptor = unsigned long long;

constexpr MatrixDescriptor kSwizzle128 = 1ull << 62;
constexpr MatrixDescriptor kGroupOfRows = 64ull << 32;  // 8 rows of 128 bytes

// A tile whose rows hold the terms (q, k): 16 terms further are 2 units, 64 terms a panel.
__device__ __forceinline__ MatrixDescriptor rows_of_terms(unsigned tile) {
    return MatrixDescriptor((tile & 0x3ffff) >> 4) | (1ull << 16) | kGroupOfRows | kSwizzle128;
}

// A tile whose columns hold the terms (v), with `rows` rows: 16 terms further are
// 128 units.
__device__ __forceinline__ MatrixDescriptor columns_of_terms(unsigned tile, int rows) {
    return MatrixDescriptor((tile & 0x3ffff) >> 4) | (MatrixDescriptor(rows * 8) << 16) |
           kGroupOfRows | kSwizzle128;
}

// -------------------------------------------------------------------------------- products
//
// A product is one statement of all its instructions: apart, the compiler would keep them apart in
// time too, each waiting for the one before.

// d = a b, or d += a b, of kPanels panels of terms, which are kRowsA and kRowsB rows long.
template <typename T, int kColumns>
struct SharedProduct;
// d = a b of kSteps times 16 terms. The columns of both hold the terms.
template <typename T, int kColumns, int kSteps>
struct ColumnsProduct;
// d += a b, or d = a b unless `accumulate`, of kSteps times 16 terms. a is in registers, as for
// mma.sync; the columns of b hold the terms.
template <typename T, int kColumns, int kSteps>
struct HeldProduct;
// d += a b, or d = a b unless `accumulate`, of one panel of terms; the rows of b hold the terms
// (kTermsInRows), or its columns.
template <typename T, int kColumns, bool kTermsInRows>
struct PanelProduct;

// clang-format off
// The registers of an accumulator as the text and the operands of an instruction, by tens.
#define CUFLASH_TEXT_10(t) \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, " \
    "%" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define CUFLASH_REGISTER(c, d, i) c(d[(i) / 4][(i) % 4])
#define CUFLASH_REGISTERS_10(c, d, t) \
    CUFLASH_REGISTER(c, d, t##0), CUFLASH_REGISTER(c, d, t##1), CUFLASH_REGISTER(c, d, t##2), \
    CUFLASH_REGISTER(c, d, t##3), CUFLASH_REGISTER(c, d, t##4), CUFLASH_REGISTER(c, d, t##5), \
    CUFLASH_REGISTER(c, d, t##6), CUFLASH_REGISTER(c, d, t##7), CUFLASH_REGISTER(c, d, t##8), \
    CUFLASH_REGISTER(c, d, t##9)
#define CUFLASH_TEXT_32 \
    CUFLASH_TEXT_10() ", " CUFLASH_TEXT_10(1) ", " CUFLASH_TEXT_10(2) ", %30, %31"
#define CUFLASH_REGISTERS_32(c, d) \
    CUFLASH_REGISTERS_10(c, d, ), CUFLASH_REGISTERS_10(c, d, 1), \
    CUFLASH_REGISTERS_10(c, d, 2), CUFLASH_REGISTER(c, d, 30), CUFLASH_REGISTER(c, d, 31)
#define CUFLASH_TEXT_64 \
    CUFLASH_TEXT_10() ", " CUFLASH_TEXT_10(1) ", " CUFLASH_TEXT_10(2) ", " CUFLASH_TEXT_10(3) \
    ", " CUFLASH_TEXT_10(4) ", " CUFLASH_TEXT_10(5) ", %60, %61, %62, %63"
#define CUFLASH_REGISTERS_64(c, d) \
    CUFLASH_REGISTERS_10(c, d, ), CUFLASH_REGISTERS_10(c, d, 1), \
    CUFLASH_REGISTERS_10(c, d, 2), CUFLASH_REGISTERS_10(c, d, 3), \
    CUFLASH_REGISTERS_10(c, d, 4), CUFLASH_REGISTERS_10(c, d, 5), CUFLASH_REGISTER(c, d, 60), \
    CUFLASH_REGISTER(c, d, 61), CUFLASH_REGISTER(c, d, 62), CUFLASH_REGISTER(c, d, 63)
#define CUFLASH_TEXT_128 \
    CUFLASH_TEXT_10() ", " CUFLASH_TEXT_10(1) ", " CUFLASH_TEXT_10(2) ", " CUFLASH_TEXT_10(3) \
    ", " CUFLASH_TEXT_10(4) ", " CUFLASH_TEXT_10(5) ", " CUFLASH_TEXT_10(6) ", " \
    CUFLASH_TEXT_10(7) ", " CUFLASH_TEXT_10(8) ", " CUFLASH_TEXT_10(9) ", " \
    CUFLASH_TEXT_10(10) ", " CUFLASH_TEXT_10(11) \
    ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CUFLASH_REGISTERS_128(c, d) \
    CUFLASH_REGISTERS_10(c, d, ), CUFLASH_REGISTERS_10(c, d, 1), \
    CUFLASH_REGISTERS_10(c, d, 2), CUFLASH_REGISTERS_10(c, d, 3), \
    CUFLASH_REGISTERS_10(c, d, 4), CUFLASH_REGISTERS_10(c, d, 5), \
    CUFLASH_REGISTERS_10(c, d, 6), CUFLASH_REGISTERS_10(c, d, 7), \
    CUFLASH_REGISTERS_10(c, d, 8), CUFLASH_REGISTERS_10(c, d, 9), \
    CUFLASH_REGISTERS_10(c, d, 10), CUFLASH_REGISTERS_10(c, d, 11), \
    CUFLASH_REGISTER(c, d, 120), CUFLASH_REGISTER(c, d, 121), CUFLASH_REGISTER(c, d, 122), \
    CUFLASH_REGISTER(c, d, 123), CUFLASH_REGISTER(c, d, 124), CUFLASH_REGISTER(c, d, 125), \
    CUFLASH_REGISTER(c, d, 126), CUFLASH_REGISTER(c, d, 127)

// The instruction of N columns in R registers.
#define CUFLASH_WGMMA(type, N, R) \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" CUFLASH_TEXT_##R "}, "
#define CUFLASH_SHARED(type, N, R, sum) CUFLASH_WGMMA(type, N, R) "a, b, " sum ", 1, 1, 0, 0;\n"
#define CUFLASH_NEXT "add.s64 a, a, 2;\nadd.s64 b, b, 2;\n"
#define CUFLASH_PANEL(type, N, R, first) \
    CUFLASH_SHARED(type, N, R, first) \
    CUFLASH_NEXT CUFLASH_SHARED(type, N, R, "yes") \
    CUFLASH_NEXT CUFLASH_SHARED(type, N, R, "yes") \
    CUFLASH_NEXT CUFLASH_SHARED(type, N, R, "yes")
#define CUFLASH_NEXT_PANEL(C, D) "add.s64 a, a, %" #C ";\nadd.s64 b, b, %" #D ";\n"
#define CUFLASH_SHARED_STATEMENT(R, A, B, c, panels) \
    asm volatile( \
        "{\n.reg .b64 a, b;\n.reg .pred no, yes;\n" \
        "setp.ne.b32 no, 0, 0;\nsetp.eq.b32 yes, 0, 0;\n" \
        "mov.b64 a, %" #A ";\nmov.b64 b, %" #B ";\n" panels "}" \
        : CUFLASH_REGISTERS_##R(c, d) \
        : "l"(a), "l"(b), "n"(kRowsA * 8 - 6), "n"(kRowsB * 8 - 6))
// Behind the registers come the operands A..D.
#define CUFLASH_SHARED_PRODUCT_AS(name, type, N, R, A, B, C, D, c, first) \
    template <int kPanels, int kRowsA, int kRowsB> \
    static __device__ __forceinline__ void name(float (&d)[R / 4][4], MatrixDescriptor a, \
                                                MatrixDescriptor b) { \
        static_assert(kPanels == 1 || kPanels == 2 || kPanels == 4, "no such product"); \
        if constexpr (kPanels == 1) \
            CUFLASH_SHARED_STATEMENT(R, A, B, c, CUFLASH_PANEL(type, N, R, first)); \
        else if constexpr (kPanels == 2) \
            CUFLASH_SHARED_STATEMENT( \
                R, A, B, c, CUFLASH_PANEL(type, N, R, first) \
                CUFLASH_NEXT_PANEL(C, D) CUFLASH_PANEL(type, N, R, "yes")); \
        else \
            CUFLASH_SHARED_STATEMENT( \
                R, A, B, c, CUFLASH_PANEL(type, N, R, first) \
                CUFLASH_NEXT_PANEL(C, D) CUFLASH_PANEL(type, N, R, "yes") \
                CUFLASH_NEXT_PANEL(C, D) CUFLASH_PANEL(type, N, R, "yes") \
                CUFLASH_NEXT_PANEL(C, D) CUFLASH_PANEL(type, N, R, "yes")); \
    }
#define CUFLASH_SHARED_PRODUCT(T, type, N, R, A, B, C, D) \
    template <> \
    struct SharedProduct<T, N> { \
        CUFLASH_SHARED_PRODUCT_AS(start, type, N, R, A, B, C, D, "=f", "no") \
        CUFLASH_SHARED_PRODUCT_AS(add, type, N, R, A, B, C, D, "+f", "yes") \
    };
#define CUFLASH_SHARED_PRODUCTS(N, R, A, B, C, D) \
    CUFLASH_SHARED_PRODUCT(__half, "f16", N, R, A, B, C, D) \
    CUFLASH_SHARED_PRODUCT(__nv_bfloat16, "bf16", N, R, A, B, C, D)

CUFLASH_SHARED_PRODUCTS(64, 32, 32, 33, 34, 35)
CUFLASH_SHARED_PRODUCTS(128, 64, 64, 65, 66, 67)

#define CUFLASH_COLUMNS(type, N, R, sum) CUFLASH_WGMMA(type, N, R) "a, b, " sum ", 1, 1, 1, 1;\n"
// Addresses are in the lower words: half the additions of those that may not run in uniform registers.
#define CUFLASH_COLUMNS_NEXT(type, N, R) \
    "add.u32 al, al, 128;\nadd.u32 bl, bl, 128;\nmov.b64 a, {al, ah};\nmov.b64 b, {bl, bh};\n" \
    CUFLASH_COLUMNS(type, N, R, "yes")
#define CUFLASH_COLUMNS_8(type, N, R) \
    CUFLASH_COLUMNS(type, N, R, "no") CUFLASH_COLUMNS_NEXT(type, N, R) \
    CUFLASH_COLUMNS_NEXT(type, N, R) CUFLASH_COLUMNS_NEXT(type, N, R) \
    CUFLASH_COLUMNS_NEXT(type, N, R) CUFLASH_COLUMNS_NEXT(type, N, R) \
    CUFLASH_COLUMNS_NEXT(type, N, R) CUFLASH_COLUMNS_NEXT(type, N, R)
#define CUFLASH_COLUMNS_12(type, N, R) \
    CUFLASH_COLUMNS_8(type, N, R) CUFLASH_COLUMNS_NEXT(type, N, R) \
    CUFLASH_COLUMNS_NEXT(type, N, R) CUFLASH_COLUMNS_NEXT(type, N, R) \
    CUFLASH_COLUMNS_NEXT(type, N, R)
#define CUFLASH_COLUMNS_PRODUCT(T, type, N, R, K, A, B) \
    template <> \
    struct ColumnsProduct<T, N, K> { \
        static __device__ __forceinline__ void start(float (&d)[R / 4][4], MatrixDescriptor a, \
                                                     MatrixDescriptor b) { \
            asm volatile( \
                "{\n.reg .b64 a, b;\n.reg .b32 al, ah, bl, bh;\n.reg .pred no, yes;\n" \
                "setp.ne.b32 no, 0, 0;\nsetp.eq.b32 yes, 0, 0;\n" \
                "mov.b64 a, %" #A ";\nmov.b64 b, %" #B ";\n" \
                "mov.b64 {al, ah}, a;\nmov.b64 {bl, bh}, b;\n" CUFLASH_COLUMNS_##K(type, N, R) \
                "}" \
                : CUFLASH_REGISTERS_##R("=f", d) \
                : "l"(a), "l"(b)); \
        } \
    };
#define CUFLASH_COLUMNS_PRODUCTS(N, R, K, A, B) \
    CUFLASH_COLUMNS_PRODUCT(__half, "f16", N, R, K, A, B) \
    CUFLASH_COLUMNS_PRODUCT(__nv_bfloat16, "bf16", N, R, K, A, B)

CUFLASH_COLUMNS_PRODUCTS(64, 32, 8, 32, 33)
CUFLASH_COLUMNS_PRODUCTS(64, 32, 12, 32, 33)

// Step k takes the registers of the left operand that follow R + 2: the other operands come first.
#define CUFLASH_LEFT_32_0 "{%34, %35, %36, %37}"
#define CUFLASH_LEFT_32_1 "{%38, %39, %40, %41}"
#define CUFLASH_LEFT_32_2 "{%42, %43, %44, %45}"
#define CUFLASH_LEFT_32_3 "{%46, %47, %48, %49}"
#define CUFLASH_LEFT_32_4 "{%50, %51, %52, %53}"
#define CUFLASH_LEFT_32_5 "{%54, %55, %56, %57}"
#define CUFLASH_LEFT_32_6 "{%58, %59, %60, %61}"
#define CUFLASH_LEFT_32_7 "{%62, %63, %64, %65}"
#define CUFLASH_LEFT_64_0 "{%66, %67, %68, %69}"
#define CUFLASH_LEFT_64_1 "{%70, %71, %72, %73}"
#define CUFLASH_LEFT_64_2 "{%74, %75, %76, %77}"
#define CUFLASH_LEFT_64_3 "{%78, %79, %80, %81}"
#define CUFLASH_LEFT_64_4 "{%82, %83, %84, %85}"
#define CUFLASH_LEFT_64_5 "{%86, %87, %88, %89}"
#define CUFLASH_LEFT_64_6 "{%90, %91, %92, %93}"
#define CUFLASH_LEFT_64_7 "{%94, %95, %96, %97}"
#define CUFLASH_LEFT_128_0 "{%130, %131, %132, %133}"
#define CUFLASH_LEFT_128_1 "{%134, %135, %136, %137}"
#define CUFLASH_LEFT_128_2 "{%138, %139, %140, %141}"
#define CUFLASH_LEFT_128_3 "{%142, %143, %144, %145}"
#define CUFLASH_HELD(type, N, R, k, sum) \
    CUFLASH_WGMMA(type, N, R) CUFLASH_LEFT_##R##_##k ", b, " sum ", 1, 1, 1;\n"
#define CUFLASH_HELD_NEXT(type, N, R, k) "add.s64 b, b, 128;\n" CUFLASH_HELD(type, N, R, k, "yes")
#define CUFLASH_STEPS_4(type, N, R) \
    CUFLASH_HELD(type, N, R, 0, "first") CUFLASH_HELD_NEXT(type, N, R, 1) \
    CUFLASH_HELD_NEXT(type, N, R, 2) CUFLASH_HELD_NEXT(type, N, R, 3)
#define CUFLASH_STEPS_5(type, N, R) CUFLASH_STEPS_4(type, N, R) CUFLASH_HELD_NEXT(type, N, R, 4)
#define CUFLASH_STEPS_6(type, N, R) CUFLASH_STEPS_5(type, N, R) CUFLASH_HELD_NEXT(type, N, R, 5)
#define CUFLASH_STEPS_8(type, N, R) \
    CUFLASH_STEPS_6(type, N, R) CUFLASH_HELD_NEXT(type, N, R, 6) CUFLASH_HELD_NEXT(type, N, R, 7)
#define CUFLASH_LEFT(a, k) "r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]), "r"(a[k][3])
#define CUFLASH_LEFTS_4(a) \
    CUFLASH_LEFT(a, 0), CUFLASH_LEFT(a, 1), CUFLASH_LEFT(a, 2), CUFLASH_LEFT(a, 3)
#define CUFLASH_LEFTS_5(a) CUFLASH_LEFTS_4(a), CUFLASH_LEFT(a, 4)
#define CUFLASH_LEFTS_6(a) CUFLASH_LEFTS_5(a), CUFLASH_LEFT(a, 5)
#define CUFLASH_LEFTS_8(a) CUFLASH_LEFTS_6(a), CUFLASH_LEFT(a, 6), CUFLASH_LEFT(a, 7)
#define CUFLASH_HELD_PRODUCT(T, type, N, R, K, B, ACCUMULATE) \
    template <> \
    struct HeldProduct<T, N, K> { \
        static __device__ __forceinline__ void add(float (&d)[R / 4][4], \
                                                   const unsigned (&a)[K][4], MatrixDescriptor b, \
                                                   int accumulate) { \
            asm volatile( \
                "{\n.reg .b64 b;\n.reg .pred first, yes;\n" \
                "setp.ne.b32 first, %" #ACCUMULATE ", 0;\nsetp.eq.b32 yes, 0, 0;\n" \
                "mov.b64 b, %" #B ";\n" CUFLASH_STEPS_##K(type, N, R) "}" \
                : CUFLASH_REGISTERS_##R("+f", d) \
                : "l"(b), "r"(accumulate), CUFLASH_LEFTS_##K(a)); \
        } \
    };
#define CUFLASH_HELD_PRODUCTS(N, R, K, B, ACCUMULATE) \
    CUFLASH_HELD_PRODUCT(__half, "f16", N, R, K, B, ACCUMULATE) \
    CUFLASH_HELD_PRODUCT(__nv_bfloat16, "bf16", N, R, K, B, ACCUMULATE)

CUFLASH_HELD_PRODUCTS(64, 32, 4, 32, 33)
CUFLASH_HELD_PRODUCTS(64, 32, 8, 32, 33)
CUFLASH_HELD_PRODUCTS(128, 64, 4, 64, 65)
CUFLASH_HELD_PRODUCTS(128, 64, 8, 64, 65)
CUFLASH_HELD_PRODUCTS(256, 128, 4, 128, 129)

// The second descriptor's step, and whether that operand is transposed, say how b lies.
#define CUFLASH_PANEL_STEP(type, N, R, sum, S, X) \
    CUFLASH_WGMMA(type, N, R) "a, b, " sum ", 1, 1, 0, %" #X ";\n"
#define CUFLASH_PANEL_NEXT(type, N, R, S, X) \
    "add.s64 a, a, 2;\nadd.s64 b, b, %" #S ";\n" CUFLASH_PANEL_STEP(type, N, R, "yes", S, X)
#define CUFLASH_PANEL_PRODUCT(T, type, N, R, A, B, ACCUMULATE, S, X) \
    template <bool kTermsInRows> \
    struct PanelProduct<T, N, kTermsInRows> { \
        static __device__ __forceinline__ void add(float (&d)[R / 4][4], MatrixDescriptor a, \
                                                   MatrixDescriptor b, int accumulate) { \
            asm volatile( \
                "{\n.reg .b64 a, b;\n.reg .pred first, yes;\n" \
                "setp.ne.b32 first, %" #ACCUMULATE ", 0;\nsetp.eq.b32 yes, 0, 0;\n" \
                "mov.b64 a, %" #A ";\nmov.b64 b, %" #B ";\n" \
                CUFLASH_PANEL_STEP(type, N, R, "first", S, X) \
                CUFLASH_PANEL_NEXT(type, N, R, S, X) CUFLASH_PANEL_NEXT(type, N, R, S, X) \
                CUFLASH_PANEL_NEXT(type, N, R, S, X) "}" \
                : CUFLASH_REGISTERS_##R("+f", d) \
                : "l"(a), "l"(b), "r"(accumulate), "n"(kTermsInRows ? 2 : 128), \
                  "n"(kTermsInRows ? 0 : 1)); \
        } \
    };
#define CUFLASH_PANEL_PRODUCTS(N, R, A, B, ACCUMULATE, S, X) \
    CUFLASH_PANEL_PRODUCT(__half, "f16", N, R, A, B, ACCUMULATE, S, X) \
    CUFLASH_PANEL_PRODUCT(__nv_bfloat16, "bf16", N, R, A, B, ACCUMULATE, S, X)

CUFLASH_PANEL_PRODUCTS(128, 64, 64, 65, 66, 67, 68)
CUFLASH_PANEL_PRODUCTS(256, 128, 128, 129, 130, 131, 132)
// clang-format on

}  // namespace cuflash

// Storage of bfloat16 values, for kernels compiled by a host compiler.
#pragma once

struct __nv_bfloat16 {
    unsigned short bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
    return __uint_as_float(unsigned(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    if (x != x) return {0x7fff};
    unsigned bits = __float_as_uint(x);
    return {static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
// The larger of each; the other one where one is NaN.
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
    auto larger = [](__nv_bfloat16 s, __nv_bfloat16 t) {
        const float u = __bfloat162float(s), v = __bfloat162float(t);
        return u != u || u < v ? t : s;
    };
    return {larger(a.x, b.x), larger(a.y, b.y)};
}

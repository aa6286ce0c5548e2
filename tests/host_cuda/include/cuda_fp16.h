// Storage of float16 values, for kernels compiled by a host compiler.
#pragma once

struct __half {
    unsigned short bits;
};

inline float __half2float(__half x) {
    return float(bits_as<_Float16>(x.bits));
}
inline __half __float2half_rn(float x) {
    return {bits_as<unsigned short>(_Float16(x))};
}

struct alignas(4) __half2 {
    __half x, y;
};
// The larger of each; the other one where one is NaN.
inline __half2 __hmax2(__half2 a, __half2 b) {
    auto larger = [](__half s, __half t) {
        const float u = __half2float(s), v = __half2float(t);
        return u != u || u < v ? t : s;
    };
    return {larger(a.x, b.x), larger(a.y, b.y)};
}

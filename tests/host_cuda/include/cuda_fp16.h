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

// Arrays whose element type is known only at run time: options that are read once a batch entry, or
// once a score by the instantiation that holds every option, and parts to be merged.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

// As `cuflash/device/parameters.py` numbers them.
enum FloatType { kFloat64, kFloat32, kFloat16, kBFloat16 };
enum IntegerType { kInt8, kInt16, kInt32, kInt64, kUint8, kUint16, kUint32, kUint64 };

template <typename A>
__device__ __forceinline__ A read_float(const void* data, int64 index, int type) {
    switch (type) {
        case kFloat64:
            return A(static_cast<const double*>(data)[index]);
        case kFloat32:
            return A(static_cast<const float*>(data)[index]);
        case kFloat16:
            return A(widen(static_cast<const __half*>(data)[index]));
        default:
            return A(widen(static_cast<const __nv_bfloat16*>(data)[index]));
    }
}

template <typename A>
__device__ __forceinline__ void write_float(void* data, int64 index, int type, A x) {
    switch (type) {
        case kFloat64:
            static_cast<double*>(data)[index] = double(x);
            break;
        case kFloat32:
            static_cast<float*>(data)[index] = float(x);
            break;
        case kFloat16:
            static_cast<__half*>(data)[index] = narrow<__half>(float(x));
            break;
        default:
            static_cast<__nv_bfloat16*>(data)[index] = narrow<__nv_bfloat16>(float(x));
            break;
    }
}

// Values of 2^63 and more saturate.
__device__ __forceinline__ int64 read_integer(const void* data, int64 index, int type) {
    switch (type) {
        case kInt8:
            return static_cast<const signed char*>(data)[index];
        case kInt16:
            return static_cast<const short*>(data)[index];
        case kInt32:
            return static_cast<const int*>(data)[index];
        case kInt64:
            return static_cast<const int64*>(data)[index];
        case kUint8:
            return static_cast<const unsigned char*>(data)[index];
        case kUint16:
            return static_cast<const unsigned short*>(data)[index];
        case kUint32:
            return static_cast<const unsigned*>(data)[index];
        default: {
            unsigned long long value = static_cast<const unsigned long long*>(data)[index];
            return value >> 63 ? 0x7fffffffffffffffLL : int64(value);
        }
    }
}

}  // namespace cuflash

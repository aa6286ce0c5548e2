// The instruction of kernels/lib/ptx_prefetch.cuh as a read of all it names.
#pragma once

namespace cuflash {

inline void prefetch_to_l2(const void* from, int bytes) {
    if (reinterpret_cast<unsigned long long>(from) % 16 || bytes <= 0 || bytes % 16)
        cuda_on_host::fail("a prefetch is not of whole chunks");
    const auto* octets = static_cast<const volatile unsigned char*>(from);
    for (int i = 0; i < bytes; ++i) (void)octets[i];
}

}  // namespace cuflash

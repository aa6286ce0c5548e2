// The instruction of kernels/lib/ptx_load.cuh, which needs a multiple of what it loads.
#pragma once

namespace cuflash {

inline uint4 load_global(const void* from) {
    if (reinterpret_cast<unsigned long long>(from) % sizeof(uint4))
        cuda_on_host::fail("a load is not aligned");
    return *static_cast<const uint4*>(from);
}

}  // namespace cuflash

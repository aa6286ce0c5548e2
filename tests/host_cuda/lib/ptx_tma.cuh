// The copies of kernels/lib/ptx_tma.cuh that need no tensor map.
#pragma once

#include "lib/ptx_barrier.cuh"

namespace cuflash {

inline void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    if (to % 16 || reinterpret_cast<unsigned long long>(from) % 16 || bytes <= 0 || bytes % 16)
        cuda_on_host::fail("a bulk copy is not of whole chunks");
    // The place may be read no more.
    __builtin_memset(&shared_at<char>(to), 0xff, bytes);
    BulkCopies& pending = bulk_copies();
    if (pending.count == BulkCopies::kMost) cuda_on_host::fail("too many bulk copies");
    pending.copies[pending.count++] = {to, barrier, from, bytes};
}
inline void fence_shared_for_copies() {}

}  // namespace cuflash

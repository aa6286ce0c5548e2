// The barriers of kernels/lib/ptx_barrier.cuh for one block's copies.
#pragma once

#include "lib/ptx_mma.cuh"

namespace cuflash {

// Copies happen as late as they may: when their barrier is waited for.
struct Barrier {
    short arrivals_left, phase;
    int bytes_left;
};
struct BulkCopy {
    unsigned to, barrier;
    const void* from;
    int bytes;
};
struct BulkCopies {
    static constexpr int kMost = 256;
    BulkCopy copies[kMost];
    int count;
};
inline BulkCopies& bulk_copies() {
    static BulkCopies of_block;
    return of_block;
}

inline void barrier_begin(unsigned barrier, int count) {
    shared_at<Barrier>(barrier) = {short(count), 0, 0};
}
inline void fence_barriers() {}
inline void barrier_arrive(unsigned barrier) {
    if (--shared_at<Barrier>(barrier).arrivals_left < 0)
        cuda_on_host::fail("more arrivals than a barrier expects");
}
inline void barrier_arrive_expecting(unsigned barrier, int bytes) {
    shared_at<Barrier>(barrier).bytes_left += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(unsigned barrier, unsigned parity) {
    Barrier& state = shared_at<Barrier>(barrier);
    while (unsigned(state.phase) == parity) {
        if (state.arrivals_left > 0) {
            cuda_on_host::poll();
            continue;
        }
        BulkCopies& pending = bulk_copies();
        int kept = 0;
        for (int i = 0; i < pending.count; ++i) {
            const BulkCopy copy = pending.copies[i];
            if (copy.barrier != barrier) {
                pending.copies[kept++] = copy;
                continue;
            }
            __builtin_memcpy(&shared_at<char>(copy.to), copy.from, copy.bytes);
            state.bytes_left -= copy.bytes;
        }
        pending.count = kept;
        if (state.bytes_left)
            cuda_on_host::poll();
        else
            state = {1, short(state.phase ^ 1), 0};
    }
}

}  // namespace cuflash

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

// Additions happen as late as they may. What is added must not change meanwhile: who writes there
// comes too late for them, or too early.
struct PendingAdditions {
    static constexpr int kMost = 2, kFloats = 256;
    struct {
        float* to;
        unsigned from;
        int count;
        float seen[kFloats];
    } rows[kMost];
    int count;
};
inline PendingAdditions& own_additions() {
    static PendingAdditions of_thread[1024];
    return of_thread[threadIdx.x];
}
inline void add_floats(float* to, unsigned from, int bytes) {
    if (from % 16 || reinterpret_cast<unsigned long long>(to) % 16 || bytes <= 0 || bytes % 16)
        cuda_on_host::fail("a bulk addition is not of whole chunks");
    PendingAdditions& own = own_additions();
    if (own.count == PendingAdditions::kMost || bytes > 4 * PendingAdditions::kFloats)
        cuda_on_host::fail("too many bulk additions");
    auto& row = own.rows[own.count++];
    row.to = to;
    row.from = from;
    row.count = bytes / 4;
    __builtin_memcpy(row.seen, &shared_at<float>(from), bytes);
}
inline void commit_boxes() {}
inline void wait_for_boxes_read() {
    PendingAdditions& own = own_additions();
    for (int i = 0; i < own.count; ++i) {
        const auto& row = own.rows[i];
        const float* const from = &shared_at<float>(row.from);
        if (__builtin_memcmp(row.seen, from, 4 * row.count))
            cuda_on_host::fail("what is added changed meanwhile");
        for (int j = 0; j < row.count; ++j) row.to[j] += from[j];
    }
    own.count = 0;
}
inline void wait_for_boxes() {
    wait_for_boxes_read();
}

}  // namespace cuflash

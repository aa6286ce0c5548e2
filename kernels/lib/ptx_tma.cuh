// Copies of boxes between tensors and shared memory (TMA, sm_90).
//
// A tensor map describes a tensor of five axes, the contiguous one first; `device/tensor_map.py`
// makes it. Elements outside the tensor are read as 0 and not written.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// Where a box begins: element and row, then the batch axes.
struct BoxStart {
    int element, row, batch[3];
};

// Starts to copy a box to shared memory; its bytes count at `barrier`.
__device__ __forceinline__ void copy_box(unsigned to, const TensorMap* from, const BoxStart& at,
                                         unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(from), "r"(barrier), "r"(at.element), "r"(at.row), "r"(at.batch[0]), "r"(at.batch[1]),
        "r"(at.batch[2])
        : "memory");
}

// Starts to copy a box from shared memory, as a group of this thread's copies that
// `commit_boxes` closes.
__device__ __forceinline__ void copy_box(const TensorMap* to, const BoxStart& at, unsigned from) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group "
        "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(to),
        "r"(from), "r"(at.element), "r"(at.row), "r"(at.batch[0]), "r"(at.batch[1]),
        "r"(at.batch[2])
        : "memory");
}
__device__ __forceinline__ void commit_boxes() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's groups but the last `kPending` have been read, or all have arrived:
// shared memory is free again.
template <int kPending = 0>
__device__ __forceinline__ void wait_for_boxes_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending = 0>
__device__ __forceinline__ void wait_for_boxes() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Starts to copy bytes that lie together, a multiple of 16 at such addresses, to shared memory;
// they count at `barrier`. They are the first to leave the caches.
__device__ __forceinline__ void copy_bytes(unsigned to, const void* from, int bytes,
                                           unsigned barrier) {
    asm volatile(
        "{\n"
        ".reg .b64 once;\n"
        "createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], once;\n"
        "}" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
        : "memory");
}

// The same of bytes that others will read, too.
__device__ __forceinline__ void copy_shared_bytes(unsigned to, const void* from, int bytes,
                                                  unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
        : "memory");
}

// Starts to add floats that lie together in shared memory, a multiple of 16 bytes at such
// addresses, to as many in global memory, each atomically: one of this thread's boxes.
__device__ __forceinline__ void add_floats(float* to, unsigned from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(from), "r"(bytes)
                 : "memory");
}

// Lets copies see what threads wrote to shared memory.
__device__ __forceinline__ void fence_shared_for_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Fetches a tensor map ahead of its first use.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace cuflash

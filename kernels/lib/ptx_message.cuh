// Messages through global memory: 16 bytes that arrive together (sm_70, PTX 8.3).
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

struct alignas(16) Message {
    unsigned long long value, tag;
};

__device__ __forceinline__ void post(Message* place, const Message& message) {
    asm volatile(
        "{\n"
        ".reg .b128 both;\n"
        "mov.b128 both, {%1, %2};\n"
        "st.relaxed.gpu.global.b128 [%0], both;\n"
        "}" ::"l"(place),
        "l"(message.value), "l"(message.tag)
        : "memory");
}
__device__ __forceinline__ Message look(const Message* place) {
    Message message;
    asm volatile(
        "{\n"
        ".reg .b128 both;\n"
        "ld.relaxed.gpu.global.b128 both, [%2];\n"
        "mov.b128 {%0, %1}, both;\n"
        "}"
        : "=l"(message.value), "=l"(message.tag)
        : "l"(place)
        : "memory");
    return message;
}

}  // namespace cuflash

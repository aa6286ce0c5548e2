// Blocks anywhere on the GPU that hold a row together and hear from each other through memory.
#pragma once

#include "lib/ptx_message.cuh"
#include "softmax/cluster.cuh"

namespace cuflash {

__device__ __forceinline__ unsigned long long bits_of(float x) {
    return __float_as_uint(x);
}
__device__ __forceinline__ unsigned long long bits_of(double x) {
    return bytes_as<unsigned long long>(x);
}
template <typename A>
__device__ __forceinline__ A from_bits(unsigned long long bits);
template <>
__device__ __forceinline__ float from_bits<float>(unsigned long long bits) {
    return __uint_as_float(unsigned(bits));
}
template <>
__device__ __forceinline__ double from_bits<double>(unsigned long long bits) {
    return bytes_as<double>(bits);
}

// p.parts blocks a row, all of which must run at a time. p.states, zeroed before the launch, has
// two slots of two messages for each block: one for the present row, one for that before, which
// others may still read. Who posts for the next row but one has seen everybody's message of the
// next one, posted after reading this one's.
class Grid {
    template <typename A>
    static __device__ A first_of(const OnlineSoftmax<A>&);
    template <typename A>
    static __device__ A first_of(const Sum<A>&);
    template <typename A>
    static __device__ __forceinline__ OnlineSoftmax<A> empty_of(const OnlineSoftmax<A>&) {
        return OnlineSoftmax<A>::identity();
    }
    template <typename A>
    static __device__ __forceinline__ Sum<A> empty_of(const Sum<A>&) {
        return {A(0), A(0)};
    }

  public:
    static constexpr bool kGather = true;

    __device__ __forceinline__ explicit Grid(const SoftmaxParameters& p)
        : count_(p.parts),
          messages_(static_cast<Message*>(p.states) + blockIdx.x / p.parts * p.parts * 4) {}
    __device__ __forceinline__ int count() const { return count_; }
    __device__ __forceinline__ int rank() const { return blockIdx.x % count_; }
    __device__ __forceinline__ int lanes() const { return 32; }

    // Gives each lane of a warp a share of the blocks' values, combined.
    template <typename V, typename Combine>
    __device__ __forceinline__ V gather(const V& value, Combine combine) {
        struct Both {
            decltype(first_of(V{})) first, second;
        };
        using A = decltype(first_of(V{}));
        __shared__ V shares[2][32];
        turn_ += 1;
        if (threadIdx.x < 32) {
            Message* const slots = messages_ + turn_ % 2 * count_ * 2;
            if (threadIdx.x == 0) {
                const Both own = bytes_as<Both>(value);
                post(slots + 2 * rank(), {bits_of(own.first), turn_});
                post(slots + 2 * rank() + 1, {bits_of(own.second), turn_});
            }
            V share = value;
            bool any = false;
            for (int block = threadIdx.x; block < count_; block += 32) {
                Message first = look(slots + 2 * block), second = look(slots + 2 * block + 1);
                while (first.tag != turn_) first = look(slots + 2 * block);
                while (second.tag != turn_) second = look(slots + 2 * block + 1);
                const V heard =
                    bytes_as<V>(Both{from_bits<A>(first.value), from_bits<A>(second.value)});
                share = any ? combine(share, heard) : heard;
                any = true;
            }
            shares[turn_ % 2][threadIdx.x] = any ? share : V(empty_of(value));
        }
        __syncthreads();
        return shares[turn_ % 2][threadIdx.x % 32];
    }

  private:
    int count_;
    unsigned turn_ = 0;
    Message* messages_;
};

}  // namespace cuflash

// Random bits by number: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
// easy as 1, 2, 3", 2011), and the dropout mask made of them.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

constexpr int kPhiloxRounds = 10;

// The key of each round, of which the first is the seed.
struct PhiloxKeys {
    unsigned low[kPhiloxRounds], high[kPhiloxRounds];
};

// 128 random bits for each of some counters below 2^64, side by side: a round's key is fetched
// once.
template <int kCount>
__device__ __forceinline__ void philox(const PhiloxKeys& keys,
                                       const unsigned long long (&counters)[kCount],
                                       uint4 (&bits)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)  // here: as a number of 32 bits, not a part of one of 64
        bits[i] = {here(unsigned(counters[i])), unsigned(counters[i] >> 32), 0, 0};
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const unsigned low = keys.low[round], high = keys.high[round];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const unsigned long long a = 0xd2511f53ull * bits[i].x, b = 0xcd9e8d57ull * bits[i].z;
            bits[i] = {unsigned(b >> 32) ^ bits[i].y ^ low, unsigned(b),
                       unsigned(a >> 32) ^ bits[i].w ^ high, unsigned(a)};
        }
    }
}

// Whether elements of T are decided on in pairs. In pairs the kernels of float16, and they alone,
// gave wrong results on an H200, without a random bit drawn too. They have 16-bit registers, as has
// what the compiler makes such a comparison of.
template <typename T>
constexpr bool kInPairs = true;
template <>
constexpr bool kInPairs<__half> = false;

// Element e of an array in C order has lane e % 8, of 16 bits, of counter e / 8 + offset; it is
// kept if the lane is at least `threshold`, 65536 times the probability of being dropped.
struct Dropout {
    PhiloxKeys keys;
    unsigned long long offset;
    unsigned threshold;  // 0..65536; 0: everything is kept
    Real scale;          // of what is kept

    // The lanes of eight elements, two a word.
    struct Octet {
        unsigned words[4];
    };

    // Where the lanes of some element are.
    struct Place {
        unsigned long long counter;
        unsigned lane;

        // So many octets further on.
        __device__ __forceinline__ Place operator+(unsigned octets) const {
            return {counter + octets, lane};
        }
    };
    __device__ __forceinline__ Place place(int64 element) const {
        return {words_here((unsigned long long)(element) / 8 + offset), unsigned(element % 8)};
    }

    // The lanes of eight elements each, from those at first[i] on; all bits if nothing is dropped.
    // kWhole: these have lane 0.
    template <bool kWhole, int kCount>
    __device__ __forceinline__ void draw(Octet (&octets)[kCount],
                                         const Place (&first)[kCount]) const {
        if (threshold == 0) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) octets[i] = {~0u, ~0u, ~0u, ~0u};
            return;
        }
        unsigned long long counters[kCount];
        uint4 bits[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) counters[i] = first[i].counter;
        philox(keys, counters, bits);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            octets[i] = bytes_as<Octet>(bits[i]);
            if constexpr (!kWhole) shift(octets[i], first[i]);
        }
    }

    // Which of eight elements are dropped. kPairs: two comparisons at a time, which are one
    // instruction of sm_90.
    template <bool kPairs>
    __device__ __forceinline__ void decide(const Octet& octet, bool (&dropped)[8]) const {
        if constexpr (kPairs) {
            const unsigned last = threshold ? (threshold - 1) * 0x10001 : 0;
#pragma unroll
            for (int w = 0; w < 4; ++w)
                __vibmax_u16x2(last, octet.words[w], &dropped[2 * w + 1], &dropped[2 * w]);
        } else {
            // A lane in the upper half of a word meets the threshold there, whatever the lower
            // half is.
            const unsigned last = threshold ? (threshold << 16) - 1 : 0;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const unsigned word = octet.words[e / 2];
                dropped[e] = (e % 2 ? word : word << 16) <= last;
            }
        }
    }

  private:
    // Elements that begin within an octet have lanes of the next one too.
    __device__ __forceinline__ void shift(Octet& octet, Place first) const {
        const unsigned lanes = first.lane;
        if (lanes == 0) return;
        const unsigned long long counter[1] = {first.counter + 1};
        uint4 bits[1];
        philox(keys, counter, bits);
        unsigned words[8] = {octet.words[0], octet.words[1], octet.words[2], octet.words[3],
                             bits[0].x,      bits[0].y,      bits[0].z,      bits[0].w};
#pragma unroll
        for (int w = 0; w < 6; ++w)
            if (lanes & 4) words[w] = words[w + 2];
#pragma unroll
        for (int w = 0; w < 5; ++w)
            if (lanes & 2) words[w] = words[w + 1];
#pragma unroll
        for (int w = 0; w < 4; ++w)
            octet.words[w] = lanes & 1 ? words[w] >> 16 | words[w + 1] << 16 : words[w];
    }
};

}  // namespace cuflash

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
    for (int i = 0; i < kCount; ++i)
        bits[i] = {unsigned(counters[i]), unsigned(counters[i] >> 32), 0, 0};
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

// Element e of an array in C order has lane e % 8, of 16 bits, of counter e / 8 + offset; it is
// kept if the lane is at least `threshold`, 65536 times the probability of being dropped.
struct Dropout {
    PhiloxKeys keys;
    unsigned long long offset;
    unsigned threshold;  // 0..65536; 0: everything is kept
    double scale;        // of what is kept

    // The lanes of eight elements, two a word.
    struct Octet {
        unsigned words[4];
    };

    // Those of the elements from number first[i] on. kWhole: these are multiples of 8.
    template <bool kWhole, int kCount>
    __device__ __forceinline__ void draw(Octet (&octets)[kCount],
                                         const int64 (&first)[kCount]) const {
        if (threshold == 0) {
#pragma unroll
            for (int i = 0; i < kCount; ++i)
#pragma unroll
                for (int w = 0; w < 4; ++w) octets[i].words[w] = ~0u;
            return;
        }
        unsigned long long counters[kCount];
        uint4 bits[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) counters[i] = (unsigned long long)(first[i]) / 8 + offset;
        philox(keys, counters, bits);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            octets[i] = bytes_as<Octet>(bits[i]);
            if constexpr (!kWhole) shift(octets[i], first[i]);
        }
    }

    // A lane in the upper half of a word meets the threshold there, whatever the lower half is.
    __device__ __forceinline__ bool keeps(const Octet& octet, int e) const {
        const unsigned word = octet.words[e / 2];
        return (e % 2 ? word : word << 16) > (threshold ? (threshold << 16) - 1 : 0);
    }

  private:
    // Elements that begin within an octet have lanes of the next one too.
    __device__ __forceinline__ void shift(Octet& octet, int64 first) const {
        const unsigned lanes = unsigned(first % 8);
        if (lanes == 0) return;
        const unsigned long long counter[1] = {first / 8 + 1 + offset};
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

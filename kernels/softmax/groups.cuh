// What the warps of a row tell each other where its blocks lie anywhere on the GPU.
//
// The warps of a block meet in its shared memory; one of them sends the block's state to p.states,
// where every row has a place for each of its blocks, and reads those of the others as they come.
// Blocks wait for each other: all of a row have to run at a time.
#pragma once

#include "softmax/exchange.cuh"

namespace cuflash {

// A word of a state that has not been sent. No state has it: the maximum is never NaN, and a NaN
// normalizer is sent as another one.
constexpr unsigned long long kUnsent = ~0ull;

template <typename A, int kWarps>
class GroupExchange {
    using State = OnlineSoftmax<A>;

  public:
    // All threads, with 128-byte aligned memory.
    __device__ __forceinline__ GroupExchange(const SoftmaxParameters& p, unsigned char* memory)
        : memory_(memory), blocks_(p.parts), rank_(blockIdx.x % p.parts) {
        sent_ = static_cast<State*>(p.states) + int64(blockIdx.x / p.parts) * p.parts;
        if (threadIdx.x == 0) {
#pragma unroll
            for (int turn = 0; turn < 2; ++turn) {
                barrier_begin(of_block(turn), kWarps);
                barrier_begin(of_row(turn), 1);
            }
            fence_barriers();
        }
        __syncthreads();
    }

    // The number of this warp among those of its row, and how many there are.
    __device__ __forceinline__ int number() const { return rank_ * kWarps + threadIdx.x / 32; }
    __device__ __forceinline__ int count() const { return blocks_ * kWarps; }
    // The number of these blocks among those that have rows of their own, and how many there are.
    __device__ __forceinline__ int group() const { return blockIdx.x / blocks_; }
    __device__ __forceinline__ int groups() const { return gridDim.x / blocks_; }

    __device__ __forceinline__ unsigned char* memory_end() const {
        return memory_ + (32 + (2 * (kWarps + 1) + blocks_) * int(sizeof(State)) + 127) / 128 * 128;
    }

    // Unites the states of all warps of a row; each row of the block in turn. Two buffers take
    // turns: who writes for the next but one has read what the next one united, and so have all.
    __device__ __forceinline__ State unite(const State& state) {
        State* const states = reinterpret_cast<State*>(memory_ + 32) + turn_ * (kWarps + 1);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane == 0) {
            states[warp] = state;
            barrier_arrive(of_block(turn_));
        }
        if (warp == 0) {
            barrier_wait(of_block(turn_), parity_);
            const State united = unite_all(states, kWarps);
            if (lane == 0) send(united);
            State* const others = reinterpret_cast<State*>(memory_ + 32) + 2 * (kWarps + 1);
#pragma unroll 1
            for (int i = lane; i < blocks_; i += 32) others[i] = receive(i);
            const State of_all = unite_all(others, blocks_);
            if (lane == 0) {
                states[kWarps] = of_all;
                barrier_arrive(of_row(turn_));
            }
        }
        barrier_wait(of_row(turn_), parity_);
        parity_ ^= turn_;
        turn_ ^= 1;
        sent_ += int64(groups()) * blocks_;
        return states[kWarps];
    }

  private:
    // Words that others write, or read, meanwhile.
    struct Words {
        unsigned long long word[sizeof(State) / 8];
    };

    unsigned char* memory_;
    int blocks_, rank_;
    State* sent_;  // of this row
    int turn_ = 0, parity_ = 0;

    __device__ __forceinline__ unsigned of_block(int turn) const {
        return shared_address(memory_ + 8 * turn);
    }
    __device__ __forceinline__ unsigned of_row(int turn) const {
        return shared_address(memory_ + 16 + 8 * turn);
    }

    __device__ __forceinline__ void send(State state) const {
        if (is_nan(state.l)) state.l = not_a_number<A>();
        const Words words = bytes_as<Words>(state);
        volatile Words* to = reinterpret_cast<volatile Words*>(sent_ + rank_);
#pragma unroll
        for (int w = 0; w < int(sizeof(State) / 8); ++w) to->word[w] = words.word[w];
    }
    __device__ __forceinline__ State receive(int rank) const {
        const volatile Words* from = reinterpret_cast<const volatile Words*>(sent_ + rank);
        Words words;
#pragma unroll
        for (int w = 0; w < int(sizeof(State) / 8); ++w) {
            do {
                words.word[w] = from->word[w];
            } while (words.word[w] == kUnsent);
        }
        return bytes_as<State>(words);
    }

    // To be called by a warp, each lane with its share of the states: i with i % 32 == lane.
    static __device__ __forceinline__ State unite_all(const State* states, int count) {
        const int lane = threadIdx.x % 32;
        A m = -infinity<A>(), l = 0;
#pragma unroll 1
        for (int i = lane; i < count; i += 32) m = maximum(m, states[i].m);
        m = of_warp(m, Maximum{});
#pragma unroll 1
        for (int i = lane; i < count; i += 32) l = add(l, states[i].relative_to(m));
        return {m, of_warp(l, Plus{})};
    }
};

}  // namespace cuflash

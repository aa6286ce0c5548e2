// Rows that are copied to shared memory ahead of their turn (sm_90): memory has work while an
// earlier row is reduced and written.
#pragma once

#include "lib/ptx_barrier.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/ptx_tma.cuh"
#include "softmax/rows.cuh"

namespace cuflash {

// Bytes before the stages.
constexpr int kBarrierBytes = 256;

// The chunks of a block's rows in a ring of p.stages stages in shared memory. A stage is a run of
// blockDim.x neighbouring chunks, one for each lane of the block; runs come in the order in which
// lanes take their chunks, of each operand in turn, row by row. A stage is fetched anew when the
// block has given it back: by a barrier after the last of its lanes has read it.
template <typename T, int kOperands, typename Team>
class Feed {
  public:
    // All threads, with 128-byte aligned memory: kBarrierBytes and the stages.
    __device__ __forceinline__ Feed(const SoftmaxParameters& p, const Team& team,
                                    unsigned char* memory)
        : p_(p), team_(team), stages_(reinterpret_cast<uint4*>(memory + kBarrierBytes)) {
        barriers_ = shared_address(memory);
        const int64 chunks = p.columns / kVector<T>, lanes = team.all_lanes();
        runs_ = int((chunks + lanes - 1) / lanes);
        const int64 first = first_row(team);
        const int64 rows =
            first < p.rows ? (p.rows - first + row_step(team) - 1) / row_step(team) : 0;
        total_ = unsigned(rows) * runs_ * kOperands;
        for (int stage = threadIdx.x; stage < p.stages; stage += blockDim.x)
            barrier_begin(barriers_ + 8 * stage, 1);
        fence_barriers();
        __syncthreads();
        fetch(p.stages);
    }

    // Runs of a row, of each operand.
    __device__ __forceinline__ int runs() const { return runs_; }

    // Waits for the next run and returns its stage.
    __device__ __forceinline__ int take() {
        barrier_wait(barriers_ + 8 * stage_, parity_);
        const int taken = stage_;
        if (++stage_ == p_.stages) {
            stage_ = 0;
            parity_ ^= 1;
        }
        return taken;
    }

    // This lane's chunk of a stage, or of `fill` unless `present`.
    __device__ __forceinline__ Vector<T> chunk(int stage, bool present, T fill) const {
        Vector<T> filled;
#pragma unroll
        for (int v = 0; v < kVector<T>; ++v) filled.element[v] = fill;
        uint4 words = bytes_as<uint4>(filled);
        if (present) words = stages_[stage * blockDim.x + threadIdx.x];
        return bytes_as<Vector<T>>(words);
    }
    template <typename Chunk>
    __device__ __forceinline__ void replace(int stage, const Chunk& chunk) const {
        stages_[stage * blockDim.x + threadIdx.x] = bytes_as<uint4>(chunk);
    }

    // Has the next `count` runs fetched, at most as many as there are threads. They take the places
    // of those that all threads have read.
    __device__ __forceinline__ void fetch(int count) {
        const unsigned run = fetched_ + threadIdx.x;
        if (int(threadIdx.x) < count && run < total_) start(run);
        fetched_ += count;
    }

  private:
    const SoftmaxParameters& p_;
    const Team& team_;
    uint4* stages_;
    unsigned barriers_, total_, fetched_ = 0;
    int runs_, stage_ = 0, parity_ = 0;

    __device__ __forceinline__ void start(unsigned run) const {
        const unsigned stage = run % p_.stages, of_row = run / (runs_ * kOperands),
                       rest = run % (runs_ * kOperands);
        const Place place(p_, first_row(team_) + of_row * row_step(team_));
        const bool second = kOperands == 2 && rest % 2;
        const int64 chunk =
            int64(rest / kOperands) * team_.all_lanes() + team_.blocks().rank() * team_.lanes;
        const int64 left = p_.columns / kVector<T> - chunk;
        const int count = left < team_.lanes ? int(left) : team_.lanes;
        const unsigned barrier = barriers_ + 8 * stage;
        if (count <= 0) {
            barrier_arrive(barrier);
            return;
        }
        const T* from = static_cast<const T*>(second ? p_.input[1].data : p_.input[0].data) +
                        (second ? place.input[1] : place.input[0]) + chunk * kVector<T>;
        barrier_arrive_expecting(barrier, count * 16);
        copy_bytes(shared_address(stages_ + stage * blockDim.x), from, count * 16, barrier);
    }
};

}  // namespace cuflash

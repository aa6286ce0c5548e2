// Parts of rows that warps have copied to shared memory ahead of their turn (sm_90): memory has
// work while an earlier row is reduced and written.
#pragma once

#include "lib/ptx_barrier.cuh"
#include "lib/ptx_mma.cuh"
#include "lib/ptx_tma.cuh"
#include "softmax/rows.cuh"

namespace cuflash {

// Of a stage: each costs its warp 50 instructions beside what it holds.
constexpr int kStageBytes = 2048;
// A lane's chunks of each operand in a stage.
template <int kOperands>
constexpr int kRun = kStageBytes / (32 * 16 * kOperands);

// The chunks of a row that belong to one of its warps: neighbours, whole lines of 128 bytes. Rows
// have one kept axis.
template <typename T, int kOperands>
struct WarpPart {
    using Element = T;
    static constexpr int kUnits = 32 * kRun<kOperands>;  // chunks of a stage, of each operand

    int first, count;

    __device__ __forceinline__ WarpPart(int chunks, int part, int parts) {
        const int each = ((chunks + parts - 1) / parts + 7) & ~7;
        first = part * each;
        count = chunks - first < each ? chunks - first : each;
        if (count < 0) count = 0;
    }
    static __device__ __forceinline__ int64 rows(const SoftmaxParameters& p) { return p.rows; }

    // Starts to copy a stage of a row, whose last `left` chunks are still to come. By a whole warp.
    __device__ __forceinline__ void fetch(const SoftmaxParameters& p, int row, int left,
                                          unsigned to, unsigned barrier) const {
        if (threadIdx.x % 32) return;
        const int bytes = (left < kUnits ? left : kUnits) * 16;
        barrier_arrive_expecting(barrier, kOperands * bytes);
#pragma unroll
        for (int i = 0; i < kOperands; ++i) {
            const T* from =
                static_cast<const T*>(p.input[i].data) + row * p.input[i].kept_stride[0];
            copy_bytes(to + i * kUnits * 16, from + (first + count - left) * kVector<T>, bytes,
                       barrier);
        }
    }
};

// A warp's parts of its rows in a ring of p.stages stages in shared memory, in the order of the
// units that they are copied in, row by row; a stage has the same units of all operands. What a
// warp has read it gives back, and the next units take the place: nobody else is waited for, but
// for what the next row is. `Rows` tells the number of row i, of those known: kKnown at first, one
// more by each learn().
template <typename Part, typename Rows>
class Feed {
    using T = typename Part::Element;
    static constexpr int kUnits = Part::kUnits;

  public:
    // `memory`, aligned to 128 bytes, is the block's: [the warps' stages][barriers of 8 bytes].
    __device__ __forceinline__ Feed(const SoftmaxParameters& p, const Rows& rows,
                                    unsigned char* memory, const Part& part)
        : p_(p), rows_(rows), last_(p.stages - 1), part_(part) {
        const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
        stages_ = reinterpret_cast<uint4*>(memory + warp * p.stages * kStageBytes);
        barriers_ = shared_address(memory + warps * p.stages * kStageBytes) + warp * p.stages * 8;
        for (int stage = threadIdx.x % 32; stage < p.stages; stage += 32)
            barrier_begin(barriers_ + 8 * stage, 1);
        fence_barriers();
        begin();
        fetch(p.stages);
    }

    // Which of its cluster's rows is the present one, counted from 0.
    __device__ __forceinline__ int number() const { return known_ - kKnown; }

    // To be called once a row, when the next one after those that were known is known.
    __device__ __forceinline__ void learn() {
        if (row_ == known_++) begin();
        fetch(0);
    }

    // Stages of a row.
    __device__ __forceinline__ int stages() const { return (part_.count + kUnits - 1) / kUnits; }

    // Waits for the next stage and returns it.
    __device__ __forceinline__ int take() {
        barrier_wait(barriers_ + 8 * taken_, parity_);
        const int stage = taken_;
        parity_ ^= stage == last_;
        taken_ = next(stage);
        return stage;
    }

    __device__ __forceinline__ int next(int stage) const { return stage == last_ ? 0 : stage + 1; }

    __device__ __forceinline__ uint4& stage(int number) const {
        return stages_[number * (kStageBytes / 16)];
    }
    // This lane's chunk j of an operand in a stage.
    __device__ __forceinline__ uint4& at(int stage, int j, int operand = 0) const {
        return stages_[stage * (kStageBytes / 16) + operand * kUnits + j * 32 + threadIdx.x % 32];
    }

    // The same of stage s of a row, or `fill` where the row has no such chunk.
    __device__ __forceinline__ Vector<T> chunk(int stage, int s, int j, T fill,
                                               int operand = 0) const {
        Vector<T> filled;
#pragma unroll
        for (int v = 0; v < kVector<T>; ++v) filled.element[v] = fill;
        uint4 words = bytes_as<uint4>(filled);
        if (has(s, j)) words = at(stage, j, operand);
        return bytes_as<Vector<T>>(words);
    }
    __device__ __forceinline__ bool has(int s, int j) const {
        return s * kUnits + j * 32 + int(threadIdx.x % 32) < part_.count;
    }

    // Calls visit(s, chunk) for the first kStages stages of the next row, which are given back: a
    // lane's chunk j of an operand is chunk(j, fill, operand).
    template <int kStages, typename Visit>
    __device__ __forceinline__ void take_first(Visit visit) {
#pragma unroll
        for (int s = 0; s < kStages; ++s) {
            if ((s + 1) * kUnits <= part_.count) {
                const int stage = take();
                visit(s, [&](int j, T, int operand = 0) {
                    return bytes_as<Vector<T>>(at(stage, j, operand));
                });
                fetch(1);
            } else {
                const int stage = s < stages() ? take() : 0;
                visit(s, [&](int j, T fill, int operand = 0) {
                    return chunk(stage, s, j, fill, operand);
                });
                if (s < stages()) fetch(1);
            }
        }
    }

    // Has the oldest stages of the ring fetched anew, those that the whole warp has read, as far as
    // rows are known.
    __device__ __forceinline__ void fetch(int count) {
        __syncwarp();
        free_ += count;
#pragma unroll 1
        for (; free_ > 0 && left_ > 0; --free_) {
            part_.fetch(p_, from_, left_, shared_address(stages_ + fetched_ * (kStageBytes / 16)),
                        barriers_ + 8 * fetched_);
            fetched_ = next(fetched_);
            left_ -= kUnits;
            if (left_ <= 0 && ++row_ < known_) begin();
        }
    }

  private:
    const SoftmaxParameters& p_;
    const Rows& rows_;
    const int last_;
    const Part part_;
    uint4* stages_;
    unsigned barriers_;
    int taken_ = 0;
    unsigned parity_ = 0;
    // What is fetched next: left_ units of row from_, its cluster's row_ of known_, to free_
    // stages.
    int from_ = 0, left_ = 0, row_ = 0, known_ = kKnown, free_ = 0, fetched_ = 0;

    __device__ __forceinline__ void begin() {
        from_ = rows_.row(row_);
        if (from_ < Part::rows(p_)) left_ = part_.count;
    }
};

}  // namespace cuflash

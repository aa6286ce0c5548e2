// How the kernels of dropout, bias and LayerNorm see their arrays: rows of columns that lie end to
// end, each row with a team of lanes, each lane with octets of columns.
//
// Octet o of a row, columns 8 * o to 8 * o + 7, belongs to lane o % lanes: what one call of Philox
// decides over is one lane's where rows are multiples of 8. Lanes of a warp merge pairwise and so
// do the warps of a team: a sum depends on its terms and the number of lanes alone.
#pragma once

#include "lib/numeric.cuh"
#include "lib/philox.cuh"
#include "lib/ptx_mma.cuh"

namespace cuflash {

constexpr int kMaxWarps = 16;  // of a block

struct RowArray {
    void* data;        // null if absent
    int64 row_stride;  // in elements
};

struct LayerNormParameters {
    int64 rows, columns;
    int log2_lanes;          // of a team
    RowArray input[3];       // x, residual, dy
    RowArray output[2];      // y, or dx and dresidual
    void* vector[3];         // bias, gamma, beta: (columns,)
    void* statistic[2];      // mean, 1 / standard deviation: (rows,), of the accumulator's type
    void* partial;           // (teams of the grid, 3, columns): sums of dbias, dgamma, dbeta
    void* vector_result[3];  // dbias, dgamma, dbeta: (columns,)
    int64 parts;             // teams of the grid
    int64 resident;          // blocks that run at a time
    Real share, epsilon;     // 1 / columns; added to the variance
    Dropout dropout;
};

enum { kX, kResidualInput, kCotangent };
enum { kBias, kGamma, kBeta };

// Where an octet begins: so many columns behind the first one of its lane.
template <typename Index_>
struct Column {
    using Index = Index_;
    Index of_lane, further;
    bool surely;  // whole: no comparison is needed

    __device__ __forceinline__ Index number() const { return of_lane + further; }

    // Whether the row has column e of the octet; kPacked: all or none of them.
    template <bool kPacked>
    __device__ __forceinline__ bool is_there(int e, int64 columns) const {
        // What lanes share is on the right: no register for the number of each of their octets.
        if constexpr (kPacked) return surely || of_lane < Index(columns) - further;
        return surely || number() < Index(columns) - e;
    }
};

template <typename T>
__device__ __forceinline__ Wide<T> widened(const Vector<T>& chunk) {
    return Wide<T>(chunk);
}
// The lower half of a word goes up by a product, on the pipe of multiplications: the other one has
// Philox's exclusive ors and the upper halves. Blocks have one row of threads; as the compiler does
// not know that, it cannot shift instead.
__device__ __forceinline__ Wide<__nv_bfloat16> widened(const Vector<__nv_bfloat16>& chunk) {
    const unsigned up = blockDim.y << 16;
    const uint4 words = bytes_as<uint4>(chunk);
    Wide<__nv_bfloat16> wide;
    const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        wide.element[2 * w] = __uint_as_float(word[w] * up);
        wide.element[2 * w + 1] = __uint_as_float(word[w] & 0xffff0000u);
    }
    return wide;
}

// Eight neighbouring columns as they lie in memory, in whole words. kPacked: rows are octets at
// multiples of 16 bytes, moved 16 bytes at a time.
template <typename T>
struct Octet {
    using A = Accumulator<T>;
    static constexpr int kParts = 8 / kVector<T>;
    uint4 part[kParts];

    __device__ __forceinline__ void widen_to(A (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const Wide<T> wide = widened(bytes_as<Vector<T>>(part[i]));
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v) x[i * kVector<T> + v] = wide.element[v];
        }
    }
    __device__ __forceinline__ void narrow_from(const A (&x)[8]) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            Vector<T> vector;
#pragma unroll
            for (int v = 0; v < kVector<T>; ++v)
                vector.element[v] = narrow<T>(x[i * kVector<T> + v]);
            part[i] = bytes_as<uint4>(vector);
        }
    }

    // `row` is where the lane's first column lies. Columns past the end become 0. kOnce: the first
    // to leave the caches.
    template <bool kPacked, bool kOnce, typename Column>
    __device__ __forceinline__ void load(const T* row, Column column, int64 columns) {
        const T* const from = row + column.further;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            part[i] = {0, 0, 0, 0};
            if constexpr (kPacked) {
                const uint4* const words = reinterpret_cast<const uint4*>(from) + i;
                if (column.template is_there<true>(0, columns))
                    part[i] = kOnce ? __ldcs(words) : __ldg(words);
            } else {
                auto vector = bytes_as<Vector<T>>(part[i]);
#pragma unroll
                for (int v = 0; v < kVector<T>; ++v) {
                    const int e = i * kVector<T> + v;
                    if (column.template is_there<false>(e, columns)) vector.element[v] = from[e];
                }
                part[i] = bytes_as<uint4>(vector);
            }
        }
    }

    template <bool kPacked, typename Column>
    __device__ __forceinline__ void store(T* row, Column column, int64 columns) const {
        T* const to = row + column.further;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            if constexpr (kPacked) {
                if (column.template is_there<true>(0, columns))
                    __stcs(reinterpret_cast<uint4*>(to) + i, part[i]);
            } else {
                const auto vector = bytes_as<Vector<T>>(part[i]);
#pragma unroll
                for (int v = 0; v < kVector<T>; ++v) {
                    const int e = i * kVector<T> + v;
                    if (column.template is_there<false>(e, columns)) to[e] = vector.element[v];
                }
            }
        }
    }
};

// The sum of four sums that were kept side by side: terms of one would each wait for the one
// before.
template <typename A>
__device__ __forceinline__ A fold(const A (&x)[4]) {
    return add(add(x[0], x[2]), add(x[1], x[3]));
}

// The kThreads of a block in teams, one a row; kLanes of each, or if that is 0 as many as the
// launch says. What reduces is to be called by all threads of the block, a team without a row too.
// kWhole: rows fill what their lanes hold.
template <int kLanes, int kThreads, bool kWhole = false>
struct RowTeam {
    int lanes, slots, lane, slot;

    __device__ __forceinline__ explicit RowTeam(int log2_lanes) {
        lanes = kLanes ? kLanes : 1 << log2_lanes;
        slots = kThreads / lanes;
        lane = kLanes == kThreads ? threadIdx.x : threadIdx.x % lanes;
        slot = kLanes == kThreads ? 0 : threadIdx.x / lanes;
    }

    __device__ __forceinline__ int64 first_row() const { return int64(blockIdx.x) * slots; }
    __device__ __forceinline__ int64 step() const { return int64(gridDim.x) * slots; }
    // The row of a team that has one, found anew where it is wanted.
    __device__ __forceinline__ int64 row_of_block() const {
        return int64(here(blockIdx.x)) * slots + slot;
    }
    // The number of the team in the grid.
    __device__ __forceinline__ int64 number() const { return first_row() + slot; }

    // Where this lane's first column lies in a row or a vector. One address for all its octets: the
    // compiler would compute one for each.
    template <typename T>
    __device__ __forceinline__ T* in(const RowArray& array, int64 row) const {
        return words_here(static_cast<T*>(array.data) + row * array.row_stride + 8 * lane);
    }
    template <typename T>
    __device__ __forceinline__ const T* in(const void* vector) const {
        return words_here(static_cast<const T*>(vector) + 8 * lane);
    }

    // Octet i of those that a lane holds: rows fill more than half of what lanes can hold.
    template <int kOctets>
    __device__ __forceinline__ Column<int> column(int i) const {
        return {8 * lane, 8 * i * lanes, kWhole || (kLanes > 0 && i < kOctets / 2)};
    }

    // Calls work(i, column) for each octet of a lane: those that it holds, or all of its row.
    template <int kOctets, typename Work>
    __device__ __forceinline__ void for_each(int64 columns, Work work) const {
        if constexpr (kOctets > 0) {
#pragma unroll
            for (int i = 0; i < kOctets; ++i) work(i, column<kOctets>(i));
        } else {
#pragma unroll 1
            for (int64 at = 8 * int64(lane); at < columns; at += 8 * lanes)
                work(0, Column<int64>{8 * lane, at - 8 * lane, false});
        }
    }

    // Sums over the team; all lanes get them. Two calls in a row are to be given different shared
    // memory, so that one barrier each is enough.
    template <int kCount, typename A>
    __device__ __forceinline__ void sum(A (&values)[kCount],
                                        A (&exchange)[kCount][kMaxWarps]) const {
        if (lanes <= 32) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) values[i] = over_lanes(values[i], 1, lanes);
            return;
        }
        const int warp = threadIdx.x / 32, warps = lanes / 32, in_warp = threadIdx.x % 32;
        // As long as there are several values, lanes share them out: each adds half of them up.
        int which = 0;
#pragma unroll
        for (int count = kCount, bit = 1; count > 1; count /= 2, bit *= 2) {
            const bool upper = in_warp & bit;
            which += upper ? count / 2 : 0;
#pragma unroll
            for (int i = 0; i < count / 2; ++i) {
                const A own = upper ? values[i + count / 2] : values[i];
                const A other = upper ? values[i] : values[i + count / 2];
                values[i] = add(own, __shfl_xor_sync(kFullWarp, other, bit));
            }
        }
        const A total = over_lanes(values[0], kCount, 32);
        if (in_warp < kCount) exchange[which][warp] = total;
        __syncthreads();
        const int first = warp / warps * warps;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if constexpr (kLanes > 32 && kLanes <= 128) {
                A part[kLanes / 32];
#pragma unroll
                for (int w = 0; w < kLanes / 32; ++w) part[w] = exchange[i][first + w];
#pragma unroll
                for (int bit = 1; bit < kLanes / 32; bit *= 2)
#pragma unroll
                    for (int w = 0; w < kLanes / 32; w += 2 * bit)
                        part[w] = add(part[w], part[w + bit]);
                values[i] = part[0];
            } else {
                values[i] = over_lanes(exchange[i][first + in_warp % warps], 1, warps);
            }
        }
    }

    // Whether all teams of the block have to go on because one of them does: those that `sum` keeps
    // together.
    __device__ __forceinline__ bool any_of_block(bool own) const {
        if (lanes <= 32) return __any_sync(kFullWarp, own);
        return slots > 1 || own;
    }

  private:
    // The sum over lanes whose numbers differ in bits from `bit` to `end`, which is not one of
    // them.
    template <typename A>
    static __device__ __forceinline__ A over_lanes(A value, int bit, int end) {
#pragma unroll
        for (int i = 1; i < 32; i *= 2)
            if (i >= bit && i < end) value = add(value, __shfl_xor_sync(kFullWarp, value, i));
        return value;
    }
};

// The octets of a lane in a vector: in registers (kHeld), or read from L1 each time.
template <typename T, bool kPacked, int kOctets, bool kHeld>
class VectorOctets {
  public:
    template <typename Team>
    __device__ __forceinline__ VectorOctets(const void* vector, const Team& team, int64 columns)
        : base_(vector), vector_(team.template in<T>(vector)), columns_(columns) {
        if constexpr (kHeld)
            team.template for_each<kOctets>(
                columns, [&](int i, auto column) { read(column).widen_to(held_[i]); });
    }

    // To be called for each row: it keeps the compiler from reading octets once, which would take
    // the registers of a row.
    __device__ __forceinline__ void renew() { vector_ = words_here(vector_); }

    template <typename Column>
    __device__ __forceinline__ void get(Accumulator<T> (&x)[8], int i, Column column) const {
        if constexpr (kHeld) {
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] = held_[i][e];
        } else {
            read(column).widen_to(x);
        }
    }

    template <typename Column>
    __device__ __forceinline__ Octet<T> read(Column column) const {
        Octet<T> octet;
        // For rows of any length, of which a lane has one octet at a time, it takes no register.
        const T* const first =
            kOctets > 0 ? vector_ : static_cast<const T*>(base_) + column.of_lane;
        octet.template load<kPacked, false>(first, column, columns_);
        return octet;
    }

  private:
    const void* base_;
    const T* vector_;
    int64 columns_;
    Accumulator<T> held_[kHeld ? kOctets : 1][8];
};

// Rows on their way: each thread has its octets of the next kStages rows copied to shared memory of
// its own, in the background, so that memory has work while the row before is reduced, and
// registers are free. Nobody else reads them: no barrier is needed.
template <typename T, int kOctets, int kThreads, int kStages, int kOperands>
class RowStages {
  public:
    __device__ __forceinline__ explicit RowStages(uint4* memory) : own_(memory + threadIdx.x) {}

    // Starts to copy the octets of an operand's row, of which `row` is the lane's first column.
    template <typename Team>
    __device__ __forceinline__ void fetch(const Team& team, int stage, int operand, const T* row,
                                          int64 columns) const {
        team.template for_each<kOctets>(columns, [&](int i, auto column) {
#pragma unroll
            for (int part = 0; part < Octet<T>::kParts; ++part) {
                const unsigned to = shared_address(own_ + place(stage, operand, i, part));
                const T* const from = row + column.further + part * kVector<T>;
                if (column.template is_there<true>(0, columns))
                    copy_async(to, from);
                else
                    own_[place(stage, operand, i, part)] = {0, 0, 0, 0};
            }
        });
    }
    __device__ __forceinline__ Octet<T> get(int stage, int operand, int i) const {
        Octet<T> octet;
#pragma unroll
        for (int part = 0; part < Octet<T>::kParts; ++part)
            octet.part[part] = own_[place(stage, operand, i, part)];
        return octet;
    }

  private:
    uint4* own_;

    static __device__ __forceinline__ int place(int stage, int operand, int octet, int part) {
        return (((stage * kOperands + operand) * kOctets + octet) * Octet<T>::kParts + part) *
               kThreads;
    }
};

// Octets of x + bias, 0 where dropped and not scaled yet, and the bits that decided: all kept if
// nothing is dropped. `read(i, x, bias)` gives those of octet i, after the bits are drawn: till
// then their registers are free. places[i] is that of its first element.
template <typename T, bool kPacked, int kCount, typename Read>
__device__ __forceinline__ void add_bias_and_drop(const Dropout& dropout, Read read,
                                                  const Dropout::Place (&places)[kCount],
                                                  Accumulator<T> (&z)[kCount][8],
                                                  Dropout::Octet (&bits)[kCount]) {
    Accumulator<T> bias[8];
    // Apart, so that without dropout there is nothing to decide.
    if (dropout.threshold == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            bits[i] = {~0u, ~0u, ~0u, ~0u};
            read(i, z[i], bias);
#pragma unroll
            for (int e = 0; e < 8; ++e) z[i][e] = add(z[i][e], bias[e]);
        }
        return;
    }
    dropout.template draw<kPacked>(bits, places);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        bool dropped[8];
        dropout.template decide<kInPairs<T>>(bits[i], dropped);
        read(i, z[i], bias);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            z[i][e] = dropped[e] ? Accumulator<T>(0) : add(z[i][e], bias[e]);
    }
}

// What is kept is scaled, and the residual added.
template <typename T>
__device__ __forceinline__ void add_residual(const Octet<T>& residual, Accumulator<T> scale,
                                             Accumulator<T> (&z)[8]) {
    Accumulator<T> other[8];
    residual.widen_to(other);
#pragma unroll
    for (int e = 0; e < 8; ++e) z[e] = multiply_add(z[e], scale, other[e]);
}

}  // namespace cuflash

// Merging results over disjoint sets of keys: attention's (out, lse) pairs, and softmax states.
//
// A part whose lse (or maximum) is -inf is the identity, bit for bit, whatever else it holds; with
// two parts every operation is commutative. Sums begin at -0, which unlike +0 changes no addend.
// Grid: blocks of rows, batch entry by batch entry. In combine a row takes `warps` warps, columns
// across lanes and shares of the parts across warps, whose sums meet in shared memory in a fixed
// order; in combine_states a thread. No dynamic shared memory.
#include "lib/numeric.cuh"
#include "lib/runtime_dtype.cuh"
#include "lib/scheduler.cuh"

namespace cuflash {

constexpr int kListedParts = 8;
constexpr int kMostWarps = 16;   // of a block
constexpr int kLaneColumns = 4;  // of a lane at a time, 32 apart
constexpr int kPartsAtOnce = 4;  // under way: their latency is what few rows wait for

// A row of a batch entry.
struct RowPlace {
    const BatchAxes& axes;
    const BatchIndex& entry;
    int64 row;

    __device__ __forceinline__ int64 in(const BatchedArray& array) const {
        return entry_offset(array.batch_stride, axes, entry) + row * array.row_stride;
    }
};

// A row of an array of any type.
template <typename A>
struct AnyRow {
    const BatchedArray& array;
    int64 start;

    __device__ __forceinline__ AnyRow(const BatchedArray& array, const RowPlace& at)
        : array(array), start(at.in(array)) {}

    __device__ __forceinline__ A get(int64 column) const {
        return read_float<A>(array.data, start + column * array.column_stride, array.type);
    }
    __device__ __forceinline__ void set(int64 column, A x) const {
        write_float<A>(array.data, start + column * array.column_stride, array.type, x);
    }
};

// Parts of strides and types of their own.
struct ListedParts {
    BatchedArray out[kListedParts], lse[kListedParts];
    int count;

    // One row of all parts.
    template <typename A>
    struct Row {
        const ListedParts& parts;
        const RowPlace& at;

        __device__ __forceinline__ AnyRow<A> out(int i) const { return {parts.out[i], at}; }
        __device__ __forceinline__ A lse(int i) const { return AnyRow<A>(parts.lse[i], at).get(0); }
    };
};

// Parts that follow each other in memory, unrounded: what a forward over shares of the keys leaves.
struct EvenParts {
    BatchedArray out, lse;
    int64 out_step, lse_step;
    int count;

    template <typename A>
    struct PartRow {
        const A* data;

        __device__ __forceinline__ A get(int64 column) const { return data[column]; }
    };
    template <typename A>
    struct Row {
        const A *first_out, *first_lse;
        int64 out_step, lse_step;

        __device__ __forceinline__ Row(const EvenParts& parts, const RowPlace& at)
            : first_out(static_cast<const A*>(parts.out.data) + at.in(parts.out)),
              first_lse(static_cast<const A*>(parts.lse.data) + at.in(parts.lse)),
              out_step(parts.out_step),
              lse_step(parts.lse_step) {}

        __device__ __forceinline__ PartRow<A> out(int i) const {
            return {first_out + i * out_step};
        }
        __device__ __forceinline__ A lse(int i) const { return first_lse[i * lse_step]; }
    };
};

template <typename Parts>
struct CombineParameters {
    BatchAxes batch;
    int64 rows, values;     // of a batch entry; values: columns of out
    BatchedArray out, lse;  // of states: normalizer and maximum, without columns
    int warps;              // of a row, in combine
    Parts parts;
};

// The row of a thread's team, and its batch entry.
struct CombinedRow {
    int64 row, entry;

    __device__ __forceinline__ CombinedRow(int64 rows, int lanes) {
        int teams = blockDim.x / lanes;
        int64 tiles = (rows + teams - 1) / teams, block = blockIdx.x;
        row = block % tiles * teams + threadIdx.x / lanes;
        entry = block / tiles;
    }
};

// Like fmax, but NaN if one operand is.
template <typename A>
__device__ __forceinline__ A maximum_or_nan(A a, A b) {
    return is_nan(a) ? a : is_nan(b) ? b : maximum(a, b);
}

// Reduces over a warp; all lanes get the result, of the same bits.
template <typename A, typename Combine>
__device__ __forceinline__ A reduce_warp(A x, Combine combine) {
    for (int bit = 1; bit < 32; bit *= 2) x = combine(x, __shfl_xor_sync(kFullWarp, x, bit));
    return x;
}

// lse = log sum_i exp(lse_i) and out = sum_i w_i out_i with w_i = exp(lse_i - lse).
template <typename A, typename Parts>
__global__ void combine(const __grid_constant__ CombineParameters<Parts> p) {
    __shared__ BatchIndex entry;
    __shared__ A sums[kMostWarps][kLaneColumns][32];
    const CombinedRow row(p.rows, 32 * p.warps);
    decode_batch(p.batch, row.entry, entry, threadIdx.x);
    __syncthreads();
    const bool exists =
        row.row < p.rows;  // else it does what the last row does, and writes nothing
    const RowPlace at{p.batch, entry, min(row.row, p.rows - 1)};
    const typename Parts::template Row<A> parts{p.parts, at};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp % p.warps;
    const int count = p.parts.count;

    // Every warp of a row needs the lse of all parts, a lane each at a time.
    A m = -infinity<A>();
    for (int i = lane; i < count; i += 32) m = maximum_or_nan(m, parts.lse(i));
    m = reduce_warp(m, [](A a, A b) { return maximum_or_nan(a, b); });
    const A reference = m == -infinity<A>() ? A(0) : m;
    A total = 0;
    for (int i = lane; i < count; i += 32)
        total = add(total, exponential(parts.lse(i) - reference));
    total = reduce_warp(total, [](A a, A b) { return add(a, b); });

    const int begin = count * own / p.warps, end = count * (own + 1) / p.warps;
    const AnyRow<A> out(p.out, at);
    for (int64 start = lane; start < p.values + lane; start += 32 * kLaneColumns) {
        A sum[kLaneColumns];
        for (int c = 0; c < kLaneColumns; ++c) sum[c] = A(-0.0);
        for (int first = begin; first < end; first += 32) {
            const A lse = first + lane < end ? parts.lse(first + lane) : -infinity<A>();
            const A weight = exponential(lse - reference) / total;
            const unsigned counted = __ballot_sync(kFullWarp, lse != -infinity<A>());
            for (int i = 0; i < min(32, end - first); i += kPartsAtOnce) {
                A x[kPartsAtOnce][kLaneColumns];
#pragma unroll
                for (int n = 0; n < kPartsAtOnce; ++n) {
                    const auto part = parts.out(min(first + i + n, end - 1));
#pragma unroll
                    for (int c = 0; c < kLaneColumns; ++c)
                        x[n][c] = start + 32 * c < p.values ? part.get(start + 32 * c) : A(0);
                }
#pragma unroll
                for (int n = 0; n < kPartsAtOnce; ++n) {
                    const A w = __shfl_sync(kFullWarp, weight, i + n);
                    if (!(counted >> (i + n) & 1)) continue;
#pragma unroll
                    for (int c = 0; c < kLaneColumns; ++c)
                        sum[c] = add(sum[c], multiply(w, x[n][c]));
                }
            }
        }
        for (int c = 0; c < kLaneColumns; ++c) sums[warp][c][lane] = sum[c];
        __syncthreads();
        for (int c = own; c < kLaneColumns; c += p.warps) {
            A whole = A(-0.0);
            for (int w = 0; w < p.warps; ++w) whole = add(whole, sums[warp - own + w][c][lane]);
            if (exists && start + 32 * c < p.values)
                out.set(start + 32 * c, m == -infinity<A>() ? A(0) : whole);
        }
        __syncthreads();
    }
    if (!p.lse.data) return;
    __syncthreads();  // the result may be one of the parts
    if (!exists || own != 0 || lane != 0) return;
    // The maximum itself where it is the whole sum; +inf comes with a total of NaN.
    const bool alone = total == A(1) || m == infinity<A>() || m == -infinity<A>();
    AnyRow<A>(p.lse, at).set(0, alone ? m : m + logarithm(total));
}

// m = max m_i and l = sum_i l_i exp(m_i - m): parts' `lse` are the maxima, `out` the normalizers.
template <typename A>
__global__ void combine_states(const __grid_constant__ CombineParameters<ListedParts> p) {
    __shared__ BatchIndex entry;
    const CombinedRow at(p.rows, 1);
    decode_batch(p.batch, at.entry, entry, threadIdx.x);
    __syncthreads();
    if (at.row >= p.rows) return;

    const RowPlace place{p.batch, entry, at.row};
    const ListedParts::Row<A> parts{p.parts, place};
    A m = -infinity<A>();
    for (int i = 0; i < p.parts.count; ++i) m = maximum_or_nan(m, parts.lse(i));
    const A reference = m == -infinity<A>() ? A(0) : m;
    A sum = A(-0.0);
    for (int i = 0; i < p.parts.count; ++i) {
        const A part = parts.lse(i);
        if (part == -infinity<A>()) continue;
        sum = add(sum, multiply(parts.out(i).get(0), exponential(part - reference)));
    }
    AnyRow<A>(p.lse, place).set(0, m);
    AnyRow<A>(p.out, place).set(0, m == -infinity<A>() ? A(0) : sum);
}

}  // namespace cuflash

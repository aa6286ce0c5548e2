// Merging results over disjoint sets of keys: attention's (out, lse) pairs, and softmax states.
//
// A part whose lse (or maximum) is -inf is the identity, bit for bit, whatever else it holds; with
// two parts every operation is commutative. Sums begin at -0, which unlike +0 changes no addend.
// Grid: blocks of rows, batch entry by batch entry; a row takes a warp (combine) or a thread
// (combine_states). No dynamic shared memory.
#include "lib/numeric.cuh"
#include "lib/runtime_dtype.cuh"
#include "lib/scheduler.cuh"

namespace cuflash {

constexpr int kListedParts = 8;

// Parts of strides and types of their own.
struct ListedParts {
    BatchedArray out[kListedParts], lse[kListedParts];
    int count;

    struct Place {
        const BatchedArray& array;
        int64 shift;
    };
    __device__ __forceinline__ Place out_of(int i) const { return {out[i], 0}; }
    __device__ __forceinline__ Place lse_of(int i) const { return {lse[i], 0}; }
};

// Parts that follow each other in memory: what a forward over shares of the keys leaves.
struct EvenParts {
    BatchedArray out, lse;
    int64 out_step, lse_step;
    int count;

    using Place = ListedParts::Place;
    __device__ __forceinline__ Place out_of(int i) const { return {out, i * out_step}; }
    __device__ __forceinline__ Place lse_of(int i) const { return {lse, i * lse_step}; }
};

template <typename Parts>
struct CombineParameters {
    BatchAxes batch;
    int64 rows, values;     // of a batch entry; values: columns of out
    BatchedArray out, lse;  // of states: normalizer and maximum, without columns
    Parts parts;
};

// Element (row, column) of one entry of an array of any type.
template <typename A>
struct Element {
    void* data;
    int64 index;
    int type;

    __device__ __forceinline__ Element(const BatchedArray& array, const BatchAxes& axes,
                                       const BatchIndex& entry, int64 row, int64 column,
                                       int64 shift = 0)
        : data(array.data),
          index(entry_offset(array.batch_stride, axes, entry) + row * array.row_stride +
                column * array.column_stride + shift),
          type(array.type) {}

    __device__ __forceinline__ A get() const { return read_float<A>(data, index, type); }
    __device__ __forceinline__ void set(A x) const { write_float<A>(data, index, type, x); }
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

// The largest of all parts' lse (or maxima) at one row.
template <typename A, typename Read>
__device__ __forceinline__ A largest(int count, Read read) {
    A m = -infinity<A>();
    for (int i = 0; i < count; ++i) m = maximum_or_nan(m, read(i));
    return m;
}

// lse = log sum_i exp(lse_i) and out = sum_i w_i out_i with w_i = exp(lse_i - lse).
template <typename A, typename Parts>
__global__ void combine(const __grid_constant__ CombineParameters<Parts> p) {
    __shared__ BatchIndex entry;
    const CombinedRow at(p.rows, 32);
    decode_batch(p.batch, at.entry, entry, threadIdx.x);
    __syncthreads();
    if (at.row >= p.rows) return;

    auto lse_of = [&](int i) {
        auto [array, shift] = p.parts.lse_of(i);
        return Element<A>(array, p.batch, entry, at.row, 0, shift).get();
    };
    const A m = largest<A>(p.parts.count, lse_of);
    const A reference = m == -infinity<A>() ? A(0) : m;
    A total = 0;
    for (int i = 0; i < p.parts.count; ++i) total = add(total, exponential(lse_of(i) - reference));

    const int lane = threadIdx.x % 32;
    for (int64 column = lane; column < p.values; column += 32) {
        A sum = A(-0.0);
        for (int i = 0; i < p.parts.count; ++i) {
            A lse = lse_of(i);
            if (lse == -infinity<A>()) continue;
            auto [array, shift] = p.parts.out_of(i);
            A part = Element<A>(array, p.batch, entry, at.row, column, shift).get();
            sum = add(sum, multiply(exponential(lse - reference) / total, part));
        }
        Element<A>(p.out, p.batch, entry, at.row, column).set(m == -infinity<A>() ? A(0) : sum);
    }
    __syncwarp();  // the result may be one of the parts
    if (lane == 0 && p.lse.data) {
        // The maximum itself where it is the whole sum; +inf comes with a total of NaN.
        bool alone = total == A(1) || m == infinity<A>() || m == -infinity<A>();
        Element<A>(p.lse, p.batch, entry, at.row, 0).set(alone ? m : m + logarithm(total));
    }
}

// m = max m_i and l = sum_i l_i exp(m_i - m): parts' `lse` are the maxima, `out` the normalizers.
template <typename A>
__global__ void combine_states(const __grid_constant__ CombineParameters<ListedParts> p) {
    __shared__ BatchIndex entry;
    const CombinedRow at(p.rows, 1);
    decode_batch(p.batch, at.entry, entry, threadIdx.x);
    __syncthreads();
    if (at.row >= p.rows) return;

    auto maximum_of = [&](int i) {
        return Element<A>(p.parts.lse[i], p.batch, entry, at.row, 0).get();
    };
    const A m = largest<A>(p.parts.count, maximum_of);
    const A reference = m == -infinity<A>() ? A(0) : m;
    A sum = A(-0.0);
    for (int i = 0; i < p.parts.count; ++i) {
        A part = maximum_of(i);
        if (part == -infinity<A>()) continue;
        A l = Element<A>(p.parts.out[i], p.batch, entry, at.row, 0).get();
        sum = add(sum, multiply(l, exponential(part - reference)));
    }
    Element<A>(p.lse, p.batch, entry, at.row, 0).set(m);
    Element<A>(p.out, p.batch, entry, at.row, 0).set(m == -infinity<A>() ? A(0) : sum);
}

}  // namespace cuflash

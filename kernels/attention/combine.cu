// Merging results over disjoint sets of keys: attention's (out, lse) pairs, and softmax states.
//
// A part whose lse (or maximum) is -inf is the identity, bit for bit, whatever else it holds; with
// two parts every operation is commutative. Sums begin at -0, which unlike +0 changes no addend.
// Grid: blocks of rows, batch entry by batch entry; a row takes a warp (combine, combine_vjp) or a
// thread (combine_states). No dynamic shared memory.
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

// Cotangents of the result, the two parts that it was merged from, and their gradients.
struct CombineVjpParameters {
    BatchAxes batch;
    int64 rows, values;
    BatchedArray dout, dlse;  // dlse may be absent
    ListedParts parts, grads;
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

// With the parts' weights w_a and w_b, dout_i = w_i dout and
// dlse_a = w_a dlse + w_a w_b sum(dout (out_a - out_b)), likewise dlse_b.
template <typename A>
__global__ void combine_vjp(const __grid_constant__ CombineVjpParameters p) {
    __shared__ BatchIndex entry;
    const CombinedRow at(p.rows, 32);
    decode_batch(p.batch, at.entry, entry, threadIdx.x);
    __syncthreads();
    if (at.row >= p.rows) return;

    auto element = [&](const BatchedArray& array, int64 column) {
        return Element<A>(array, p.batch, entry, at.row, column);
    };
    const A lse_a = element(p.parts.lse[0], 0).get(), lse_b = element(p.parts.lse[1], 0).get();
    const bool empty_a = lse_a == -infinity<A>(), empty_b = lse_b == -infinity<A>();
    const A m = maximum_or_nan(lse_a, lse_b);
    A w_a = empty_a ? A(0) : exponential(lse_a - m), w_b = empty_b ? A(0) : exponential(lse_b - m);
    const A total = empty_a && empty_b ? A(1) : add(w_a, w_b);
    w_a /= total;
    w_b /= total;

    const int lane = threadIdx.x % 32;
    A between = 0;
    for (int64 column = lane; column < p.values; column += 32) {
        const A rise = element(p.dout, column).get();
        if (!empty_a && !empty_b)
            between += rise * (element(p.parts.out[0], column).get() -
                               element(p.parts.out[1], column).get());
        element(p.grads.out[0], column).set(empty_a ? A(0) : w_a * rise);
        element(p.grads.out[1], column).set(empty_b ? A(0) : w_b * rise);
    }
    for (int bit = 1; bit < 32; bit *= 2) between += __shfl_xor_sync(kFullWarp, between, bit);
    if (lane > 0) return;
    between *= w_a * w_b;
    const A dlse = p.dlse.data ? element(p.dlse, 0).get() : A(0);
    element(p.grads.lse[0], 0).set(empty_a ? A(0) : w_a * dlse + between);
    element(p.grads.lse[1], 0).set(empty_b ? A(0) : w_b * dlse - between);
}

}  // namespace cuflash

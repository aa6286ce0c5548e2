// Merging results over disjoint sets of keys: attention's (out, lse) pairs, and softmax states.
//
// A listed part whose lse (or maximum) is -inf is the identity, bit for bit, whatever it holds;
// with two parts every operation is commutative. Sums begin at -0, which unlike +0 changes no
// addend. Grid: blocks of rows, batch entry by batch entry. In combine a row takes `warps` warps,
// columns across lanes and shares of the parts across warps, whose sums meet in shared memory in a
// fixed order; in combine_vjp a warp, in combine_states a thread. No dynamic shared memory.
#include "lib/numeric.cuh"
#include "lib/runtime_dtype.cuh"
#include "lib/scheduler.cuh"

namespace cuflash {

constexpr int kListedParts = 8;
constexpr int kMostWarps = 16;   // of a block
constexpr int kLaneColumns = 4;  // of a lane at a time
constexpr int kPartsAtOnce = 4;  // under way: their latency is what few rows wait for

template <typename A>
struct alignas(16) Columns {
    A x[kLaneColumns];
};

// Columns of a row that are `step` apart; 0 for those that are not there.
template <typename A, typename Row>
__device__ __forceinline__ Columns<A> read_columns(const Row& row, int64 first, int step,
                                                   int64 columns) {
    Columns<A> read;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c)
        read.x[c] = first + c * step < columns ? row.get(first + c * step) : A(0);
    return read;
}

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
    static constexpr bool kEmptyIsNothing = true;

    // One row of all parts.
    template <typename A>
    struct Row {
        const ListedParts& parts;
        const RowPlace& at;

        __device__ __forceinline__ AnyRow<A> out(int i) const { return {parts.out[i], at}; }
        __device__ __forceinline__ bool is_wide(int64) const { return false; }
        __device__ __forceinline__ Columns<A> columns(int i, int64 first, bool,
                                                      int64 values) const {
            return read_columns<A>(out(i), first, 32, values);
        }
        __device__ __forceinline__ A lse(int i) const { return AnyRow<A>(parts.lse[i], at).get(0); }
    };
};

// Parts that follow each other in memory, unrounded: what a forward over shares of the keys leaves.
struct EvenParts {
    BatchedArray out, lse;
    int64 out_step, lse_step;
    int count;
    // A share whose keys all have weight 0 may have seen a non-finite value: 0 times that is NaN.
    static constexpr bool kEmptyIsNothing = false;

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

        // Whether a lane's columns are neighbours, read at once: all rows begin at 16 bytes.
        __device__ __forceinline__ bool is_wide(int64 values) const {
            return values % kLaneColumns == 0;
        }
        __device__ __forceinline__ Columns<A> columns(int i, int64 first, bool wide,
                                                      int64 values) const {
            const A* const row = first_out + i * out_step;
            if (!wide) return read_columns<A>(PartRow<A>{row}, first, 32, values);
            if (first >= values) return {};
            return *reinterpret_cast<const Columns<A>*>(row + first);
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
    int tiles;              // blocks of a batch entry
    Parts parts;
};

// Cotangents of the result, the two parts that it was merged from, and their gradients.
struct CombineVjpParameters {
    BatchAxes batch;
    int64 rows, values;
    BatchedArray dout, dlse;  // dlse may be absent
    int tiles;                // blocks of a batch entry
    ListedParts parts, grads;
};

// The row of a thread's team, and its batch entry.
struct CombinedRow {
    int64 row, entry;

    __device__ __forceinline__ CombinedRow(unsigned tiles, unsigned lanes) {
        const unsigned teams = blockDim.x / lanes;
        row = int64(blockIdx.x % tiles) * teams + threadIdx.x / lanes;
        entry = blockIdx.x / tiles;
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

// What the lse of all parts say: the weight of one is exp(lse - reference) / total.
template <typename A>
struct PartWeights {
    A largest, reference, total;

    // A lane has a part at a time.
    template <typename Row>
    __device__ __forceinline__ void find(const Row& parts, int count) {
        const int lane = threadIdx.x % 32;
        const A first = lane < count ? parts.lse(lane) : -infinity<A>();
        largest = first;
#pragma unroll 1
        for (int i = lane + 32; i < count; i += 32) largest = maximum_or_nan(largest, parts.lse(i));
        largest = reduce_warp(largest, [](A a, A b) { return maximum_or_nan(a, b); });
        reference = largest == -infinity<A>() ? A(0) : largest;
        total = exponential(first - reference);
#pragma unroll 1
        for (int i = lane + 32; i < count; i += 32)
            total = add(total, exponential(parts.lse(i) - reference));
        total = reduce_warp(total, [](A a, A b) { return add(a, b); });
    }
    __device__ __forceinline__ A of(A lse) const { return exponential(lse - reference) / total; }
    // The largest itself where it is the whole sum; +inf comes with a total of NaN.
    __device__ __forceinline__ A lse() const {
        const bool alone = total == A(1) || largest == infinity<A>() || largest == -infinity<A>();
        return alone ? largest : largest + logarithm(total);
    }
};

// lse = log sum_i exp(lse_i) and out = sum_i w_i out_i with w_i = exp(lse_i - lse).
//
// Few rows wait for memory, but once: the weights are found while a warp's first parts are under
// way.
template <typename A, typename Parts>
__global__ void combine(const __grid_constant__ CombineParameters<Parts> p) {
    __shared__ BatchIndex entry;
    __shared__ A sums[kMostWarps][kLaneColumns][32];
    const CombinedRow row(p.tiles, 32 * p.warps);
    decode_batch(p.batch, row.entry, entry, threadIdx.x);
    __syncthreads();
    const bool exists =
        row.row < p.rows;  // else it does what the last row does, and writes nothing
    const RowPlace at{p.batch, entry, min(row.row, p.rows - 1)};
    const typename Parts::template Row<A> parts{p.parts, at};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp % p.warps;
    const int begin = p.parts.count * own / p.warps, end = p.parts.count * (own + 1) / p.warps;
    const bool wide = parts.is_wide(p.values);
    const int step = wide ? 1 : 32;

    PartWeights<A> weights;
    const AnyRow<A> out(p.out, at);
    int64 start = 0;
    do {  // also without columns: the weights are lse's too
        const int64 column = start + (wide ? kLaneColumns * lane : lane);
        A sum[kLaneColumns];
        for (int c = 0; c < kLaneColumns; ++c) sum[c] = A(-0.0);
#pragma unroll 1
        for (int first = begin; first < end; first += kPartsAtOnce) {
            Columns<A> part[kPartsAtOnce];
            A lse[kPartsAtOnce];
#pragma unroll
            for (int n = 0; n < kPartsAtOnce; ++n) {
                part[n] = parts.columns(min(first + n, end - 1), column, wide, p.values);
                lse[n] = parts.lse(min(first + n, end - 1));
            }
            if (start == 0 && first == begin) weights.find(parts, p.parts.count);
#pragma unroll
            for (int n = 0; n < kPartsAtOnce; ++n) {
                const bool empty = lse[n] == -infinity<A>();
                if (first + n >= end || (Parts::kEmptyIsNothing && empty)) continue;
                const A weight = empty ? A(0) : weights.of(lse[n]);
#pragma unroll
                for (int c = 0; c < kLaneColumns; ++c)
                    sum[c] = add(sum[c], multiply(weight, part[n].x[c]));
            }
        }
        for (int c = 0; c < kLaneColumns; ++c) sums[warp][c][lane] = sum[c];
        __syncthreads();
        for (int c = own; c < kLaneColumns; c += p.warps) {
            A whole = A(-0.0);
            for (int w = 0; w < p.warps; ++w) whole = add(whole, sums[warp - own + w][c][lane]);
            if (weights.largest == -infinity<A>() && (Parts::kEmptyIsNothing || !is_nan(whole)))
                whole = 0;
            if (exists && column + c * step < p.values) out.set(column + c * step, whole);
        }
        __syncthreads();  // the result may be one of the parts
        start += 32 * kLaneColumns;
    } while (start < p.values);
    if (p.lse.data && exists && own == 0 && lane == 0) AnyRow<A>(p.lse, at).set(0, weights.lse());
}

// m = max m_i and l = sum_i l_i exp(m_i - m): parts' `lse` are the maxima, `out` the normalizers.
template <typename A>
__global__ void combine_states(const __grid_constant__ CombineParameters<ListedParts> p) {
    __shared__ BatchIndex entry;
    const CombinedRow at(p.tiles, 1);
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

// With the parts' weights w_a and w_b, dout_i = w_i dout and
// dlse_a = w_a dlse + w_a w_b sum(dout (out_a - out_b)), likewise dlse_b.
template <typename A>
__global__ void combine_vjp(const __grid_constant__ CombineVjpParameters p) {
    __shared__ BatchIndex entry;
    const CombinedRow at(p.tiles, 32);
    decode_batch(p.batch, at.entry, entry, threadIdx.x);
    __syncthreads();
    if (at.row >= p.rows) return;

    const RowPlace place{p.batch, entry, at.row};
    auto row = [&](const BatchedArray& array) { return AnyRow<A>(array, place); };
    const A lse_a = row(p.parts.lse[0]).get(0), lse_b = row(p.parts.lse[1]).get(0);
    const bool empty_a = lse_a == -infinity<A>(), empty_b = lse_b == -infinity<A>();
    const A m = maximum_or_nan(lse_a, lse_b);
    A w_a = empty_a ? A(0) : exponential(lse_a - m), w_b = empty_b ? A(0) : exponential(lse_b - m);
    const A total = empty_a && empty_b ? A(1) : add(w_a, w_b);
    w_a /= total;
    w_b /= total;

    const int lane = threadIdx.x % 32;
    A between = 0;
    for (int64 column = lane; column < p.values; column += 32) {
        const A rise = row(p.dout).get(column);
        if (!empty_a && !empty_b)
            between += rise * (row(p.parts.out[0]).get(column) - row(p.parts.out[1]).get(column));
        row(p.grads.out[0]).set(column, empty_a ? A(0) : w_a * rise);
        row(p.grads.out[1]).set(column, empty_b ? A(0) : w_b * rise);
    }
    between = reduce_warp(between, [](A a, A b) { return a + b; });
    if (lane > 0) return;
    between *= w_a * w_b;
    const A dlse = p.dlse.data ? row(p.dlse).get(0) : A(0);
    row(p.grads.lse[0]).set(0, empty_a ? A(0) : w_a * dlse + between);
    row(p.grads.lse[1]).set(0, empty_b ? A(0) : w_b * dlse - between);
}

}  // namespace cuflash

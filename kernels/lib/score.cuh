// The score pipeline: who sees whom, and what happens to q.k between the dot product and the
// softmax.
//
// An attention kernel takes a `Score` as template parameter and asks it, for one batch entry:
//   range(row)             the keys that a row can see before the mask: causal, window, lengths
//   score(dot, row, key)   the score of a pair in that range, -inf if the mask hides it
//   sees(row, key)         whether the mask lets a pair of that range see each other
//   change_row(s, pairs)   the same as score, for a thread's dot products of one row
//   change_tile(pairs)     the same for some rows, if options have elements for all of the pairs
//   with_slope(dot, ...)   score, and its derivative with respect to the scaled dot product
// `Score<A, kRanged, Steps...>` is made of steps, functors that are applied in order. A new option
// is a new step; the kernels' loops do not change. A step that is absent from a call is switched
// off by its own parameters, so that three instantiations serve all calls: PlainScore, RangedScore
// (causal, window, offsets, lengths: bounds alone) and FullScore. Those of a single step are for
// kernels whose registers are worth it.
//
// Scores, bounds and steps are set up once a block by `load` and have no constructors, so that they
// can lie in shared memory: registers are for the accumulators.
#pragma once

#include "lib/numeric.cuh"
#include "lib/runtime_dtype.cuh"
#include "lib/scheduler.cuh"
#include "lib/sequences.cuh"

namespace cuflash {

// An integer for each batch entry: in `data`, or `value` for all if data is null.
struct EntryInteger {
    const void* data;
    int64 batch_stride[kBatchAxes];
    int64 value;
    int type;  // IntegerType
};

struct ScoreParameters {
    int64 queries, keys;  // Tq, Tk: all tokens of the axes
    int64 left, right;    // window sides, kUnlimited for none
    double scale;
    double softcap;      // 0: none
    int default_offset;  // the last query of an entry stands at its last key
    EntryInteger query_offset, query_lengths, key_lengths;
    BatchedArray mask, bias, alibi_slopes, sinks;
};

// Sums of two positions, or of a position and a window side, stay within int64.
constexpr int64 kFarthest = 1LL << 62;
constexpr int64 kUnlimited = 1LL << 61;

// What a step may look at besides the score.
struct Pair {
    int64 row, key;
    int64 distance;  // from the key forward to the position of the query
};

// Pairs of one row with keys at `first_key` + column. In range are `count` columns from `low` on.
struct RowPairs {
    int64 row, first_key;
    int low, count;

    // The column, or the nearest one in range, which can be read without a branch.
    __device__ __forceinline__ int nearest(int column) const {
        return min(max(column, low), low + count - 1);
    }
};

// `change_tile`, which all lanes of a warp call, takes pairs of some rows with some keys for all of
// which options have elements, be they in range or not, as an object of a type of the kernel's:
//   kRows, kColumns        how many there are; rows are kRowStep apart, column j lies column(j)
//                          after the first, next to column j + 1 if j is even
//   first_row, first_key   those of pair (0, 0); `distance` is its distance
//   side                   1: no key comes after its query, and rows see all keys from here to it;
//                          -1: none comes before, and rows see all from it to here; 0: else
//   at(i, j)               the score
//   shift[i]               0, or what a step leaves to be added to all scores of row i
template <typename Pairs, typename Change>
__device__ __forceinline__ void change_pairs(Pairs& pairs, Change change) {
#pragma unroll
    for (int i = 0; i < Pairs::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Pairs::kColumns; ++j) pairs.at(i, j) = change(pairs.at(i, j), i, j);
}

// Replaces the score in each column, be it in range or not.
template <typename A, int kCount, typename ColumnOf, typename Change>
__device__ __forceinline__ void change_each(A (&s)[kCount], ColumnOf column_of, Change change) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) s[j] = change(s[j], column_of(j));
}

// ------------------------------------------------------------------------------------- bounds

// What rows see of keys by their position alone, counted from a row and a key: row i those from
// `first` + i to `end` + i - 1.
struct Band {
    int first, end;

    // Far enough for any row of a tile to see all keys, or none.
    static __device__ __forceinline__ int within(int64 x) {
        return int(clamp(x, -512, (1LL << 31) - 512));
    }
};

// Lengths and position of one sequence. Values that come from device memory were checked by nobody:
// lengths are clamped to the sequence.
struct EntryBounds {
    int64 first;    // row 0 of the sequence
    int64 queries;  // the first row that is not used
    int64 keys;     // used keys
    int64 offset;   // position of row 0 among the keys
    int64 left, right;

    __device__ __forceinline__ void load(const ScoreParameters& p, const BatchAxes& axes,
                                         const BatchIndex& index, const Segment& segment) {
        first = segment.start;
        left = p.left;
        right = p.right;
        const int64 rows = clamp(read(p.query_lengths, axes, index), 0, segment.rows);
        keys = clamp(read(p.key_lengths, axes, index), 0, segment.keys);
        queries = segment.start + rows;
        offset = p.default_offset ? keys - rows
                                  : clamp(read(p.query_offset, axes, index), -kFarthest, kFarthest);
        offset -= segment.start;
    }

    // Empty for rows past the end.
    __device__ __forceinline__ KeyRange range(int64 row) const {
        if (row >= queries) return {0, -1};
        int64 position = row + offset;
        return {max(position - left, 0LL), min(position + right, keys - 1)};
    }

    __device__ __forceinline__ Band band(int64 row, int64 key) const {
        const int64 distance = row + offset - key;
        return {Band::within(distance - left), Band::within(distance + right + 1)};
    }

    // The rows that see one of the keys begin..end - 1 or more, counted from the sequence's first.
    __device__ __forceinline__ RowRange rows_that_see(int64 begin, int64 end) const {
        end = min(end, keys);
        if (begin >= end) return {0, -1};
        const int64 shift = offset + first;  // the position of the first row
        return {max(begin - right - shift, 0LL), min(end - 1 + left - shift, queries - first - 1)};
    }

  private:
    static __device__ __forceinline__ int64 read(const EntryInteger& x, const BatchAxes& axes,
                                                 const BatchIndex& index) {
        if (!x.data) return x.value;
        return read_integer(x.data, entry_offset(x.batch_stride, axes, index), x.type);
    }
};

// A number for each entry, or `absent`.
template <typename A>
__device__ __forceinline__ A read_entry(const BatchedArray& x, const BatchAxes& axes,
                                        const BatchIndex& index, A absent) {
    if (!x.data) return absent;
    return read_float<A>(x.data, entry_offset(x.batch_stride, axes, index), x.type);
}

// ------------------------------------------------------------------------------------- steps
//
// `step(s, pair)` is the score of one pair in range after the step. `change_row` does the same for
// a row's pairs, of which column 0 lies `distance` from the query's position; out of range it may
// give anything, but reads nothing. `change_tile(pairs, factor)` takes scores times 1 / factor; it
// leaves masks to `Score::mask`, and is for options that `has_tiles` is true of. `derivative(s)` is
// that of the step at s.

// A step that is `kScaleFree` may be done before the scale, if it hears of it by `divide_by`.

// Steps that add something to the score, or hide the pair.
template <typename A>
struct Shift {
    __device__ __forceinline__ A derivative(A) const { return A(1); }
    template <int kCount>
    __device__ __forceinline__ void bend(A (&)[kCount], const A (&)[kCount]) const {}
};

// Steps that hide no pair.
struct Transparent {
    static constexpr bool kHides = false;
    __device__ __forceinline__ bool sees(const Pair&) const { return true; }
    __device__ __forceinline__ bool has_tiles() const { return true; }
    template <int kCount, typename ColumnOf>
    __device__ __forceinline__ unsigned hidden(const RowPairs&, ColumnOf) const {
        return 0;
    }
};

template <typename A>
struct Softcap : Transparent {
    static constexpr bool kScaleFree = false;
    A cap;

    __device__ __forceinline__ void load(const ScoreParameters& p, const BatchAxes&,
                                         const BatchIndex&) {
        cap = A(p.softcap);
    }
    __device__ __forceinline__ bool is_present() const { return cap != A(0); }
    __device__ __forceinline__ A operator()(A s, const Pair&) const {
        // Far below the cap a score stays as it is, and s / cap could lose it to underflow.
        if (cap == A(0) || fabs(s) < cap * linear(cap)) return s;
        return cap * hyperbolic_tangent(s / cap);
    }
    __device__ __forceinline__ A derivative(A s) const {
        if (cap == A(0)) return A(1);
        const A t = hyperbolic_tangent(s / cap);
        return (A(1) - t) * (A(1) + t);
    }
    template <int kCount>
    __device__ __forceinline__ void bend(A (&slopes)[kCount], const A (&s)[kCount]) const {
#pragma unroll
        for (int j = 0; j < kCount; ++j) slopes[j] *= derivative(s[j]);
    }
    template <int kCount, typename ColumnOf>
    __device__ __forceinline__ void change_row(A (&s)[kCount], const RowPairs&, int64,
                                               ColumnOf column_of) const {
        change_each(s, column_of, [&](A x, int) { return (*this)(x, Pair{}); });
    }
    __device__ __forceinline__ bool has_tiles() const {
        return cap > A(0x1p-60) && cap < A(0x1p60);
    }
    // What the scores of a tile, times 1 / factor, have in common.
    struct Curve {
        A most, rate;
        A c1, c3, c5, c7, c9;  // of a polynomial for small ones
        bool is_normal;        // all of its constants are normal numbers
    };
    __device__ __forceinline__ Curve curve(A factor) const {
        const A rate = factor / cap, u = rate * rate, v = u * factor;
        const A c9 = u * u * u * v * kNear9;
        auto is_normal = [](A x) { return fabs(x) > A(0x1p-124) && fabs(x) < A(0x1p124); };
        return {cap,
                rate,
                factor,
                v * kNear3,
                u * v * kNear5,
                u * u * v * kNear7,
                c9,
                is_normal(factor) && is_normal(c9)};
    }
    template <typename Pairs>
    __device__ __forceinline__ void change_tile(Pairs& pairs, A factor) const {
        change_tile(pairs, curve(factor));
    }
    // Without a division or a branch for each score.
    template <typename Pairs>
    static __device__ __forceinline__ void change_tile(Pairs& pairs, const Curve& curve) {
        A largest[4] = {};
        change_pairs(pairs, [&](A x, int, int j) {
            largest[j % 4] = fmax(largest[j % 4], fabs(x));
            return x;
        });
        const A most = fmax(fmax(largest[0], largest[1]), fmax(largest[2], largest[3]));
        if (most * fabs(curve.rate) < kNear && curve.is_normal) {
            change_pairs(pairs, [&](A x, int, int) {
                const A u = x * x;
                A p = multiply_add(curve.c9, u, curve.c7);
                p = multiply_add(p, u, curve.c5);
                p = multiply_add(p, u, curve.c3);
                return x * multiply_add(p, u, curve.c1);
            });
            return;
        }
        change_pairs(pairs, [&](A x, int, int) {
            const A t = x * curve.rate;
            const A far = 1 - __fdividef(2, exp2f(t * A(2 * 1.4426950408889634)) + 1);
            return curve.most * (fabs(t) < kNear ? near_tangent(t) : far);
        });
    }

  private:
    // tanh(t) = 1 - 2 / (exp(2 t) + 1) would lose the digits of a small t, where a polynomial in
    // t^2 has a relative error of 4e-8, interpolated by weighted least squares.
    static constexpr float kNear = 0.55f;
    static constexpr A kNear3 = -0.3333294690f, kNear5 = 0.1332072467f;
    static constexpr A kNear7 = -0.0526717715f, kNear9 = 0.0164375100f;
    static __device__ __forceinline__ A near_tangent(A t) {
        const A u = t * t;
        A p = multiply_add(kNear9, u, kNear7);
        p = multiply_add(p, u, kNear5);
        p = multiply_add(p, u, kNear3);
        return multiply_add(t * u, p, t);
    }

    // The x below which x - tanh(x), at most x^3 / 3, is lost to rounding: as `problem.py` has it.
    static __device__ __forceinline__ float linear(float) { return 1.7e-4f; }
    static __device__ __forceinline__ double linear(double) { return 7.4e-9; }
    static __device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
    static __device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }
};

constexpr double kLargestFloat = 3.4028234663852886e38;

// A matrix of a type of its own, added in the wider of that type and A.
template <typename A>
struct Bias : Transparent, Shift<A> {
    static constexpr bool kScaleFree = false;  // a bias over a small scale could be infinite
    const void* data;
    int64 start, row_stride, column_stride;
    int type;

    __device__ __forceinline__ void load(const ScoreParameters& p, const BatchAxes& axes,
                                         const BatchIndex& index) {
        data = p.bias.data;
        start = entry_offset(p.bias.batch_stride, axes, index);
        row_stride = p.bias.row_stride;
        column_stride = p.bias.column_stride;
        type = p.bias.type;
    }
    __device__ __forceinline__ bool is_present() const { return data; }
    __device__ __forceinline__ A operator()(A s, const Pair& at) const {
        if (!data) return s;
        const int64 element = start + at.row * row_stride + at.key * column_stride;
        if (type == kFloat64) return sum(s, static_cast<const double*>(data)[element]);
        return s + read_float<A>(data, element, type);
    }
    template <int kCount, typename ColumnOf>
    __device__ __forceinline__ void change_row(A (&s)[kCount], const RowPairs& pairs, int64,
                                               ColumnOf column_of) const {
        if (pairs.count == 0) return;
        switch (type) {
            case kFloat64:
                return add_row<double>(s, pairs, column_of);
            case kFloat32:
                return add_row<float>(s, pairs, column_of);
            case kFloat16:
                return add_row<__half>(s, pairs, column_of);
            default:
                return add_row<__nv_bfloat16>(s, pairs, column_of);
        }
    }

    // Neighbours are read together; in float64 there are not the registers.
    __device__ __forceinline__ bool has_tiles() const {
        if (type == kFloat64) return false;
        const int size = type == kFloat32 ? 4 : 2;
        const auto first = reinterpret_cast<unsigned long long>(data) + start * size;
        return column_stride == 1 && (first | row_stride * size) % (2 * size) == 0;
    }
    template <typename Pairs>
    __device__ __forceinline__ void change_tile(Pairs& pairs, A factor) const {
        switch (type) {
            case kFloat32:
                return add_tile<float>(pairs, factor);
            case kFloat16:
                return add_tile<__half>(pairs, factor);
            default:
                return add_tile<__nv_bfloat16>(pairs, factor);
        }
    }

  private:
    template <typename B>
    struct alignas(2 * sizeof(B)) Neighbours {
        B first, second;
    };

    template <typename B, typename Pairs>
    __device__ __forceinline__ void add_tile(Pairs& pairs, A factor) const {
        const B* row =
            static_cast<const B*>(data) + start + pairs.first_row * row_stride + pairs.first_key;
#pragma unroll
        for (int i = 0; i < Pairs::kRows; ++i, row += Pairs::kRowStep * row_stride) {
            // Three rows at a time: all that are read before they are added take registers.
            if (sizeof(B) == sizeof(A) && i > 0 && i % 3 == 0) __syncwarp();
#pragma unroll
            for (int j = 0; j < Pairs::kColumns; j += 2) {
                const auto two = *reinterpret_cast<const Neighbours<B>*>(row + Pairs::column(j));
                pairs.at(i, j) = sum(pairs.at(i, j) * factor, two.first);
                pairs.at(i, j + 1) = sum(pairs.at(i, j + 1) * factor, two.second);
            }
        }
    }
    template <typename B, int kCount, typename ColumnOf>
    __device__ __forceinline__ void add_row(A (&s)[kCount], const RowPairs& pairs,
                                            ColumnOf column_of) const {
        const B* const row = static_cast<const B*>(data) + start + pairs.row * row_stride +
                             pairs.first_key * column_stride;
        change_each(s, column_of, [&](A x, int column) {
            return sum(x, row[pairs.nearest(column) * column_stride]);
        });
    }
    template <typename B>
    static __device__ __forceinline__ A sum(A s, B bias) {
        return s + A(widen(bias));
    }
    static __device__ __forceinline__ A sum(A s, double bias) {
        double both = double(s) + bias;
        // Past the range of A a finite sum stays finite, or a low one would hide its key.
        if (sizeof(A) < sizeof(double) && both - both == 0)
            both = fmin(fmax(both, -kLargestFloat), kLargestFloat);
        return A(both);
    }
};

template <typename A>
struct Alibi : Transparent, Shift<A> {
    static constexpr bool kScaleFree = true;
    A slope;

    __device__ __forceinline__ void load(const ScoreParameters& p, const BatchAxes& axes,
                                         const BatchIndex& index) {
        slope = read_entry(p.alibi_slopes, axes, index, A(0));
    }
    __device__ __forceinline__ bool is_present() const { return slope != A(0); }
    __device__ __forceinline__ A operator()(A s, const Pair& at) const {
        return slope == A(0) ? s : s - slope * A(llabs(at.distance));
    }
    template <int kCount, typename ColumnOf>
    __device__ __forceinline__ void change_row(A (&s)[kCount], const RowPairs&, int64 distance,
                                               ColumnOf column_of) const {
        if (llabs(distance) < kExact) {
            const A first = A(distance);
            change_each(s, column_of,
                        [&](A x, int column) { return x - slope * fabs(first - A(column)); });
        } else {
            change_each(s, column_of,
                        [&](A x, int column) { return x - slope * A(llabs(distance - column)); });
        }
    }

    // Neither a slope times a column nor one times a distance leaves the range, as infinity would
    // be NaN times a column of 0.
    __device__ __forceinline__ bool has_tiles() const { return fabs(slope) < A(0x1p60); }
    template <typename Pairs>
    __device__ __forceinline__ void change_tile(Pairs& pairs, A factor) const {
        const A first = A(pairs.distance);
        if (pairs.side != 0) {
            // Linear: what all pairs of a row have in common is left to their weights.
            const A rate = pairs.side * slope;
#pragma unroll
            for (int i = 0; i < Pairs::kRows; ++i)
                pairs.shift[i] = -rate * (first + A(Pairs::kRowStep * i));
            change_pairs(pairs, [&](A x, int, int j) {
                return multiply_add(rate, A(Pairs::column(j)), x * factor);
            });
            return;
        }
        change_pairs(pairs, [&](A x, int i, int j) {
            return x * factor - slope * fabs(first + A(Pairs::kRowStep * i - Pairs::column(j)));
        });
    }

    // A finite slope stays finite, as infinity times a distance of 0 is not 0.
    __device__ __forceinline__ void divide_by(A scale) {
        if (slope - slope == A(0))
            slope = fmin(fmax(slope / scale, A(-kLargestFloat)), A(kLargestFloat));
    }

    // Distances up to here, and columns, add up exactly.
    static constexpr int64 kExact = 1 << 23;
};

template <typename A>
struct Mask : Shift<A> {
    static constexpr bool kScaleFree = true, kHides = true;
    Matrix<const unsigned char> matrix;

    __device__ __forceinline__ void load(const ScoreParameters& p, const BatchAxes& axes,
                                         const BatchIndex& index) {
        matrix = Matrix<const unsigned char>::of(p.mask, axes, index);
        if (!p.mask.data) matrix.data = nullptr;
    }
    __device__ __forceinline__ bool is_present() const { return matrix.data; }
    __device__ __forceinline__ bool sees(const Pair& at) const {
        return !matrix.data || matrix.at(at.row, at.key);
    }
    template <int kCount, typename ColumnOf>
    __device__ __forceinline__ unsigned hidden(const RowPairs& pairs, ColumnOf column_of) const {
        static_assert(kCount <= 32, "a bit for each");
        if (!matrix.data || pairs.count == 0) return 0;
        const unsigned char* const row = &matrix.at(pairs.row, pairs.first_key);
        unsigned bits = 0;
#pragma unroll
        for (int j = 0; j < kCount; ++j)
            if (!row[pairs.nearest(column_of(j)) * matrix.column_stride]) bits |= 1u << j;
        return bits;
    }
    __device__ __forceinline__ A operator()(A s, const Pair& at) const {
        return sees(at) ? s : -infinity<A>();
    }
    template <int kCount, typename ColumnOf>
    __device__ __forceinline__ void change_row(A (&s)[kCount], const RowPairs& pairs, int64,
                                               ColumnOf column_of) const {
        if (pairs.count == 0) return;
        const unsigned char* const row = &matrix.at(pairs.row, pairs.first_key);
        change_each(s, column_of, [&](A x, int column) {
            return row[pairs.nearest(column) * matrix.column_stride] ? x : -infinity<A>();
        });
    }
    // Bytes are read 16 at a time.
    __device__ __forceinline__ bool has_tiles() const {
        const auto first = reinterpret_cast<unsigned long long>(matrix.data);
        return matrix.column_stride == 1 && (first | matrix.row_stride) % 16 == 0;
    }
    template <typename Pairs>
    __device__ __forceinline__ void change_tile(Pairs&, A) const {}
    __device__ __forceinline__ void divide_by(A) const {}
};

// ---------------------------------------------------------------------------------- pipeline

template <typename A>
struct ScoreAndSlope {
    A score, slope;
};

template <typename A, bool kRanged, typename... Steps>
struct Score : private Steps... {
    // Whether a pair that is in range needs more than the scale, by one step; whether that may be
    // to be hidden.
    static constexpr bool kPerPair = sizeof...(Steps) > 0, kSingle = sizeof...(Steps) == 1;
    static constexpr bool kHides = (Steps::kHides || ...);
    // Whether `change_row` and `change_tile` scale scores, or else leave that to the weights.
    static constexpr bool kScales = !(Steps::kScaleFree && ...);

    A scale;
    A sink;  // -inf: none
    EntryBounds bounds;

    __device__ __forceinline__ void load(const ScoreParameters& p, const BatchAxes& axes,
                                         const BatchIndex& index, const Segment& segment) {
        scale = A(p.scale);
        sink = read_entry(p.sinks, axes, index, -infinity<A>());
        bounds.load(p, axes, index, segment);
        (static_cast<Steps&>(*this).load(p, axes, index), ...);
        if constexpr (!kScales) (static_cast<Steps&>(*this).divide_by(scale), ...);
    }

    // Whether a row is inside its entry's used length.
    __device__ __forceinline__ bool is_used(int64 row) const { return row < bounds.queries; }

    __device__ __forceinline__ KeyRange range(int64 row) const {
        if constexpr (kRanged)
            return bounds.range(row);
        else
            return {0, bounds.keys - 1};
    }

    __device__ __forceinline__ Band band(int64 row, int64 key) const {
        if constexpr (kRanged)
            return bounds.band(row, key);
        else
            return {Band::within(-kUnlimited), Band::within(kUnlimited)};
    }

    // What at least one of the rows begin..end - 1 sees. Both ends of a range rise with the row.
    __device__ __forceinline__ KeyRange range_of_any(int64 begin, int64 end) const {
        end = min(end, bounds.queries);
        if (begin >= end) return {0, -1};
        return {range(begin).first, range(end - 1).last};
    }

    // What all of those rows see that are used at all.
    __device__ __forceinline__ KeyRange range_of_all(int64 begin, int64 end) const {
        end = min(end, bounds.queries);
        if (begin >= end) return {0, -1};
        return {range(end - 1).first, range(begin).last};
    }

    __device__ __forceinline__ A operator()(A dot, int64 row, int64 key) const {
        A s = kScales ? dot * scale : dot;
        const Pair at = pair(row, key);
        ((s = static_cast<const Steps&>(*this)(s, at)), ...);
        return kScales ? s : s * scale;
    }

    __device__ __forceinline__ ScoreAndSlope<A> with_slope(A dot, int64 row, int64 key) const {
        static_assert(kScales || !kPerPair, "slopes are those of scaled scores");
        ScoreAndSlope<A> x{dot * scale, A(1)};
        const Pair at = pair(row, key);
        ((x.slope *= static_cast<const Steps&>(*this).derivative(x.score),
          x.score = static_cast<const Steps&>(*this)(x.score, at)),
         ...);
        return x;
    }

    // Turns dot products with the keys in columns `column_of(j)` into scores; out of range they are
    // left to the caller. A step is done with all of them before the next one, and not at all if it
    // is absent.
    template <int kCount, typename ColumnOf>
    __device__ __forceinline__ void change_row(A (&s)[kCount], const RowPairs& pairs,
                                               ColumnOf column_of) const {
        if constexpr (kScales) change_each(s, column_of, [&](A dot, int) { return dot * scale; });
        const int64 distance = pair(pairs.row, pairs.first_key).distance;
        (apply_step(static_cast<const Steps&>(*this), s, pairs, distance, column_of), ...);
    }

    // The same for `pairs`, as described at `change_pairs`; masks are left to `mask`.
    template <typename Pairs>
    __device__ __forceinline__ void change_tile(Pairs& pairs) const {
        static_assert(kSingle, "a tile's steps would fill the registers, one after the other");
        (static_cast<const Steps&>(*this).change_tile(pairs, kScales ? scale : A(1)), ...);
    }

    // Whether options allow `change_tile`.
    __device__ __forceinline__ bool has_tiles() const {
        return kSingle && (static_cast<const Steps&>(*this).has_tiles() && ...);
    }

    __device__ __forceinline__ const Matrix<const unsigned char>& mask() const {
        return static_cast<const Mask<A>&>(*this).matrix;
    }

    template <typename Step>
    __device__ __forceinline__ const Step& step() const {
        return static_cast<const Step&>(*this);
    }

    // Where a query stands among the keys.
    __device__ __forceinline__ int64 position(int64 row) const { return row + bounds.offset; }

    // The same, and multiplies `slopes` by the derivatives. Returns a bit for each column that a
    // step hides, whose score is to be left alone.
    template <int kCount, typename ColumnOf>
    __device__ __forceinline__ unsigned change_row_with_slope(A (&s)[kCount], A (&slopes)[kCount],
                                                              const RowPairs& pairs,
                                                              ColumnOf column_of) const {
        change_each(s, column_of, [&](A dot, int) { return dot * scale; });
        const int64 distance = pair(pairs.row, pairs.first_key).distance;
        ((static_cast<const Steps&>(*this).bend(slopes, s),
          apply_step(static_cast<const Steps&>(*this), s, pairs, distance, column_of)),
         ...);
        return (static_cast<const Steps&>(*this).template hidden<kCount>(pairs, column_of) | ...);
    }

    __device__ __forceinline__ bool sees(int64 row, int64 key) const {
        const Pair at = pair(row, key);
        return (static_cast<const Steps&>(*this).sees(at) && ...);
    }

  private:
    template <typename Step, int kCount, typename ColumnOf>
    static __device__ __forceinline__ void apply_step(const Step& step, A (&s)[kCount],
                                                      const RowPairs& pairs, int64 distance,
                                                      ColumnOf column_of) {
        if (step.is_present()) step.change_row(s, pairs, distance, column_of);
    }

    __device__ __forceinline__ Pair pair(int64 row, int64 key) const {
        return {row, key, row + bounds.offset - key};
    }
};

template <typename A>
using PlainScore = Score<A, false>;
template <typename A>
using RangedScore = Score<A, true>;
template <typename A>
using SoftcapScore = Score<A, true, Softcap<A>>;
template <typename A>
using BiasScore = Score<A, true, Bias<A>>;
template <typename A>
using AlibiScore = Score<A, true, Alibi<A>>;
template <typename A>
using MaskScore = Score<A, true, Mask<A>>;
template <typename A>
using FullScore = Score<A, true, Softcap<A>, Bias<A>, Alibi<A>, Mask<A>>;

}  // namespace cuflash

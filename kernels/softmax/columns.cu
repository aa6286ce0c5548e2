// Softmax and its gradients of rows that lie side by side in memory, such as the columns of a
// C-order matrix.
//
// A thread moves kRows neighbouring rows of one column at a time and keeps a state for each; the
// kWidth threads beside each other read 64 to 256 bytes. The fewer rows a thread has, the fewer
// states there are to unite.
//
// kHeld > 0: every lane holds that many columns in registers, so that rows of up to
// lanes * kHeld columns make two trips to memory (gradients: three). kBlocks > 1: those of a
// cluster's blocks (sm_90). kHeld = 0: rows of any length are read twice.
//
// x (rows, columns) -> output[0] (rows, columns), or one or two entries a row; gradients as in
// backward.cu. The last of the kept axes has stride 1 and a multiple of kRows rows; all other
// strides are such multiples, too.
// Grid: clusters of kBlocks blocks, tile by tile; any number of them is right. Dynamic shared
// memory: as `Tiles` wants it.
#include "softmax/columns.cuh"
#include "softmax/fused.cuh"

namespace cuflash {

// Bytes of each operand that a thread reads at a time where it does not hold its rows.
constexpr int kReadBytes = 64, kReadBytesOfPair = 32;
// Blocks of a multiprocessor, as `kMinBlocks`: elsewhere the compiler needs more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kColumnBlocks = 2;
#else
constexpr int kColumnBlocks = 1;
#endif
// 256 bytes a lane do not fit 64 registers.
template <int kBytes>
constexpr int kTileBlocks = kBytes <= 128 ? kColumnBlocks : 1;

struct Once {
    static constexpr bool value = true;
};
struct Again {
    static constexpr bool value = false;
};

template <typename T, typename Operation, int kRows, int kWidth, int kHeld, int kBlocks>
__global__ void CUFLASH_CLUSTERS(kBlocks)
    __launch_bounds__(kMaxThreads, (kTileBlocks<kHeld * kRows* int(sizeof(T))>))
        columns(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    using Few = Bundle<T, kRows>;
    using State = OnlineSoftmax<A>;
    constexpr bool kWeights = Operation::kOfWeights && sizeof(T) == sizeof(A);
    CUFLASH_DYNAMIC_SHARED(State, memory);
    Tiles<State, kRows, kWidth, kBlocks> tiles(memory);
    const int lanes = tiles.lanes(), lane = tiles.lane();
    const int64 x_step = p.input[0].reduced_stride[0], y_step = p.output[0].reduced_stride[0];

    tiles.for_each(p, [&](int64 row, bool active) {
        const Place place(p, row);
        const T* x = static_cast<const T*>(p.input[0].data) + place.input[0];
        T* y = static_cast<T*>(p.output[0].data) + place.output[0];
        const int64 columns = active ? p.columns : 0;
        State base[kRows], state[kRows];
#pragma unroll
        for (int v = 0; v < kRows; ++v) base[v] = State::identity();
        auto unite_and_write_entries = [&] {
            tiles.unite(state);
            if constexpr (!Operation::kColumns) {
                if (!active || lane != 0) return;
#pragma unroll
                for (int v = 0; v < kRows; ++v)
                    Operation(state[v]).template write<T>(p, Place(p, row + v));
            }
        };
        if constexpr (kHeld > 0) {
            const int mine = columns_of_lane(columns, lane, lanes);
            Few held[kHeld];
            // Weights that the compiler may compute side by side, between branches that skip
            // columns past the end, whose weights are 0: more would not fit 64 registers.
            constexpr int kOfWide = sizeof(T) == 8 && kWeights && kHeld > 8 ? 4 : kHeld;
            constexpr int kAtOnce = sizeof(T) == 2 ? 8 : kOfWide;
            static_assert(kHeld % kAtOnce == 0, "a weight without a column");
            const T* from = x + lane * x_step;
#pragma unroll
            for (int i = 0; i < kHeld; ++i, from += lanes * x_step)
                held[i] = load_bundle<T, kRows>(from, i < mine, lowest<T>());
            const Few top = largest_of(held);
#pragma unroll
            for (int v = 0; v < kRows; ++v) {
                base[v].m = widened(top, v);
                const Weight<T, Operation> weight(base[v].m);
                auto weigh = [&](int i) {
                    const A w = weight(widened(held[i], v));
                    if constexpr (kWeights) held[i].element[v] = w;
                    if constexpr (sizeof(T) == 8 && !kWeights) held[i] = words_here(held[i]);
                    base[v].l = add(base[v].l, w);
                };
#pragma unroll
                for (int first = 0; first < kHeld; first += kAtOnce) {
                    if (kAtOnce == kHeld || first < mine) {
#pragma unroll
                        for (int i = first; i < first + kAtOnce; ++i) weigh(i);
                    }
                }
                state[v] = base[v];
            }
            unite_and_write_entries();
            if constexpr (Operation::kColumns) {
                Operation operation[kRows];
#pragma unroll
                for (int v = 0; v < kRows; ++v) operation[v] = Operation(state[v], base[v]);
                T* to = y + lane * y_step;
#pragma unroll
                for (int i = 0; i < kHeld; ++i, to += lanes * y_step) {
                    Few result;
#pragma unroll
                    for (int v = 0; v < kRows; ++v)
                        result.element[v] = narrow<T>(
                            result_of_held<T, kWeights>(operation[v], widened(held[i], v)));
                    if (i < mine) store_bundle<T, kRows>(to, result);
                }
            }
        } else {
            constexpr int kTogether = kReadBytes / int(sizeof(Few));
            auto load = [&](int64 column, auto once) {
                return load_bundle<T, kRows, decltype(once)::value>(x + column * x_step,
                                                                    column < columns, lowest<T>());
            };
            CompensatedSum<A> l[kRows];
#pragma unroll 1
            for (int64 column = lane; column < columns; column += kTogether * lanes) {
                Few scores[kTogether];
#pragma unroll
                for (int i = 0; i < kTogether; ++i) scores[i] = load(column + i * lanes, Again{});
#pragma unroll
                for (int v = 0; v < kRows; ++v) {
                    A top = base[v].m, batch = 0;
#pragma unroll
                    for (int i = 0; i < kTogether; ++i) top = maximum(top, widened(scores[i], v));
                    if (top > base[v].m) l[v].scale(base[v].raise(top));
#pragma unroll
                    for (int i = 0; i < kTogether; ++i)
                        batch = add(batch, base[v].weight(widened(scores[i], v)));
                    l[v].push(batch);
                }
            }
#pragma unroll
            for (int v = 0; v < kRows; ++v) state[v] = {base[v].m, l[v].sum};
            unite_and_write_entries();
            if constexpr (Operation::kColumns) {
                Operation operation[kRows];
#pragma unroll
                for (int v = 0; v < kRows; ++v) operation[v] = Operation(state[v], state[v]);
#pragma unroll 1
                for (int64 column = lane; column < columns; column += kTogether * lanes) {
                    Few scores[kTogether];
#pragma unroll
                    for (int i = 0; i < kTogether; ++i)
                        scores[i] = load(column + i * lanes, Once{});
#pragma unroll
                    for (int i = 0; i < kTogether; ++i) {
                        const int64 at = column + i * lanes;
                        Few result;
#pragma unroll
                        for (int v = 0; v < kRows; ++v)
                            result.element[v] =
                                narrow<T>(result_of<false>(operation[v], widened(scores[i], v)));
                        if (at < columns) store_bundle<T, kRows>(y + at * y_step, result);
                    }
                }
            }
        }
    });
}

template <typename T, typename Gradient, int kRows, int kWidth, int kHeld, int kBlocks>
__global__ void CUFLASH_CLUSTERS(kBlocks) __launch_bounds__(kMaxThreads, kColumnBlocks)
    columns_vjp(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    using Few = Bundle<T, kRows>;
    CUFLASH_DYNAMIC_SHARED(Sum<A>, memory);
    Tiles<Sum<A>, kRows, kWidth, kBlocks> tiles(memory);
    const int lanes = tiles.lanes(), lane = tiles.lane();
    const int64 dy_step = p.input[0].reduced_stride[0], y_step = p.input[1].reduced_stride[0],
                dx_step = p.output[0].reduced_stride[0];

    tiles.for_each(p, [&](int64 row, bool active) {
        const Place place(p, row);
        const T* dy = static_cast<const T*>(p.input[0].data) + place.input[0];
        const T* y = static_cast<const T*>(p.input[1].data) + place.input[1];
        T* dx = static_cast<T*>(p.output[0].data) + place.output[0];
        const int64 columns = active ? p.columns : 0;
        auto load_dy = [&](const T* from, bool present) {
            return load_bundle<T, kRows>(from, present, narrow<T>(A(0)));
        };
        auto load_y = [&](const T* from, bool present) {
            return load_bundle<T, kRows>(from, present, narrow<T>(Gradient::absent()));
        };
        Sum<A> sum[kRows];
#pragma unroll
        for (int v = 0; v < kRows; ++v) sum[v] = {A(0), A(0)};
        auto accumulate = [&](const Few& dys, const Few& ys) {
#pragma unroll
            for (int v = 0; v < kRows; ++v) {
                const A value = widened(ys, v);
                sum[v].total = add(sum[v].total, Gradient::term(widened(dys, v), value));
                if (value != Gradient::absent()) sum[v].occupied = 1;
            }
        };
        auto write = [&](T* to, const Few& dys, const Few& ys) {
            Few result;
#pragma unroll
            for (int v = 0; v < kRows; ++v) {
                const A value = Gradient{sum[v].total}.value(widened(dys, v), widened(ys, v));
                result.element[v] = narrow<T>(sum[v].occupied == A(0) ? A(0) : value);
            }
            store_bundle<T, kRows>(to, result);
        };
        if constexpr (kHeld > 0) {
            const int mine = columns_of_lane(columns, lane, lanes);
            Few dys[kHeld], ys[kHeld];
            const T* from = dy + lane * dy_step;
#pragma unroll
            for (int i = 0; i < kHeld; ++i, from += lanes * dy_step)
                dys[i] = load_dy(from, i < mine);
            from = y + lane * y_step;
#pragma unroll
            for (int i = 0; i < kHeld; ++i, from += lanes * y_step) ys[i] = load_y(from, i < mine);
#pragma unroll
            for (int i = 0; i < kHeld; ++i) accumulate(dys[i], ys[i]);
            tiles.unite(sum);
            T* to = dx + lane * dx_step;
#pragma unroll
            for (int i = 0; i < kHeld; ++i, to += lanes * dx_step)
                if (i < mine) write(to, dys[i], ys[i]);
        } else {
            constexpr int kTogether = kReadBytesOfPair / int(sizeof(Few));
            Few dys[kTogether], ys[kTogether];
            auto load = [&](int64 column) {
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const int64 at = column + i * lanes;
                    dys[i] = load_dy(dy + at * dy_step, at < columns);
                    ys[i] = load_y(y + at * y_step, at < columns);
                }
            };
#pragma unroll 1
            for (int64 column = lane; column < columns; column += kTogether * lanes) {
                load(column);
#pragma unroll
                for (int i = 0; i < kTogether; ++i) accumulate(dys[i], ys[i]);
            }
            tiles.unite(sum);
#pragma unroll 1
            for (int64 column = lane; column < columns; column += kTogether * lanes) {
                load(column);
#pragma unroll
                for (int i = 0; i < kTogether; ++i)
                    if (column + i * lanes < columns)
                        write(dx + (column + i * lanes) * dx_step, dys[i], ys[i]);
            }
        }
    });
}

}  // namespace cuflash

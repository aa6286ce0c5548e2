// Gradients of the softmax family.
//
//   softmax_vjp      dx = y * (dy - sum(y * dy))   input[0] dy, input[1] y (rows, columns)
//   log_softmax_vjp  dx = dy - exp(y) * sum(dy)    as above
//   logsumexp_vjp    dx = dlse * exp(x - lse)      input[0] dlse, input[2] lse (rows), input[1] x
//
// An empty row (y all 0, y all -inf, lse -inf) gets 0, whatever its cotangent holds.
// kChunks > 0: every lane holds that many 16-byte chunks of dy and of y in registers: three trips
// to memory, two reads and a write. kChunks = 0: rows of any length are read twice: five trips.
// logsumexp_vjp reduces nothing: two trips.
//
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: what a team's reductions need.
#include "softmax/backward.cuh"

namespace cuflash {

template <typename T, typename Gradient, Layout kLayout, int kChunks>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocksOfPairs<T, kChunks>)
    reduced_vjp(const __grid_constant__ SoftmaxParameters p) {
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    vjp_of_rows<T, Gradient, kLayout, kChunks>(p, memory);
}

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    logsumexp_vjp(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    const Team<kLayout, Parts> team(p, nullptr);
    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        int64 row = first + team.slot;
        if (row >= p.rows) continue;
        Place place(p, row);
        A dlse = read_entry<T>(p.input[0], place.input[0]);
        A lse = read_entry<T>(p.input[2], place.input[2]);
        Row<T, kLayout> x(p, p.input[1], place.input[1]), dx(p, p.output[0], place.output[0]);
        WhereRow<kLayout> where(p, p.where, place.where);
        auto value = [&](A score) {
            return lse == -infinity<A>() ? A(0) : multiply(dlse, exponential(score - lse));
        };
        bool poisoned = is_nan(value(-infinity<A>()));
        for_each_batch<T, kBatch<T>>(
            p, team, [&](int64 column) { return x.load(column, where, lowest<T>()); },
            [&](const Vector<T>* chunks, int64 column) {
#pragma unroll
                for (int j = 0; j < kBatch<T>; ++j, column += chunk_step<T>(team)) {
                    const Wide<T> scores(chunks[j]);
                    Vector<T> result;
#pragma unroll
                    for (int v = 0; v < kVector<T>; ++v)
                        result.element[v] = narrow<T>(value(scores.element[v]));
                    if (poisoned) where.hide(column, result, narrow<T>(A(0)));
                    dx.store(column, result);
                }
            });
    }
}

}  // namespace cuflash

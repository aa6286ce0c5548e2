// The gradients of LayerNorm of dropout(x + bias) + residual in one pass over x and dy; z, mean and
// rstd as in layer_norm.cu, xhat = (z - mean) * rstd:
//
//   dresidual = rstd * (dy * gamma - mean(dy * gamma) - xhat * mean(dy * gamma * xhat))
//   dx = dropout(dresidual), by the mask of the forward
//   dbias = sum of dx, dgamma = sum of dy * xhat, dbeta = sum of dy, over rows
//
// kOctets > 0: every lane holds that many octets of kRows rows, has those of the next kStages times
// as many on their way, and keeps the sums over its team's rows in registers: three trips to
// memory. kOctets = 0: rows of any length are read twice, and the sums lie in `partial`.
//
// input[0] x, input[1] residual, input[2] dy, vector bias and gamma, statistic mean and rstd ->
// output[0] dx, output[1] dresidual, partial.
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: kStages times kRows rows of each team, of x, dy and the residual.
//
// `column_sums` adds the teams' sums up in order. Grid: blocks of 32 columns by kSumWarps warps,
// for each of the three vectors in turn.
#include "fused/rows.cuh"

namespace cuflash {

constexpr int kSumWarps = 16;

template <typename T, bool kPacked, bool kResidual, int kOctets, int kLanes, int kThreads,
          int kRows, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    layer_norm_vjp(const __grid_constant__ LayerNormParameters p) {
    using A = Accumulator<T>;
    constexpr bool kHeld = kOctets > 0;
    constexpr int kSlots = kHeld ? kOctets : 1;
    CUFLASH_DYNAMIC_SHARED(uint4, memory);
    __shared__ A exchange[2][2 * kRows][kMaxWarps];
    const RowTeam<kLanes, kThreads> team(p.log2_lanes);
    const A share = p.share.as<A>(), scale = p.dropout.scale.as<A>();

    const VectorOctets<T, kPacked, kOctets, kOctets == 1> bias(p.vector[kBias], team, p.columns),
        gamma(p.vector[kGamma], team, p.columns);

    A sums[3][kSlots][8] = {};
    auto partial = [&](int which, auto column, int e) -> A& {
        return static_cast<A*>(
            p.partial)[(team.number() * 3 + which) * p.columns + column.number() + e];
    };
    auto store_sums = [&](int i, auto column) {
#pragma unroll
        for (int which = 0; which < 3; ++which)
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (column.template is_there<false>(e, p.columns))
                    partial(which, column, e) = sums[which][i][e];
    };
    if (!kHeld) team.template for_each<kOctets>(p.columns, store_sums);

    constexpr int kOperands = 2 + kResidual;
    const RowStages<T, kSlots, kThreads, kStages * kRows, kOperands> stages(memory);
    const int operands[3] = {kX, kCotangent, kResidualInput};
    // The rows from `first` on, as a group of copies.
    auto fetch = [&](int stage, int64 first) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int64 row = first + r * team.step();
            if (row >= p.rows) continue;
#pragma unroll
            for (int i = 0; i < kOperands; ++i)
                stages.fetch(team, stage * kRows + r, i,
                             team.template in<const T>(p.input[operands[i]], row), p.columns);
        }
        commit_copies();
    };

    int stage = 0, turn = 0;
    if constexpr (kHeld) {
#pragma unroll
        for (int s = 0; s < kStages; ++s) fetch(s, team.number() + s * kRows * team.step());
    }
    for (int64 first = team.first_row(); first < p.rows; first += kRows * team.step()) {
        A mean[kRows], rstd[kRows];
        bool active[kRows];
        A xhat[kRows][kSlots][8];
        Octet<T> dy[kRows][kSlots];
        Dropout::Octet bits[kRows][kSlots];
        auto row_of = [&](int r) { return first + team.slot + r * team.step(); };
        // Octet i, at `column`, of row r of an operand.
        auto read = [&](int operand, int r, int i, auto column) {
            if constexpr (kHeld) return stages.get(stage * kRows + r, operand, i);
            Octet<T> octet;
            octet.template load<kPacked, false>(
                team.template in<const T>(p.input[operands[operand]], row_of(r)), column,
                p.columns);
            return octet;
        };
        // xhat, dy and bits of octet i of all rows.
        auto prepare = [&](int i, auto column) {
            Dropout::Octet drawn[kRows];
            Dropout::Place places[kRows];
            A z[kRows][8];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                places[r] = p.dropout.place(row_of(r) * p.columns + column.number());
                dy[r][i] = read(1, r, i, column);
            }
            add_bias_and_drop<T, kPacked>(
                p.dropout,
                [&](int r, A(&x)[8], A(&b)[8]) {
                    read(0, r, i, column).widen_to(x);
                    bias.get(b, i, column);
                },
                places, z, drawn);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                bits[r][i] = drawn[r];
                if (kResidual && active[r]) add_residual(read(2, r, i, column), scale, z[r]);
                const A factor = kResidual ? rstd[r] : scale * rstd[r];
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    xhat[r][i][e] = column.template is_there<kPacked>(e, p.columns)
                                        ? multiply_add(z[r][e], factor, -mean[r] * rstd[r])
                                        : A(0);
            }
        };
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            active[r] = row_of(r) < p.rows;
            mean[r] = active[r] ? static_cast<const A*>(p.statistic[0])[row_of(r)] : A(0);
            rstd[r] = active[r] ? static_cast<const A*>(p.statistic[1])[row_of(r)] : A(0);
        }
        if constexpr (kHeld) {
            wait_for_copies<kStages - 1>();
            team.template for_each<kOctets>(p.columns, prepare);
            fetch(stage, row_of(0) + kStages * kRows * team.step());
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        // Calls work(r, i, column) for each octet of each row; rows that are not there are 0.
        auto for_each = [&](auto work) {
            if (!kHeld && !active[0]) return;
            team.template for_each<kOctets>(p.columns, [&](int i, auto column) {
                if constexpr (!kHeld) prepare(i, column);
#pragma unroll
                for (int r = 0; r < kRows; ++r)
                    if (active[r]) work(r, i, column);
            });
        };

        A means[2 * kRows] = {};
        for_each([&](int r, int i, auto column) {
            A cotangent[8], slopes[8];
            dy[r][i].widen_to(cotangent);
            gamma.get(slopes, i, column);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const A scaled = multiply(cotangent[e], slopes[e]);
                means[2 * r] += scaled;
                means[2 * r + 1] = multiply_add(scaled, xhat[r][i][e], means[2 * r + 1]);
            }
        });
        team.sum(means, exchange[turn ^= 1]);

        for_each([&](int r, int i, auto column) {
            A cotangent[8], slopes[8], dz[8];
            dy[r][i].widen_to(cotangent);
            gamma.get(slopes, i, column);
            const A level = -means[2 * r] * share, slope = -means[2 * r + 1] * share;
#pragma unroll
            for (int e = 0; e < 8; ++e)
                dz[e] = rstd[r] * multiply_add(xhat[r][i][e], slope,
                                               multiply_add(cotangent[e], slopes[e], level));
            Octet<T> result;
            if constexpr (kResidual) {
                result.narrow_from(dz);
                result.template store<kPacked>(team.template in<T>(p.output[1], row_of(r)), column,
                                               p.columns);
            }
            bool dropped[8];
            p.dropout.template decide<kInPairs<T>>(bits[r][i], dropped);
#pragma unroll
            for (int e = 0; e < 8; ++e) dz[e] = dropped[e] ? A(0) : dz[e] * scale;
            result.narrow_from(dz);
            result.template store<kPacked>(team.template in<T>(p.output[0], row_of(r)), column,
                                           p.columns);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if constexpr (kHeld) {
                    sums[kBias][i][e] += dz[e];
                    sums[kGamma][i][e] =
                        multiply_add(cotangent[e], xhat[r][i][e], sums[kGamma][i][e]);
                    sums[kBeta][i][e] += cotangent[e];
                } else if (column.template is_there<false>(e, p.columns)) {
                    partial(kBias, column, e) += dz[e];
                    partial(kGamma, column, e) += cotangent[e] * xhat[r][i][e];
                    partial(kBeta, column, e) += cotangent[e];
                }
            }
        });
    }
    if (kHeld) team.template for_each<kOctets>(p.columns, store_sums);
}

template <typename T>
__global__ void __launch_bounds__(32 * kSumWarps)
    column_sums(const __grid_constant__ LayerNormParameters p) {
    using A = Accumulator<T>;
    __shared__ A sums[kSumWarps][33];
    const int64 tiles = (p.columns + 31) / 32;
    const int which = int(blockIdx.x / tiles), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (!p.vector_result[which]) return;
    const int64 column = blockIdx.x % tiles * 32 + lane;
    A sum = 0;
    if (column < p.columns) {
        const A* from = static_cast<const A*>(p.partial) + which * p.columns + column;
#pragma unroll 8
        for (int64 part = warp; part < p.parts; part += kSumWarps)
            sum += from[part * 3 * p.columns];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= p.columns) return;
    for (int other = 1; other < kSumWarps; ++other) sum += sums[other][lane];
    static_cast<T*>(p.vector_result[which])[column] = narrow<T>(sum);
}

}  // namespace cuflash

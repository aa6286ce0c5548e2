// LayerNorm of dropout(x + bias) + residual in one kernel: two trips to memory, three with a
// residual.
//
//   z = dropout(x + bias) + residual
//   y = (z - mean(z)) / sqrt(mean((z - mean(z))^2) + epsilon) * gamma + beta
//
// kOctets > 0: every lane holds that many octets of its row in registers, and those of its team's
// next kStages rows are on their way. kOctets = 0: rows of any length are read three times, the
// latter two from L2 where a row of every team fits.
//
// input[0] x, input[1] residual (rows, columns), vector bias, gamma, beta -> output[0] y, statistic
// mean and 1 / standard deviation, unless null.
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: kStages rows of each team, of x and of the residual (RowStages).
#include "fused/rows.cuh"

namespace cuflash {

// Octets whose random bits are drawn side by side.
template <int kOctets>
constexpr int kSideBySide = kOctets % 4 == 0 && kOctets > 0 ? 4
                            : kOctets == 2                  ? 2
                                                            : 1;

// kThreads of a block, and kBlocks that a multiprocessor has room for: some compute while others
// wait for their rows' sums. `device/layer_norm_plans.py` says which there are, and why.
template <typename T, bool kPacked, bool kResidual, int kOctets, int kLanes, int kThreads,
          int kBlocks, int kStages>
__global__ void __launch_bounds__(kThreads, kBlocks)
    layer_norm(const __grid_constant__ LayerNormParameters p) {
    using A = Accumulator<T>;
    constexpr bool kHeld = kOctets > 0;
    constexpr bool kHoldsVectors = kHeld && kOctets <= 2 && sizeof(T) <= 4;
    constexpr int kSlots = kHeld ? kOctets : 1, kGroup = kSideBySide<kOctets>;
    CUFLASH_DYNAMIC_SHARED(uint4, memory);
    __shared__ A exchange[2][1][kMaxWarps];
    const RowTeam<kLanes> team(p.log2_lanes);
    // Of this type, and once: conversions from double take long.
    const A share = A(1) / A(p.columns), epsilon = words_here(A(p.epsilon));
    const A scale = words_here(A(p.dropout.scale));

    const VectorOctets<T, kPacked, kOctets, kHoldsVectors> bias(p.vector[kBias], team, p.columns),
        gamma(p.vector[kGamma], team, p.columns), beta(p.vector[kBeta], team, p.columns);
    const RowStages<T, kSlots, kThreads, kStages, 1 + kResidual> stages(memory);
    auto fetch = [&](int stage, int64 row) {
        if (row < p.rows) {
            stages.fetch(team, stage, kX, team.template in<const T>(p.input[kX], row), p.columns);
            if constexpr (kResidual)
                stages.fetch(team, stage, kResidualInput,
                             team.template in<const T>(p.input[kResidualInput], row), p.columns);
        }
        commit_copies();
    };

    int stage = 0;
    if constexpr (kHeld) {
#pragma unroll
        for (int s = 0; s < kStages; ++s) fetch(s, team.number() + s * team.step());
    }
    for (int64 first = team.first_row(); first < p.rows; first += team.step()) {
        const int64 row = first + team.slot;
        const bool active = row < p.rows;
        A held[kSlots][8];
        // Octet `i` of an operand, which is at `column`.
        auto read = [&](int operand, int i, auto column) {
            if constexpr (kHeld) return stages.get(stage, operand, i);
            Octet<T> octet;
            octet.template load<kPacked, false>(team.template in<const T>(p.input[operand], row),
                                                column, p.columns);
            return octet;
        };
        // z of kGroup octets, from number `i` on.
        auto hide = [&](int i, auto column_of) {
            Octet<T> x[kGroup];
            Dropout::Octet bits[kGroup];
            int64 numbers[kGroup];
            A z[kGroup][8], shift[kGroup][8];
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                const auto column = column_of(i + j);
                numbers[j] = row * p.columns + column.number();
                x[j] = read(kX, i + j, column);
                bias.get(shift[j], i + j, column);
            }
            add_bias_and_drop<T, kPacked>(p.dropout, x, shift, numbers, z, bits);
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                if constexpr (kResidual)
                    add_residual(read(kResidualInput, i + j, column_of(i + j)), scale, z[j]);
#pragma unroll
                for (int e = 0; e < 8; ++e) held[i + j][e] = z[j][e];
            }
        };
        // Calls work(i, column, z) for each octet.
        auto for_each = [&](auto work) {
            if (!active) return;
            team.template for_each<kOctets>(p.columns, [&](int i, auto column) {
                if constexpr (!kHeld) hide(0, [&](int) { return column; });
                work(i, column, held[i]);
            });
        };
        if constexpr (kHeld) {
            wait_for_copies<kStages - 1>();
            if (active) {
#pragma unroll
                for (int i = 0; i < kOctets; i += kGroup)
                    hide(i, [&](int at) { return team.template column<kOctets>(at); });
            }
            fetch(stage, row + kStages * team.step());
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }

        A sums[8] = {};
        for_each([&](int, auto column, A(&z)[8]) {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (column.template is_there<kPacked>(e, p.columns)) sums[e] += z[e];
        });
        A total[1] = {fold(sums)};
        team.sum(total, exchange[0]);
        const A mean = total[0] * share;
        A squares[8] = {};
        for_each([&](int, auto column, A(&z)[8]) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                z[e] -= mean;
                if (column.template is_there<kPacked>(e, p.columns))
                    squares[e] = multiply_add(z[e], z[e], squares[e]);
            }
        });
        total[0] = fold(squares);
        team.sum(total, exchange[1]);
        // Without a residual the row as a whole is to be scaled: in its statistics.
        const A whole = kResidual ? A(1) : scale;
        const A rstd = inverse_root(total[0] * share * whole * whole + epsilon);
        const A factor = whole * rstd;

        T* const to = team.template in<T>(p.output[0], active ? row : 0);
        for_each([&](int i, auto column, A(&z)[8]) {
            A slope[8], shift[8];
            gamma.get(slope, i, column);
            beta.get(shift, i, column);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const A from_mean = kHeld ? z[e] : z[e] - mean;
                z[e] = multiply_add(from_mean * factor, slope[e], shift[e]);
            }
            Octet<T> y;
            y.narrow_from(z);
            y.template store<kPacked>(to, column, p.columns);
        });
        if (active && team.lane == 0) {
            if (p.statistic[0]) static_cast<A*>(p.statistic[0])[row] = mean * whole;
            if (p.statistic[1]) static_cast<A*>(p.statistic[1])[row] = rstd;
        }
    }
}

}  // namespace cuflash

// LayerNorm of dropout(x + bias) + residual in one kernel: two trips to memory, three with a
// residual.
//
//   z = dropout(x + bias) + residual
//   y = (z - mean(z)) / sqrt(mean((z - mean(z))^2) + epsilon) * gamma + beta
//
// kOctets > 0: every lane holds that many octets of its row in registers. Of its team's next rows
// kStages are on their way to shared memory. With kStages = 0 a team has one row, which it reads
// straight; blocks come and go, and have each other's rows brought to L2. kOctets = 0: rows of any
// length are read two or three times, the latter ones from L2 where a row of every team fits.
//
// input[0] x, input[1] residual (rows, columns), vector bias, gamma, beta -> output[0] y, statistic
// mean and 1 / standard deviation, unless null.
// Grid: blocks of one or more teams (rows.cuh), each row by row, and any number of blocks is right;
// with kStages = 0 as many as there are rows for.
// Dynamic shared memory: kStages rows of each team, of x and of the residual (RowStages).
#include "fused/rows.cuh"
#include "lib/ptx_prefetch.cuh"

namespace cuflash {

// Octets whose random bits are drawn side by side.
template <int kOctets>
constexpr int kSideBySide = kOctets % 4 == 0 && kOctets > 0 ? 4
                            : kOctets == 2                  ? 2
                                                            : 1;

// kThreads of a block, and kBlocks that a multiprocessor has room for: some compute while others
// wait for their rows' sums. kWhole: rows fill what their lanes hold.
// `device/layer_norm_plans.py` says which there are, and why.
template <typename T, bool kPacked, bool kResidual, int kOctets, int kLanes, int kThreads,
          int kBlocks, int kStages, bool kWhole>
__global__ void __launch_bounds__(kThreads, kBlocks)
    layer_norm(const __grid_constant__ LayerNormParameters p) {
    using A = Accumulator<T>;
    using Team = RowTeam<kLanes, kThreads, kWhole>;
    constexpr bool kHeld = kOctets > 0, kStaged = kHeld && kStages > 0;
    constexpr bool kOneRow = kHeld && !kStaged;
    constexpr bool kHoldsVectors = kHeld && kOctets <= 2 && sizeof(T) <= 4;
    // 16 bits: the sums of z and of z^2 in one go, which will do unless they cancel.
    constexpr bool kAtOnce = sizeof(T) < sizeof(A);
    constexpr int kSlots = kHeld ? kOctets : 1, kGroup = kSideBySide<kOctets>;
    constexpr int kOperands = 1 + kResidual;
    CUFLASH_DYNAMIC_SHARED(uint4, memory);
    __shared__ A exchange[2][2][kMaxWarps], exchange_squares[1][kMaxWarps];
    const Team team(p.log2_lanes);
    const RowStages<T, kSlots, kThreads, kStages, kOperands> stages(memory);
    auto fetch = [&](int stage, int64 row) {
        if (row < p.rows)
#pragma unroll
            for (int i = 0; i < kOperands; ++i)
                stages.fetch(team, stage, i, team.template in<const T>(p.input[i], row), p.columns);
        commit_copies();
    };

    int stage = 0, turn = 0;
    if constexpr (kStaged) {
#pragma unroll
        for (int s = 0; s < kStages; ++s) fetch(s, team.number() + s * team.step());
    }
    if constexpr (kOneRow && kPacked) {
        // The row of the team that will take this one's place.
        const int64 later = team.number() + p.resident * team.slots;
        if (team.lane == 0 && later < p.rows && blockIdx.x + p.resident < gridDim.x)
#pragma unroll
            for (int i = 0; i < kOperands; ++i)
                prefetch_to_l2(team.template in<const T>(p.input[i], later),
                               int(p.columns * sizeof(T)));
    }

    VectorOctets<T, kPacked, kOctets, kHoldsVectors> bias(p.vector[kBias], team, p.columns),
        gamma(p.vector[kGamma], team, p.columns), beta(p.vector[kBeta], team, p.columns);
    for (int64 first = team.first_row(); first < p.rows; first += team.step()) {
        const int64 row = first + team.slot;
        const bool active = team.slots == 1 || row < p.rows;
        const T* from[kOperands];
#pragma unroll
        for (int i = 0; i < kOperands; ++i)
            from[i] = kStaged ? nullptr : team.template in<const T>(p.input[i], active ? row : 0);
        Octet<T> straight[kOperands][kSlots];
        if constexpr (kOneRow) {
#pragma unroll
            for (int i = 0; i < kOperands; ++i)
                team.template for_each<kOctets>(p.columns, [&](int o, auto column) {
                    straight[i][o].template load<kPacked, true>(from[i], column, p.columns);
                });
        }
        if constexpr (!kHoldsVectors) bias.renew();
        const Dropout::Place begin = p.dropout.place(row * p.columns) + unsigned(team.lane);
        A held[kSlots][8];
        // Octet `i` of an operand, which is at `column`.
        auto read = [&](int operand, int i, auto column) {
            if constexpr (kStaged) return stages.get(stage, operand, i);
            if constexpr (kHeld) return straight[operand][i];
            Octet<T> octet;
            octet.template load<kPacked, false>(from[operand], column, p.columns);
            return octet;
        };
        // z of kGroup octets, from number `i` on.
        auto hide = [&](int i, auto column_of) {
            Dropout::Octet bits[kGroup];
            Dropout::Place places[kGroup];
            Octet<T> shift[kGroup];
            A z[kGroup][8];
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                const auto column = column_of(i + j);
                if constexpr (!kHoldsVectors) shift[j] = bias.read(column);
                places[j] = begin + unsigned(column.further) / 8;
            }
            add_bias_and_drop<T, kPacked>(
                p.dropout,
                [&](int j, A(&x)[8], A(&b)[8]) {
                    const auto column = column_of(i + j);
                    read(kX, i + j, column).widen_to(x);
                    if constexpr (kHoldsVectors)
                        bias.get(b, i + j, column);
                    else
                        shift[j].widen_to(b);
                },
                places, z, bits);
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                if constexpr (kResidual)
                    add_residual(read(kResidualInput, i + j, column_of(i + j)),
                                 p.dropout.scale.as<A>(), z[j]);
#pragma unroll
                for (int e = 0; e < 8; ++e) held[i + j][e] = z[j][e];
            }
        };
        // Calls work(i, column, z) for each octet.
        auto for_each = [&](auto work) {
            if (!kHeld && !active) return;
            team.template for_each<kOctets>(p.columns, [&](int i, auto column) {
                if constexpr (!kHeld) hide(0, [&](int) { return column; });
                work(i, column, held[i]);
            });
        };

        A sums[4] = {}, squares[4] = {};
        auto accumulate = [&](const A(&z)[8]) {  // 0 past the end
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                sums[e % 4] += z[e];
                if constexpr (kAtOnce) squares[e % 4] = multiply_add(z[e], z[e], squares[e % 4]);
            }
        };
        if constexpr (kHeld) {
            if constexpr (kStaged) wait_for_copies<kStages - 1>();
#pragma unroll
            for (int i = 0; i < kOctets; i += kGroup) {
                hide(i, [&](int at) { return team.template column<kOctets>(at); });
#pragma unroll
                for (int j = i; j < i + kGroup; ++j) accumulate(held[j]);
            }
            if constexpr (kStaged) {
                fetch(stage, row + kStages * team.step());
                stage = stage + 1 == kStages ? 0 : stage + 1;
            }
        } else {
            for_each([&](int, auto, A(&z)[8]) { accumulate(z); });
        }
        A totals[2] = {fold(sums), fold(squares)};
        team.sum(totals, exchange[turn ^= 1]);

        const A share = p.share.as<A>(), scale = p.dropout.scale.as<A>();
        const A mean = totals[0] * share;
        A variance = multiply_add(-mean, mean, totals[1] * share);
        // At most a bit has cancelled, or z - mean it must be.
        const bool cancelled = !kAtOnce || !(variance >= mean * mean);
        const A pivot = cancelled ? mean : A(0);
        if (team.any_of_block(cancelled)) {
            A about[4] = {};
            for_each([&](int, auto column, A(&z)[8]) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const A from_pivot = z[e] - pivot;
                    if constexpr (kHeld) z[e] = from_pivot;
                    if (column.template is_there<kPacked>(e, p.columns))
                        about[e % 4] = multiply_add(from_pivot, from_pivot, about[e % 4]);
                }
            });
            A total[1] = {fold(about)};
            team.sum(total, exchange_squares);
            if (cancelled) variance = total[0] * share;
        }
        // Without a residual the row as a whole is to be scaled: in its statistics.
        const A whole = kResidual ? A(1) : scale;
        const A rstd = inverse_root(variance * whole * whole + p.epsilon.as<A>());
        const A factor = whole * rstd, level = cancelled ? A(0) : -mean * factor;

        // Beside the elements of two rows there was no register for its number.
        const int64 own_row = kOneRow && kResidual ? team.row_of_block() : row;
        if constexpr (!kHoldsVectors) {
            gamma.renew();
            beta.renew();
        }
        T* const to = team.template in<T>(p.output[0], active ? own_row : 0);
        for_each([&](int i, auto column, A(&z)[8]) {
            A slope[8], shift[8];
            gamma.get(slope, i, column);
            beta.get(shift, i, column);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const A from_pivot = kHeld ? z[e] : z[e] - pivot;
                z[e] = multiply_add(multiply_add(from_pivot, factor, level), slope[e], shift[e]);
            }
            Octet<T> y;
            y.narrow_from(z);
            if (active) y.template store<kPacked>(to, column, p.columns);
        });
        auto keep = [&](int which, A value) {
            if (active && team.lane == 0 && p.statistic[which])
                static_cast<A*>(p.statistic[which])[own_row] = value;
        };
        keep(0, mean * whole);
        keep(1, rstd);
        if constexpr (kOneRow) break;
    }
}

}  // namespace cuflash

// Attention forward on the tensor cores of Hopper, for 16-bit inputs that TMA can read (sm_90a).
//
// FlashAttention-3 (Shah et al. 2024) in outline: a producer fetches tiles by TMA into rings
// of stages; each consumer warpgroup owns 64 query rows of the block's tile, keeps their sums in
// registers, and runs the softmax of one tile of keys while the tensor cores multiply. The blocks
// stay: one pipeline runs over all tiles of a block, the first product of the next tile of queries
// beside the last one of this.
//
// Keys are walked from the last tile to the first, so that masked tiles come first, and only they,
// and the first whole tile, look for the largest score. After that the weights are made relative to
// the present reference at once. A row whose weights sum up to more than 2^10 then takes a larger
// reference, relative to which its weights become by a power of two (`Consumer::lighten`). Only
// where scores are so far above that weights might overflow, its warp finds them again
// (`Consumer::start_over`). With options that change scores (wgmma_scores.cuh) all tiles look for
// the largest.
//
// Under a diagonal the warpgroups of a tile see different keys: each begins at its own first tile
// and lets those before pass. Of two tiles of a pair the second has its warpgroups in reverse, so
// that all of them do the same work.
//
// Grid: as many blocks as run at once; which tiles a block takes says `tile_of_round`. Dynamic
// shared memory: stages of queries (64 x kWidth, a warpgroup's), of keys and of values (kKeys x
// kWidth), results on their way out (16 rows a warp, up to 128 columns), all as panels of 64
// columns; then the slots and the barriers.
#include "attention/fragments.cuh"
#include "attention/wgmma_producer.cuh"
#include "attention/wgmma_results.cuh"
#include "attention/wgmma_scores.cuh"
#include "lib/nonfinite.cuh"
#include "lib/ptx_wgmma.cuh"

namespace cuflash {

// ------------------------------------------------------------------------------------- consumer

struct No {
    static constexpr bool value = false;
};
struct Yes {
    static constexpr bool value = true;
};

// A warp of a consumer warpgroup.
template <typename T, typename Score, typename Tile>
struct Consumer : private WarpResults<T, Score, Tile> {
    using Results = WarpResults<T, Score, Tile>;
    using Results::finish, Results::put_back;
    using Results::group, Results::p, Results::rooms;
    using Results::lane, Results::own_row, Results::part_of, Results::warp, Results::warp_row;
    using typename Results::Inverses, typename Results::RoomsType, typename Results::SlotType;
    static constexpr int kKeyTiles = Tile::kKeyTiles, kValueTiles = Tile::kValueTiles;
    // Sums of a thread's weights in a tile up to here need no larger reference; up to here they
    // are as exact as any.
    static constexpr float kMostWeight = 1024, kMostExact = 0x1p115f;
    // Where registers would not do for results and weights that are not packed, these are packed
    // before results leave. A mask tells only then whether there are any.
    static constexpr bool kPacksEarly = Tile::kGroups == 4 && Score::kPerPair && !Score::kHides;

    const float unit;
    unsigned turn = 0;  // the number of the tile of queries, among the block's
    int tile = 0;       // that of keys, from the first that the tile sees
    Ring<Tile::kStages> keys{0}, values{0};

    float s[kKeyTiles][4];
    float out[kValueTiles][4];
    unsigned weights[Tile::kKeySteps][4];
    FragmentRow state[2];
    TileOptions<Score, Tile> options;
    bool large;  // some reference of the warp is: options alone lead there

    __device__ __forceinline__ Consumer(const WgmmaParameters& p, const RoomsType& rooms, int group)
        : Results{p, rooms, group},
          unit(Score::kScales ? kLog2OfE : float(p.attention.score.scale) * kLog2OfE),
          options(p.attention.score) {
        static_assert(!(Score::kPerPair && Tile::kTopless), "scores are not there to start over");
    }

    __device__ __forceinline__ void run() {
        if (Tile::kTurns && group == Tile::kGroups - 1) give_turn(0);
        Token token = kWork;
        while (token != kEnd) {
            wait_for_queries();
            const SlotType& current = slot(turn);
            token = Token(uniform(current.token));
            if (token != kWork) {
                free_queries();
                ++turn;
                free_last_slot();
                continue;
            }
            begin_keys(current);
            start_scores(current);
            begin_products();
            multiply_keys();
            commit_products();
            pass_turn();
            options.expect(p.attention.score);
            wait_for_products<0>();
            pin(s);
            begin(current);
            float factor[2], sum[2];
            soften(current, false, factor, sum);
            count(sum);
            free_scored();
            skip_values(current);
            pack_weights();
            while (walk()) {
            }
        }
        if (lane() == 0) wait_for_boxes();
        // The rows that a warp puts back results in may be another's.
        named_barrier_wait(Tile::kCleanBarrier, 32 * Tile::kWarps);
        const int count = rooms.dirty->count;
        for (int i = 0; count > DirtyTiles::kMost || i < count; ++i) {
            int tile = rooms.dirty->tile[i % DirtyTiles::kMost];
            if (count > DirtyTiles::kMost) tile = tile_of_round(p, i);  // too many to be listed
            if (tile == kNoMoreTiles) break;
            if (tile != kNoTile) put_back(tile);
        }
    }

  private:
    // From the first weights of a tile of queries to its results, and on to the next tiles as long
    // as they come: each step has the scores of one tile of keys, beside the sums of the one
    // before.
    __device__ __forceinline__ bool walk() {
        const SlotType& current = slot(turn);
        const bool clean = uniform(current.clean);
        int accumulate = 0;
        const int whole_begin = uniform(current.whole_begin[part_of(current)]);
        const int whole_end = uniform(current.whole_end[part_of(current)]);
        // Masked tiles, whole ones, and under a window masked ones again.
        int until = Tile::kTopless ? max(whole_end - 1, whole_begin) : 0;
        while (true) {
            while (tile > until) step(current, accumulate, clean, No{});
            if (until == 0) break;
            if (Tile::kTopless)
                while (tile > whole_begin) step(current, accumulate, clean, Yes{});
            until = 0;
        }
        ++turn;
        // The next queries may still be on their way: then results leave meanwhile.
        if (clean) clean_values();
        if (Tile::kAhead) wait_for_queries();
        const SlotType& next = slot(turn);
        if (!Tile::kAhead || uniform(next.token) != kWork) {
            end(accumulate);
            return false;
        }
        begin_keys(next);
        start_scores(next);
        start_products(accumulate);
        options.expect(p.attention.score);
        wait_for_products<1>();
        pin(s);
        const Inverses inverses = normalize(slot(turn - 1));
        begin(next);
        float factor[2], sum[2];
        soften(next, false, factor, sum);
        free_scored();
        count(sum);
        finish_before_wait(__float_as_uint(sum[0] + sum[1]), rooms.queries);
        wait_for_products<0>();
        pin(out);
        free_values();
        if (kPacksEarly) pack_weights();
        finish(slot(turn - 1), out, inverses);
        free_last_slot();
        skip_values(next);
        if (!kPacksEarly) pack_weights();
        return true;
    }

    // The scores of the next tile of keys and its weights, beside the sums of the one before.
    template <typename Topless>
    __device__ __forceinline__ void step(const SlotType& current, int& accumulate, bool clean,
                                         Topless) {
        if (clean) clean_values();
        --tile;
        start_scores(current);
        start_products(accumulate);
        options.expect(p.attention.score);
        wait_for_products<1>();
        pin(s);
        float factor[2], sum[2];
        bool rose = soften(current, Topless::value, factor, sum);
        const bool heavy = Topless::value && __any_sync(kFullWarp, !(sum[0] <= kMostWeight) ||
                                                                       !(sum[1] <= kMostWeight));
        if (!heavy) {
            free_scored();
            count(sum);
        }
        if (!Topless::value) finish_before_wait(__float_as_uint(sum[0] + sum[1]), rooms.queries);
        wait_for_products<0>();
        pin(out);
        free_values();
        if (heavy) {
            lighten(factor);
            free_scored();
            rose = true;
        }
        if (kPacksEarly) pack_weights();
        if (rose) {
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[j][e] *= factor[e / 2];
        }
        if (!kPacksEarly) pack_weights();
        accumulate = 1;
    }

    // The product of the next scores, and of the weights before with their values.
    __device__ __forceinline__ void start_products(int accumulate) {
        begin_products();
        multiply_keys();
        commit_products();
        wait_for_values();
        multiply_values(accumulate);
        commit_products();
        pass_turn();
    }

    // The last sums of a tile of queries and its results.
    __device__ __forceinline__ void end(int accumulate) {
        const Inverses inverses = normalize(slot(turn - 1));
        wait_for_values();
        begin_products();
        multiply_values(accumulate);
        commit_products();
        wait_for_products<0>();
        pin(out);
        free_values();
        finish(slot(turn - 1), out, inverses);
        free_last_slot();
    }

    // Lets the keys pass that none of the warpgroup's rows sees.
    __device__ __forceinline__ void begin_keys(const SlotType& next) {
        if (Tile::kAhead) {
#pragma unroll 1
            for (int count = unseen(next); count > 0; --count) {
                wait_for_keys();
                take_turn();
                pass_turn();
                free_keys();
            }
        }
        tile = uniform(next.seen_end[part_of(next)]) - 1;
    }
    // What can be done about the scores of a tile of keys before their product; then its turn.
    __device__ __forceinline__ void start_scores(const SlotType& current) {
        options.start(p.attention.score, current.block.score, corner_of(current));
        wait_for_keys();
        take_turn();
    }
    // The same of their values.
    __device__ __forceinline__ void skip_values(const SlotType& current) {
        if (!Tile::kAhead) return;
#pragma unroll 1
        for (int count = unseen(current); count > 0; --count) {
            if (uniform(current.clean)) clean_values();
            wait_for_values();
            free_values();
        }
    }
    __device__ __forceinline__ int unseen(const SlotType& current) const {
        return uniform(current.tiles - current.seen_end[part_of(current)]);
    }

    // --------------------------------------------------------------------------- rows and scores

    __device__ __forceinline__ void begin(const SlotType& current) {
        const float sink =
            current.block.work.split == 0 ? current.block.score.sink : -infinity<float>();
#pragma unroll
        for (int i = 0; i < 2; ++i) state[i].begin(sink, lane() % 4 == 0);
        if (Score::kPerPair) find_large();
    }

    __device__ __forceinline__ TileCorner corner_of(const SlotType& current) const {
        const int row = warp_row(part_of(current)), key = tile * Tile::kKeys;
        return {current.block.first_row + row, current.first_key + key,
                current.distance + row - key, current.distance != SlotType::kFar};
    }

    // Dot products of a tile of keys become weights; tells whether sums must be multiplied by
    // `factor`. Where a mask hides all they are left to `pack_weights`.
    __device__ __forceinline__ bool soften(const SlotType& current, bool topless,
                                           float (&factor)[2], float (&sum)[2]) {
        factor[0] = factor[1] = 1;
        sum[0] = sum[1] = 0;
        if (options.hides_all()) return false;
        options.change(s, p.attention.score, current.block.score, corner_of(current));
        bool rose = false;
        if (!topless) {
            hide_unseen(current);
            rose = raise(factor);
        }
        weigh(sum);
        return rose;
    }
    __device__ __forceinline__ void count(const float (&sum)[2]) {
        state[0].l += sum[0];
        state[1].l += sum[1];
    }

    // -inf where a pair is unseen by its position.
    __device__ __forceinline__ void hide_unseen(const SlotType& current) {
        const int part = part_of(current);
        if (tile >= current.whole_begin[part] && tile < current.whole_end[part]) return;
        const int first_key = tile * Tile::kKeys + lane() % 4 * 2;
        int low[2], high[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = own_row(part, i);
            low[i] = current.band.first + row - first_key;
            const int end = row < current.rows ? current.band.end + row : 0;
            high[i] = min(end, current.key_end) - first_key;
        }
        hide_if([&](int key, int i) { return key >= high[i]; });
        // All keys before a row's last one are seen but for a window. The condition is one of the
        // launch, so that it is no divergence.
        if (p.attention.score.left < kUnlimited)
            hide_if([&](int key, int i) { return key < low[i]; });
    }

    template <typename Unseen>
    __device__ __forceinline__ void hide_if(Unseen unseen) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (unseen(8 * j + e % 2, e / 2)) s[j][e] = -infinity<float>();
    }

    __device__ __forceinline__ float top(int i) const {
        float a = s[0][2 * i], b = s[0][2 * i + 1];
#pragma unroll
        for (int j = 1; j < kKeyTiles; ++j) {
            a = maximum(a, s[j][2 * i]);
            b = maximum(b, s[j][2 * i + 1]);
        }
        return maximum(a, b);
    }

    // Raises the references that scores are too far above; tells whether there may be any.
    __device__ __forceinline__ bool raise(float (&factor)[2]) {
        float tops[2] = {top(0), top(1)};
        if (!__any_sync(kFullWarp, state[0].is_passed_by(tops[0], unit) ||
                                       state[1].is_passed_by(tops[1], unit)))
            return false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            tops[i] = reduce_quad(tops[i], [](float a, float b) { return maximum(a, b); });
            factor[i] = state[i].raise(tops[i], unit);
        }
        if (Score::kPerPair) find_large();
        return true;
    }

    __device__ __forceinline__ void find_large() {
        large = __any_sync(kFullWarp, state[0].is_large() || state[1].is_large());
    }

    // Scores become weights, summed a row. Where references are large that takes a step of its own,
    // to which the one for all adds nothing: one copy of that, whose registers need no others.
    __device__ __forceinline__ void weigh(float (&sum)[2]) {
        float rate = unit, shift[2] = {0 - state[0].reference, 0 - state[1].reference};
        if (Score::kPerPair && large) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                subtract_reference(i);
                shift[i] = 0;
            }
            rate = 1;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) weigh_row(i, sum[i], rate, shift[i]);
    }
    // Logarithms of weights, see `FragmentRow::weight` and `weight_of_large`.
    __device__ __forceinline__ void subtract_reference(int i) {
        const bool is_large = state[i].is_large();
        const float first = is_large ? 0 : -state[i].reference;
        const float second = is_large ? -state[i].reference : 0;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = s[j][2 * i + e];
                x = add(multiply_add(x, unit, first), second);
            }
    }
    __device__ __forceinline__ void weigh_row(int i, float& sum) {
        weigh_row(i, sum, unit, 0 - state[i].reference);
    }
    __device__ __forceinline__ void weigh_row(int i, float& sum, float rate, float shift) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = s[j][2 * i + e];
                x = exp2_approximate(multiply_add(x, rate, shift));
            }
        sum = sum_row(i);
    }
    __device__ __forceinline__ float sum_row(int i) const {
        float even = 0, odd = 0;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            even += s[j][2 * i];
            odd += s[j][2 * i + 1];
        }
        return even + odd;
    }

    // Rows whose weights are heavy take a larger reference. Weights that are not near overflow
    // become relative to it by a power of two, without a rounding. No row decides over another's
    // bits.
    __device__ __forceinline__ void lighten(float (&factor)[2]) {
        bool lost[2];
        float sum[2];
        pin(s);  // sums are found again: registers do not keep them through the wait before
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = sum_row(i);
            const float most = reduce_quad(sum[i], [](float a, float b) { return maximum(a, b); });
            lost[i] = most > kMostExact;
            if (lost[i] || !(most > kMostWeight)) continue;
            const int exponent = (__float_as_int(most) >> 23) - 127;
            const float power = __int_as_float((127 - exponent) << 23);
            state[i].reference += float(exponent);
            state[i].l *= power;
            sum[i] *= power;
            factor[i] *= power;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                s[j][2 * i] *= power;
                s[j][2 * i + 1] *= power;
            }
        }
        if (__any_sync(kFullWarp, lost[0] || lost[1])) start_over(lost, factor, sum);
        count(sum);
    }

    // The weights of rows that are `lost`, once more, from the tiles that are still there, by the
    // warp alone, relative to the largest score.
    __device__ __forceinline__ void start_over(const bool (&lost)[2], float (&factor)[2],
                                               float (&sum)[2]) {
        const unsigned query_rows = rooms.queries + query_stage() * Tile::kQueryBytes +
                                    (warp() % 4 * 16 + lane() % 16) * 128;
        const unsigned key_rows = rooms.keys + keys.stage() * Tile::kKeyBytes + lane() % 8 * 128;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            float dots[4] = {};
#pragma unroll 1
            for (int panel = 0; panel < Tile::kPanels; ++panel)
#pragma unroll 1
                for (int chunk = 0; chunk < 8; chunk += 4) {
                    const unsigned keys_at = key_rows + panel * Tile::kKeys * 128 + j * 8 * 128;
                    const unsigned queries_at = query_rows + panel * 64 * 128;
                    unsigned a[4], b[4];
                    load_matrices(b, keys_at + ((chunk + lane() / 8) ^ lane() % 8) * 16);
                    load_matrices(a, queries_at + ((chunk + lane() / 16) ^ lane() % 8) * 16);
                    MatrixProduct<T>::add(dots, a, b[0], b[1]);
                    load_matrices(a, queries_at + ((chunk + 2 + lane() / 16) ^ lane() % 8) * 16);
                    MatrixProduct<T>::add(dots, a, b[2], b[3]);
                }
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (lost[e / 2]) s[j][e] = dots[e];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float t = reduce_quad(top(i), [](float a, float b) { return maximum(a, b); });
            if (!lost[i]) continue;
            factor[i] *= state[i].raise(t, unit);
            weigh_row(i, sum[i]);
        }
    }

    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int step = 0; step < Tile::kKeySteps; ++step)
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const float* pair = &s[2 * step + part / 2][part % 2 * 2];
                weights[step][part] = options.hides_all() ? 0 : pack<T>(pair[0], pair[1]);
            }
    }

    // ---------------------------------------------------------------------------------- products

    __device__ __forceinline__ void multiply_keys() {
        SharedProduct<T, Tile::kKeys>::template start<Tile::kPanels, 64, Tile::kKeys>(
            s, rows_of_terms(rooms.queries + query_stage() * Tile::kQueryBytes),
            rows_of_terms(rooms.keys + keys.stage() * Tile::kKeyBytes));
    }

    __device__ __forceinline__ void multiply_values(int accumulate) {
        HeldProduct<T, Tile::kWidth, Tile::kKeySteps>::add(
            out, weights,
            columns_of_terms(rooms.values + values.stage() * Tile::kKeyBytes, Tile::kKeys),
            accumulate);
    }

    // In tiles that are taken again: non-finite values become 0.
    __device__ __forceinline__ void clean_values() {
        struct alignas(4) Pair {
            T first, second;
        };
        constexpr int kThreads = 32 * Tile::kWarps;
        wait_for_values();
        unsigned* words = reinterpret_cast<unsigned*>(
            rooms.memory + (rooms.values - rooms.queries) + values.stage() * Tile::kKeyBytes);
#pragma unroll 1
        for (int i = threadIdx.x - 128; i < Tile::kKeyBytes / 4; i += kThreads) {
            const auto pair = bytes_as<Pair>(words[i]);
            words[i] = bytes_as<unsigned>(
                Pair{is_finite(widen(pair.first)) ? pair.first : narrow<T>(0),
                     is_finite(widen(pair.second)) ? pair.second : narrow<T>(0)});
        }
        fence_shared_for_copies();
        named_barrier_wait(Tile::kCleanBarrier, kThreads);
    }

    // ----------------------------------------------------------------------------------- results

    // Reduces the normalizers and stores lse: what can be done before the last sums are there.
    __device__ __forceinline__ Inverses normalize(const SlotType& current) const {
        const int first = own_row(part_of(current), 0);
        Inverses inverses;
        float l[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            l[i] = reduce_quad(state[i].l, [](float a, float b) { return add(a, b); });
            if (first + 8 * i >= current.rows) l[i] = 0;
            inverses.of_row[i] = l[i] == 0 ? 0 : reciprocal_approximate(l[i]);
        }
        if (p.attention.lse.data && lane() % 4 == 0) {
            const Output<T> output(p.attention, current.out_start, current.lse_start);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int64 row = current.block.first_row + first + 8 * i;
                if (row < current.block.end_row)
                    output.store_lse(row, l[i] == 0 ? -infinity<float>()
                                                    : multiply_add(state[i].reference, kLogOf2,
                                                                   logarithm(l[i])));
            }
        }
        return inverses;
    }

    // ------------------------------------------------------------------------------------- waits

    __device__ __forceinline__ const SlotType& slot(unsigned turn) const {
        return rooms.slots[turn % kSlots];
    }
    // Each warpgroup's in turn.
    __device__ __forceinline__ unsigned query_stage() const {
        return (turn * Tile::kGroups + group) % Tile::kQueryStages;
    }
    __device__ __forceinline__ void wait_for_queries() const {
        barrier_wait(rooms.queries_full + 8 * query_stage(),
                     (turn * Tile::kGroups + group) / Tile::kQueryStages % 2);
    }
    __device__ __forceinline__ void wait_for_keys() const {
        barrier_wait(rooms.keys_full + 8 * keys.stage(), keys.parity());
    }
    __device__ __forceinline__ void wait_for_values() const {
        barrier_wait(rooms.values_full + 8 * values.stage(), values.parity());
    }
    __device__ __forceinline__ void release(unsigned barrier) const {
        if (lane() == 0) barrier_arrive(barrier);
    }
    __device__ __forceinline__ void free_keys() {
        release(rooms.keys_free + 8 * keys.stage());
        keys.advance();
    }
    // After the scores of a tile of keys, the queries too if it was their last.
    __device__ __forceinline__ void free_scored() {
        free_keys();
        if (tile == 0) free_queries();
    }
    __device__ __forceinline__ void free_values() {
        release(rooms.values_free + 8 * values.stage());
        values.advance();
    }
    __device__ __forceinline__ void free_queries() const {
        release(rooms.queries_free + 8 * query_stage());
    }
    __device__ __forceinline__ void free_last_slot() const {
        __syncwarp();
        release(rooms.slot_free + 8 * ((turn - 1) % kSlots));
    }

    // One warpgroup starts its products while the others have their softmax.
    __device__ __forceinline__ void take_turn() const {
        if (Tile::kTurns) named_barrier_wait(1 + group, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (Tile::kTurns) give_turn(group + 1 == Tile::kGroups ? 0 : group + 1);
    }
    __device__ __forceinline__ void give_turn(int to) const { named_barrier_arrive(1 + to, 256); }
};

// --------------------------------------------------------------------------------------- kernel

template <typename T, typename Score, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    forward_wgmma(const __grid_constant__ WgmmaParameters p) {
    extern __shared__ __align__(1024) unsigned char wgmma_shared[];
    using SlotType = Slot<T, Score, Tile::kGroups>;
    const Rooms<Tile, SlotType> rooms(wgmma_shared);
    const int group = uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        prefetch_map(&p.q);
        prefetch_map(&p.k);
        prefetch_map(&p.v);
        rooms.begin();
    }
    __syncthreads();
    if (group == 0) {
        give_back_registers<Tile::kProducerRegisters>();
        if (uniform(threadIdx.x / 32) == 0) {
            Fetcher<T, Score, Tile>(p, rooms).run();
        } else {
            Describer<T, Score, Tile>(p, rooms).run();
        }
    } else {
        take_registers<Tile::kConsumerRegisters>();
        Consumer<T, Score, Tile>(p, rooms, group - 1).run();
    }
}

}  // namespace cuflash

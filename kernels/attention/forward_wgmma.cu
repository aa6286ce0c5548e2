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

// Makes sure that what `x` comes from is done before a wait that follows: ptxas moves waits up over
// arithmetic, but not over a store, which this, as sums of weights are not negative, never is.
__device__ __forceinline__ void finish_before_wait(float x, unsigned address) {
    asm volatile(
        "{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n"
        "@never st.shared.u32 [%1], %1;\n}" ::"f"(x),
        "r"(address)
        : "memory");
}

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

    int part;  // which 64 rows of the tile under way
    const float unit;
    Ring<Tile::kQueryStages> queries;
    Ring<Tile::kStages> keys{0}, values{0};
    int slot = 0;

    float s[kKeyTiles][4];
    float out[kValueTiles][4];
    unsigned weights[Tile::kKeySteps][4];
    FragmentRow state[2];
    TileOptions<Score, Tile> options;
    bool whole;  // the tile of keys under way, for these rows
    bool large;  // some reference of the warp is: options alone lead there

    __device__ __forceinline__ Consumer(const WgmmaParameters& p, const RoomsType& rooms, int group)
        : Results{p, rooms, group},
          part(group),
          unit(Score::kScales ? kLog2OfE : float(p.attention.score.scale) * kLog2OfE),
          queries{group},
          options(p.attention.score) {
        static_assert(!(Score::kPerPair && Tile::kTopless), "scores are not there to start over");
    }

    __device__ __forceinline__ void run() {
        if (Tile::kTurns && group == Tile::kGroups - 1) give_turn(0);
        while (true) {
            barrier_wait(rooms.queries_full + 8 * queries.stage(), queries.parity());
            const SlotType* current = &rooms.slots[slot];
            const Token token = Token(uniform(current->token));
            if (token != kWork) {
                free_queries();
                free_slot();
                if (token == kEnd) break;
                continue;
            }
            begin(*current);
            const int unseen = begin_part(*current);
            skip_keys(unseen);
            start_scores(*current, current->seen_end[part] - 1);
            wait_for_keys();
            take_turn();
            begin_products();
            multiply_keys();
            commit_products();
            pass_turn();
            options.expect(p.attention.score);
            wait_for_products<0>();
            pin(s);
            free_keys();
            if (current->seen_end[part] == 1) release(rooms.queries_free + 8 * queries.stage());
            first_softmax(*current);
            skip_values(unseen, uniform(current->clean));
            pack_weights();
            while (current = walk(*current)) {
            }
        }
        if (lane() == 0) wait_for_boxes();
        const int count = rooms.dirty->count;
        for (int i = 0; count > DirtyTiles::kMost || i < count; ++i) {
            int tile = rooms.dirty->tile[i % DirtyTiles::kMost];
            if (count > DirtyTiles::kMost) tile = tile_of_round(p, i);  // too many to be listed
            if (tile == kNoMoreTiles) break;
            if (tile != kNoTile) put_back(tile);
        }
    }

  private:
    // From the first weights of a tile to its results. Returns the next tile, whose first weights
    // are made then, or null.
    __device__ __forceinline__ const SlotType* walk(const SlotType& current) {
        const bool clean = uniform(current.clean);
        int accumulate = 0;
        int tile = uniform(current.seen_end[part]) - 2;
        const int whole_begin = uniform(current.whole_begin[part]);
        // Masked tiles, whole ones, and under a window masked ones again.
        int until = Tile::kTopless ? max(uniform(current.whole_end[part]) - 1, whole_begin) : 0;
        while (true) {
            for (; tile >= until; --tile) step(current, tile, accumulate, clean, Yes{});
            if (until == 0) break;
            if (Tile::kTopless)
                for (; tile >= whole_begin; --tile) step(current, tile, accumulate, clean, No{});
            until = 0;
        }

        if (!Tile::kAhead) {
            // The next queries are still on their way: results leave meanwhile.
            if (clean) clean_values();
            queries.advance(Tile::kGroups);
            end(current, accumulate);
            return nullptr;
        }
        Ring<Tile::kQueryStages> after = queries;
        after.advance(Tile::kGroups);
        barrier_wait(rooms.queries_full + 8 * after.stage(), after.parity());
        const SlotType& next = rooms.slots[(slot + 1) % kSlots];
        queries = after;
        if (clean) clean_values();
        if (uniform(next.token) != kWork) {
            end(current, accumulate);
            return nullptr;
        }
        const int unseen = begin_part(next);
        skip_keys(unseen);
        start_scores(next, next.seen_end[part] - 1);
        wait_for_keys();
        take_turn();
        begin_products();
        multiply_keys();
        commit_products();
        wait_for_values();
        multiply_values(accumulate);
        commit_products();
        pass_turn();
        options.expect(p.attention.score);
        wait_for_products<1>();
        pin(s);
        free_keys();
        if (next.seen_end[part] == 1) release(rooms.queries_free + 8 * queries.stage());
        const Inverses inverses = normalize(current);
        begin(next);
        first_softmax(next);
        finish_before_wait(state[0].l + state[1].l, rooms.queries);
        wait_for_products<0>();
        pin(out);
        free_values();
        finish(current, out, inverses);
        free_slot();
        skip_values(unseen, uniform(next.clean));
        pack_weights();
        return &next;
    }

    // The last sums of a tile and its results.
    __device__ __forceinline__ void end(const SlotType& current, int accumulate) {
        const Inverses inverses = normalize(current);
        wait_for_values();
        begin_products();
        multiply_values(accumulate);
        commit_products();
        wait_for_products<0>();
        pin(out);
        free_values();
        finish(current, out, inverses);
        free_slot();
    }

    // Which rows of a tile are the warpgroup's; how many tiles of keys none of them sees come
    // first.
    __device__ __forceinline__ int begin_part(const SlotType& next) {
        if (!Tile::kAhead) return 0;
        part = uniform(part_of(next));
        return uniform(next.tiles - next.seen_end[part]);
    }
    __device__ __forceinline__ void skip_keys(int count) {
        if (!Tile::kAhead) return;
#pragma unroll 1
        for (; count > 0; --count) {
            wait_for_keys();
            take_turn();
            pass_turn();
            free_keys();
        }
    }
    __device__ __forceinline__ void skip_values(int count, bool clean) {
        if (!Tile::kAhead) return;
#pragma unroll 1
        for (; count > 0; --count) {
            if (clean) clean_values();
            wait_for_values();
            free_values();
        }
    }

    // Scores and weights of one tile of keys, beside the sums of the one before.
    template <typename Exact>
    __device__ __forceinline__ void step(const SlotType& current, int tile, int& accumulate,
                                         bool clean, Exact) {
        if (clean) clean_values();
        start_scores(current, tile);
        wait_for_keys();
        take_turn();
        begin_products();
        multiply_keys();
        commit_products();
        wait_for_values();
        multiply_values(accumulate);
        commit_products();
        pass_turn();
        options.expect(p.attention.score);
        wait_for_products<1>();
        pin(s);
        float factor[2] = {1, 1};
        bool rose = false;
        if constexpr (Tile::kTopless && !Exact::value) {
            float sum[2];
            weigh(sum);
            if (__any_sync(kFullWarp, !(sum[0] <= kMostWeight) || !(sum[1] <= kMostWeight))) {
                lighten(factor, sum);
                rose = true;
            }
            state[0].l += sum[0];
            state[1].l += sum[1];
        } else {
            rose = weigh_exactly(current, tile, factor);
            finish_before_wait(state[0].l + state[1].l, rooms.queries);
        }
        free_keys();
        if (tile == 0) release(rooms.queries_free + 8 * queries.stage());
        wait_for_products<0>();
        pin(out);
        free_values();
        if (rose) {
#pragma unroll
            for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[j][e] *= factor[e / 2];
        }
        pack_weights();
        accumulate = 1;
    }

    // --------------------------------------------------------------------------- rows and scores

    __device__ __forceinline__ void begin(const SlotType& current) {
        const float sink =
            current.block.work.split == 0 ? current.block.score.sink : -infinity<float>();
#pragma unroll
        for (int i = 0; i < 2; ++i) state[i].begin(sink, lane() % 4 == 0);
        if (Score::kPerPair) find_large();
    }

    // What can be done about the scores of a tile before their product.
    __device__ __forceinline__ void start_scores(const SlotType& current, int tile) {
        whole = tile >= current.whole_begin[part] && tile < current.whole_end[part];
        options.start(p.attention.score, current.block.score, corner_of(current, tile));
    }
    __device__ __forceinline__ TileCorner corner_of(const SlotType& current, int tile) const {
        return {current.block.first_row + warp_row(part), current.first_key + tile * Tile::kKeys,
                current.distance + warp_row(part) - tile * Tile::kKeys,
                current.distance != SlotType::kFar};
    }

    __device__ __forceinline__ void first_softmax(const SlotType& current) {
        float factor[2];
        weigh_exactly(current, current.seen_end[part] - 1, factor);
    }

    // Dot products become weights, relative to references that are raised before; whether any is.
    // Where a mask hides all they are left to `pack_weights`.
    __device__ __forceinline__ bool weigh_exactly(const SlotType& current, int tile,
                                                  float (&factor)[2]) {
        if (options.hides_all()) return false;
        options.change(s, p.attention.score, current.block.score, corner_of(current, tile));
        hide_unseen(current, tile);
        const bool rose = raise(factor);
        float sum[2];
        weigh(sum);
        state[0].l += sum[0];
        state[1].l += sum[1];
        return rose;
    }

    // -inf where a pair is unseen by its position.
    __device__ __forceinline__ void hide_unseen(const SlotType& current, int tile) {
        if (whole) return;
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
        factor[0] = factor[1] = 1;
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

    // Scores become weights, summed a row.
    __device__ __forceinline__ void weigh(float (&sum)[2]) {
        if (Score::kPerPair && large)
            weigh_by(sum, [&](int i, float x) {
                return state[i].is_large() ? state[i].weight_of_large(x, unit, 0)
                                           : state[i].weight(x, unit);
            });
        else
            weigh_by(sum, [&](int i, float x) { return state[i].weight(x, unit); });
    }
    template <typename WeightOf>
    __device__ __forceinline__ void weigh_by(float (&sum)[2], WeightOf weight_of) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float odd = 0;
            sum[i] = 0;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                float &a = s[j][2 * i], &b = s[j][2 * i + 1];
                a = weight_of(i, a);
                b = weight_of(i, b);
                sum[i] += a;
                odd += b;
            }
            sum[i] += odd;
        }
    }

    // Rows whose weights are heavy take a larger reference. Weights that are not near overflow
    // become relative to it by a power of two, without a rounding. No row decides over another's
    // bits.
    __device__ __forceinline__ void lighten(float (&factor)[2], float (&sum)[2]) {
        bool lost[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
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
    }

    // The weights of rows that are `lost`, once more, from the tiles that are still there, by the
    // warp alone, relative to the largest score.
    __device__ __forceinline__ void start_over(const bool (&lost)[2], float (&factor)[2],
                                               float (&sum)[2]) {
        wait_for_products<0>();  // registers of the weights before are free
        pin(out);
        const unsigned query_rows = rooms.queries + queries.stage() * Tile::kQueryBytes +
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
            float odd = 0;
            sum[i] = 0;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                sum[i] += s[j][2 * i] = state[i].weight(s[j][2 * i], unit);
                odd += s[j][2 * i + 1] = state[i].weight(s[j][2 * i + 1], unit);
            }
            sum[i] += odd;
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
            s, rows_of_terms(rooms.queries + queries.stage() * Tile::kQueryBytes),
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
    __device__ __forceinline__ void free_values() {
        release(rooms.values_free + 8 * values.stage());
        values.advance();
    }
    __device__ __forceinline__ void free_queries() {
        release(rooms.queries_free + 8 * queries.stage());
        queries.advance(Tile::kGroups);
    }
    __device__ __forceinline__ void free_slot() {
        __syncwarp();
        release(rooms.slot_free + 8 * slot);
        slot = (slot + 1) % kSlots;
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

// What `forward_wgmma` makes of dot products: a warp takes all tiles of one entry. p.q holds the
// dot products, p.out takes the scores, float32 rows of all keys both.
#include "attention/parameters.cuh"
#include "attention/wgmma_scores.cuh"

namespace cuflash {

template <int kKeys_, int kWidth_>
struct Shape {
    static constexpr int kKeys = kKeys_, kWidth = kWidth_, kKeyTiles = kKeys_ / 8;
};

template <typename Score, typename Tile>
__global__ void change_scores(const __grid_constant__ AttentionParameters p) {
    __shared__ Score score;
    const int queries = int(p.score.queries), keys = int(p.score.keys);
    if (threadIdx.x == 0) {
        const BatchIndex index{};
        score.load(p.score, p.batch, index, {0, queries, queries, 0, keys, 0});
    }
    __syncthreads();
    const auto* dots = static_cast<const float*>(p.q.data);
    auto* scores = static_cast<float*>(p.out.data);
    TileOptions<Score, Tile> options(p.score);
    for (int row = 0; row < queries; row += 16)
        for (int key = 0; key < keys; key += Tile::kKeys) {
            const int64 position = score.position(row);
            const TileCorner at{row, key, int(position - key), llabs(position) < (1 << 22)};
            auto for_each = [&](auto act) {
                for (int j = 0; j < Tile::kKeyTiles; ++j)
                    for (int e = 0; e < 4; ++e) {
                        const int64 i = at.own_row() + e / 2 * 8;
                        const int64 k = at.own_key() + 8 * j + e % 2;
                        act(j, e, i < queries && k < keys ? i * keys + k : -1);
                    }
            };
            float s[Tile::kKeyTiles][4];
            options.start(p.score, score, at);
            options.expect(p.score);
            for_each([&](int j, int e, int64 at) { s[j][e] = at < 0 ? 0 : dots[at]; });
            if (!options.hides_all()) options.change(s, p.score, score, at);
            for_each([&](int j, int e, int64 at) {
                if (at >= 0) scores[at] = options.hides_all() ? -infinity<float>() : s[j][e];
            });
        }
}

}  // namespace cuflash

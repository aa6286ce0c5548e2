// The tile of attention on float64 tensor cores. Weights are left operands as they are: of 16 keys
// a lane takes 2t, 2t + 1, 2t + 8 and 2t + 9, and of 16 features chunks t and t + 4.
#pragma once

#include "attention/chunk_tile.cuh"

namespace cuflash {

template <int kColumns>
using FeatureRows = FeatureChunks<double, kColumns>;
template <int kColumns>
using ValueRows = ValueChunks<double, kColumns>;
template <typename Layout, int kRows, int kThreads>
using DoubleCopies = ChunkCopies<Layout, kRows, kThreads, double>;

// Warps of a block, of 16 query rows each, keys of a tile, padded features, columns of v that a
// block takes, whether a warp holds its queries in registers, blocks that a multiprocessor should
// hold. `device/attention_plans_dmma.py` says which tiles there are, and why.
template <int kWarps, int kKeys_, int kFeatures_, int kValues_, bool kQueriesHeld_, int kBlocks_>
struct DmmaTile {
    static constexpr int kThreads = 32 * kWarps, kWarpRows = 16, kQueries = kWarpRows * kWarps;
    static constexpr int kKeys = kKeys_, kFeatures = kFeatures_, kValues = kValues_;
    static constexpr bool kQueriesHeld = kQueriesHeld_;
    static constexpr int kBlocks = kBlocks_;
    static constexpr int kRowTiles = 1, kRows = 2;   // rows that a thread has a part of
    static constexpr int kKeyTiles = kKeys / 8;      // 8 keys each
    static constexpr int kValueTiles = kValues / 8;  // 8 columns each
    static constexpr int kFeatureSteps = kFeatures / 16;
    static constexpr int kKeySteps = kKeys / 16;
    using Features = FeatureRows<kFeatures>;
    using Values = ValueRows<kValues>;
    static constexpr int kQueryBytes = kQueriesHeld ? 0 : kQueries * Features::kPitch;
    static constexpr int kKeyBytes = kKeys * Features::kPitch;
    static constexpr int kValueBytes = kKeys * Values::kPitch;
};

}  // namespace cuflash

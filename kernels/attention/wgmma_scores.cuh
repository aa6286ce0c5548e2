// Options that change scores pair by pair, in `forward_wgmma`. All that can be known before the dot
// products of a tile of keys is found beside them: `start` sends for what is read, `expect` makes
// of it what `change`, which turns dot products into scores, has to wait for nothing else for. What
// positions hide comes after. A thread has pairs of neighbours of two rows.
//
// Biases and masks are read where rows lie end to end and all else in steps of 16 bytes, what the
// keys of a row take too: `device/attention_plans_wgmma.py` sends others elsewhere.
#pragma once

#include "attention/fragments.cuh"
#include "lib/ptx_load.cuh"
#include "lib/score.cuh"

namespace cuflash {

// The warp's first row and the first key of a tile, and how far this comes before that one's
// position if that is `near`.
struct TileCorner {
    int64 row, key;
    int distance;
    bool near;

    __device__ __forceinline__ int64 own_row() const { return row + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int64 own_key() const { return key + threadIdx.x % 4 * 2; }
};

// A thread's scores as `change_pairs` has it. Nothing is left to the weights: a step for each score
// is cheap beside its products.
template <typename Tile>
struct WarpgroupPairs {
    static constexpr int kRows = 2, kRowStep = 8, kColumns = 2 * Tile::kKeyTiles, side = 0;
    float (&s)[Tile::kKeyTiles][4];
    int distance = 0;
    float shift[kRows] = {};

    static __device__ __forceinline__ constexpr int column(int j) { return 8 * (j / 2) + j % 2; }
    __device__ __forceinline__ float& at(int i, int j) const { return s[j / 2][2 * i + j % 2]; }
};

// An option of which nothing has to be made, and that hides no tile.
struct SimpleOption {
    __device__ __forceinline__ explicit SimpleOption(const ScoreParameters&) {}
    __device__ __forceinline__ void expect(const ScoreParameters&) {}
    __device__ __forceinline__ bool hides_all() const { return false; }
};

// Bounds alone.
template <typename Score, typename Tile>
struct TileOptions : SimpleOption {
    using SimpleOption::SimpleOption;
    __device__ __forceinline__ void start(const ScoreParameters&, const Score&, TileCorner) {}
    __device__ __forceinline__ void change(float (&)[Tile::kKeyTiles][4], const ScoreParameters&,
                                           const Score&, TileCorner) {}
};

template <typename Tile>
struct TileOptions<SoftcapScore<float>, Tile> : SimpleOption {
    using Score = SoftcapScore<float>;
    Softcap<float>::Curve curve;

    __device__ __forceinline__ explicit TileOptions(const ScoreParameters& p) : SimpleOption(p) {
        Softcap<float> softcap;
        softcap.cap = float(p.softcap);
        curve = softcap.curve(float(p.scale));
    }
    __device__ __forceinline__ void start(const ScoreParameters&, const Score&, TileCorner) {}
    __device__ __forceinline__ void change(float (&s)[Tile::kKeyTiles][4], const ScoreParameters&,
                                           const Score&, TileCorner) const {
        WarpgroupPairs<Tile> pairs{s};
        Softcap<float>::change_tile(pairs, curve);
    }
};

template <typename Tile>
struct TileOptions<AlibiScore<float>, Tile> : SimpleOption {
    using Score = AlibiScore<float>;
    Alibi<float> alibi;
    int distance;
    bool near;
    using SimpleOption::SimpleOption;

    __device__ __forceinline__ void start(const ScoreParameters&, const Score& score,
                                          TileCorner at) {
        alibi = score.template step<Alibi<float>>();
        near = __all_sync(kFullWarp, at.near && alibi.has_tiles());
        distance = at.distance + threadIdx.x % 32 / 4 - threadIdx.x % 4 * 2;
    }
    __device__ __forceinline__ void change(float (&s)[Tile::kKeyTiles][4], const ScoreParameters&,
                                           const Score& score, TileCorner at) const {
        WarpgroupPairs<Tile> pairs{s, distance};
        if (near) return alibi.change_tile(pairs, 1);
        if (!alibi.is_present()) return;
        const int64 first = score.position(at.own_row()) - at.own_key();
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < pairs.kColumns; ++j)
                pairs.at(i, j) -= alibi.slope * float(llabs(first + 8 * i - pairs.column(j)));
    }
};

// A lane reads half of the keys of one row, and makes bits of them for all lanes.
template <typename Tile>
struct TileOptions<MaskScore<float>, Tile> : SimpleOption {
    using Score = MaskScore<float>;
    static constexpr int kBytes = Tile::kKeys / 2, kWords = kBytes / 32;
    uint4 bytes[kBytes / 16];
    bool has_any, has_all;          // of the warp's pairs
    unsigned shown[2][2 * kWords];  // of 32 keys: bit 8 e + j is key 8 j + e of the thread's
    using SimpleOption::SimpleOption;

    // Past the ends the last row or chunk is read again, for pairs that their positions hide.
    __device__ __forceinline__ void start(const ScoreParameters& p, const Score& score,
                                          TileCorner at) {
        const int lane = threadIdx.x % 32;
        const unsigned char* const row = &score.mask().at(min(at.row + lane / 2, p.queries - 1), 0);
        const int first = int(at.key) + lane % 2 * kBytes, last = int(p.keys) - 16;
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i)
            bytes[i] = load_global(row + min(first + 16 * i, last));
    }

    __device__ __forceinline__ void expect(const ScoreParameters&) {
        // Byte b of word 2 n + h is bit 8 b + 4 h + n.
        unsigned bits[kWords], any = 0, all = ~0u;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint4 &low = bytes[2 * w], &high = bytes[2 * w + 1];
            bits[w] = bit_of(low.x, 0) | bit_of(low.z, 1) | bit_of(high.x, 2) | bit_of(high.z, 3) |
                      bit_of(low.y, 4) | bit_of(low.w, 5) | bit_of(high.y, 6) | bit_of(high.w, 7);
            any |= bits[w];
            all &= bits[w];
        }
        has_any = __any_sync(kFullWarp, any);
        has_all = __all_sync(kFullWarp, all == ~0u);
        const int lane = threadIdx.x % 32, own = lane % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int w = 0; w < 2 * kWords; ++w)
                shown[i][w] =
                    __shfl_sync(kFullWarp, bits[w % kWords], 2 * (8 * i + lane / 4) + w / kWords) >>
                    (own % 2 * 16 + own / 2 * 4);
    }

    __device__ __forceinline__ bool hides_all() const { return !has_any; }
    __device__ __forceinline__ void change(float (&s)[Tile::kKeyTiles][4], const ScoreParameters&,
                                           const Score&, TileCorner) const {
        if (has_all) return;
        // By neighbouring bits, which become predicates together.
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int w = 0; w < 2 * kWords; ++w)
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (!(shown[i][w] >> (8 * e + j) & 1))
                            s[4 * w + j][2 * i + e] = -infinity<float>();
    }

  private:
    // Whether bytes are not 0, at bit n of each: NumPy's are 0 or 1, others' may be anything.
    static __device__ __forceinline__ unsigned bit_of(unsigned bytes, int n) {
        return (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu | bytes) & 0x80808080u) >> (7 - n);
    }
};

// A lane reads chunks of 16 bytes, each 64 bytes after the one before, and lanes of a quad exchange
// what is another's: to read a thread's own pairs takes the L1 cache twice or four times as long.
template <typename Tile>
struct TileOptions<BiasScore<float>, Tile> : SimpleOption {
    using Score = BiasScore<float>;
    static constexpr int kKeyTiles = Tile::kKeyTiles;
    // Chunks of 16-bit elements, and of float32. Of these there are registers for half beside the
    // sums of wide heads; the others are sent for when these are used.
    static constexpr int kSingle = kKeyTiles / 4, kDouble = kKeyTiles / 2;
    static constexpr int kAhead = Tile::kWidth > 64 ? kDouble / 2 : kDouble;
    static_assert(kAhead >= kSingle, "room for either");
    float scale;
    unsigned held[2][kAhead][4];
    __device__ __forceinline__ explicit TileOptions(const ScoreParameters& p)
        : SimpleOption(p), scale(float(p.scale)) {}
    __device__ __forceinline__ void start(const ScoreParameters& p, const Score& score,
                                          TileCorner at) {
        const Chunks chunks(p, score, at);
        read<kSingle>(chunks, 0);
        if (p.bias.type == kFloat32) read<kAhead - kSingle>(chunks, kSingle);
    }

    __device__ __forceinline__ void expect(const ScoreParameters& p) {
        if (p.bias.type == kFloat32) return exchange_wide();
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int c = 0; c < kSingle; ++c) transpose_quad(held[i][c]);
    }

    __device__ __forceinline__ void change(float (&s)[kKeyTiles][4], const ScoreParameters& p,
                                           const Score& score, TileCorner at) {
        if (p.bias.type == kFloat32) {
            add_wide(s, 0);
            if constexpr (kAhead < kDouble) {
                read<kAhead>(Chunks(p, score, at), kAhead);
                exchange_wide();
                add_wide(s, kAhead);
            }
        } else if (p.bias.type == kFloat16) {
            add<__half>(s);
        } else {
            add<__nv_bfloat16>(s);
        }
    }

  private:
    // Where the thread's chunks are. Found again for the second half: there are no registers to
    // keep it in.
    struct Chunks {
        const unsigned char* row[2];  // the first ones
        int last;                     // bytes from there to the last chunk of a row

        __device__ __forceinline__ Chunks(const ScoreParameters& p, const Score& score,
                                          TileCorner at) {
            const auto& bias = score.template step<Bias<float>>();
            const bool wide = p.bias.type == kFloat32;
            const int size = wide ? 4 : 2, own = threadIdx.x % 4;
            const int shift = 16 * (wide ? own % 2 * 2 + own / 2 : own);
            last = int(p.keys - at.key) * size - 16 - shift;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int64 own_row = min(at.own_row() + 8 * i, p.queries - 1);
                row[i] = static_cast<const unsigned char*>(bias.data) +
                         (bias.start + own_row * bias.row_stride + at.key) * size + shift;
            }
        }
    };

    // Chunks from `first` on. Past the end of a row its last one, for positions to hide.
    template <int kCount>
    __device__ __forceinline__ void read(const Chunks& chunks, int first) {
        if (chunks.last >= 64 * (kDouble - 1))
            read_at<kCount>(chunks, first, [](int offset) { return offset; });
        else
            read_at<kCount>(chunks, first, [&](int offset) { return min(offset, chunks.last); });
    }
    template <int kCount, typename At>
    __device__ __forceinline__ void read_at(const Chunks& chunks, int first, At at) {
#pragma unroll
        for (int c = 0; c < kCount; ++c)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 words = load_global(chunks.row[i] + at(64 * (first + c)));
                unsigned (&x)[4] = held[i][(first + c) % kAhead];
                x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
            }
    }
    // A lane has two pairs of 8 keys, and needs one of them and one of the next 8: that one for
    // which lanes 1 and 2 have each other's chunks.
    __device__ __forceinline__ void exchange_wide() {
        const bool odd = threadIdx.x % 2;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int c = 0; c < kAhead; ++c)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    unsigned &a = held[i][c][e], &b = held[i][c][2 + e];
                    const unsigned kept = odd ? b : a;
                    const unsigned got = __shfl_xor_sync(kFullWarp, odd ? a : b, 1);
                    a = odd ? got : kept;
                    b = odd ? kept : got;
                }
    }
    __device__ __forceinline__ void add_wide(float (&s)[kKeyTiles][4], int first) const {
#pragma unroll
        for (int c = 0; c < kAhead; ++c)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    float& x = s[2 * (first + c) + w / 2][2 * i + w % 2];
                    x = multiply_add(x, scale, __uint_as_float(held[i][c][w]));
                }
    }
    template <typename B>
    __device__ __forceinline__ void add(float (&s)[kKeyTiles][4]) const {
        struct alignas(4) Neighbours {
            B element[2];
        };
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const auto two = bytes_as<Neighbours>(held[e / 2][j / 4][j % 4]);
                s[j][e] = multiply_add(s[j][e], scale, widen(two.element[e % 2]));
            }
    }
};

}  // namespace cuflash

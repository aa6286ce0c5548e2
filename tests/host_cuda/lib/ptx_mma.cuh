// The instructions of kernels/lib/ptx_mma.cuh as PTX describes them, for kernels on the CPU.
//
// Background copies happen as late as they may, when their group is waited for: who reads without
// waiting reads what was there before.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

inline unsigned shared_address(const void* pointer) {
    return unsigned(static_cast<const char*>(pointer) -
                    static_cast<const char*>(cuda_on_host::dynamic_shared()));
}
template <typename T>
inline T& shared_at(unsigned address) {
    return *reinterpret_cast<T*>(static_cast<char*>(cuda_on_host::dynamic_shared()) + address);
}

// ------------------------------------------------------------------------------ copies (cp.async)

struct PendingCopy {
    unsigned to;
    const void* from;
    int bytes, group;
};
struct PendingCopies {
    static constexpr int kMost = 512;
    PendingCopy copies[kMost];
    int count, groups;
};
inline PendingCopies& own_copies() {
    static PendingCopies of_thread[1024];
    return of_thread[threadIdx.x];
}

inline void copy_async(unsigned to, const void* from, int bytes = 16) {
    PendingCopies& own = own_copies();
    if (to % 16 || reinterpret_cast<unsigned long long>(from) % 16 || bytes < 0 || bytes > 16)
        cuda_on_host::fail("a background copy is not aligned");
    if (own.count == PendingCopies::kMost) cuda_on_host::fail("too many background copies");
    own.copies[own.count++] = {to, from, bytes, own.groups};
}
inline void commit_copies() {
    ++own_copies().groups;
}
template <int kPending>
inline void wait_for_copies() {
    PendingCopies& own = own_copies();
    int kept = 0;
    for (int i = 0; i < own.count; ++i) {
        const PendingCopy copy = own.copies[i];
        if (copy.group >= own.groups - kPending) {
            own.copies[kept++] = copy;
            continue;
        }
        __builtin_memset(&shared_at<char>(copy.to), 0, 16);
        __builtin_memcpy(&shared_at<char>(copy.to), copy.from, copy.bytes);
    }
    own.count = kept;
}

// ------------------------------------------------------------------------------ where a warp runs

// As if all blocks were on one multiprocessor.
inline unsigned hardware_warp() {
    return (blockIdx.x * blockDim.x + threadIdx.x) / 32;
}

// ----------------------------------------------------------------------------- matrices (ldmatrix)

using RowAddresses = const unsigned long long*;

inline RowAddresses row_addresses(unsigned row) {
    if (row % 16) cuda_on_host::fail("a row of a matrix is not aligned");
    return cuda_on_host::exchange(kFullWarp, row, __LINE__);
}
inline void load_matrices(unsigned (&to)[4], unsigned row) {
    const RowAddresses rows = row_addresses(row);
    const unsigned lane = cuda_on_host::lane();
    for (int i = 0; i < 4; ++i)
        to[i] = shared_at<unsigned>(unsigned(rows[8 * i + lane / 4]) + lane % 4 * 4);
}
inline void load_transposed_matrices(unsigned (&to)[4], unsigned row) {
    const RowAddresses rows = row_addresses(row);
    const unsigned lane = cuda_on_host::lane();
    for (int i = 0; i < 4; ++i) {
        to[i] = 0;
        for (int e = 0; e < 2; ++e) {
            const unsigned from = unsigned(rows[8 * i + lane % 4 * 2 + e]) + lane / 4 * 2;
            to[i] |= unsigned(shared_at<unsigned short>(from)) << 16 * e;
        }
    }
}

// --------------------------------------------------------------------------------- products (mma)

// 16-bit elements `first` and `first` + 1 of a lane's payload, widened.
template <typename T>
inline double element(unsigned long long payload, int index) {
    return widen(bits_as<T>(static_cast<unsigned short>(payload >> 16 * index)));
}

template <typename T>
struct MatrixProduct {
    static void add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        const unsigned lane = cuda_on_host::lane();
        unsigned long long rows[2][4], columns[2][4];
        // A lane's payload holds rows g and g + 8 of one half of the contracted axis.
        for (int half = 0; half < 2; ++half) {
            const auto* all = cuda_on_host::exchange(
                kFullWarp, a[2 * half] | 1ull * a[2 * half + 1] << 32, __LINE__);
            for (int t = 0; t < 4; ++t) rows[half][t] = all[lane / 4 * 4 + t];
        }
        const auto* all = cuda_on_host::exchange(kFullWarp, b0 | 1ull * b1 << 32, __LINE__);
        for (int n = 0; n < 2; ++n)
            for (int t = 0; t < 4; ++t) columns[n][t] = all[(lane % 4 * 2 + n) * 4 + t];
        for (int i = 0; i < 4; ++i) {
            double sum = c[i];
            for (int k = 0; k < 16; ++k) {
                const int half = k / 8, t = k % 8 / 2, e = k % 2;
                sum += element<T>(rows[half][t], i / 2 * 2 + e) *
                       element<T>(columns[i % 2][t], half * 2 + e);
            }
            c[i] = float(sum);
        }
    }
};

// A sum of products of TF32 numbers as tensor cores make it: each term is cut off some bits below
// the last one of the largest, and so is the sum, where a float ends.
inline float cut_off_sum(const double (&terms)[9]) {
    constexpr int kGuardBits = 2;
    auto cut_off = [](double x, double unit) { return __builtin_trunc(x / unit) * unit; };
    double plain = 0;
    int exponent = -126;
    for (double term : terms) {
        plain += term;
        if (term != 0 && term - term == 0) exponent = max(exponent, __builtin_ilogb(term));
    }
    if (plain - plain != 0) return float(plain);
    double sum = 0;
    for (double term : terms) sum += cut_off(term, __builtin_ldexp(1, exponent - 23 - kGuardBits));
    if (sum == 0) return 0;
    return float(cut_off(sum, __builtin_ldexp(1, max(__builtin_ilogb(sum), -126) - 23)));
}

template <>
struct MatrixProduct<float> {
    static void add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        const unsigned lane = cuda_on_host::lane();
        double rows[2][8], columns[2][8];
        auto number = [](unsigned bits) { return double(bits_as<float>(bits & 0xffffe000u)); };
        for (int half = 0; half < 2; ++half) {
            const auto* all = cuda_on_host::exchange(
                kFullWarp, a[2 * half] | 1ull * a[2 * half + 1] << 32, __LINE__);
            for (int i = 0; i < 2; ++i)
                for (int t = 0; t < 4; ++t)
                    rows[i][half * 4 + t] = number(unsigned(all[lane / 4 * 4 + t] >> 32 * i));
        }
        const auto* all = cuda_on_host::exchange(kFullWarp, b0 | 1ull * b1 << 32, __LINE__);
        for (int n = 0; n < 2; ++n)
            for (int k = 0; k < 8; ++k)
                columns[n][k] = number(unsigned(all[(lane % 4 * 2 + n) * 4 + k % 4] >> k / 4 * 32));
        for (int i = 0; i < 4; ++i) {
            double terms[9] = {c[i]};
            for (int k = 0; k < 8; ++k) terms[1 + k] = rows[i / 2][k] * columns[i % 2][k];
            c[i] = cut_off_sum(terms);
        }
    }
};

// Products are added one by one, whatever the depth of an instruction.
template <>
struct MatrixProduct<double> {
    // a of kQuarters x 4 terms of 16 rows, b of as many of 8 columns.
    template <int kParts, int kQuarters>
    static void add(double (&c)[4], const double (&a)[kParts], const double (&b)[kQuarters]) {
        static_assert(kParts == 2 * kQuarters, "rows g and g + 8");
        const unsigned lane = cuda_on_host::lane();
        double rows[2][4 * kQuarters], columns[2][4 * kQuarters];
        auto exchange = [](double x) {
            return cuda_on_host::exchange(kFullWarp, bits_as<unsigned long long>(x), __LINE__);
        };
        for (int i = 0; i < kParts; ++i) {
            const auto* all = exchange(a[i]);
            for (int t = 0; t < 4; ++t)
                rows[i % 2][i / 2 * 4 + t] = bits_as<double>(all[lane / 4 * 4 + t]);
        }
        for (int i = 0; i < kQuarters; ++i) {
            const auto* all = exchange(b[i]);
            for (int n = 0; n < 2; ++n)
                for (int t = 0; t < 4; ++t)
                    columns[n][4 * i + t] = bits_as<double>(all[(lane % 4 * 2 + n) * 4 + t]);
        }
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 4 * kQuarters; ++k)
                c[i] = __builtin_fma(rows[i / 2][k], columns[i % 2][k], c[i]);
    }
};
inline void add_by_quarters(double (&c)[4], const double (&a)[8], const double (&b)[4]) {
    MatrixProduct<double>::add(c, a, b);
}

// ------------------------------------------------------------------------------ additions (red)

inline void add_pair(float* to, float first, float second) {
    if (reinterpret_cast<unsigned long long>(to) % 8)
        cuda_on_host::fail("a pair of additions is not aligned");
    atomicAdd(to, first);
    atomicAdd(to + 1, second);
}

inline void add_chunk(float* to, const Vector<float>& x) {
    if (reinterpret_cast<unsigned long long>(to) % 16)
        cuda_on_host::fail("a chunk of additions is not aligned");
    for (int n = 0; n < 4; ++n) atomicAdd(to + n, x.element[n]);
}

// --------------------------------------------------------------------------------------- exp2,
// pack

inline float exp2_approximate(float x) {
    return exp2f(x);
}
inline float minimum_or_nan(float x, float y) {
    return x < y || x != x ? x : y;
}
template <typename T>
inline unsigned pack(float low, float high) {
    return bits_as<unsigned short>(narrow<T>(low)) |
           unsigned(bits_as<unsigned short>(narrow<T>(high))) << 16;
}

}  // namespace cuflash

// Copy kernels for x86-64: non-temporal stores, and the CRC by carry-less multiplication in the same pass.
//
// Four pages are walked side by side, so that four streams of reads are under way at once: one alone leaves the core
// waiting. Non-temporal stores spare the read of what is about to be overwritten.
//
// The CRC is kept in accumulators of 128 bits, congruent to the data so far. An accumulator moves past D bits by a
// multiplication with x^D, each half by itself ("folding": Gopal et al., Intel, 2009). Each of the four pages has its
// own; at the start of a block they move past the three pages that the others have covered.
#pragma once

#include <immintrin.h>

#include "kernels.h"

#define TARGET_PCLMUL __attribute__((target("sse4.1,pclmul")))
#define TARGET_AVX2 __attribute__((target("avx2,pclmul")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul")))
#define INLINE __attribute__((always_inline)) inline

namespace ckpt {

// Multipliers that move the two halves of an accumulator past `bits` of data. The halves lie 64 bits apart and stand
// for remainders of 32 bits: hence +32 and -32. The product of two reflected numbers is a bit short: hence the shift.
template <uint64_t bits>
constexpr long long kLow = static_cast<long long>(power_of_x(bits + 32)) << 1;
template <uint64_t bits>
constexpr long long kHigh = static_cast<long long>(power_of_x(bits - 32)) << 1;

constexpr uint64_t kThreePages = 3 * kPage * 8;
constexpr uint32_t kPastPage = power_of_x(kPage, 3);

template <uint64_t bits>
TARGET_PCLMUL INLINE __m128i past128() {
    return _mm_set_epi64x(kHigh<bits>, kLow<bits>);
}

// The accumulator `a`, moved by `k`, plus `data`.
TARGET_PCLMUL INLINE __m128i fold128(__m128i a, __m128i k, __m128i data) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11)), data);
}

// The register that the accumulators of four pages, one after the other, amount to.
inline uint32_t join(const void* accumulators, size_t nbytes) {
    const auto* page = static_cast<const uint8_t*>(accumulators);
    uint32_t reg = 0;
    for (int i = 0; i < 4; ++i, page += nbytes / 4)
        reg = multiply(kPastPage, reg) ^ crc_tables(page, nbytes / 4, 0);
    return reg;
}

// CRC without a copy, 64 bytes a step.
TARGET_PCLMUL inline uint32_t crc_pclmul(const uint8_t* data, size_t nbytes, uint32_t reg) {
    if (nbytes < 64) return crc_tables(data, nbytes, reg);
    const auto lane = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i); };
    __m128i a[4] = {_mm_xor_si128(lane(0), _mm_cvtsi32_si128(static_cast<int>(reg))), lane(1), lane(2), lane(3)};
    for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64)
        for (int i = 0; i < 4; ++i) a[i] = fold128(a[i], past128<512>(), lane(i));
    const __m128i last[] = {a[0], a[1], a[2], a[3]};
    return crc_tables(data, nbytes, crc_tables(reinterpret_cast<const uint8_t*>(last), sizeof last, 0));
}

template <bool kWithCrc>
TARGET_AVX2 uint32_t copy_blocks_avx2(uint8_t* dst, const uint8_t* src, size_t blocks) {
    __m128i a[4] = {}, b[4] = {};  // per page, of the first and the second 16 bytes of every 32
    for (; blocks != 0; --blocks, src += kBlock, dst += kBlock)
        for (size_t at = 0; at < kPage; at += kLine) {
            const __m128i k = at == 0 ? past128<kThreePages + 256>() : past128<256>();
#pragma GCC unroll 4
            for (size_t page = 0; page < 4; ++page) {
                const uint8_t* from = src + page * kPage + at;
                uint8_t* to = dst + page * kPage + at;
                _mm_prefetch(from + 256, _MM_HINT_T0);
                const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
                _mm256_stream_si256(reinterpret_cast<__m256i*>(to), first);
                _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), second);
                if (!kWithCrc) continue;
                a[page] = fold128(a[page], k, _mm256_castsi256_si128(first));
                b[page] = fold128(b[page], k, _mm256_extracti128_si256(first, 1));
                a[page] = fold128(a[page], past128<256>(), _mm256_castsi256_si128(second));
                b[page] = fold128(b[page], past128<256>(), _mm256_extracti128_si256(second, 1));
            }
        }
    _mm_sfence();
    const __m128i last[] = {a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]};
    return join(last, sizeof last);
}

template <uint64_t bits>
TARGET_AVX512 INLINE __m512i past512() {
    return _mm512_set4_epi64(kHigh<bits>, kLow<bits>, kHigh<bits>, kLow<bits>);
}

// Four accumulators at once.
TARGET_AVX512 INLINE __m512i fold512(__m512i a, __m512i k, __m512i data) {
    const __m512i low = _mm512_clmulepi64_epi128(a, k, 0x00), high = _mm512_clmulepi64_epi128(a, k, 0x11);
    return _mm512_ternarylogic_epi64(low, high, data, 0x96);  // exclusive or of the three
}

template <bool kWithCrc>
TARGET_AVX512 uint32_t copy_blocks_avx512(uint8_t* dst, const uint8_t* src, size_t blocks) {
    __m512i a[4] = {}, b[4] = {};  // per page, of the first and the second line of every two
    for (; blocks != 0; --blocks, src += kBlock, dst += kBlock)
        for (size_t at = 0; at < kPage; at += 2 * kLine) {
            const __m512i k = at == 0 ? past512<kThreePages + 1024>() : past512<1024>();
#pragma GCC unroll 4
            for (size_t page = 0; page < 4; ++page) {
                const uint8_t* from = src + page * kPage + at;
                uint8_t* to = dst + page * kPage + at;
                _mm_prefetch(from + 256, _MM_HINT_T0);
                _mm_prefetch(from + 256 + kLine, _MM_HINT_T0);
                const __m512i first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(from + kLine);
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to), first);
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to + kLine), second);
                if (!kWithCrc) continue;
                a[page] = fold512(a[page], k, first);
                b[page] = fold512(b[page], k, second);
            }
        }
    _mm_sfence();
    const __m512i last[] = {a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]};
    return join(last, sizeof last);
}

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("pclmul"); }

inline bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("vpclmulqdq");
}

constexpr Kernel kCompiled[] = {
    {"avx512", has_avx512, copy_blocks_avx512<false>, copy_blocks_avx512<true>, crc_pclmul},
    {"avx2", has_avx2, copy_blocks_avx2<false>, copy_blocks_avx2<true>, crc_pclmul},
    kPortable,
};
}  // namespace ckpt

// Copy kernels for x86-64: non-temporal stores, the CRC by carry-less multiplication in the same pass.
//
// Four pages are walked side by side: each step moves a line or two of every page, so that four streams of reads
// are under way at once; one stream leaves a core waiting. Non-temporal stores spare the read of what is
// about to be overwritten.
//
// CRC: an accumulator A of 128 bits is congruent to the data so far. To move it past D bits of new data it is
// multiplied by x^D ("folding": Gopal et al., Intel, 2009): with A = low + high * x^-64 in reflected order,
// A * x^D = low * x^(D+64) + high * x^D, each product of a 64-bit half and a 32-bit remainder. Every page has its own
// accumulators. At the end of a block they are folded into those of the last page, which the first page of
// the next block carries on.

#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "crc32.h"

namespace ckpt {
namespace {

#define TARGET_PCLMUL __attribute__((target("sse4.1,pclmul")))
#define TARGET_AVX2 __attribute__((target("avx2,pclmul")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul")))
#define INLINE __attribute__((always_inline)) inline

// The two multipliers that move an accumulator past `bits` of data. The carry-less product of reflected numbers is one
// bit short of the reflected product: hence the shift by one. The remainder's x^32 shows in the exponents.
template <uint64_t bits>
constexpr long long kLow = static_cast<long long>(power_of_x(bits + 32)) << 1;
template <uint64_t bits>
constexpr long long kHigh = static_cast<long long>(power_of_x(bits - 32)) << 1;

constexpr uint64_t kPageBits = kPage * 8;

template <uint64_t bits>
TARGET_PCLMUL INLINE __m128i past128() {
    return _mm_set_epi64x(kHigh<bits>, kLow<bits>);
}

// The accumulator `a`, moved by what `k` stands for, plus `data`.
TARGET_PCLMUL INLINE __m128i fold128(__m128i a, __m128i k, __m128i data) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11)), data);
}

// The accumulators of four pages, moved to the end of the last.
TARGET_PCLMUL INLINE __m128i join128(const __m128i page[4]) {
    const __m128i sum = fold128(page[2], past128<kPageBits>(), page[3]);
    return fold128(page[0], past128<3 * kPageBits>(), fold128(page[1], past128<2 * kPageBits>(), sum));
}

TARGET_PCLMUL INLINE uint32_t reduce128(__m128i a) {
    alignas(16) uint8_t bytes[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes), a);
    return crc_tables(bytes, sizeof bytes, 0);
}

TARGET_PCLMUL INLINE __m128i load128(const uint8_t* data) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// CRC without a copy, 64 bytes a step.
TARGET_PCLMUL uint32_t crc_pclmul(const uint8_t* data, size_t nbytes, uint32_t reg) {
    if (nbytes >= 64) {
        const __m128i k512 = past128<512>(), k128 = past128<128>();
        __m128i a[4];
        for (int i = 0; i < 4; ++i) a[i] = load128(data + 16 * i);
        a[0] = _mm_xor_si128(a[0], _mm_cvtsi32_si128(static_cast<int>(reg)));
        for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64)
            for (int i = 0; i < 4; ++i) a[i] = fold128(a[i], k512, load128(data + 16 * i));
        for (int i = 1; i < 4; ++i) a[i] = fold128(a[i - 1], k128, a[i]);
        reg = reduce128(a[3]);
    }
    return crc_tables(data, nbytes, reg);
}

// ---- AVX2 ----

template <bool kWithCrc>
TARGET_AVX2 uint32_t copy_blocks_avx2(uint8_t* dst, const uint8_t* src, size_t blocks) {
    const __m128i k256 = past128<256>();
    __m128i a[4] = {}, b[4] = {};  // page by page: accumulators of the first and second 16 bytes of every 32
    for (; blocks != 0; --blocks, src += kBlock, dst += kBlock) {
        for (size_t at = 0; at < kPage; at += kLine)
#pragma GCC unroll 4
            for (size_t page = 0; page < 4; ++page) {
                const uint8_t* from = src + page * kPage + at;
                uint8_t* to = dst + page * kPage + at;
                _mm_prefetch(from + 256, _MM_HINT_T0);
                for (size_t half = 0; half < kLine; half += 32) {
                    const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half));
                    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + half), data);
                    if (kWithCrc) {
                        a[page] = fold128(a[page], k256, _mm256_castsi256_si128(data));
                        b[page] = fold128(b[page], k256, _mm256_extracti128_si256(data, 1));
                    }
                }
            }
        if (!kWithCrc) continue;
        a[0] = join128(a), b[0] = join128(b);
        for (int page = 1; page < 4; ++page) a[page] = b[page] = _mm_setzero_si128();
    }
    _mm_sfence();
    return kWithCrc ? reduce128(fold128(a[0], past128<128>(), b[0])) : 0;
}

void copy_avx2(uint8_t* dst, const uint8_t* src, size_t blocks) { copy_blocks_avx2<false>(dst, src, blocks); }

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("pclmul"); }

// ---- AVX-512 ----

template <uint64_t bits>
TARGET_AVX512 INLINE __m512i past512() {
    return _mm512_set4_epi64(kHigh<bits>, kLow<bits>, kHigh<bits>, kLow<bits>);
}

// Four accumulators at a time.
TARGET_AVX512 INLINE __m512i fold512(__m512i a, __m512i k, __m512i data) {
    const int exclusive_or = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, k, 0x00), _mm512_clmulepi64_epi128(a, k, 0x11), data,
                                     exclusive_or);
}

TARGET_AVX512 INLINE __m512i join512(const __m512i page[4]) {
    const __m512i sum = fold512(page[2], past512<kPageBits>(), page[3]);
    return fold512(page[0], past512<3 * kPageBits>(), fold512(page[1], past512<2 * kPageBits>(), sum));
}

TARGET_AVX512 INLINE uint32_t reduce512(__m512i a) {
    alignas(64) uint8_t bytes[64];
    _mm512_store_si512(bytes, a);
    return crc_tables(bytes, sizeof bytes, 0);
}

template <bool kWithCrc>
TARGET_AVX512 uint32_t copy_blocks_avx512(uint8_t* dst, const uint8_t* src, size_t blocks) {
    const __m512i k1024 = past512<1024>();
    __m512i a[4] = {}, b[4] = {};  // page by page: accumulators of the first and second line of every two
    for (; blocks != 0; --blocks, src += kBlock, dst += kBlock) {
        for (size_t at = 0; at < kPage; at += 2 * kLine)
#pragma GCC unroll 4
            for (size_t page = 0; page < 4; ++page) {
                const uint8_t* from = src + page * kPage + at;
                uint8_t* to = dst + page * kPage + at;
                _mm_prefetch(from + 256, _MM_HINT_T0);
                _mm_prefetch(from + 256 + kLine, _MM_HINT_T0);
                const __m512i first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(from + kLine);
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to), first);
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to + kLine), second);
                if (kWithCrc) {
                    a[page] = fold512(a[page], k1024, first);
                    b[page] = fold512(b[page], k1024, second);
                }
            }
        if (!kWithCrc) continue;
        a[0] = join512(a), b[0] = join512(b);
        for (int page = 1; page < 4; ++page) a[page] = b[page] = _mm512_setzero_si512();
    }
    _mm_sfence();
    return kWithCrc ? reduce512(fold512(a[0], past512<512>(), b[0])) : 0;
}

void copy_avx512(uint8_t* dst, const uint8_t* src, size_t blocks) { copy_blocks_avx512<false>(dst, src, blocks); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("vpclmulqdq");
}

}  // namespace

const Kernel kAvx512 = {"avx512", has_avx512, copy_avx512, copy_blocks_avx512<true>, crc_pclmul};
const Kernel kAvx2 = {"avx2", has_avx2, copy_avx2, copy_blocks_avx2<true>, crc_pclmul};

}  // namespace ckpt

#endif

// CRC-32 of the zip format (APPNOTE.TXT 4.4.7): reflected polynomial 0xEDB88320.
//
// A CRC *register* is the raw 32-bit remainder; the CRC that zip stores is its complement, and a
// message starts from the register ~0. Registers are linear (over GF(2)) in the message, so pieces of a
// message are computed apart and joined: register(a + b) = shift(register(a), bytes of b) ^ register of b
// started from 0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ckpt {

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ckpt_engine's formats are little-endian, and so must be the machine"
#endif

// Product of two polynomials modulo the CRC polynomial; bit 31 is x^0, bit 0 is x^31.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; --bit) {
        product ^= b & (0u - (a >> bit & 1));
        b = (b >> 1) ^ (0xEDB88320u & (0u - (b & 1)));  // b * x
    }
    return product;
}

// kSquares[k] = x^(2^k). x has order 2^32 - 1, so x^(2^32) = x and the table is cyclic.
constexpr std::array<uint32_t, 32> kSquares = [] {
    std::array<uint32_t, 32> squares{};
    squares[0] = 1u << 30;
    for (size_t k = 1; k < 32; ++k) squares[k] = multiply(squares[k - 1], squares[k - 1]);
    return squares;
}();

// x^exponent modulo the CRC polynomial.
constexpr uint32_t power_of_x(uint64_t exponent, unsigned square = 0) {
    uint32_t power = 1u << 31;
    for (; exponent != 0; exponent >>= 1, ++square)
        if (exponent & 1) power = multiply(power, kSquares[square & 31]);
    return power;
}

// The register after `nbytes` more zero bytes.
inline uint32_t shift(uint32_t reg, uint64_t nbytes) {
    return multiply(power_of_x(nbytes, 3), reg);  // 2^3 bits in a byte
}

// CRC of the concatenation of two pieces from the CRCs of the pieces (complemented ones, as in zip).
inline uint32_t combine(uint32_t first, uint32_t second, uint64_t second_nbytes) {
    return shift(first, second_nbytes) ^ second;
}

// Register after `nbytes` of data, 16 bytes per step from tables ("slicing": Kounavis and Berry, 2005).
uint32_t crc_tables(const uint8_t* data, size_t nbytes, uint32_t reg);

}  // namespace ckpt

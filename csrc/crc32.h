// CRC-32 of the zip format (APPNOTE.TXT 4.4.7): reflected polynomial 0xEDB88320.
//
// A *register* is the raw remainder of 32 bits; a message starts from the register ~0, and its CRC is the complement of
// the last one. Messages are joined by crc(a, b) = shift(crc(a), bytes of b) ^ crc(b), and so are registers of which
// that of b was started from 0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the formats are little-endian, and so must be the machine"
#endif

namespace ckpt {

constexpr size_t kSlices = 16;

// kTables[k][b]: the register after the byte b and k zero bytes.
inline constexpr auto kTables = [] {
    std::array<std::array<uint32_t, 256>, kSlices> tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t reg = byte;
        for (int bit = 0; bit < 8; ++bit) reg = reg >> 1 ^ (0xEDB88320u & (0u - (reg & 1)));
        tables[0][byte] = reg;
    }
    for (size_t k = 1; k < kSlices; ++k)
        for (size_t b = 0; b < 256; ++b) tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 255];
    return tables;
}();

// Product of two polynomials modulo that of the CRC; bit 31 stands for x^0, bit 0 for x^31.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
    uint64_t multiples[16] = {};  // of b by all polynomials of four bits
    for (size_t i = 1; i < 16; ++i) multiples[i] = i & 1 ? multiples[i - 1] ^ b : multiples[i / 2] << 1;
    uint64_t product = 0;
    for (int at = 28; at >= 0; at -= 4) product = product << 4 ^ multiples[a >> at & 15];
    // Bit 63 stands for x^0 now: the upper half is reduced, the lower one a register before four zero bytes.
    product <<= 1;
    auto reg = static_cast<uint32_t>(product >> 32);
    for (size_t i = 0; i < 4; ++i) reg ^= kTables[3 - i][product >> 8 * i & 255];
    return reg;
}

// x^(2^k) for every k. The order of x is 2^32 - 1, so x^(2^32) is x again: the table is cyclic.
inline constexpr std::array<uint32_t, 32> kSquares = [] {
    std::array<uint32_t, 32> squares{1u << 30};
    for (size_t k = 1; k < squares.size(); ++k) squares[k] = multiply(squares[k - 1], squares[k - 1]);
    return squares;
}();

// x^(n * 2^k).
constexpr uint32_t power_of_x(uint64_t n, unsigned k = 0) {
    uint32_t power = 1u << 31;
    for (; n != 0; n >>= 1, ++k)
        if (n & 1) power = multiply(power, kSquares[k % 32]);
    return power;
}

// The register after `nbytes` zero bytes more.
inline uint32_t shift(uint32_t reg, uint64_t nbytes) { return reg == 0 ? 0 : multiply(power_of_x(nbytes, 3), reg); }

// `shift` for many lengths of which few differ: a power of x costs several products, so the last ones are kept.
class Shifts {
  public:
    uint32_t operator()(uint32_t reg, uint64_t nbytes) {
        if (reg == 0 || nbytes == 0) return reg;
        Kept& kept = kept_[nbytes * 0x9E3779B97F4A7C15 >> 58];
        if (kept.nbytes != nbytes) kept = {nbytes, power_of_x(nbytes, 3)};
        return multiply(kept.power, reg);
    }

  private:
    struct Kept {
        uint64_t nbytes = 0;
        uint32_t power = 0;
    };
    std::array<Kept, 64> kept_;
};

// The register after `nbytes` of data, 16 bytes a step ("slicing": Kounavis and Berry, 2005).
inline uint32_t crc_tables(const uint8_t* data, size_t nbytes, uint32_t reg) {
    for (; nbytes >= kSlices; nbytes -= kSlices, data += kSlices) {
        uint64_t words[2];
        std::memcpy(words, data, sizeof words);
        words[0] ^= reg;
        reg = 0;
        for (size_t i = 0; i < kSlices; ++i) reg ^= kTables[kSlices - 1 - i][words[i / 8] >> i % 8 * 8 & 255];
    }
    for (; nbytes != 0; --nbytes, ++data) reg = reg >> 8 ^ kTables[0][(reg ^ *data) & 255];
    return reg;
}
}  // namespace ckpt

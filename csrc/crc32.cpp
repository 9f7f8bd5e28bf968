#include "crc32.h"

#include <cstring>

namespace ckpt {
namespace {

constexpr size_t kSlices = 16;
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// kTables[k][b]: the register after byte b and then k zero bytes.
constexpr Tables kTables = [] {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) tables[0][byte] = multiply(power_of_x(8), byte);
    for (size_t k = 1; k < kSlices; ++k)
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables[k - 1][byte];
            tables[k][byte] = before >> 8 ^ tables[0][before & 255];
        }
    return tables;
}();

}  // namespace

uint32_t crc_tables(const uint8_t* data, size_t nbytes, uint32_t reg) {
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

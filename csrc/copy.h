// Many ranges in one call, by several threads, with the CRC-32 of each range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace ckpt {

struct Range {
    const uint8_t* src;
    uint8_t* dst;
    size_t nbytes;
};

// Copies every range; returns the CRC of each, or nothing if `with_crc` is false. All bytes are globally
// visible when it returns. REQUIRES: ranges readable and writable, no overlap among destinations.
std::vector<uint32_t> copy_ranges(const std::vector<Range>& ranges, int threads, const Kernel& kernel, bool with_crc);

// CRC of `data`, continued from `crc`.
uint32_t crc32(const uint8_t* data, size_t nbytes, uint32_t crc, int threads);

// Work is dealt out in pieces of this size: large enough to forget the cost of dealing, small enough that
// a thread which loses its core to a neighbour does not keep the others waiting.
constexpr size_t kPiece = 2 << 20;

}  // namespace ckpt

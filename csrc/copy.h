// Many ranges in one call, by several threads, with the CRC-32 of each range.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "atomics.h"
#include "kernels.h"
#include "pool.h"

namespace ckpt {

struct Range {
    const uint8_t* src;
    uint8_t* dst;
    size_t nbytes;
};

// Work is dealt out in pieces of this size: large enough to forget the cost of dealing, small enough that a thread
// which loses its core to a neighbour does not keep the others waiting.
constexpr size_t kPiece = 2 << 20;

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14; older kernels refuse it, older headers lack it

// Fresh memory is touched at once where the kernel can: page by page, in the middle of a copy, costs twice as much.
inline void touch(const uint8_t* begin, const uint8_t* end) {
    const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kPage - 1) / kPage * kPage;
    const uintptr_t last = reinterpret_cast<uintptr_t>(end) / kPage * kPage;
    if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, kPopulateWrite);
}

// A part of a range, and its CRC.
struct Piece : Range {
    size_t range;
    uint32_t crc;
};

inline std::vector<Piece> cut(const std::vector<Range>& ranges) {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < ranges.size(); ++i)
        for (size_t done = 0, step; done < ranges[i].nbytes; done += step) {
            step = std::min(ranges[i].nbytes - done, kPiece);
            pieces.push_back({{ranges[i].src + done, ranges[i].dst + done, step}, i, 0});
        }
    return pieces;
}

// Whole blocks by the kernel; memcpy for the rest: up to a cache line of `dst` before them, less than a block after.
inline void copy_piece(Piece& piece, const Kernel& kernel, bool with_crc) {
    uint32_t reg = ~0u;
    size_t done = 0;
    const auto plain = [&](size_t nbytes) {
        std::memcpy(piece.dst + done, piece.src + done, nbytes);
        if (with_crc) reg = kernel.crc(piece.src + done, nbytes, reg);
        done += nbytes;
    };
    if (piece.nbytes >= kBlock + kLine) {
        plain(-reinterpret_cast<uintptr_t>(piece.dst) % kLine);
        const size_t blocks = (piece.nbytes - done) / kBlock;
        const auto copy = with_crc ? kernel.copy_crc : kernel.copy;
        reg = shift(reg, blocks * kBlock) ^ copy(piece.dst + done, piece.src + done, blocks);
        done += blocks * kBlock;
    }
    plain(piece.nbytes - done);
    piece.crc = ~reg;
}

// Copies every range; returns the CRC of each, or nothing without `with_crc`. All bytes are globally visible when it
// returns. `fresh`: nobody has touched the destinations. REQUIRES: ranges readable and writable, no overlap among
// destinations.
inline std::vector<uint32_t> copy_ranges(const std::vector<Range>& ranges, int threads, const Kernel& kernel,
                                         bool with_crc, bool fresh) {
    std::vector<Piece> pieces = cut(ranges);
    parallel_for(threads, pieces.size(), [&](size_t i) {
        if (fresh) touch(pieces[i].dst, pieces[i].dst + pieces[i].nbytes);
        copy_piece(pieces[i], kernel, with_crc);
    });
    fence();
    std::vector<uint32_t> crcs(with_crc ? ranges.size() : 0);
    if (with_crc)
        for (const Piece& piece : pieces) crcs[piece.range] = shift(crcs[piece.range], piece.nbytes) ^ piece.crc;
    return crcs;
}

// The CRC of `nbytes`, continued from `crc`. `crc_of(begin, end)` is the CRC of a piece; up to `threads` threads ask
// for one at a time. REQUIRES: it does not throw.
template <class CrcOf>
uint32_t crc_by_pieces(size_t nbytes, uint32_t crc, int threads, CrcOf crc_of) {
    std::vector<uint32_t> crcs((nbytes + kPiece - 1) / kPiece);
    const auto end = [&](size_t i) { return std::min((i + 1) * kPiece, nbytes); };
    parallel_for(threads, crcs.size(), [&](size_t i) { crcs[i] = crc_of(i * kPiece, end(i)); });
    for (size_t i = 0; i < crcs.size(); ++i) crc = shift(crc, end(i) - i * kPiece) ^ crcs[i];
    return crc;
}
}  // namespace ckpt

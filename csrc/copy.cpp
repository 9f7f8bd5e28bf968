#include "copy.h"

#include <algorithm>
#include <cstring>

#include "atomics.h"
#include "crc32.h"
#include "pool.h"

namespace ckpt {
namespace {

// A part of one range, and the register of its bytes started from 0.
struct Piece {
    const uint8_t* src;
    uint8_t* dst;
    size_t nbytes;
    size_t range;
    uint32_t reg;
};

// The pieces of all ranges in order, and where each portion of about kPiece bytes begins among them: one
// portion is a piece of a large range, or many small ranges.
struct Plan {
    std::vector<Piece> pieces;
    std::vector<size_t> portions;
};

Plan make_plan(const std::vector<Range>& ranges) {
    Plan plan;
    plan.pieces.reserve(ranges.size());
    size_t filled = kPiece;
    for (size_t i = 0; i < ranges.size(); ++i)
        for (size_t done = 0; done < ranges[i].nbytes;) {
            if (filled >= kPiece) {
                plan.portions.push_back(plan.pieces.size());
                filled = 0;
            }
            const size_t nbytes = std::min(ranges[i].nbytes - done, kPiece);
            plan.pieces.push_back({ranges[i].src + done, ranges[i].dst + done, nbytes, i, 0});
            done += nbytes;
            filled += nbytes;
        }
    plan.portions.push_back(plan.pieces.size());
    return plan;
}

// Plain memcpy for what does not fill a block or a cache line of `dst`.
uint32_t copy_plain(uint8_t* dst, const uint8_t* src, size_t nbytes, const Kernel& kernel, bool with_crc, uint32_t reg) {
    std::memcpy(dst, src, nbytes);
    return with_crc ? kernel.crc(src, nbytes, reg) : 0;
}

void copy_piece(Piece& piece, const Kernel& kernel, bool with_crc) {
    const auto [src, dst, nbytes, range, zero] = piece;
    if (nbytes < kBlock + kLine) {
        piece.reg = copy_plain(dst, src, nbytes, kernel, with_crc, 0);
        return;
    }
    const size_t head = -reinterpret_cast<uintptr_t>(dst) % kLine;
    const size_t blocks = (nbytes - head) / kBlock;
    const size_t body = blocks * kBlock;
    uint32_t reg = copy_plain(dst, src, head, kernel, with_crc, 0);
    if (with_crc)
        reg = shift(reg, body) ^ kernel.copy_crc(dst + head, src + head, blocks);
    else
        kernel.copy(dst + head, src + head, blocks);
    const size_t done = head + body;
    piece.reg = copy_plain(dst + done, src + done, nbytes - done, kernel, with_crc, reg);
}

}  // namespace

std::vector<uint32_t> copy_ranges(const std::vector<Range>& ranges, int threads, const Kernel& kernel, bool with_crc) {
    Plan plan = make_plan(ranges);
    parallel_for(threads, plan.portions.size() - 1, [&](size_t portion) {
        for (size_t i = plan.portions[portion]; i < plan.portions[portion + 1]; ++i)
            copy_piece(plan.pieces[i], kernel, with_crc);
    });
    full_fence();
    if (!with_crc) return {};

    std::vector<uint32_t> crcs(ranges.size(), ~0u);
    for (const Piece& piece : plan.pieces) crcs[piece.range] = shift(crcs[piece.range], piece.nbytes) ^ piece.reg;
    for (uint32_t& crc : crcs) crc = ~crc;
    return crcs;
}

uint32_t crc32(const uint8_t* data, size_t nbytes, uint32_t crc, int threads) {
    const Kernel& kernel = kernels().front();
    std::vector<uint32_t> regs((nbytes + kPiece - 1) / kPiece);
    const auto length = [&](size_t i) { return std::min(kPiece, nbytes - i * kPiece); };
    parallel_for(threads, regs.size(), [&](size_t i) { regs[i] = kernel.crc(data + i * kPiece, length(i), 0); });
    uint32_t reg = ~crc;
    for (size_t i = 0; i < regs.size(); ++i) reg = shift(reg, length(i)) ^ regs[i];
    return ~reg;
}

}  // namespace ckpt

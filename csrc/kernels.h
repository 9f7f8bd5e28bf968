// Copy kernels: the same job for different CPUs, chosen at run time.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "crc32.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace ckpt {

constexpr size_t kPage = 4096;
constexpr size_t kBlock = 4 * kPage;  // kernels copy four pages at a time, interleaved
constexpr size_t kLine = 64;          // kernels store whole cache lines

// One CPU's way to copy. `copy` and `copy_crc` take whole blocks and a `dst` aligned to kLine, and end with a store
// fence; `copy_crc` returns the register of these bytes started from 0, `copy` nothing of meaning.
struct Kernel {
    const char* name;
    bool (*runs_here)();
    uint32_t (*copy)(uint8_t* dst, const uint8_t* src, size_t blocks);
    uint32_t (*copy_crc)(uint8_t* dst, const uint8_t* src, size_t blocks);
    uint32_t (*crc)(const uint8_t* data, size_t nbytes, uint32_t reg);
};

// Block by block, so that the CRC finds its bytes in the first-level cache.
template <uint32_t (*crc)(const uint8_t*, size_t, uint32_t), bool kWithCrc>
uint32_t copy_blocks(uint8_t* dst, const uint8_t* src, size_t blocks) {
    uint32_t reg = 0;
    for (; blocks != 0; --blocks, src += kBlock, dst += kBlock) {
        std::memcpy(dst, src, kBlock);
        if (kWithCrc) reg = crc(src, kBlock, reg);
    }
    return reg;
}

constexpr Kernel kPortable = {"portable", [] { return true; }, copy_blocks<crc_tables, false>,
                              copy_blocks<crc_tables, true>, crc_tables};
}  // namespace ckpt

#if defined(__x86_64__)
#include "kernels_x86.h"
#elif defined(__aarch64__) && defined(__linux__)
namespace ckpt {

inline uint32_t crc_arm(const uint8_t* data, size_t nbytes, uint32_t reg) {
    for (uint64_t word; nbytes >= sizeof word; nbytes -= sizeof word, data += sizeof word) {
        std::memcpy(&word, data, sizeof word);
        asm(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(reg) : "r"(word));
    }
    for (; nbytes != 0; --nbytes, ++data)
        asm(".arch_extension crc\n\tcrc32b %w0, %w0, %w1" : "+r"(reg) : "r"(uint32_t{*data}));
    return reg;
}

inline bool has_crc() { return (getauxval(AT_HWCAP) & 1 << 7) != 0; }  // HWCAP_CRC32

constexpr Kernel kCompiled[] = {
    {"arm-crc", has_crc, copy_blocks<crc_arm, false>, copy_blocks<crc_arm, true>, crc_arm}, kPortable};
}  // namespace ckpt

#else
namespace ckpt {
constexpr Kernel kCompiled[] = {kPortable};
}
#endif

namespace ckpt {

// The kernels this CPU can run, best first; never empty. Never destroyed: a thread may copy while the process ends.
inline const std::vector<Kernel>& kernels() {
    static const auto* const usable = [] {
        auto* found = new std::vector<Kernel>;
        for (const Kernel& kernel : kCompiled)
            if (kernel.runs_here()) found->push_back(kernel);
        return found;
    }();
    return *usable;
}

// The kernel of that name, the best one for "". Throws std::invalid_argument.
inline const Kernel& kernel_named(const std::string& name) {
    for (const Kernel& kernel : kernels())
        if (name.empty() || name == kernel.name) return kernel;
    throw std::invalid_argument("no copy kernel '" + name + "' for this CPU (see cpu_kernels())");
}
}  // namespace ckpt

// Copy kernel for aarch64 with the CRC32 instructions (ARMv8.1; optional in 8.0).

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)

#include <arm_acle.h>
#include <sys/auxv.h>

#include <cstring>

namespace ckpt {
namespace {

#if defined(__clang__)
#define TARGET_CRC __attribute__((target("crc")))
#else
#define TARGET_CRC __attribute__((target("+crc")))
#endif

bool has_crc() { return (getauxval(AT_HWCAP) & (1 << 7)) != 0; }  // HWCAP_CRC32

TARGET_CRC uint32_t crc_arm(const uint8_t* data, size_t nbytes, uint32_t reg) {
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        uint64_t word;
        std::memcpy(&word, data, sizeof word);
        reg = __crc32d(reg, word);
    }
    for (; nbytes != 0; --nbytes, ++data) reg = __crc32b(reg, *data);
    return reg;
}

void copy_arm(uint8_t* dst, const uint8_t* src, size_t blocks) { std::memcpy(dst, src, blocks * kBlock); }

uint32_t copy_crc_arm(uint8_t* dst, const uint8_t* src, size_t blocks) {
    uint32_t reg = 0;
    for (; blocks != 0; --blocks, src += kBlock, dst += kBlock) {
        std::memcpy(dst, src, kBlock);
        reg = crc_arm(src, kBlock, reg);
    }
    return reg;
}

}  // namespace

const Kernel kArmCrc = {"arm-crc", has_crc, copy_arm, copy_crc_arm, crc_arm};

}  // namespace ckpt

#endif

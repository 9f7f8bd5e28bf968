// Copy kernels: the same job for different CPUs, chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ckpt {

constexpr size_t kPage = 4096;
constexpr size_t kBlock = 4 * kPage;  // kernels copy four pages at a time, interleaved
constexpr size_t kLine = 64;          // kernels store whole cache lines

// One CPU's way to copy. `copy` and `copy_crc` take whole blocks and a `dst` aligned to kLine; `copy_crc`
// returns the register of these bytes started from 0. Both end with a store fence.
struct Kernel {
    const char* name;
    bool (*runs_here)();
    void (*copy)(uint8_t* dst, const uint8_t* src, size_t blocks);
    uint32_t (*copy_crc)(uint8_t* dst, const uint8_t* src, size_t blocks);
    uint32_t (*crc)(const uint8_t* data, size_t nbytes, uint32_t reg);
};

extern const Kernel kAvx512, kAvx2, kArmCrc, kPortable;

// The kernels this CPU can run, best first; never empty.
const std::vector<Kernel>& kernels();

// The kernel of that name, the best one for "". Throws std::invalid_argument.
const Kernel& kernel_named(const std::string& name);

}  // namespace ckpt

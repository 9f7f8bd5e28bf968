#include "kernels.h"

#include <cstring>
#include <stdexcept>

#include "crc32.h"

namespace ckpt {
namespace {

bool always() { return true; }

void copy_portable(uint8_t* dst, const uint8_t* src, size_t blocks) { std::memcpy(dst, src, blocks * kBlock); }

// Block by block, so that the CRC finds its bytes in the first-level cache.
uint32_t copy_crc_portable(uint8_t* dst, const uint8_t* src, size_t blocks) {
    uint32_t reg = 0;
    for (; blocks != 0; --blocks, src += kBlock, dst += kBlock) {
        std::memcpy(dst, src, kBlock);
        reg = crc_tables(src, kBlock, reg);
    }
    return reg;
}

}  // namespace

const Kernel kPortable = {"portable", always, copy_portable, copy_crc_portable, crc_tables};

namespace {
#if defined(__x86_64__)
const Kernel* const kCompiled[] = {&kAvx512, &kAvx2, &kPortable};
#elif defined(__aarch64__) && defined(__linux__)
const Kernel* const kCompiled[] = {&kArmCrc, &kPortable};
#else
const Kernel* const kCompiled[] = {&kPortable};
#endif
}  // namespace

const std::vector<Kernel>& kernels() {
    static const std::vector<Kernel> usable = [] {
        std::vector<Kernel> found;
        for (const Kernel* kernel : kCompiled)
            if (kernel->runs_here()) found.push_back(*kernel);
        return found;
    }();
    return usable;
}

const Kernel& kernel_named(const std::string& name) {
    for (const Kernel& kernel : kernels())
        if (name.empty() || name == kernel.name) return kernel;
    throw std::invalid_argument("no copy kernel '" + name + "' for this CPU (see cpu_kernels())");
}

}  // namespace ckpt

#include "writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "atomics.h"
#include "copy.h"
#include "crc32.h"
#include "pool.h"

namespace ckpt {
namespace {

constexpr size_t kSector = 4096;  // what O_DIRECT may ask of addresses, offsets and lengths, at most

// Repeats a call that a signal interrupted.
template <class Call>
auto retried(Call call) {
    for (;;) {
        const auto result = call();
        if (result >= 0 || errno != EINTR) return result;
    }
}

class File {
  public:
    File(const std::string& path, int flags, unsigned mode = 0)
        : fd_(retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC, mode); })) {
        if (fd_ < 0) throw SystemError("open", errno);
    }
    ~File() { ::close(fd_); }
    File(const File&) = delete;

    int fd() const { return fd_; }

    // Switches O_DIRECT; false if the file system has none. (Asking open() for it would leave a created file
    // behind where it is refused.)
    bool set_direct(bool on) {
#ifdef O_DIRECT
        const int flags = ::fcntl(fd_, F_GETFL);
        return flags >= 0 && ::fcntl(fd_, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
#else
        return !on;
#endif
    }

  private:
    const int fd_;
};

bool direct_io_refused(int code) { return code == EINVAL || code == EOPNOTSUPP; }

// Asks for write-back of a part now, so that the fsync at the end finds little to do.
void start_writeback([[maybe_unused]] int fd, [[maybe_unused]] size_t offset, [[maybe_unused]] size_t nbytes) {
#ifdef SYNC_FILE_RANGE_WRITE
    ::sync_file_range(fd, static_cast<off64_t>(offset), static_cast<off64_t>(nbytes), SYNC_FILE_RANGE_WRITE);
#endif
}

}  // namespace

bool write_file(const std::string& path, const uint8_t* data, size_t nbytes, const WriteOptions& options) {
    File file(path, O_WRONLY | O_CREAT | O_EXCL, options.mode);
    const bool aligned = reinterpret_cast<uintptr_t>(data) % kSector == 0;
    bool direct = options.direct && aligned && file.set_direct(true);
    bool padded = false;
    alignas(kSector) uint8_t last_sector[kSector];

    // One pwrite per turn. What O_DIRECT refuses, at the start (a file system without it) or after a short
    // write (an odd offset), goes on buffered.
    for (size_t done = 0; done < nbytes;) {
        const size_t left = nbytes - done;
        const uint8_t* from = data + done;
        size_t count = std::min(left, options.chunk_bytes);
        if (direct && left < kSector) {
            std::memset(last_sector, 0, kSector);
            std::memcpy(last_sector, from, left);
            from = last_sector;
            count = kSector;
            padded = true;
        } else if (direct) {
            count -= count % kSector;
        }
        const ssize_t written = ::pwrite(file.fd(), from, count, static_cast<off_t>(done));
        if (written < 0) {
            if (errno == EINTR) continue;
            if (!direct || !direct_io_refused(errno)) throw SystemError("write", errno);
            if (!file.set_direct(false)) throw SystemError("fcntl", errno);
            direct = false;
            continue;
        }
        if (written == 0) throw SystemError("write", EIO);  // a file system that neither writes nor says why
        const size_t moved = std::min(left, static_cast<size_t>(written));
        if (!direct) start_writeback(file.fd(), done, moved);
        if (options.progress != nullptr) add(options.progress, moved);
        done += moved;
    }
    if (padded && retried([&] { return ::ftruncate(file.fd(), static_cast<off_t>(nbytes)); }) != 0)
        throw SystemError("ftruncate", errno);
    if (retried([&] { return ::fsync(file.fd()); }) != 0) throw SystemError("fsync", errno);
    return direct;
}

uint32_t read_file(const std::string& path, uint8_t* dst, size_t nbytes, int threads) {
    constexpr size_t kStep = 256 << 10;  // read, then checksummed while still in the cache
    const Kernel& kernel = kernels().front();
    File file(path, O_RDONLY | O_NONBLOCK);  // a fifo of that name is refused by pread instead of waited for
    std::vector<uint32_t> regs((nbytes + kPiece - 1) / kPiece);
    std::atomic<int> failure{0};
    std::atomic<bool> ended{false};

    parallel_for(threads, regs.size(), [&](size_t piece) {
        const size_t end = std::min(nbytes, (piece + 1) * kPiece);
        for (size_t at = piece * kPiece; at < end && failure == 0 && !ended;) {
            const ssize_t got = retried(
                [&] { return ::pread(file.fd(), dst + at, std::min(kStep, end - at), static_cast<off_t>(at)); });
            if (got < 0) {
                failure = errno;
            } else if (got == 0) {
                ended = true;
            } else {
                regs[piece] = kernel.crc(dst + at, static_cast<size_t>(got), regs[piece]);
                at += static_cast<size_t>(got);
            }
        }
    });
    if (failure != 0) throw SystemError("read", failure);
    if (ended) throw ShortFile(path + " holds fewer than " + std::to_string(nbytes) + " bytes");

    uint32_t reg = ~0u;
    for (size_t i = 0; i < regs.size(); ++i) reg = shift(reg, std::min(kPiece, nbytes - i * kPiece)) ^ regs[i];
    return ~reg;
}

}  // namespace ckpt

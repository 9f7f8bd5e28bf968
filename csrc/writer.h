// Whole files from memory and to memory.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

#include "copy.h"

#if !defined(O_DIRECT)
#define O_DIRECT 0  // not Linux: the flag that does nothing
#endif

namespace ckpt {

struct WriteOptions {
    bool direct;
    size_t chunk_bytes;  // a multiple of kSector
    unsigned mode;
    uint64_t* progress;  // bytes written are added to it; may be null
};

constexpr size_t kSector = 4096;  // the most that O_DIRECT asks of addresses, offsets and lengths

// The result of a system call, repeated when a signal interrupts it.
template <class Call>
ssize_t retried(Call call) {
    for (;;)
        if (const ssize_t result = call(); result >= 0 || errno != EINTR) return result;
}

class File {
  public:
    File(const std::string& path, int flags, unsigned mode = 0)
        : path_(path), fd_(static_cast<int>(retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC, mode); }))) {
        check(fd_);
    }
    ~File() { ::close(fd_); }
    File(const File&) = delete;

    operator int() const { return fd_; }

    [[noreturn]] void fail(int code) const {
        throw std::filesystem::filesystem_error("", path_, std::error_code(code, std::generic_category()));
    }

    void check(ssize_t result) const {
        if (result < 0) fail(errno);
    }

    // Switches O_DIRECT; false if the file system has none. (Where open() is asked for it and refuses, the file may
    // have been created all the same.)
    bool set_direct(bool on) const {
        const int flags = ::fcntl(fd_, F_GETFL);
        return flags >= 0 && ::fcntl(fd_, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
    }

  private:
    const std::string& path_;
    const int fd_;
};

// Creates `path`, which must not exist, with these bytes and syncs it; returns whether O_DIRECT carried them all.
// Throws filesystem_error and then leaves the file for the caller to unlink. After a crash: it holds any prefix.
inline bool write_file(const std::string& path, const uint8_t* data, size_t nbytes, const WriteOptions& options) {
    const File file(path, O_WRONLY | O_CREAT | O_EXCL, options.mode);
    const bool aligned = reinterpret_cast<uintptr_t>(data) % kSector == 0;
    bool direct = options.direct && aligned && file.set_direct(true);
    alignas(kSector) uint8_t last_sector[kSector] = {};

    for (size_t done = 0; done < nbytes;) {
        const size_t left = nbytes - done;
        const uint8_t* from = data + done;
        size_t count = std::min(left, options.chunk_bytes);
        if (direct && left < kSector) {
            std::memcpy(last_sector, from, left);
            from = last_sector;
            count = kSector;
        } else if (direct) {
            count -= count % kSector;
        }
        const ssize_t written = retried([&] { return ::pwrite(file, from, count, done); });
        if (written < 0 && direct && (errno == EINVAL || errno == EOPNOTSUPP)) {
            // The file system refuses what it let us ask for, or the offset is odd after a short write: go on buffered.
            direct = false;
            if (file.set_direct(false)) continue;
        }
        file.check(written);
        if (written == 0) file.fail(EIO);  // nothing written and no reason given
        const size_t step = std::min<size_t>(left, written);
#if defined(__linux__)
        if (!direct) ::sync_file_range(file, done, step, SYNC_FILE_RANGE_WRITE);  // so that fsync finds little to do
#endif
        if (options.progress != nullptr) add(options.progress, step);
        done += step;
    }
    if (nbytes % kSector != 0) file.check(retried([&] { return ::ftruncate(file, nbytes); }));
    file.check(retried([&] { return ::fsync(file); }));
    return direct;
}

// Reads the first `nbytes` of `path`; returns their CRC, or nothing if there are fewer. Throws filesystem_error.
inline std::optional<uint32_t> read_file(const std::string& path, uint8_t* dst, size_t nbytes, int threads) {
    constexpr size_t kStep = 256 << 10;  // checksummed while still in the cache
    const Kernel& kernel = kernels().front();
    const File file(path, O_RDONLY | O_NONBLOCK);  // a fifo of that name is refused by pread, not waited for
    std::atomic<int> failure{0};
    std::atomic<bool> ended{false};

    const uint32_t crc = crc_by_pieces(nbytes, 0, threads, [&](size_t begin, size_t end) {
        uint32_t reg = ~0u;
        while (begin < end && failure == 0 && !ended) {
            const size_t count = std::min(kStep, end - begin);
            const ssize_t got = retried([&] { return ::pread(file, dst + begin, count, begin); });
            if (got < 0) failure = errno;
            if (got == 0) ended = true;
            if (got <= 0) break;
            reg = kernel.crc(dst + begin, got, reg);
            begin += got;
        }
        return ~reg;
    });
    if (failure != 0) file.fail(failure);
    if (ended) return std::nullopt;
    return crc;
}
}  // namespace ckpt

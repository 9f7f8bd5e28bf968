// Whole files from memory and to memory.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <thread>

#include "copy.h"

#if !defined(O_DIRECT)
#define O_DIRECT 0  // not Linux: the flag that does nothing
#endif

namespace ckpt {

struct WriteOptions {
    bool direct;
    size_t chunk_bytes;  // a multiple of kSector
    int threads;         // chunks in flight
    unsigned mode;
    uint64_t* progress;  // bytes written are added to it; may be null
    const uint64_t* limit;  // bytes per second, 0 = as fast as it goes; read again and again; may be null
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

// Reserves the blocks of a file, so that chunks in flight do not wait for each other to make it longer, and a full disk
// is told before the first byte. Where the file system cannot, nothing happens.
inline void reserve(const File& file, size_t nbytes) {
#if defined(__linux__)
    if (retried([&] { return ::fallocate(file, 0, 0, nbytes); }) < 0 && (errno == ENOSPC || errno == EDQUOT))
        file.fail(errno);
#endif
}

// One file on its way to the disk, in chunks that several threads write at once.
class Writing {
  public:
    Writing(const File& file, const uint8_t* data, size_t nbytes, const WriteOptions& options)
        : file_(file), data_(data), nbytes_(nbytes), options_(options) {
        const bool aligned = reinterpret_cast<uintptr_t>(data) % kSector == 0;
        direct_ = options.direct && aligned && file.set_direct(true);
    }

    size_t chunks() const { return (nbytes_ + options_.chunk_bytes - 1) / options_.chunk_bytes; }
    bool direct() const { return direct_; }
    int failure() const { return failure_; }

    // Writes chunk `i`; after a failure of any chunk it does nothing.
    void write(size_t i) {
        const size_t end = std::min(nbytes_, (i + 1) * options_.chunk_bytes);
        for (size_t done = i * options_.chunk_bytes; done < end && failure_ == 0;) {
            const ssize_t written = put(done, end - done);
            if (written <= 0) {
                failure_ = written < 0 ? errno : EIO;  // nothing written and no reason given
                return;
            }
            const size_t step = std::min<size_t>(end - done, written);
#if defined(__linux__)
            if (!direct_) ::sync_file_range(file_, done, step, SYNC_FILE_RANGE_WRITE);  // so that fsync finds little to do
#endif
            if (options_.progress != nullptr) add(options_.progress, step);
            done += step;
        }
        keep_pace(done_ += end - i * options_.chunk_bytes);
    }

  private:
    // Sleeps until `done` bytes are not more than the limit allows since the beginning.
    void keep_pace(size_t done) const {
        while (const uint64_t limit = options_.limit == nullptr ? 0 : load(options_.limit)) {
            const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
            const double early = static_cast<double>(done) / static_cast<double>(limit) - passed.count();
            if (early <= 0) return;
            std::this_thread::sleep_for(std::chrono::duration<double>(std::min(early, 0.1)));
        }
    }

    ssize_t put(size_t begin, size_t count) {
        const bool direct = direct_;
        const uint8_t* from = data_ + begin;
        alignas(kSector) uint8_t last_sector[kSector] = {};
        if (direct && count < kSector) {
            std::memcpy(last_sector, from, count);
            from = last_sector;
            count = kSector;
        } else if (direct) {
            count -= count % kSector;
        }
        const ssize_t written = retried([&] { return ::pwrite(file_, from, count, begin); });
        if (written >= 0 || !direct || (errno != EINVAL && errno != EOPNOTSUPP)) return written;
        // The file system refuses what it let us ask for, or the offset is odd after a short write: go on buffered.
        direct_ = false;
        return file_.set_direct(false) ? put(begin, count) : -1;
    }

    const File& file_;
    const uint8_t* const data_;
    const size_t nbytes_;
    const WriteOptions& options_;
    std::atomic<bool> direct_;
    std::atomic<int> failure_{0};
    std::atomic<size_t> done_{0};
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Creates `path`, which must not exist, with these bytes and syncs it; returns whether O_DIRECT carried them all.
// Throws filesystem_error and then leaves the file for the caller to unlink. After a crash: it holds anything.
inline bool write_file(const std::string& path, const uint8_t* data, size_t nbytes, const WriteOptions& options) {
    const File file(path, O_WRONLY | O_CREAT | O_EXCL, options.mode);
    Writing writing(file, data, nbytes, options);
    const size_t chunks = writing.chunks();
    if (chunks > 1) reserve(file, nbytes);
    parallel_for(options.threads, chunks, [&](size_t i) { writing.write(i); });
    if (writing.failure() != 0) file.fail(writing.failure());
    if (nbytes % kSector != 0) file.check(retried([&] { return ::ftruncate(file, nbytes); }));
    file.check(retried([&] { return ::fsync(file); }));
    return writing.direct();
}

// One file on its way into memory. What the page cache holds is taken from there; the rest goes past it where it can.
class Reading {
  public:
    Reading(const std::string& path, uint8_t* dst) : path_(path), dst_(dst), file_(path_, kFlags) {
        if (reinterpret_cast<uintptr_t>(dst) % kSector == 0 && O_DIRECT != 0) {
            try {
                direct_.emplace(path_, kFlags | O_DIRECT);
                go_direct_ = true;
            } catch (const std::filesystem::filesystem_error&) {
                // The file system has no such thing.
            }
        }
    }

    // Reads up to `count` bytes at `begin`: their number, 0 at the end of the file, or -1 and errno.
    ssize_t read(size_t begin, size_t count) {
        constexpr size_t kStep = 256 << 10;  // checksummed while still in the cache
        uint8_t* const to = dst_ + begin;
        if (!go_direct_ || begin % kSector != 0 || count < kSector) return pread(file_, to, std::min(kStep, count), begin);
#if defined(__linux__)
        const iovec target{to, std::min(kStep, count)};
        if (const ssize_t got = ::preadv2(file_, &target, 1, begin, RWF_NOWAIT); got > 0) return got;
#endif
        const ssize_t got = pread(*direct_, to, count - count % kSector, begin);
        if (got >= 0 || (errno != EINVAL && errno != EOPNOTSUPP)) return got;
        go_direct_ = false;  // it let us open the file, but not read it
        return pread(file_, to, std::min(kStep, count), begin);
    }

    [[noreturn]] void fail(int code) const { file_.fail(code); }

  private:
    static constexpr int kFlags = O_RDONLY | O_NONBLOCK;  // a fifo of that name is refused by pread, not waited for

    static ssize_t pread(int fd, void* to, size_t count, size_t begin) {
        return retried([&] { return ::pread(fd, to, count, begin); });
    }

    const std::string path_;
    uint8_t* const dst_;
    const File file_;
    std::optional<File> direct_;
    std::atomic<bool> go_direct_{false};
};

// Reads the first `nbytes` of `path`; returns their CRC, or nothing if there are fewer. Throws filesystem_error.
inline std::optional<uint32_t> read_file(const std::string& path, uint8_t* dst, size_t nbytes, int threads) {
    const Kernel& kernel = kernels().front();
    Reading reading(path, dst);
    std::atomic<int> failure{0};
    std::atomic<bool> ended{false};

    const uint32_t crc = crc_by_pieces(nbytes, 0, threads, [&](size_t begin, size_t end) {
        uint32_t reg = ~0u;
        touch(dst + begin, dst + end);
        while (begin < end && failure == 0 && !ended) {
            const ssize_t got = reading.read(begin, end - begin);
            if (got < 0) failure = errno;
            if (got == 0) ended = true;
            if (got <= 0) break;
            reg = kernel.crc(dst + begin, got, reg);
            begin += got;
        }
        return ~reg;
    });
    if (failure != 0) reading.fail(failure);
    if (ended) return std::nullopt;
    return crc;
}
}  // namespace ckpt

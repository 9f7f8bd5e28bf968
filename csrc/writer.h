// Whole files to and from memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ckpt {

// A system call failed; the binding turns it into OSError.
struct SystemError : std::runtime_error {
    SystemError(const char* call, int code) : std::runtime_error(call), code(code) {}
    int code;  // errno
};

// The file ended before its time; the binding turns it into EOFError.
struct ShortFile : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct WriteOptions {
    bool direct = true;
    size_t chunk_bytes = 8 << 20;  // a multiple of 4096
    unsigned mode = 0666;
    uint64_t* progress = nullptr;  // bytes written are added to it
};

// Creates `path`, which must not exist, with these bytes and syncs it. Returns whether O_DIRECT carried all of
// them. Throws SystemError and then leaves the file for the caller to unlink.
// After a crash: the file holds any prefix, possibly none.
bool write_file(const std::string& path, const uint8_t* data, size_t nbytes, const WriteOptions& options);

// Reads the first `nbytes` of `path`; returns their CRC. Throws SystemError, ShortFile.
uint32_t read_file(const std::string& path, uint8_t* dst, size_t nbytes, int threads);

}  // namespace ckpt

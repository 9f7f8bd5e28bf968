// Where a path leads.
#pragma once

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <string>

namespace ckpt {

// True if the path exists and no part of it is a symbolic link, in one system call: openat2 of Linux 5.6. False for all
// else, a kernel or a filter that does not let us ask included.
inline bool is_free_of_links(const std::string& path) {
    struct {
        uint64_t flags, mode, resolve;
    } how{O_PATH | O_CLOEXEC, 0, 0x04 /* RESOLVE_NO_SYMLINKS, which older headers lack */};
#ifdef SYS_openat2
    constexpr long kOpenat2 = SYS_openat2;
#else
    constexpr long kOpenat2 = 437;  // on every architecture
#endif
    const long fd = syscall(kOpenat2, AT_FDCWD, path.c_str(), &how, sizeof how);
    if (fd >= 0) close(static_cast<int>(fd));
    return fd >= 0;
}
}  // namespace ckpt

// A small pool of threads that lives as long as the process.
#pragma once

#include <cstddef>
#include <functional>

namespace ckpt {

constexpr int kMaxThreads = 64;

// Calls task(0) … task(count - 1), each once, on this thread and up to `threads - 1` helpers; returns when
// all have returned. `task` must not throw. Any number of threads may call this at the same time: a caller
// never waits for a helper that has not started, it does the work itself. Works in a forked child.
void parallel_for(int threads, size_t count, const std::function<void(size_t)>& task);

// Runs `body` in a detached thread that receives no signals (they are Python's). Throws std::system_error.
void start_thread(std::function<void()> body);

}  // namespace ckpt

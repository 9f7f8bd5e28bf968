// Touching the pages of a mapping in the background, so that the first fill costs no page faults.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <future>
#include <memory>

#include "arguments.h"
#include "copy.h"

namespace ckpt {

// Touches pages in a thread of its own, from construction until done or told to stop, and keeps the buffer exported
// until then. Bytes never change by it, also while others write them. Failures end it quietly.
class Populate {
  public:
    Populate(py::handle buffer, py::handle offset, py::handle nbytes)
        : buffer_(buffer, Buffer::kWrite) {
        const Window window(buffer_, offset, nbytes, -1);
        try {
            start_thread([window, progress = progress_] { run(window.data, window.nbytes, *progress); });
        } catch (const std::system_error&) {
            progress_->end.set_value();  // no thread to be had
        }
    }

    ~Populate() { stop(); }

    void stop() {
        progress_->stopped = true;
        while (!ended_within(1)) continue;
        buffer_.release();
    }

    // Waits in slices, so that a signal handler that raises (Ctrl-C) is heard.
    bool wait(double timeout_s) {
        if (!(timeout_s >= 0)) throw py::value_error("timeout_s must be 0 or more");
        const auto start = std::chrono::steady_clock::now();
        for (;;) {
            const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
            if (ended_within(std::clamp(timeout_s - waited.count(), 0.0, 0.5))) return true;
            if (waited.count() >= timeout_s) return false;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
    }

    size_t done_bytes() const { return progress_->done_bytes; }

  private:
    // Shared with the thread: neither has to outlive the other.
    struct Progress {
        std::atomic<bool> stopped{false};
        std::atomic<size_t> done_bytes{0};
        std::promise<void> end;
    };

    static void run(uint8_t* data, size_t nbytes, Progress& progress) {
        constexpr size_t kStep = 16 << 20;
        for (size_t done = 0; done < nbytes && !progress.stopped; progress.done_bytes = done) {
            const size_t step = std::min(kStep, nbytes - done);
            if (!touch(data + done, step)) break;
            done += step;
        }
        progress.end.set_value();
    }

    // False when the memory cannot be had.
    static bool touch(uint8_t* data, size_t nbytes) {
        const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
        const auto into_page = [page](uint8_t* byte) { return reinterpret_cast<uintptr_t>(byte) % page; };
        if (::madvise(data - into_page(data), into_page(data) + nbytes, kPopulateWrite) == 0) return true;
        if (errno != EINVAL) return false;
        for (uint8_t* byte = data; byte < data + nbytes; byte += page - into_page(byte)) {
            uint8_t value = __atomic_load_n(byte, __ATOMIC_RELAXED);  // written back only if nobody changed it
            __atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        }
        return true;
    }

    bool ended_within(double seconds) {
        if (owner_ != ::getpid()) return true;  // a forked child: the thread stayed with the parent
        const auto status = without_gil([&] { return ended_.wait_for(std::chrono::duration<double>(seconds)); });
        return status == std::future_status::ready;
    }

    Buffer buffer_;
    const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
    const std::future<void> ended_ = progress_->end.get_future();
    const pid_t owner_ = ::getpid();
};
}  // namespace ckpt

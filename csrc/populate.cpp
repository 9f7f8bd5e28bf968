#include "populate.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <system_error>

#include "pool.h"

namespace ckpt {
namespace {

constexpr size_t kStride = 16 << 20;

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; older kernels answer EINVAL
#endif

// A write that leaves every byte as it is, whatever others do to it meanwhile.
void touch_each_page(uint8_t* data, size_t nbytes, size_t page) {
    for (uint8_t* byte = data; byte < data + nbytes;) {
        uint8_t value = __atomic_load_n(byte, __ATOMIC_RELAXED);
        __atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        byte += page - reinterpret_cast<uintptr_t>(byte) % page;
    }
}

// False when the memory cannot be had.
bool populate(uint8_t* data, size_t nbytes) {
    static const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t before = reinterpret_cast<uintptr_t>(data) % page;
    while (::madvise(data - before, before + nbytes, kPopulateWrite) != 0) {
        if (errno == EINVAL) {
            touch_each_page(data, nbytes, page);
            return true;
        }
        if (errno != EINTR && errno != EAGAIN) return false;
    }
    return true;
}

}  // namespace

// Shared by the thread and its owner, so that neither has to outlive the other.
class PopulateState {
  public:
    void run(uint8_t* data, size_t nbytes) {
        for (size_t done = 0; done < nbytes && !stop_; done = done_bytes_) {
            const size_t step = std::min(kStride, nbytes - done);
            if (!populate(data + done, step)) break;
            done_bytes_ = done + step;
        }
        end();
    }

    void end() {
        const std::lock_guard lock(mutex_);
        ended_ = true;
        changed_.notify_all();
    }

    bool wait_for(double seconds) {
        if (owner_ != ::getpid()) return true;  // a forked child: the thread stayed with the parent
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return ended_; });
    }

    std::atomic<bool> stop_{false};
    std::atomic<size_t> done_bytes_{0};

  private:
    const pid_t owner_ = ::getpid();
    std::mutex mutex_;
    std::condition_variable changed_;
    bool ended_ = false;
};

Populate::Populate(uint8_t* data, size_t nbytes) : state_(std::make_shared<PopulateState>()) {
    try {
        start_thread([state = state_, data, nbytes] { state->run(data, nbytes); });
    } catch (const std::system_error&) {
        state_->end();  // no thread to be had: an optimisation less
    }
}

void Populate::stop() {
    state_->stop_ = true;
    while (!state_->wait_for(3600)) continue;
}

bool Populate::wait_for(double seconds) { return state_->wait_for(seconds); }

size_t Populate::done_bytes() const { return state_->done_bytes_; }

}  // namespace ckpt

#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace ckpt {
namespace {

struct Job {
    const std::function<void(size_t)>& task;
    const size_t count;
    int helpers_wanted;  // guarded by the pool's mutex, as is `helpers_running`
    int helpers_running = 0;
    std::atomic<size_t> next{0};

    void work() {
        for (size_t i; (i = next.fetch_add(1)) < count;) task(i);
    }
};

class Pool {
  public:
    void run(Job& job) {
        std::unique_lock lock(mutex_);
        hire(job.helpers_wanted);
        jobs_.push_back(&job);
        lock.unlock();
        work_waits_.notify_all();

        job.work();

        lock.lock();
        const auto place = std::find(jobs_.begin(), jobs_.end(), &job);
        if (place != jobs_.end()) jobs_.erase(place);  // helpers that come now would come too late
        helper_done_.wait(lock, [&] { return job.helpers_running == 0; });
    }

  private:
    void hire(int helpers) {
        try {
            for (; hired_ < helpers; ++hired_) start_thread([this] { serve(); });
        } catch (const std::system_error&) {
            // No more threads to be had: those that exist, and the caller, do the work.
        }
    }

    [[noreturn]] void serve() {
        std::unique_lock lock(mutex_);
        for (;;) {
            work_waits_.wait(lock, [&] { return !jobs_.empty(); });
            Job& job = *jobs_.front();
            ++job.helpers_running;
            if (--job.helpers_wanted == 0) jobs_.pop_front();
            lock.unlock();
            job.work();
            lock.lock();
            if (--job.helpers_running == 0) helper_done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable work_waits_, helper_done_;
    std::deque<Job*> jobs_;
    int hired_ = 0;
};

// Never destroyed: idle helpers wait in it until the process ends. A forked child has none of the threads
// and perhaps a locked mutex, so it forgets its parent's pool and makes its own when it needs one.
std::atomic<Pool*> the_pool{nullptr};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });

Pool& pool() {
    Pool* current = the_pool.load();
    if (current == nullptr) {
        Pool* fresh = new Pool;
        if (the_pool.compare_exchange_strong(current, fresh)) return *fresh;
        delete fresh;  // another thread was faster
    }
    return *current;
}

}  // namespace

void parallel_for(int threads, size_t count, const std::function<void(size_t)>& task) {
    Job job{task, count, static_cast<int>(std::min<size_t>(threads, count)) - 1};
    if (job.helpers_wanted > 0)
        pool().run(job);
    else
        job.work();
}

void start_thread(std::function<void()> body) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        std::thread(std::move(body)).detach();
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace ckpt

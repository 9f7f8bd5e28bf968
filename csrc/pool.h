// A small pool of threads that lives as long as the process.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace ckpt {

constexpr int kMaxThreads = 64;

// Runs `body` in a detached thread that receives no signals (they are Python's). Throws std::system_error.
inline void start_thread(std::function<void()> body) {
    std::thread([body = std::move(body)] {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, nullptr);
        body();
    }).detach();
}

class Pool {
  public:
    struct Job {
        const std::function<void(size_t)> task;
        const size_t count;
        int helpers_wanted;  // this and the next under the pool's mutex
        int helpers_running = 0;
        std::atomic<size_t> next{0};

        void work() {
            for (size_t i; (i = next.fetch_add(1)) < count;) task(i);
        }
    };

    // The pool of this process. It is never destroyed, since idle helpers wait in it until the process ends.
    static Pool& instance() {
        static std::atomic<Pool*> current;
        // A forked child has none of the threads and perhaps a locked mutex: it makes its own pool.
        [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
        if (Pool* pool = current) return *pool;
        Pool *none = nullptr, *fresh = new Pool;
        if (current.compare_exchange_strong(none, fresh)) return *fresh;
        delete fresh;  // another thread was faster
        return *none;
    }

    void run(Job& job) {
        std::unique_lock lock(mutex_);
        try {
            for (; hired_ < job.helpers_wanted; ++hired_) start_thread([this] { serve(); });
        } catch (const std::system_error&) {
            // The limit of threads is reached: those that exist, and this one, do the work.
        }
        jobs_.push_back(&job);
        lock.unlock();
        job_came_.notify_all();
        job.work();
        lock.lock();
        jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());  // who comes now comes too late
        helper_left_.wait(lock, [&] { return job.helpers_running == 0; });
    }

  private:
    void serve() {
        for (std::unique_lock lock(mutex_);;) {
            job_came_.wait(lock, [&] { return !jobs_.empty(); });
            Job& job = *jobs_.front();
            ++job.helpers_running;
            if (--job.helpers_wanted == 0) jobs_.pop_front();
            lock.unlock();
            job.work();
            lock.lock();
            if (--job.helpers_running == 0) helper_left_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable job_came_, helper_left_;
    std::deque<Job*> jobs_;
    int hired_ = 0;
};

// Calls task(0) … task(count - 1), each once, on this thread and up to `threads - 1` helpers; returns when all have
// returned. Any number of threads may call it at the same time, also in a forked child: a caller does not wait for
// helpers that are busy or cannot be had, it does the work itself. REQUIRES: `task` does not throw.
template <class Task>
void parallel_for(int threads, size_t count, const Task& task) {
    Pool::Job job{std::cref(task), count, static_cast<int>(std::min<size_t>(threads, count)) - 1};
    job.helpers_wanted > 0 ? Pool::instance().run(job) : job.work();
}
}  // namespace ckpt

#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headway {
namespace {

// About 20 microseconds: longer than the gap between two tasks of a step, shorter than anybody minds.
constexpr int SPINS = 2000;
// A worker that lost its core in the middle of a part holds the step up: then the waiting one gives its own core back.
constexpr int WAIT_SPINS = 20000;

constexpr int PART_BITS = 24;  // the rest counts tasks; that it wraps only costs a worker a task that it slept through
constexpr uint64_t PART_MASK = (1u << PART_BITS) - 1, NEXT_TASK = 1ull << 2 * PART_BITS;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

#if defined(__linux__)
// A worker keeps to the core of its number, where there is one for each thread: it finds its caches as it left them. The
// thread that calls run() goes where the system puts it, which is where no worker is. Fewer threads than cores share the
// machine with others, which would keep to the same cores.
void pin(int number, int threads) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) != threads) return;
    int left = number;
    for (int core = 0; core < CPU_SETSIZE; core++) {
        if (!CPU_ISSET(core, &allowed) || left-- > 0) continue;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        return;
    }
}
#endif

std::atomic<unsigned> forks{0};

unsigned generation() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)registered;
    return forks.load(std::memory_order_relaxed);
}

}  // namespace

Pool::Pool(int threads) : generation_(generation()) {
    try {
        for (int number = 1; number < threads; number++) workers_.emplace_back([=] { work(number, threads); });
    } catch (...) {
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
        ticket_.fetch_add(NEXT_TASK);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

bool Pool::forked() const { return generation_ != forks.load(std::memory_order_relaxed); }

void Pool::run(int parts, const std::function<void(int, int)>& task) {
    if (parts > MOST_PARTS) throw std::length_error("a step of more parts than the thread pool counts");
    if (workers_.empty() || parts <= 1 || forked()) {
        for (int part = 0; part < parts; part++) task(part, 0);
        return;
    }
    task_ = &task;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t number = ticket_.load(std::memory_order_relaxed) / NEXT_TASK + 1;
    ticket_.store(number * NEXT_TASK | (uint64_t)parts << PART_BITS, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        // The lock orders this with a worker that is about to sleep: it looks at the ticket under it.
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    take(0);
    for (int spins = 0; done_.load(std::memory_order_acquire) < parts; spins++) {
        if (spins < WAIT_SPINS)
            pause();
        else
            std::this_thread::yield();
    }
}

void Pool::take(int number) {
    for (;;) {
        const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
        const uint64_t part = ticket & PART_MASK, parts = ticket >> PART_BITS & PART_MASK;
        if (part >= parts) return;
        // Whoever holds a part keeps the task alive: run() does not return before it is done.
        (*task_)((int)part, number);
        done_.fetch_add(1, std::memory_order_release);
    }
}

void Pool::work(int number, int threads) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "kernels");
    pin(number, threads);
#endif
    uint64_t seen = 0;
    auto same = [&](std::memory_order order) { return ticket_.load(order) / NEXT_TASK == seen; };
    for (;;) {
        int spins = 0;
        while (same(std::memory_order_acquire) && ++spins < SPINS) pause();
        if (same(std::memory_order_acquire)) {
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return !same(std::memory_order_seq_cst); });
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
        if (stop_.load()) return;
        seen = ticket_.load(std::memory_order_acquire) / NEXT_TASK;
        take(number);
    }
}

}  // namespace headway

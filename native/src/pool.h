// Threads that run one task at a time: they spin briefly between tasks, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headway {

class Pool {
  public:
    static constexpr int MOST_PARTS = (1 << 24) - 4096;  // late threads each count one past the last part

    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return (int)workers_.size() + 1; }

    // Whether this process is a fork of the one that started the threads: here there are none. run() then does all
    // parts itself, and the pool must be leaked rather than destroyed, as its condition variable waits for the lost.
    bool forked() const;

    // Call task(part, worker) once for each part 0..parts-1, in any order; returns when all are done. Parts are taken
    // in turn, so a core that is half lost costs its share and not the whole step. Tasks must not throw.
    void run(int parts, const std::function<void(int, int)>& task);

  private:
    void work(int number, int threads);
    void take(int number);
    void stop();

    std::vector<std::thread> workers_;
    const std::function<void(int, int)>* task_ = nullptr;
    // The task's number, how many parts it has, and the next part: in one word, so that a worker that comes late takes
    // a part of the present task or none, and nobody has to wait for a worker that has taken nothing.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    const unsigned generation_;
};

}  // namespace headway

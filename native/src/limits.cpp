// What the machine can do at most, measured on the threads that run the steps.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "program.h"

namespace headway {
namespace {

constexpr int64_t READ_FLOATS = 64 << 20;  // 256 MB: more than any cache
constexpr int READ_PARTS = 256;
constexpr int64_t ROUNDS = 1 << 18;        // some milliseconds
constexpr int PRODUCT_PARTS = 16;          // a thread

double seconds_since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

double Program::read_rate() {
    float* memory = (float*)map(READ_FLOATS * (int64_t)sizeof(float));  // as weights lie
    const int64_t each = READ_FLOATS / READ_PARTS;
    pool_->run(READ_PARTS, [&](int part, int) { std::fill_n(memory + part * each, each, 1.0f); });
    std::vector<float> sums(READ_PARTS);
    const auto began = std::chrono::steady_clock::now();
    pool_->run(READ_PARTS, [&](int part, int) { sums[part] = kernels_.read(memory + part * each, each); });
    const double seconds = seconds_since(began);
    maps_.pop_back();
    return (double)READ_FLOATS * sizeof(float) / seconds;
}

double Program::product_rate() {
    const int parts = PRODUCT_PARTS * pool_->threads();
    std::atomic<int64_t> done{0};
    const auto began = std::chrono::steady_clock::now();
    pool_->run(parts, [&](int, int) { done += kernels_.products(ROUNDS / PRODUCT_PARTS); });
    return (double)done.load() / seconds_since(began);
}

}  // namespace headway

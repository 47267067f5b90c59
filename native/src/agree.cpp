// Whether kernels on special units of the processor give the bits that they must: asked once, before they are offered.
#include <cstring>
#include <vector>

#include "program.h"

namespace headway {
namespace {

struct Noise {  // a linear congruential generator: the same everywhere
    uint32_t state = 1;
    uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }
    float signed_unit() { return (float)(int32_t)(next() & 0xffff) / 32768.0f - 1.0f; }
};

constexpr int ROWS = 20, K = 256, N = 32;

bool products_agree(const Kernels& one, const Kernels& other, Kind kind, int group, bool minimum) {
    Noise noise;
    Weight w{};
    w.kind = kind, w.n = N, w.k = K, w.group = group, w.has_min = minimum, w.zero = minimum ? 0 : 8, w.rescale = 1;
    w.strip_bytes = w.group_bytes() * (K / group);
    std::vector<uint8_t> data((size_t)(w.strip_bytes * w.strips()));
    for (uint8_t& byte : data) byte = (uint8_t)noise.next();
    const int64_t codes = (int64_t)group * STRIP / (kind == Kind::q4 ? 2 : 1);
    for (int64_t at = codes; at < (int64_t)data.size(); at += w.group_bytes())
        for (int64_t i = 0; i < w.group_bytes() - codes; i += 2) data[at + i + 1] = (uint8_t)((data[at + i + 1] & 0x83) | 0x30);  // near 1/4
    w.data = data.data();
    std::vector<float> x((size_t)ROWS * K), out[2];
    for (float& value : x) value = noise.signed_unit();
    const Kernels* both[2] = {&one, &other};
    for (int which = 0; which < 2; which++) {
        const int rows = ROWS + SPARE_ROWS, groups = K / group;
        std::vector<int8_t> a((size_t)rows * K);
        std::vector<float> scales((size_t)rows * groups), weighted(scales.size());
        std::vector<int32_t> zeros(scales.size());
        const Quantized q{a.data(), scales.data(), zeros.data(), weighted.data()};
        for (int row = 0; row < ROWS; row++) both[which]->quantize(x.data() + (size_t)row * K, w, q, row);
        out[which].resize((size_t)ROWS * N);
        both[which]->linear_quantized(w, 0, w.strips(), q, ROWS, out[which].data(), N, {nullptr, nullptr, 0});
    }
    return std::memcmp(out[0].data(), out[1].data(), sizeof(float) * out[0].size()) == 0;
}

bool pairs_agree(const Kernels& kernels) {
    Noise noise;
    Weight w{};
    w.kind = Kind::pairs, w.n = N, w.k = K, w.rescale = 1, w.strip_bytes = 2 * K * STRIP;
    std::vector<uint16_t> data((size_t)N * K), x((size_t)(ROWS + SPARE_ROWS) * K);
    for (auto* values : {&data, &x})
        for (uint16_t& value : *values) {
            const float drawn = noise.signed_unit();
            kernels.to_bf16(&drawn, &value, 1);
        }
    w.data = (uint8_t*)data.data();
    std::vector<float> whole((size_t)ROWS * N), single(whole.size());
    kernels.linear_pairs(w, 0, w.strips(), x.data(), ROWS, whole.data(), N, {nullptr, nullptr, 0});
    for (int row = 0; row < ROWS; row++)
        kernels.linear_pairs(w, 0, w.strips(), x.data() + (size_t)row * K, 1, single.data() + (size_t)row * N, N,
                             {nullptr, nullptr, 0});
    return std::memcmp(whole.data(), single.data(), sizeof(float) * whole.size()) == 0;
}

}  // namespace

bool agree(const Kernels& one, const Kernels& other) {
    for (Kind kind : {Kind::q4, Kind::q8})
        for (int group : {16, 32, 128})
            for (bool minimum : {false, true})
                if (!products_agree(one, other, kind, group, minimum)) return false;
    return !one.linear_pairs || pairs_agree(one);
}

}  // namespace headway

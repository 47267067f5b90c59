// Compares every instruction set of this machine with the scalar one, bit for bit, without Python: for cross builds that
// run under an emulator (scripts/cross). Exits with 1 and says where, if any differs.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "../src/program.h"

using namespace headway;

#if defined(HW_EMULATED)
namespace headway {
extern const Kernels amx_emulated_kernels;
#if defined(__x86_64__)
extern const Kernels avx512_emulated_kernels;
#endif
}
#endif

namespace {

std::mt19937 rng(7);
int failures = 0;

std::vector<float> normal(size_t count) {
    std::normal_distribution<float> draw;
    std::vector<float> out(count);
    for (float& x : out) x = draw(rng);
    return out;
}

void same(const std::string& what, const std::vector<float>& found, const std::vector<float>& wanted) {
    if (found.size() == wanted.size() && std::memcmp(found.data(), wanted.data(), 4 * found.size()) == 0) return;
    size_t at = 0;
    while (std::memcmp(&found[at], &wanted[at], 4) == 0) at++;
    std::printf("%s differs at %zu: %.9g, scalar %.9g\n", what.c_str(), at, found[at], wanted[at]);
    failures++;
}

void linears(const Kernels& kernels) {
    const int n = 37, k = 192;
    struct Form {
        const char* name;
        int bits, group, zero;
        bool minimum;
    };
    for (const Form& form : {Form{"q4 zero", 4, 32, 8, false}, Form{"q4 minimum", 4, 32, 0, true}, Form{"q4 64", 4, 64, 8, false},
                             Form{"q4 48", 4, 48, 8, false}, Form{"q8 zero", 8, 32, 128, false},
                             Form{"q8 minimum", 8, 64, 0, true}, Form{"q8 16", 8, 16, 32, false}}) {
        std::vector<uint8_t> codes((size_t)n * k);
        for (uint8_t& code : codes) code = (uint8_t)(rng() % (1u << form.bits));
        std::vector<float> scale = normal((size_t)n * k / form.group), minimum = normal(scale.size());
        for (int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 23, 30, 37, 64, 70, 75}) {
            const std::vector<float> x = normal((size_t)rows * k);
            std::vector<float> found((size_t)rows * n), wanted(found.size()), row((size_t)k), other(row.size());
            Program ours(kernels, 1, 1, 1, 16, 1, 16, 16), theirs(scalar_kernels, 1, 1, 1, 16, 1, 16, 16);
            const float* low = form.minimum ? minimum.data() : nullptr;
            ours.add_quantized(n, k, form.group, form.bits, form.zero, codes.data(), scale.data(), low);
            theirs.add_quantized(n, k, form.group, form.bits, form.zero, codes.data(), scale.data(), low);
            ours.linear(0, x.data(), rows, found.data());
            theirs.linear(0, x.data(), rows, wanted.data());
            same(std::string(kernels.name) + " " + form.name + " rows " + std::to_string(rows), found, wanted);
            const int32_t id = rows % n;
            ours.embed_rows(0, &id, 1, row.data());
            theirs.embed_rows(0, &id, 1, other.data());
            same(std::string(kernels.name) + " embed " + form.name, row, other);
        }
    }
    const std::vector<float> w = normal((size_t)n * k);
    std::vector<uint16_t> upper(w.size());
    for (size_t i = 0; i < w.size(); i++) {
        uint32_t bits;
        std::memcpy(&bits, &w[i], 4);
        upper[i] = (uint16_t)(bits >> 16);
    }
    for (Kind kind : {Kind::f32, Kind::bf16, Kind::f16}) {
        if (kind == Kind::bf16 && kernels.linear_pairs) continue;
        for (int rows = 1; rows <= 20; rows++) {
            const std::vector<float> x = normal((size_t)rows * k);
            std::vector<float> found((size_t)rows * n), wanted(found.size());
            Program ours(kernels, 1, 1, 1, 16, 1, 16, 16), theirs(scalar_kernels, 1, 1, 1, 16, 1, 16, 16);
            std::vector<uint16_t> halves(upper);
            if (kind == Kind::f16)
                for (uint16_t& half : halves) half &= 0xbfff;  // no infinities
            const void* values = kind == Kind::f32 ? (const void*)w.data() : halves.data();
            ours.add_dense(n, k, kind, values);
            theirs.add_dense(n, k, kind, values);
            ours.linear(0, x.data(), rows, found.data());
            theirs.linear(0, x.data(), rows, wanted.data());
            same(std::string(kernels.name) + " dense " + std::to_string((int)kind), found, wanted);
        }
    }
}

// Weights of bfloat16 that are multiplied as such: near the scalar result, and the same bits for a row in any company.
void pairs(const Kernels& kernels) {
    if (!kernels.linear_pairs) return;
    const int n = 37, k = 192, most = 90;
    const std::vector<float> w = normal((size_t)n * k), x = normal((size_t)most * k);
    std::vector<uint16_t> halves(w.size());
    for (size_t i = 0; i < w.size(); i++) kernels.to_bf16(&w[i], &halves[i], 1);
    Program ours(kernels, 1, 1, 1, 16, 1, 16, 16), theirs(scalar_kernels, 1, 1, 1, 16, 1, 16, 16);
    ours.add_dense(n, k, Kind::bf16, halves.data());
    theirs.add_dense(n, k, Kind::bf16, halves.data());
    std::vector<float> alone((size_t)most * n), wanted(alone.size()), row((size_t)k), other(row.size());
    for (int i = 0; i < most; i++) ours.linear(0, &x[(size_t)i * k], 1, &alone[(size_t)i * n]);
    theirs.linear(0, x.data(), most, wanted.data());
    for (int rows : {2, 3, 5, 8, 9, 16, 17, 24, 25, 31, 32, 33, 64, 71, 73, most}) {
        std::vector<float> found((size_t)rows * n);
        ours.linear(0, x.data(), rows, found.data());
        same(std::string(kernels.name) + " pairs rows " + std::to_string(rows), found,
             std::vector<float>(alone.begin(), alone.begin() + (long)found.size()));
    }
    double error = 0, size = 0;
    for (size_t i = 0; i < alone.size(); i++) {
        error += std::pow(alone[i] - wanted[i], 2);
        size += std::pow(wanted[i], 2);
    }
    if (!(error < 1e-5 * size)) std::printf("%s pairs are far from the scalar result\n", kernels.name), failures++;
    const int32_t id = 20;
    ours.embed_rows(0, &id, 1, row.data());
    theirs.embed_rows(0, &id, 1, other.data());
    same(std::string(kernels.name) + " embed pairs", row, other);
}

// The fast way: near the exact one, and the same bits for a row in any company.
void fast(const Kernels& kernels) {
    if (!kernels.linear_fast) return;
    const int n = 37, k = 576, most = 300;
    const std::vector<float> x = normal((size_t)most * k);
    for (const auto& [bits, group, minimum] : {std::tuple{4, 32, true}, {4, 64, false}, {8, 16, false}, {8, 64, true}}) {
        std::vector<uint8_t> codes((size_t)n * k);
        for (uint8_t& code : codes) code = (uint8_t)(rng() % (1u << bits));
        std::vector<float> scale = normal((size_t)n * k / group), low = normal(scale.size());
        Program exact(kernels, 1, 1, 1, 16, 1, 16, 16), ours(kernels, 1, 1, 1, 16, 1, 16, 16);
        for (Program* program : {&exact, &ours})
            program->add_quantized(n, k, group, bits, minimum ? 0 : 1 << (bits - 1), codes.data(), scale.data(),
                                   minimum ? low.data() : nullptr);
        ours.set_fast(true);
        std::vector<float> wanted((size_t)most * n), found(wanted.size());
        exact.linear(0, x.data(), most, wanted.data());
        ours.linear(0, x.data(), most, found.data());
        double error = 0, size = 0;
        for (size_t i = 0; i < found.size(); i++) error += std::pow(found[i] - wanted[i], 2), size += std::pow(wanted[i], 2);
        if (!(error > 0 && error < 4e-4 * size))
            std::printf("%s fast q%d is %g from the exact result\n", kernels.name, bits, std::sqrt(error / size)), failures++;
        for (int rows : {32, 33, 47, 255, 257}) {
            std::vector<float> some((size_t)rows * n);
            ours.linear(0, x.data(), rows, some.data());
            same(std::string(kernels.name) + " fast rows " + std::to_string(rows), some,
                 std::vector<float>(found.begin(), found.begin() + (long)some.size()));
        }
    }
}

void rows(const Kernels& kernels) {
    for (int width : {16, 33, 64, 100}) {
        const std::vector<float> a = normal((size_t)3 * width), b = normal(a.size());
        std::vector<float> found(a.size()), wanted(a.size());
        const auto both = [&](const char* name, auto call) {
            call(kernels, found), call(scalar_kernels, wanted);
            same(std::string(kernels.name) + " " + name + " " + std::to_string(width), found, wanted);
        };
        both("rms_norm", [&](const Kernels& t, auto& out) { t.rms_norm(a.data(), b.data(), out.data(), 3, width, 1e-5f); });
        both("silu", [&](const Kernels& t, auto& out) { t.gate(a.data(), b.data(), out.data(), 3 * width, 0); });
        both("gelu", [&](const Kernels& t, auto& out) { t.gate(a.data(), b.data(), out.data(), 3 * width, 1); });
        both("add", [&](const Kernels& t, auto& out) { t.add(a.data(), b.data(), out.data(), 3 * width); });
        both("spread", [&](const Kernels& t, auto& out) { t.spread(a.data(), out.data(), 3, width); });
        both("softcap", [&](const Kernels& t, auto& out) { out = a, t.softcap(out.data(), (int64_t)out.size(), 2.0f); });
        if (width % 2 == 0)
            both("rotate", [&](const Kernels& t, auto& out) { t.rotate(a.data(), b.data(), b.data() + width, out.data(), 3, width); });
    }
}

void attention(const Kernels& kernels) {
    for (bool bytes : {false, true})
        for (int window : {0, 20})
            for (int width : {16, 48, 64}) {
                const int tokens = 32, context = 100, heads = 6, kv_heads = 2, count = 7;
                const Heads shape{heads, kv_heads, width, 0.2f, window ? 3.0f : 0.0f, window};
                const int64_t unit = Layer::unit_bytes(bytes, tokens, width);
                const int32_t table[4] = {2, 0, 3, 1};
                const std::vector<float> k = normal((size_t)context * kv_heads * width), v = normal(k.size());
                const std::vector<float> q = normal((size_t)count * heads * width);
                std::vector<float> results[2];
                for (int which = 0; which < 2; which++) {
                    const Kernels& t = which ? scalar_kernels : kernels;
                    std::vector<uint8_t> pool((size_t)unit * kv_heads * 4);
                    const Layer layer{pool.data(), tokens, bytes, unit};
                    for (int i = 0; i < context; i++)
                        t.store_kv(layer, shape, table[i / tokens], i % tokens, &k[(size_t)i * kv_heads * width],
                                   &v[(size_t)i * kv_heads * width]);
                    const int group = heads / kv_heads;
                    std::vector<float> out((size_t)count * group * width);
                    std::vector<Partial> state((size_t)count * group);
                    for (int head = 0; head < kv_heads; head++) {
                        t.attend_span(layer, shape, table, head, 0, &q[(size_t)head * group * width], heads * width, count,
                                      context - count, out.data(), (int64_t)group * width, state.data(), group);
                        results[which].insert(results[which].end(), out.begin(), out.end());
                        for (const Partial& part : state) results[which].push_back(part.total);
                    }
                }
                same(std::string(kernels.name) + (bytes ? " int8" : " bf16") + " attention " + std::to_string(width), results[0],
                     results[1]);
            }
}

}  // namespace

int main() {
    std::vector<const Kernels*> all;
    for (const char* name : available_kernels()) all.push_back(find_kernels(name));
#if defined(HW_EMULATED)
    all.push_back(&amx_emulated_kernels);
#if defined(__x86_64__)
    all.push_back(&avx512_emulated_kernels);
#endif
    if (!agree(amx_emulated_kernels, scalar_kernels)) std::printf("the check of AMX fails\n"), failures++;
#endif
    for (const Kernels* kernels : all) {
        linears(*kernels), pairs(*kernels), fast(*kernels), rows(*kernels), attention(*kernels);
        std::printf("%s: %s\n", kernels->name, failures ? "differs" : "the scalar kernels' bits");
    }
    return failures != 0;
}

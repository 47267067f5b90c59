// Weights into the layout that the kernels read: from codes and scales, from GGUF's blocks, from dense values. Strips are
// repacked in parallel, and blocks are read where the file is mapped.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "program.h"

namespace headway {
namespace {

constexpr int MOST_ELEMENTS = 256, MOST_GROUPS = 16;  // of a block

// A stretch of a row: codes of whole groups, with their scales and minima.
struct Piece {
    const uint8_t* codes;
    const float *scale, *minimum;
};

uint32_t four(const uint8_t* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

// One channel of some groups of a strip; `to` is where the strip has the first of them.
void pack(const Weight& w, const Piece& from, int groups, int channel, float down, uint8_t* to) {
    // In registers: the bytes that are written might be anything's.
    const int group = w.group;
    const bool nibbles = w.kind == Kind::q4, minima = w.has_min;
    const int64_t group_bytes = w.group_bytes(), lines = group_bytes - (minima ? 4 : 2) * STRIP;
    const uint8_t* codes = from.codes;
    for (int g = 0; g < groups; g++, to += group_bytes, codes += group) {
        uint8_t* line = to + 4 * channel;
        if (nibbles) {
            for (int i = 0; i < group; i += 8, line += 64) {
                const uint32_t both = four(codes + i) | four(codes + i + 4) << 4;
                std::memcpy(line, &both, 4);
            }
        } else {
            for (int i = 0; i < group; i += 4, line += 64) std::memcpy(line, codes + i, 4);
        }
        uint16_t* scales = (uint16_t*)(to + lines);
        scales[channel] = to_half(from.scale[g] * down);
        if (minima) scales[STRIP + channel] = to_half(from.minimum[g] * down);
    }
}

// The largest finite size of the given values and of `most`.
float widest(float most, const float* values, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (std::isfinite(values[i])) most = std::max(most, std::fabs(values[i]));
    return most;
}

// ---- GGUF blocks: layouts of ggml-common.h ---------------------------------------------------------------------

struct BlockForm {
    const char* name;
    int elements, bytes, bits, group, zero;
    bool minimum;
    void (*scales)(const uint8_t* block, float* scale, float* minimum);
    void (*codes)(const uint8_t* block, uint8_t* codes);
};

float half_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return from_half(half);
}

// Low nibbles of COUNT bytes to the first codes, high ones to those that follow.
template <int COUNT>
void nibbles(const uint8_t* __restrict p, uint8_t* __restrict codes) {
    for (int i = 0; i < COUNT; i++) codes[i] = p[i] & 15, codes[COUNT + i] = p[i] >> 4;
}

void fifth_bits(const uint8_t* p, uint8_t* codes) {  // bit j of 32 belongs to code j
    const uint32_t bits = four(p);
    for (int i = 0; i < 32; i++) codes[i] = (uint8_t)(codes[i] | (bits >> i & 1) << 4);
}

void one_scale(const uint8_t* p, float* scale, float*) { scale[0] = half_at(p); }
void scale_and_minimum(const uint8_t* p, float* scale, float* minimum) { scale[0] = half_at(p), minimum[0] = half_at(p + 2); }

void k_scales(const uint8_t* p, float* scale, float* minimum) {  // eight pairs of six bits in bytes 4 to 15
    const float d = half_at(p), low = half_at(p + 2);
    const uint8_t* packed = p + 4;
    for (int i = 0; i < 8; i++) {
        const int j = i - 4;
        const int s = i < 4 ? packed[i] & 63 : (packed[8 + j] & 15) | packed[j] >> 6 << 4;
        const int m = i < 4 ? packed[4 + i] & 63 : packed[8 + j] >> 4 | packed[4 + j] >> 6 << 4;
        scale[i] = d * (float)s, minimum[i] = -(low * (float)m);
    }
}
void q6_scales(const uint8_t* p, float* scale, float*) {
    const float d = half_at(p + 208);
    for (int i = 0; i < 16; i++) scale[i] = d * (float)(int8_t)p[192 + i];
}

void q4_0_codes(const uint8_t* p, uint8_t* codes) { nibbles<16>(p + 2, codes); }
void q4_1_codes(const uint8_t* p, uint8_t* codes) { nibbles<16>(p + 4, codes); }
void q5_0_codes(const uint8_t* p, uint8_t* codes) { nibbles<16>(p + 6, codes), fifth_bits(p + 2, codes); }
void q5_1_codes(const uint8_t* p, uint8_t* codes) { nibbles<16>(p + 8, codes), fifth_bits(p + 4, codes); }
void q8_0_codes(const uint8_t* __restrict p, uint8_t* __restrict codes) {
    for (int i = 0; i < 32; i++) codes[i] = p[2 + i] ^ 0x80;  // signed to unsigned with a zero point of 128
}
void q4_k_codes(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 4; i++) nibbles<32>(p + 16 + 32 * i, codes + 64 * i);
}
void q5_k_codes(const uint8_t* __restrict p, uint8_t* __restrict codes) {
    for (int i = 0; i < 4; i++) nibbles<32>(p + 48 + 32 * i, codes + 64 * i);
    for (int sub = 0; sub < 8; sub++)
        for (int i = 0; i < 32; i++) codes[32 * sub + i] = (uint8_t)(codes[32 * sub + i] | (p[16 + i] >> sub & 1) << 4);
}
void q6_k_codes(const uint8_t* __restrict p, uint8_t* __restrict codes) {
    for (int half = 0; half < 2; half++) {
        uint8_t* to = codes + 128 * half;
        nibbles<64>(p + 64 * half, to);
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i++)
                to[32 * quarter + i] =
                    (uint8_t)(to[32 * quarter + i] | (p[128 + 32 * half + i] >> 2 * quarter & 3) << 4);
    }
}

const BlockForm FORMS[] = {
    {"q4_0", 32, 18, 4, 32, 8, false, one_scale, q4_0_codes},
    {"q4_1", 32, 20, 4, 32, 0, true, scale_and_minimum, q4_1_codes},
    {"q5_0", 32, 22, 8, 32, 16, false, one_scale, q5_0_codes},
    {"q5_1", 32, 24, 8, 32, 0, true, scale_and_minimum, q5_1_codes},
    {"q8_0", 32, 34, 8, 32, 128, false, one_scale, q8_0_codes},
    {"q4_k", 256, 144, 4, 32, 0, true, k_scales, q4_k_codes},
    {"q5_k", 256, 176, 8, 32, 0, true, k_scales, q5_k_codes},
    {"q6_k", 256, 210, 8, 16, 32, false, q6_scales, q6_k_codes},
};

}  // namespace

Weight Program::quantized(int n, int k, int group, int bits, int zero, bool minimum, float most) {
    Weight w{};
    w.kind = bits == 4 ? Kind::q4 : Kind::q8;
    w.n = n, w.k = k, w.group = group, w.zero = zero, w.has_min = minimum;
    w.strip_bytes = w.group_bytes() * (k / group);
    // A power of two brings the largest scale near the top of half precision's range: none is subnormal in practice.
    int shift = 0;
    if (most > 0) {
        std::frexp(most, &shift);
        shift = std::max(shift - 15, -126);
    }
    w.rescale = std::ldexp(1.0f, shift);
    w.data = allocate(w.strip_bytes * w.strips());
    weight_bytes_ += w.strip_bytes * w.strips();
    return w;
}

int Program::add_quantized(int n, int k, int group, int bits, int zero, const uint8_t* codes, const float* scale,
                           const float* minimum) {
    const int groups = k / group;
    float most = widest(0, scale, (int64_t)n * groups);
    if (minimum) most = widest(most, minimum, (int64_t)n * groups);
    const Weight w = quantized(n, k, group, bits, zero, minimum != nullptr, most);
    const float down = 1.0f / w.rescale;
    pool_->run(w.strips(), [&](int strip, int) {
        for (int c = 0; c < std::min(STRIP, n - strip * STRIP); c++) {
            const int64_t row = strip * STRIP + c;
            const Piece piece{codes + row * k, scale + row * groups, minimum ? minimum + row * groups : nullptr};
            pack(w, piece, groups, c, down, w.data + strip * w.strip_bytes);
        }
    });
    weights_.push_back(w);
    return (int)weights_.size() - 1;
}

int Program::add_blocks(const char* form, int k, const std::vector<Blocks>& parts) {
    const BlockForm* found = nullptr;
    for (const BlockForm& one : FORMS)
        if (std::strcmp(one.name, form) == 0) found = &one;
    if (!found) throw std::invalid_argument(std::string("native kernels: no blocks of kind ") + form);
    const BlockForm& f = *found;
    if (k < f.elements || k % f.elements) throw std::invalid_argument("native kernels: columns that are no whole blocks");
    const int blocks = k / f.elements, per_block = f.elements / f.group;
    int64_t n = 0;
    for (const Blocks& part : parts) {
        if (part.bytes != (int64_t)blocks * f.bytes) throw std::invalid_argument("native kernels: rows that are no whole blocks");
        n += part.rows;
    }
    if (n < 1 || n > MOST_ROWS) throw std::invalid_argument("native kernels: a weight of impossible size");
    auto row_of = [&](int64_t row) {
        for (const Blocks& part : parts) {
            if (row < part.rows) return part.data + row * part.bytes;
            row -= part.rows;
        }
        return (const uint8_t*)nullptr;
    };
    const int strips = (int)((n + STRIP - 1) / STRIP);
    std::vector<float> largest((size_t)strips, 0.0f);
    pool_->run(strips, [&](int strip, int) {
        float scale[MOST_GROUPS], minimum[MOST_GROUPS], most = 0;
        for (int64_t row = (int64_t)strip * STRIP; row < std::min<int64_t>(n, (int64_t)(strip + 1) * STRIP); row++) {
            const uint8_t* block = row_of(row);
            for (int b = 0; b < blocks; b++, block += f.bytes) {
                f.scales(block, scale, minimum);
                most = widest(most, scale, per_block);
                if (f.minimum) most = widest(most, minimum, per_block);
            }
        }
        largest[strip] = most;
    });
    const Weight w = quantized((int)n, k, f.group, f.bits, f.zero, f.minimum, widest(0, largest.data(), strips));
    const float down = 1.0f / w.rescale;
    const int64_t step = w.group_bytes() * per_block;
    pool_->run(strips, [&](int strip, int) {
        uint8_t codes[MOST_ELEMENTS];
        float scale[MOST_GROUPS], minimum[MOST_GROUPS];
        for (int c = 0; c < std::min<int64_t>(STRIP, n - (int64_t)strip * STRIP); c++) {
            const uint8_t* block = row_of((int64_t)strip * STRIP + c);
            uint8_t* to = w.data + strip * w.strip_bytes;
            for (int b = 0; b < blocks; b++, block += f.bytes, to += step) {
                f.scales(block, scale, minimum);
                f.codes(block, codes);
                pack(w, {codes, scale, minimum}, per_block, c, down, to);
            }
        }
    });
    weights_.push_back(w);
    return (int)weights_.size() - 1;
}

int Program::add_dense(int n, int k, Kind kind, const void* values) {
    if (kind == Kind::bf16 && kernels_.linear_pairs && k % PAIRS_K == 0) kind = Kind::pairs;
    Weight w{};
    w.kind = kind;
    w.n = n, w.k = k, w.rescale = 1;
    const int64_t size = kind == Kind::f32 ? 4 : 2;
    w.strip_bytes = k * STRIP * size;
    w.data = allocate(w.strip_bytes * w.strips());
    weight_bytes_ += w.strip_bytes * w.strips();
    pool_->run(w.strips(), [&](int strip, int) {
        uint8_t* p = w.data + strip * w.strip_bytes;
        for (int c = 0; c < std::min(STRIP, n - strip * STRIP); c++) {
            const int64_t row = (int64_t)(strip * STRIP + c) * k;
            for (int i = 0; i < k; i++) {
                if (kind == Kind::pairs)
                    ((uint16_t*)p)[(i / 2 * STRIP + c) * 2 + i % 2] = ((const uint16_t*)values)[row + i];
                else if (kind == Kind::f32)
                    ((float*)p)[i * STRIP + c] = ((const float*)values)[row + i];
                else
                    ((uint16_t*)p)[i * STRIP + c] = ((const uint16_t*)values)[row + i];
            }
        }
    });
    weights_.push_back(w);
    return (int)weights_.size() - 1;
}

}  // namespace headway

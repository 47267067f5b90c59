// Sixteen lanes of float and int32 for every instruction set; one translation unit per set includes this file.
//
// Everything here is internal to its translation unit (static, no templates or inline functions with linkage), so that
// code for a newer instruction set cannot leak into the baseline. All float sums use explicit fma in a fixed order.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#include <cmath>

#define HW_FN static inline __attribute__((always_inline, unused))

namespace {

constexpr int LANES = 16;

#if defined(__AVX2__) && !defined(__AVX512F__)
// Two registers; a vector of 64 bytes would go through memory wherever an intrinsic touches it.
struct vf {
    __m256 lo, hi;
};
struct vi {
    __m256i lo, hi;
};
HW_FN vf operator+(vf a, vf b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
HW_FN vf operator-(vf a, vf b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
HW_FN vf operator*(vf a, vf b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
HW_FN vf operator/(vf a, vf b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
HW_FN vf operator-(vf a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}
HW_FN vi operator+(vi a, vi b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
HW_FN vf set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
HW_FN vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HW_FN void store(float* p, vf a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
#else
typedef float vf __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t vb __attribute__((vector_size(64), aligned(1), may_alias));

HW_FN vf set1(float a) { return vf{a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a}; }
HW_FN vi set1i(int32_t a) { return vi{a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a}; }
HW_FN vf load(const float* p) {
    vf a;
    memcpy(&a, p, 64);
    return a;
}
HW_FN void store(float* p, vf a) { memcpy(p, &a, 64); }
#endif
HW_FN float lane(vf a, int i) {
    float all[LANES];
    store(all, a);
    return all[i];
}

#if defined(__AVX512F__)
HW_FN vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
HW_FN vf to_float(vi a) { return (vf)_mm512_cvtepi32_ps((__m512i)a); }
HW_FN vi round_to_int(vf a) { return (vi)_mm512_cvtps_epi32((__m512)a); }
HW_FN vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
HW_FN vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
HW_FN vf load_bf16(const uint16_t* p) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
HW_FN vf load_int8(const int8_t* p) {
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
HW_FN vf load_half(const uint16_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
HW_FN vf zero_where_equal(vf a, vf x, vf y) {
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_NEQ_UQ), (__m512)a);
}
#elif defined(__AVX2__)
HW_FN vf fma(vf a, vf b, vf c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
HW_FN vf to_float(vi a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
HW_FN vi round_to_int(vf a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
HW_FN vf max(vf a, vf b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
HW_FN vf min(vf a, vf b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
HW_FN __m256 eight_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
HW_FN vf load_bf16(const uint16_t* p) { return {eight_bf16(p), eight_bf16(p + 8)}; }
HW_FN vf load_int8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
HW_FN vf load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
HW_FN vf zero_where_equal(vf a, vf x, vf y) {
    return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_NEQ_UQ)),
            _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_NEQ_UQ))};
}
#else
HW_FN vf fma(vf a, vf b, vf c) {
#if defined(__ARM_NEON)
    vf out;
    float32x4_t x[4], y[4], z[4];
    memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
    for (int i = 0; i < 4; i++) z[i] = vfmaq_f32(z[i], x[i], y[i]);
    memcpy(&out, z, 64);
    return out;
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}
HW_FN vf to_float(vi a) { return __builtin_convertvector(a, vf); }
HW_FN vi round_to_int(vf a) {
    vi out;
    for (int i = 0; i < LANES; i++) out[i] = (int32_t)__builtin_rintf(a[i]);
    return out;
}
HW_FN vf max(vf a, vf b) { return a > b ? a : b; }
HW_FN vf min(vf a, vf b) { return a < b ? a : b; }
HW_FN vf zero_where_equal(vf a, vf x, vf y) { return x == y ? vf{} : a; }
HW_FN vf load_bf16(const uint16_t* p) {
    vi bits;
    for (int i = 0; i < LANES; i++) bits[i] = (int32_t)((uint32_t)p[i] << 16);
    return (vf)bits;
}
HW_FN vf load_int8(const int8_t* p) {
    vi codes;
    for (int i = 0; i < LANES; i++) codes[i] = p[i];
    return to_float(codes);
}
HW_FN float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    float out;
    if (rest < 0x0400) {  // zero and subnormals: rest x 2^-24, exact
        out = (float)rest * 0x1p-24f;
    } else {
        uint32_t bits = (rest >= 0x7c00 ? rest << 13 | 0x7f800000u : (rest << 13) + (112u << 23));
        memcpy(&out, &bits, 4);
    }
    uint32_t bits;
    memcpy(&bits, &out, 4);
    bits |= sign;
    memcpy(&out, &bits, 4);
    return out;
}
HW_FN vf load_half(const uint16_t* p) {
    vf out;
    for (int i = 0; i < LANES; i++) out[i] = half_to_float(p[i]);
    return out;
}
#endif

HW_FN vf load_some(const float* p, int n) {
    vf a{};
    memcpy(&a, p, 4 * (size_t)n);
    return a;
}
HW_FN void store_some(float* p, vf a, int n) { memcpy(p, &a, 4 * (size_t)n); }

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));

// Sum and maximum of the lanes, as a tree: always in the same order.
#if defined(__AVX2__)
HW_FN __m256 low_half(vf a) {
#if defined(__AVX512F__)
    return _mm512_castps512_ps256((__m512)a);
#else
    return a.lo;
#endif
}
HW_FN __m256 high_half(vf a) {
#if defined(__AVX512F__)
    return _mm512_extractf32x8_ps((__m512)a, 1);
#else
    return a.hi;
#endif
}
HW_FN float sum(vf a) {
    const __m256 b = _mm256_add_ps(low_half(a), high_half(a));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
HW_FN float largest(vf a) {
    const __m256 b = _mm256_max_ps(low_half(a), high_half(a));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
#else
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
HW_FN float sum(vf a) {
    v8 b[2];
    v4 c[2];
    memcpy(b, &a, 64);
    b[0] = b[0] + b[1];
    memcpy(c, &b[0], 32);
    c[0] = c[0] + c[1];
    return (c[0][0] + c[0][2]) + (c[0][1] + c[0][3]);
}
HW_FN float largest(vf a) {
    v8 b[2];
    v4 c[2];
    memcpy(b, &a, 64);
    b[0] = b[0] > b[1] ? b[0] : b[1];
    memcpy(c, &b[0], 32);
    c[0] = c[0] > c[1] ? c[0] : c[1];
    const float x = c[0][0] > c[0][2] ? c[0][0] : c[0][2], y = c[0][1] > c[0][3] ? c[0][1] : c[0][3];
    return x > y ? x : y;
}
#endif

HW_FN int32_t sumi(vi a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)a);
#elif defined(__AVX2__)
    const __m256i x = _mm256_add_epi32(a.lo, a.hi);
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += a[i];
    return total;
#endif
}
// The lanes, which fit, as signed bytes.
HW_FN void store_bytes(int8_t* p, vi a) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)a));
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
#else
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)a[i];
#endif
}

HW_FN vf power_of_two(vi n) {  // from -126 to 127
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.lo, bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.hi, bias), 23))};
#else
    return (vf)((n + 127) << 23);
#endif
}

// e^x with about 1 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (minimax coefficients of degree 6).
HW_FN vf exp(vf x) {
    x = min(max(x, set1(-87.3f)), set1(88.3f));
    vi n = round_to_int(x * set1(1.44269504088896341f));
    vf k = to_float(n);
    vf r = fma(k, set1(-0.693359375f), x);
    r = fma(k, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + set1(1.0f));
    return p * power_of_two(n);
}
HW_FN float exp_one(float x) { return lane(exp(set1(x)), 0); }
HW_FN vf tanh(vf x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

// What is taken from an 8-bit code before it is multiplied, where the instruction set has signed products only; the
// quantizer's zeros put it back.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int BYTE_BIAS = 0;
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int BYTE_BIAS = 128;
#else
constexpr int BYTE_BIAS = 0;
#endif

#if !defined(__AVX2__) || defined(__AVX512F__)
// acc + sum over 4 of w x a (signed), per lane: 16 channels x 4 consecutive k. ``Few`` says that w < 16; else w is an
// unsigned code, of which BYTE_BIAS is taken.
template <bool Few>
HW_FN vi dot4(vi acc, vb w, const int8_t* a) {
    int32_t four;
    memcpy(&four, a, 4);
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__ARM_FEATURE_DOTPROD)
    int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
    int32x4_t c[4];
    uint8x16_t b[4];
    memcpy(c, &acc, 64), memcpy(b, &w, 64);
    for (int i = 0; i < 4; i++)
        c[i] = vdotq_s32(c[i], vreinterpretq_s8_u8(Few ? b[i] : veorq_u8(b[i], vdupq_n_u8(0x80))), x);
    memcpy(&acc, c, 64);
    return acc;
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) acc[lane] += (int32_t)w[4 * lane + i] * a[i];
    return acc;
#endif
}
#endif

}  // namespace

// The AVX-512 kernels with their instructions in software: for machines that have none (scripts/cross). Compiled for AVX2.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

typedef int8_t Bytes __attribute__((vector_size(64)));
typedef uint8_t Unsigned __attribute__((vector_size(64)));
typedef int32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

// What each instruction does, lane by lane, from Intel's Intrinsics Guide.
template <typename Out, typename Of>
Out lanes(Of of) {
    Out out;
    for (int i = 0; i < 16; i++) out[i] = of(i);
    return out;
}
__m512 soft_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return (__m512)lanes<Floats>([&](int i) { return __builtin_fmaf(a[i], b[i], c[i]); });
}
__m512 soft_max_ps(__m512 a, __m512 b) {
    return (__m512)lanes<Floats>([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}
__m512 soft_min_ps(__m512 a, __m512 b) {
    return (__m512)lanes<Floats>([&](int i) { return a[i] < b[i] ? a[i] : b[i]; });
}
__m512 soft_cvtepi32_ps(__m512i a) {
    return (__m512)lanes<Floats>([&](int i) { return (float)((Words)a)[i]; });
}
__m512i soft_cvtps_epi32(__m512 a) {
    return (__m512i)lanes<Words>([&](int i) { return _mm_cvtss_si32(_mm_set_ss(a[i])); });
}
__m512i soft_cvtepu16_epi32(__m256i a) {
    uint16_t from[16];
    memcpy(from, &a, 32);
    return (__m512i)lanes<Words>([&](int i) { return (int32_t)from[i]; });
}
__m512i soft_cvtepi8_epi32(__m128i a) {
    int8_t from[16];
    memcpy(from, &a, 16);
    return (__m512i)lanes<Words>([&](int i) { return (int32_t)from[i]; });
}
__m512 soft_cvtph_ps(__m256i a) {
    uint16_t from[16];
    memcpy(from, &a, 32);
    return (__m512)lanes<Floats>([&](int i) { return _cvtsh_ss(from[i]); });
}
__m128i soft_cvtepi32_epi8(__m512i a) {
    int8_t to[16];
    for (int i = 0; i < 16; i++) to[i] = (int8_t)((Words)a)[i];
    __m128i out;
    memcpy(&out, to, 16);
    return out;
}
__m512i soft_slli_epi32(__m512i a, unsigned by) { return (__m512i)((Words)a << (int)by); }
__m512i soft_set1_epi32(int a) { return (__m512i)(Words{} + a); }
uint16_t soft_differ(__m512 a, __m512 b) {
    uint16_t mask = 0;
    for (int i = 0; i < 16; i++) mask = (uint16_t)(mask | (a[i] == b[i] ? 0 : 1 << i));
    return mask;
}
__m512 soft_maskz_mov_ps(uint16_t mask, __m512 a) {
    return (__m512)lanes<Floats>([&](int i) { return mask >> i & 1 ? a[i] : 0.0f; });
}
__m256 soft_half(__m512 a, int which) {
    __m256 out;
    memcpy(&out, (const char*)&a + 32 * which, 32);
    return out;
}
int soft_reduce_add_epi32(__m512i a) {
    uint32_t total = 0;
    for (int i = 0; i < 16; i++) total += (uint32_t)((Words)a)[i];
    return (int)total;
}
__m512i soft_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    return (__m512i)lanes<Words>([&](int i) {
        int32_t sum = ((Words)sums)[i];
        for (int j = 0; j < 4; j++) sum += (int)((Unsigned)a)[4 * i + j] * ((Bytes)b)[4 * i + j];
        return sum;
    });
}

}  // namespace

#define _mm512_fmadd_ps soft_fmadd_ps
#define _mm512_max_ps soft_max_ps
#define _mm512_min_ps soft_min_ps
#define _mm512_cvtepi32_ps soft_cvtepi32_ps
#define _mm512_cvtps_epi32 soft_cvtps_epi32
#define _mm512_cvtepu16_epi32 soft_cvtepu16_epi32
#define _mm512_cvtepi8_epi32 soft_cvtepi8_epi32
#define _mm512_cvtph_ps soft_cvtph_ps
#define _mm512_cvtepi32_epi8 soft_cvtepi32_epi8
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 soft_slli_epi32
#define _mm512_set1_epi32 soft_set1_epi32
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, predicate) soft_differ(a, b)
#define _mm512_maskz_mov_ps soft_maskz_mov_ps
#define _mm512_castps512_ps256(a) soft_half(a, 0)
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(a, which) soft_half(a, which)
#define _mm512_reduce_add_epi32 soft_reduce_add_epi32
#define _mm512_dpbusd_epi32 soft_dpbusd_epi32
#define __AVX512F__ 1
#define __AVX512VNNI__ 1
#define HW_SOFT_AVX512 1
#define HW_TABLE avx512_emulated_kernels
#define HW_NAME avx512_emulated
#include "../src/kernels.inc"

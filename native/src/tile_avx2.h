// Tiles of the linear kernels for 256-bit registers: one strip of 16 channels for M rows, as two halves of 8 channels.
// Included by kernels.inc inside its namespace. The arithmetic is that of the generic tile, lane for lane.

// Sums over a group of codes x activations for M rows and 8 channels; 8-bit codes have BYTE_BIAS taken.
template <int M, bool FOUR>
HW_FN void half_dots(const uint8_t* p, const int8_t* a, int64_t k, int group, __m256i* dot) {
    const auto four = [&](int m, int i) {
        int32_t x;
        memcpy(&x, a + m * k + i, 4);
        return _mm256_set1_epi32(x);
    };
    for (int m = 0; m < M; m++) dot[m] = _mm256_setzero_si256();
    if (FOUR) {
        const __m256i mask = _mm256_set1_epi8(15);
        for (int start = 0; start < group; start += 32) {
            const int end = start + 32 < group ? start + 32 : group;
            __m256i sums[M];
            for (int m = 0; m < M; m++) sums[m] = _mm256_setzero_si256();
            for (int i = start; i < end; i += 8, p += 64) {
                const __m256i line = _mm256_loadu_si256((const __m256i*)p);
                const __m256i low = _mm256_and_si256(line, mask), high = _mm256_and_si256(_mm256_srli_epi16(line, 4), mask);
                for (int m = 0; m < M; m++) {
#if defined(__AVXVNNI__)
                    sums[m] = _mm256_dpbusd_avx_epi32(sums[m], low, four(m, i));
                    sums[m] = _mm256_dpbusd_avx_epi32(sums[m], high, four(m, i + 4));
#else
                    // 16-bit sums hold 32 k: 16 products of at most 15 x 127.
                    sums[m] = _mm256_add_epi16(sums[m], _mm256_maddubs_epi16(low, four(m, i)));
                    sums[m] = _mm256_add_epi16(sums[m], _mm256_maddubs_epi16(high, four(m, i + 4)));
#endif
                }
            }
            for (int m = 0; m < M; m++) {
#if !defined(__AVXVNNI__)
                sums[m] = _mm256_madd_epi16(sums[m], _mm256_set1_epi16(1));
#endif
                dot[m] = _mm256_add_epi32(dot[m], sums[m]);
            }
        }
        return;
    }
    for (int i = 0; i < group; i += 4, p += 64) {
        const __m256i line = _mm256_loadu_si256((const __m256i*)p);
#if defined(__AVXVNNI__)
        for (int m = 0; m < M; m++) dot[m] = _mm256_dpbusd_avx_epi32(dot[m], line, four(m, i));
#else
        // |w| up to 128 as unsigned, its sign given to the activation: 2 x 128 x 127 is below 32768.
        const __m256i code = _mm256_xor_si256(line, _mm256_set1_epi8(-128)), size = _mm256_abs_epi8(code);
        for (int m = 0; m < M; m++) {
            const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four(m, i), code));
            dot[m] = _mm256_add_epi32(dot[m], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
#endif
    }
}

template <int M, bool FOUR, bool MIN>
HW_FN void tile(const Weight& w, const uint8_t* p, const Quantized& x, int row, float* out, int64_t stride,
                const Summands& more, int channels) {
    const int k = w.k, group = w.group, groups = k / group;
    const int8_t* a = x.codes + (int64_t)row * k;
    const float *scales = x.scales + fine_of(row, 0, groups), *weighted = x.weighted + fine_of(row, 0, groups);
    const int32_t* zeros = x.zeros + fine_of(row, 0, groups);
    const int codes = group * STRIP / (FOUR ? 2 : 1);
    __m256 acc[M][2];
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    for (int g = 0; g < groups; g++, a += group) {
        const uint8_t* fine = p + codes;
        fetch_ahead(p, codes + 64);
        for (int half = 0; half < 2; half++) {
            __m256i dot[M];
            half_dots<M, FOUR>(p + 32 * half, a, k, group, dot);
            const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(fine + 16 * half)));
            __m256 minimum = scale;
            if (MIN) minimum = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(fine + 32 + 16 * half)));
            for (int m = 0; m < M; m++) {
                const int64_t at = g * FINE_ROWS + m;
                if (!MIN || (!FOUR && BYTE_BIAS)) dot[m] = _mm256_sub_epi32(dot[m], _mm256_set1_epi32(zeros[at]));
                const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[m]), _mm256_set1_ps(scales[at]));
                acc[m][half] = _mm256_fmadd_ps(product, scale, acc[m][half]);
                if (MIN) acc[m][half] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(weighted[at]), acc[m][half]);
            }
        }
        p = fine + (MIN ? 64 : 32);
    }
    for (int m = 0; m < M; m++) put(vf{acc[m][0], acc[m][1]}, out + m * stride, more, m, channels);
}

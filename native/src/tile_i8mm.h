// Linear tiles on the 8-bit matrix product of aarch64: two rows by two channels by 8 k in one instruction. Included by
// kernels.inc inside its namespace. The arithmetic is that of the generic tile, number for number.

template <bool FOUR>
HW_FN void eight_k(const uint8_t* p, int8x16_t* channels) {  // 8 pairs of channels, each with 8 consecutive k
    for (int j = 0; j < 4; j++) {
        uint8x16_t first, second;
        if (FOUR) {
            const uint8x16_t line = vld1q_u8(p + 16 * j);
            first = vandq_u8(line, vdupq_n_u8(15)), second = vshrq_n_u8(line, 4);
        } else {
            first = veorq_u8(vld1q_u8(p + 16 * j), vdupq_n_u8(BYTE_BIAS));
            second = veorq_u8(vld1q_u8(p + 64 + 16 * j), vdupq_n_u8(BYTE_BIAS));
        }
        const int32x4_t a = vreinterpretq_s32_u8(first), b = vreinterpretq_s32_u8(second);
        channels[2 * j] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
        channels[2 * j + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
    }
}

template <int M, bool FOUR, bool MIN>
HW_FN void pairs_of_rows(const Weight& w, const uint8_t* p, const Quantized& x, int row, float* out, int64_t stride,
                         const Summands& more, int channels) {
    const int k = w.k, group = w.group, groups = k / group;
    const int8_t* a = x.codes + (int64_t)row * k;
    const float *scales = x.scales + fine_of(row, 0, groups), *weighted = x.weighted + fine_of(row, 0, groups);
    const int32_t* zeros = x.zeros + fine_of(row, 0, groups);
    vf acc[M] = {};
    for (int g = 0; g < groups; g++, a += group) {
        int32x4_t dot[M / 2][8];
        for (int m = 0; m < M / 2; m++)
            for (int c = 0; c < 8; c++) dot[m][c] = vdupq_n_s32(0);
        for (int i = 0; i < group; i += 8, p += FOUR ? 64 : 128) {
            int8x16_t weights[8];
            eight_k<FOUR>(p, weights);
            for (int m = 0; m < M / 2; m++) {
                const int8_t* two = a + (int64_t)2 * m * k + i;
                const int8x16_t rows = vcombine_s8(vld1_s8(two), vld1_s8(two + k));
                for (int c = 0; c < 8; c++) dot[m][c] = vmmlaq_s32(dot[m][c], rows, weights[c]);
            }
        }
        const vf scale = load_half((const uint16_t*)p);
        p += 32;
        vf minimum = scale;
        if (MIN) minimum = load_half((const uint16_t*)p), p += 32;
        for (int m = 0; m < M; m++) {
            int32x4_t four[4];
            for (int j = 0; j < 4; j++) {
                const int32x4_t left = dot[m / 2][2 * j], right = dot[m / 2][2 * j + 1];
                four[j] = m % 2 ? vcombine_s32(vget_high_s32(left), vget_high_s32(right))
                                : vcombine_s32(vget_low_s32(left), vget_low_s32(right));
            }
            vi d;
            memcpy(&d, four, 64);
            const int64_t at = g * FINE_ROWS + m;
            if (!MIN || !FOUR) d = d - set1i(zeros[at]);
            acc[m] = fma(to_float(d) * set1(scales[at]), scale, acc[m]);
            if (MIN) acc[m] = fma(minimum, set1(weighted[at]), acc[m]);
        }
    }
    for (int m = 0; m < M; m++) put(acc[m], out + m * stride, more, m, channels);
}

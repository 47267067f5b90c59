// Linear kernels on AMX tiles: 16 rows by a strip of 16 channels at a time. Included by kernels.inc inside its namespace.
//
// For int8 the arithmetic is that of the generic tile, number for number: exact sums of a group, then the same float
// operations. Tiles 0 to 3 hold sums, 4 and 5 activations (rows by k), 6 and 7 weights (k / 4 by channels x 4 k, which
// is how strips lie in memory).

constexpr int TILE_ROWS = 16;
static_assert(TILE_ROWS <= SPARE_ROWS, "a tile reads whole rows");
// Rows from which a tile pays, rather than vectors: its time is that of 16 rows whatever the number.
constexpr int FEWEST_TILE_ROWS = 9;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(HW_AMX_EMULATED)
// What the instructions do, from Intel's Software Developer's Manual: rows and bytes past the configuration are zero.
struct SoftTiles {
    TileConfig config;
    uint8_t data[8][16][64];
};
static thread_local SoftTiles soft;

static void soft_load(int tile, const void* base, int64_t stride) {
    memset(soft.data[tile], 0, sizeof soft.data[tile]);
    for (int row = 0; row < soft.config.rows[tile]; row++)
        memcpy(soft.data[tile][row], (const uint8_t*)base + row * stride, soft.config.row_bytes[tile]);
}
static void soft_store(int tile, void* base, int64_t stride) {
    for (int row = 0; row < soft.config.rows[tile]; row++)
        memcpy((uint8_t*)base + row * stride, soft.data[tile][row], soft.config.row_bytes[tile]);
}
static void soft_dpbsud(int sums, int a, int b) {
    for (int m = 0; m < soft.config.rows[sums]; m++)
        for (int k = 0; k < soft.config.row_bytes[a] / 4; k++)
            for (int n = 0; n < soft.config.row_bytes[sums] / 4; n++) {
                int32_t sum;
                memcpy(&sum, soft.data[sums][m] + 4 * n, 4);
                for (int i = 0; i < 4; i++) sum += (int8_t)soft.data[a][m][4 * k + i] * (int)soft.data[b][k][4 * n + i];
                memcpy(soft.data[sums][m] + 4 * n, &sum, 4);
            }
}
static void soft_dpbssd(int sums, int a, int b) {
    for (int m = 0; m < soft.config.rows[sums]; m++)
        for (int k = 0; k < soft.config.row_bytes[a] / 4; k++)
            for (int n = 0; n < soft.config.row_bytes[sums] / 4; n++) {
                int32_t sum;
                memcpy(&sum, soft.data[sums][m] + 4 * n, 4);
                for (int i = 0; i < 4; i++)
                    sum += (int8_t)soft.data[a][m][4 * k + i] * (int8_t)soft.data[b][k][4 * n + i];
                memcpy(soft.data[sums][m] + 4 * n, &sum, 4);
            }
}
static float soft_bf16(const uint8_t* p) {
    uint16_t half;
    memcpy(&half, p, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static void soft_dpbf16ps(int sums, int a, int b) {
    for (int m = 0; m < soft.config.rows[sums]; m++)
        for (int n = 0; n < soft.config.row_bytes[sums] / 4; n++) {
            float part[2] = {0, 0}, sum;
            for (int k = 0; k < soft.config.row_bytes[a] / 4; k++)
                for (int i = 0; i < 2; i++)
                    part[i] = __builtin_fmaf(soft_bf16(soft.data[a][m] + 4 * k + 2 * i),
                                             soft_bf16(soft.data[b][k] + 4 * n + 2 * i), part[i]);
            memcpy(&sum, soft.data[sums][m] + 4 * n, 4);
            sum += part[0] + part[1];
            memcpy(soft.data[sums][m] + 4 * n, &sum, 4);
        }
}
#define HW_TILE_CONFIG(config) (soft.config = (config))
#define HW_TILE_RELEASE() ((void)0)
#define HW_TILE_ZERO(t) memset(soft.data[t], 0, sizeof soft.data[t])
#define HW_TILE_LOAD(t, base, stride) soft_load(t, base, stride)
#define HW_TILE_STORE(t, base, stride) soft_store(t, base, stride)
#define HW_TILE_DPBSUD(c, a, b) soft_dpbsud(c, a, b)
#define HW_TILE_DPBSSD(c, a, b) soft_dpbssd(c, a, b)
#define HW_TILE_DPBF16PS(c, a, b) soft_dpbf16ps(c, a, b)
#else
HW_FN void barrier() { asm volatile("" ::: "memory"); }
HW_FN void load_config(const TileConfig& config) {
    // GCC 12 believes that only 8 bytes are read, and drops stores to the others.
    asm volatile("" ::"m"(config) : "memory");
    _tile_loadconfig(&config);
}
#define HW_TILE_CONFIG(config) load_config(config)
#define HW_TILE_RELEASE() _tile_release()
#define HW_TILE_ZERO(t) _tile_zero(t)
// GCC's intrinsic does not say that it reads memory: what was stored there before might come later, or never.
#define HW_TILE_LOAD(t, base, stride)       \
    do {                                     \
        barrier();                           \
        _tile_loadd(t, base, stride);        \
    } while (0)
#define HW_TILE_STORE(t, base, stride) _tile_stored(t, base, stride)
#define HW_TILE_DPBSUD(c, a, b) _tile_dpbsud(c, a, b)
#define HW_TILE_DPBSSD(c, a, b) _tile_dpbssd(c, a, b)
#define HW_TILE_DPBF16PS(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

// Tiles for products over `bytes` of a row: 64, 32 or 16.
HW_FN void configure_tiles(int bytes) {
    TileConfig config;
    for (int t = 0; t < 4; t++) config.rows[t] = TILE_ROWS, config.row_bytes[t] = 64;
    for (int t = 4; t < 6; t++) config.rows[t] = TILE_ROWS, config.row_bytes[t] = (uint16_t)bytes;
    for (int t = 6; t < 8; t++) config.rows[t] = (uint8_t)(bytes / 4), config.row_bytes[t] = 64;
    HW_TILE_CONFIG(config);
}

HW_FN int tile_bytes(int group) { return group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 16; }

// The codes of some groups of a strip, a byte each, lie in `codes`; `group_bytes` from one group to the next.
constexpr int UNPACKED_K = 2048;  // 32 KB of codes: they stay in the first-level cache

// 4-bit codes to bytes; `p` is moved past the groups, and not past what follows the last.
HW_FN void unpack_groups(const uint8_t* p, int64_t group_bytes, int group, int groups, uint8_t* codes) {
    const vb mask = vb{} + (uint8_t)15;
    for (int g = 0; g < groups; g++, p += group_bytes)
        for (int i = 0; i < group / 8; i++, codes += 128) {
            const vb line = load_line(p + 64 * i), low = line & mask, high = (vb)((vi)line >> 4) & mask;
            memcpy(codes, &low, 64), memcpy(codes + 64, &high, 64);
        }
}

// Sums of one group for 16 rows into memory, on tile c with t for activations and u for weights.
#define HW_GROUP_SUMS(c, t, u, a, a_stride, b, group, bytes, sums)            \
    do {                                                                      \
        HW_TILE_ZERO(c);                                                      \
        for (int i_ = 0; i_ < (group); i_ += (bytes)) {                       \
            HW_TILE_LOAD(t, (a) + i_, a_stride);                              \
            HW_TILE_LOAD(u, (b) + (int64_t)i_ * STRIP, 64);                   \
            HW_TILE_DPBSUD(c, t, u);                                          \
        }                                                                     \
        HW_TILE_STORE(c, sums, 64);                                           \
    } while (0)

// Groups whose products are under way while an earlier group's sums become floats: a tile's way through products and
// memory takes longer than the floats of one group.
constexpr int UNDER_WAY = 4;

// 16 rows by a strip over the groups [from, to): `codes` and `fine` belong to the group `from`. The weights
// that will be needed next, from `ahead` on (or null), are asked for meanwhile.
template <bool MIN>
HW_FN void groups_of_tile(const Quantized& x, int64_t k, int group, int groups, int row, int from, int to,
                          const uint8_t* codes, int64_t codes_bytes, const uint8_t* fine, int64_t group_bytes, int bytes,
                          const uint8_t* ahead, float* sums) {
    const int8_t* a = x.codes + row * k + (int64_t)from * group;
    const float *scales = x.scales + fine_of(row, from, groups), *weighted = x.weighted + fine_of(row, from, groups);
    const int32_t* zeros = x.zeros + fine_of(row, from, groups);
    alignas(64) int32_t dots[UNDER_WAY][TILE_ROWS * LANES];
    vf acc[TILE_ROWS];
    for (int m = 0; m < TILE_ROWS; m++) acc[m] = load(sums + m * LANES);
    const int count = to - from;
    const auto begin = [&](int g) __attribute__((always_inline)) {
        const int8_t* rows = a + (int64_t)g * group;
        const uint8_t* strip = codes + g * codes_bytes;
        switch (g % UNDER_WAY) {
            case 0: HW_GROUP_SUMS(0, 4, 6, rows, k, strip, group, bytes, dots[0]); break;
            case 1: HW_GROUP_SUMS(1, 5, 7, rows, k, strip, group, bytes, dots[1]); break;
            case 2: HW_GROUP_SUMS(2, 4, 6, rows, k, strip, group, bytes, dots[2]); break;
            default: HW_GROUP_SUMS(3, 5, 7, rows, k, strip, group, bytes, dots[3]); break;
        }
    };
    for (int g = 0; g < UNDER_WAY - 1 && g < count; g++) begin(g);
    for (int g = 0; g < count; g++) {
        if (g + UNDER_WAY - 1 < count) begin(g + UNDER_WAY - 1);
        if (ahead)
            for (int64_t line = 0; line < group_bytes; line += 64) __builtin_prefetch(ahead + g * group_bytes + line);
        const int32_t* dot = dots[g % UNDER_WAY];
        const vf scale = load_half((const uint16_t*)(fine + g * group_bytes));
        vf minimum = scale;
        if (MIN) minimum = load_half((const uint16_t*)(fine + g * group_bytes) + STRIP);
        const int64_t at = (int64_t)g * FINE_ROWS;
        for (int m = 0; m < TILE_ROWS; m++) {
            vi d;
            memcpy(&d, dot + m * LANES, 64);
            if (!MIN) d = d - set1i(zeros[at + m]);
            acc[m] = fma(to_float(d) * set1(scales[at + m]), scale, acc[m]);
            if (MIN) acc[m] = fma(minimum, set1(weighted[at + m]), acc[m]);
        }
    }
    for (int m = 0; m < TILE_ROWS; m++) store(sums + m * LANES, acc[m]);
}

// The rows [row, row + rows), at most ROW_BLOCK, by a strip: whole tiles of them are computed, and those that
// are asked for are stored.
template <bool FOUR, bool MIN>
HW_FN void tiles(const Weight& w, const uint8_t* p, const Quantized& x, int row, int rows, float* out, int64_t stride,
                 const Summands& more, int channels) {
    const int group = w.group, groups = w.k / group, bytes = tile_bytes(group);
    const int64_t group_bytes = w.group_bytes(), plain = (int64_t)group * STRIP, packed = plain / (FOUR ? 2 : 1);
    const int some = group >= UNPACKED_K ? 1 : UNPACKED_K / group;
    alignas(64) uint8_t unpacked[FOUR ? UNPACKED_K * STRIP : 64];
    alignas(64) float sums[ROW_BLOCK + TILE_ROWS][LANES];
    const int count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int m = 0; m < count * TILE_ROWS; m++) store(sums[m], vf{});
    // Rows lie pages apart: their lines are on the way while the products run.
    for (int m = 0; m < rows; m++) __builtin_prefetch(out + m * stride, 1);
    for (int from = 0; from < groups; from += some) {
        const int to = from + some < groups ? from + some : groups;
        const uint8_t* first = p + from * group_bytes;
        if (FOUR) unpack_groups(first, group_bytes, group, to - from, unpacked);
        for (int t = 0; t < count; t++)
            groups_of_tile<MIN>(x, w.k, group, groups, row + t * TILE_ROWS, from, to, FOUR ? unpacked : first,
                                FOUR ? plain : group_bytes, first + packed, group_bytes, bytes,
                                t == 0 ? first + (to - from) * group_bytes : nullptr, sums[t * TILE_ROWS]);
    }
    for (int m = 0; m < rows; m++) put(load(sums[m]), out + m * stride, more, m, channels);
}

// ---- the fast way for many rows --------------------------------------------------------------------------------

void split(const float* x, int k, const Planes& out, int row) {
    int8_t *high = out.high + (int64_t)row * k, *low = out.low + (int64_t)row * k;
    float* scales = out.scales + (int64_t)row * fast_blocks(k);
    for (int from = 0; from < k; from += FAST_BLOCK) {
        const int to = from + FAST_BLOCK < k ? from + FAST_BLOCK : k;
        float amax;
        const bool finite = largest_size(x + from, to - from, &amax);
        constexpr float MOST = 127.0f * 256.0f;
        scales[from / FAST_BLOCK] = finite ? amax / MOST : __builtin_nanf("");
        const vf inverse = set1(finite && amax > 1e-36f ? MOST / amax : 0.0f);
        for (int i = from; i < to; i += LANES) {
            vi q{};
            if (finite) q = round_to_int(load(x + i) * inverse);
            const vi rest = ((q + set1i(128)) & set1i(255)) - set1i(128);
            store_bytes(low + i, rest);
            store_bytes(high + i, (q - rest) >> 8);
        }
    }
}

// Some groups of a strip as floats, [k][channels].
template <bool FOUR>
HW_FN void strip_values(const Weight& w, const uint8_t* p, int groups, float* out) {
    const vi byte = set1i(255), zero = set1i(w.zero);
    for (int g = 0; g < groups; g++) {
        const uint8_t* fine = p + (int64_t)w.group * STRIP / (FOUR ? 2 : 1);
        const vf scale = load_half((const uint16_t*)fine);
        vf minimum{};
        if (w.has_min) minimum = load_half((const uint16_t*)fine + STRIP);
        for (int i = 0; i < w.group; i += FOUR ? 8 : 4, p += 64) {
            const vb line = load_line(p);
            for (int half = 0; half < (FOUR ? 2 : 1); half++) {
                const vi codes = (vi)(FOUR ? (half ? (vb)((vi)line >> 4) : line) & (uint8_t)15 : line);
                for (int j = 0; j < 4; j++, out += LANES)
                    store(out, fma(to_float((codes >> 8 * j & byte) - zero), scale, minimum));
            }
        }
        p = fine + (w.has_min ? 4 : 2) * STRIP;
    }
}

// Floats [k][channels] to signed bytes as tiles have them, with a scale for each channel.
HW_FN vf round_again(const float* values, int k, uint8_t* codes) {
    vf most{};
    for (int i = 0; i < k; i++) {
        const vf v = load(values + i * LANES);
        most = max(most, max(v, -v));
    }
    // A channel of nothing stays nothing; one of infinities is no number, as in the exact way.
    const vf inverse = zero_where_equal(set1(127.0f) / most, most, vf{});
    for (int i = 0; i < k; i += 4, codes += 64) {
        vi four{};
        for (int j = 0; j < 4; j++)
            four = four | (round_to_int(load(values + (i + j) * LANES) * inverse) & set1i(255)) << 8 * j;
        memcpy(codes, &four, 64);
    }
    return most / set1(127.0f);
}

constexpr int FAST_ROW_BLOCK = 256;

void linear_fast(const Weight& w, int first, int last, const Planes& x, int rows, float* out, int64_t stride,
                 const Summands& all) {
    configure_tiles(FAST_K);
    const int blocks = fast_blocks(w.k);
    alignas(64) float values[FAST_BLOCK * LANES], sums[FAST_ROW_BLOCK + TILE_ROWS][LANES];
    alignas(64) uint8_t codes[FAST_BLOCK * STRIP];
    alignas(64) int32_t dots[2][TILE_ROWS * LANES];
    for (int from = 0; from < rows; from += FAST_ROW_BLOCK) {
        const int count = rows - from < FAST_ROW_BLOCK ? rows - from : FAST_ROW_BLOCK;
        for (int s = first; s < last; s++) {
            const uint8_t* p = w.data + s * w.strip_bytes;
            for (int m = 0; m < count; m++) store(sums[m], vf{});
            for (int block = 0; block < blocks; block++) {
                const int k = block * FAST_BLOCK, size = w.k - k < FAST_BLOCK ? w.k - k : FAST_BLOCK;
                const uint8_t* groups = p + k / w.group * w.group_bytes();
                if (w.kind == Kind::q4)
                    strip_values<true>(w, groups, size / w.group, values);
                else
                    strip_values<false>(w, groups, size / w.group, values);
                const vf scale = round_again(values, size, codes) * set1(w.rescale);
                for (int tile = 0; tile < count; tile += TILE_ROWS) {
                    const int64_t row = from + tile;
                    HW_TILE_ZERO(0);
                    HW_TILE_ZERO(1);
                    for (int i = 0; i < size; i += FAST_K) {
                        HW_TILE_LOAD(6, codes + i * STRIP, 64);
                        HW_TILE_LOAD(4, x.high + row * w.k + k + i, w.k);
                        HW_TILE_DPBSSD(0, 4, 6);
                        HW_TILE_LOAD(5, x.low + row * w.k + k + i, w.k);
                        HW_TILE_DPBSSD(1, 5, 6);
                    }
                    HW_TILE_STORE(0, dots[0], 64);
                    HW_TILE_STORE(1, dots[1], 64);
                    for (int m = 0; m < TILE_ROWS && tile + m < count; m++) {
                        vi high, low;
                        memcpy(&high, dots[0] + m * LANES, 64), memcpy(&low, dots[1] + m * LANES, 64);
                        const vf dot = fma(to_float(high), set1(256.0f), to_float(low));
                        const vf scaled = dot * set1(x.scales[(row + m) * blocks + block]);
                        store(sums[tile + m], fma(scaled, scale, load(sums[tile + m])));
                    }
                }
            }
            const int channels = w.n - s * STRIP < STRIP ? w.n - s * STRIP : STRIP;
            const Summands more = of_strip(all, s);
            for (int m = 0; m < count; m++)
                put(load(sums[m]), out + (from + m) * stride + s * STRIP, more, from + m, channels);
        }
    }
    HW_TILE_RELEASE();
}

// ---- bfloat16 by pairs of k ------------------------------------------------------------------------------------

// Denormals are zero, as tiles have it; put back when it goes.
struct FlushDenormals {
#if defined(__x86_64__)
    const unsigned before = __builtin_ia32_stmxcsr();
    FlushDenormals() { __builtin_ia32_ldmxcsr(before | 0x8040); }
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before); }
#endif
};

HW_FN vf lower(vi pair) { return (vf)(pair << 16); }
HW_FN vf upper(vi pair) { return (vf)(pair & set1i((int32_t)0xffff0000)); }

// M rows by a strip, in the order of a tile: sums of the even and of the odd k over 32, then both to the total.
template <int M>
HW_FN void pairs_tile(const Weight& w, const uint8_t* p, const uint16_t* x, int, float* out, int64_t stride,
                      const Summands& more, int channels) {
    vf acc[M] = {};
    for (int k = 0; k < w.k; k += PAIRS_K) {
        vf even[M] = {}, odd[M] = {};
        for (int i = k; i < k + PAIRS_K; i += 2, p += 64) {
            vi line;
            memcpy(&line, p, 64);
            const vf a = lower(line), b = upper(line);
            for (int m = 0; m < M; m++) {
                int32_t two;
                memcpy(&two, x + (int64_t)m * w.k + i, 4);
                const vi both = set1i(two);
                even[m] = fma(lower(both), a, even[m]);
                odd[m] = fma(upper(both), b, odd[m]);
            }
        }
        for (int m = 0; m < M; m++) acc[m] = acc[m] + (even[m] + odd[m]);
    }
    for (int m = 0; m < M; m++) put(acc[m], out + m * stride, more, m, channels);
}

// 16 or 32 rows, of which `rows` are asked for, by a strip.
template <bool TWO>
HW_FN void pairs_tiles(const Weight& w, const uint8_t* p, const uint16_t* x, int rows, float* out, int64_t stride,
                       const Summands& more, int channels) {
    alignas(64) float sums[TWO ? 2 : 1][TILE_ROWS][LANES];
    const int64_t bytes = 2 * (int64_t)w.k;
    HW_TILE_ZERO(0);
    if (TWO) HW_TILE_ZERO(1);
    for (int k = 0; k < w.k; k += PAIRS_K, p += PAIRS_K * STRIP * 2) {
        HW_TILE_LOAD(6, p, 64);
        HW_TILE_LOAD(4, x + k, bytes);
        HW_TILE_DPBF16PS(0, 4, 6);
        if (TWO) {
            HW_TILE_LOAD(5, x + (int64_t)TILE_ROWS * w.k + k, bytes);
            HW_TILE_DPBF16PS(1, 5, 6);
        }
    }
    HW_TILE_STORE(0, sums[0], 64);
    if (TWO) HW_TILE_STORE(1, sums[TWO ? 1 : 0], 64);
    for (int m = 0; m < rows; m++) put(load(sums[0][0] + m * LANES), out + m * stride, more, m, channels);
}

void linear_pairs(const Weight& w, int first, int last, const uint16_t* x, int rows, float* out, int64_t stride,
                  const Summands& all) {
    const FlushDenormals flush;
    const bool tiled = rows >= FEWEST_TILE_ROWS;
    if (tiled) configure_tiles(64);
    for (int block = 0; block < rows; block += ROW_BLOCK) {
        const int end = block + ROW_BLOCK < rows ? block + ROW_BLOCK : rows;
        for (int s = first; s < last; s++) {
            const uint8_t* p = w.data + s * w.strip_bytes;
            const int channels = w.n - s * STRIP < STRIP ? w.n - s * STRIP : STRIP;
            const Summands more = of_strip(all, s);
            float* to = out + s * STRIP;
            int row = block;
#define HW_PAIRS(tile, count)                                                                               \
    tile(w, p, x + (int64_t)row * w.k, count, to + row * stride, stride, of_row(more, row), channels), row += (count)
            while (end - row >= FEWEST_TILE_ROWS) {
                const int left = end - row;
                if (left >= TILE_ROWS + FEWEST_TILE_ROWS)
                    HW_PAIRS(pairs_tiles<true>, left < 2 * TILE_ROWS ? left : 2 * TILE_ROWS);
                else
                    HW_PAIRS(pairs_tiles<false>, left < TILE_ROWS ? left : TILE_ROWS);
            }
            while (row + 4 <= end) HW_PAIRS(pairs_tile<4>, 4);
            while (row + 2 <= end) HW_PAIRS(pairs_tile<2>, 2);
            while (row < end) HW_PAIRS(pairs_tile<1>, 1);
#undef HW_PAIRS
        }
    }
    if (tiled) HW_TILE_RELEASE();
}

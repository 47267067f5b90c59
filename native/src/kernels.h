// What every instruction set provides: a table of plain functions over rows, strips and blocks. No Python, no threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headway {

constexpr int STRIP = 16;  // output channels that lie interleaved
constexpr int SPARE_ROWS = 16;
constexpr int PAIRS_K = 32;  // k of a Kind::pairs weight are a multiple of it

enum class Kind : int32_t {
    q4 = 4,    // unsigned 4-bit codes
    q8 = 8,    // unsigned 8-bit codes
    bf16 = 16,
    f16 = 17,
    pairs = 18,  // bfloat16 for kernels that multiply it as such, two k at a time
    f32 = 32,
};

inline bool is_quantized(Kind kind) { return kind == Kind::q4 || kind == Kind::q8; }

// A weight [n, k], repacked: strips of 16 output channels, each one linear stream over k.
//   q4, q8: per group of k the codes (64-byte lines of 16 channels x 4 k; q4 holds the next 4 k in the high nibbles),
//           then 16 scales, then 16 minima if there are any, both in half precision times 2^-shift
//   bf16, f16, f32: per k the 16 channels
//   pairs: per two k the 16 channels, each with both
// Channels past n are zero. W[n, k] = scale * (code - zero) + minimum.
struct Weight {
    Kind kind;
    int32_t n, k, group, zero, has_min;
    float rescale;        // 2^shift: scales are stored divided by it, so that half precision suffices
    int64_t strip_bytes;  // bytes from one strip to the next
    uint8_t* data;

    int64_t group_bytes() const {  // of a strip, q4 and q8 only
        return (int64_t)group * STRIP / (kind == Kind::q4 ? 2 : 1) + (has_min ? 4 : 2) * STRIP;
    }
    int32_t strips() const { return (n + STRIP - 1) / STRIP; }
};

// Rows of activations, quantized to signed 8 bits per row and group. Kernels may read, and ignore, up to SPARE_ROWS rows
// past the last. What belongs to a group lies as [rows / FINE_ROWS, k / group, FINE_ROWS] (fine_of): a tile's rows side
// by side.
struct Quantized {
    int8_t* codes;     // [rows, k]
    float* scales;     // times the weight's rescale
    int32_t* zeros;    // what a dot product of codes has too much: zero point times the sum of the codes
    float* weighted;   // scale times the sum of the codes
};

constexpr int FINE_ROWS = 16;
static inline int64_t fine_of(int64_t row, int64_t group, int64_t groups) {
    return (row / FINE_ROWS * groups + group) * FINE_ROWS + row % FINE_ROWS;
}

struct Heads {
    int32_t heads, kv_heads, width;
    float scale, softcap;  // softcap 0: none
    int32_t window;        // 0: none
};

// One layer's part of the KV pool: a unit for each block and KV head, K as [width, block_tokens], then V as
// [block_tokens, width]. Of bfloat16, or of int8 with, after both, a float scale per token for K and then for V.
struct Layer {
    uint8_t* data;
    int32_t block_tokens;
    bool bytes;    // int8
    int64_t unit;  // bytes

    static int64_t unit_bytes(bool bytes, int block_tokens, int width) {
        const int64_t values = 2 * (int64_t)block_tokens * width;
        return bytes ? values + 2 * (int64_t)sizeof(float) * block_tokens : values * (int64_t)sizeof(uint16_t);
    }
};

constexpr int WIDEST_HEAD = 4096;
constexpr int SPAN_OF_LOGITS = 256;  // a multiple of STRIP
constexpr int SPAN = 128;  // tokens of context that are summed apart, whatever the batch; a multiple of every block size

// Running softmax over a part of the context: largest score, sum of exponentials, weighted sum of V.
struct Partial {
    float largest, total;
};

// Rows of activations in 16 bits per row and block of FAST_BLOCK k, as two planes of signed bytes: 256 high + low.
struct Planes {
    int8_t *high, *low;  // [rows, k]; as for Quantized, more rows may be read
    float* scales;       // [rows, blocks of k]
};

constexpr int FAST_BLOCK = 512, FAST_K = 64;  // k of a weight that is taken fast are a multiple of the latter
constexpr int FAST_ROWS = 32;                 // from which it pays

inline int fast_blocks(int k) { return (k + FAST_BLOCK - 1) / FAST_BLOCK; }

// What a product adds to its sums, in this order; null where there is nothing.
struct Summands {
    const float* bias;  // [n]
    const float* rows;  // [rows, n], the rows `stride` apart
    int64_t stride;
};

struct Kernels {
    const char* name;
    void (*quantize)(const float* x, const Weight& for_weight, const Quantized& out, int row);
    // out[row, n] = x . W[n] + summands, for the strips [first, last) of all rows
    void (*linear_quantized)(const Weight&, int first, int last, const Quantized&, int rows, float* out, int64_t stride,
                             const Summands&);
    void (*linear_float)(const Weight&, int first, int last, const float* x, int64_t x_stride, int rows, float* out,
                         int64_t stride, const Summands&);
    // The same nearly, and faster for many rows: the weights' groups are rounded again, to 8 bits a channel and block. Null
    // where there is no such way. A row's result still is its own, but differs from linear_quantized's.
    void (*split)(const float* x, int k, const Planes& out, int row);
    void (*linear_fast)(const Weight&, int first, int last, const Planes&, int rows, float* out, int64_t stride,
                        const Summands&);
    // The same for Kind::pairs on rows of bfloat16; null where there is no such kind.
    void (*linear_pairs)(const Weight&, int first, int last, const uint16_t* x, int rows, float* out, int64_t stride,
                         const Summands&);
    void (*to_bf16)(const float* x, uint16_t* out, int count);
    void (*embed)(const Weight&, int row, float scale, float* out);
    void (*rms_norm)(const float* x, const float* weight, float* out, int heads, int width, float eps);
    void (*rotate)(const float* x, const float* cos, const float* sin, float* out, int heads, int width);
    void (*gate)(const float* gate, const float* up, float* out, int width, int gelu);
    void (*add)(const float* a, const float* b, float* out, int width);
    // Heads of one row turned by a Hadamard matrix: q . k stays, and no channel stands out, which int8 keys need.
    void (*spread)(const float* x, float* out, int heads, int width);
    // Store one row's K and V at a place of a block; int8 keys are spread first.
    void (*store_kv)(const Layer&, const Heads&, int block, int offset, const float* k, const float* v);
    // Query rows [first_position, first_position + rows) of one sequence, one KV head, keys of one span of the context:
    // q and out are [rows, group * width] with strides; out gets the weighted sums, state one Partial per row and head.
    void (*attend_span)(const Layer&, const Heads&, const int32_t* table, int kv_head, int span, const float* q,
                        int64_t q_stride, int rows, int first_position, float* out, int64_t out_stride, Partial* state,
                        int64_t state_stride);
    // acc (+) part, both over `width` values
    void (*merge)(Partial* acc, float* acc_values, const Partial* part, const float* values, int width);
    void (*finish)(const Partial* acc, float* values, int width);  // divide by the total
    void (*softcap)(float* x, int64_t count, float cap);
    // The largest of up to SPAN_OF_LOGITS logits, or no number where one of them is infinite or none.
    float (*largest_logit)(const float* x, int count);
    // out = e^((x - best) / temperature) for up to SPAN_OF_LOGITS logits; returns their sum.
    float (*weigh)(const float* x, int count, float best, float temperature, float* out);
    // What the machine can do at most: read a stretch of memory; do products of codes on registers alone. They return a
    // sum that keeps the work from being dropped, and the multiplications and additions done.
    float (*read)(const float* x, int64_t count);
    int64_t (*products)(int64_t rounds);
};

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx2_vnni_kernels, avx512_kernels, amx_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels, neon_i8mm_kernels;
#endif

}  // namespace headway

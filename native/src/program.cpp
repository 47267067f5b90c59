#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace headway {
namespace {

constexpr int64_t WORTH = 24 * 1024;  // multiply-adds (or as much other work) from which waking a thread pays
constexpr int64_t HUGE_PAGE = 2 << 20, ARENA = 32 << 20;
constexpr int CHUNK_ROWS = 16;        // query rows of a prefill that share a conversion of K and V

int ceil_div(int a, int b) { return (a + b - 1) / b; }

void require(bool right, const char* what) {
    if (!right) throw std::invalid_argument(std::string("native kernels: wrong ") + what);
}

}  // namespace

Program::Program(const Kernels& kernels, int threads, int layers, int n_blocks, int block_tokens, int kv_heads, int width,
                 int kv_bits)
    : kernels_(kernels), layers_(layers), n_blocks_(n_blocks), block_tokens_(block_tokens), kv_heads_(kv_heads),
      width_(width) {
    require(threads >= 1 && threads <= 1024, "threads");
    require(layers >= 1 && n_blocks >= 1 && kv_heads >= 1, "the KV pool's size");
    require(block_tokens >= STRIP && block_tokens % STRIP == 0 && SPAN % block_tokens == 0, "block_tokens");
    require(width >= STRIP && width % STRIP == 0 && width <= WIDEST_HEAD, "the heads' width");
    require(kv_bits == 8 || kv_bits == 16, "kv_bits");
    const int64_t unit = Layer::unit_bytes(kv_bits == 8, block_tokens, width);
    require((double)unit * layers * n_blocks * kv_heads < 1e15, "the KV pool's size");
    const int64_t one = unit * n_blocks * kv_heads;
    uint8_t* kv = map(one * layers);
    for (int layer = 0; layer < layers; layer++) pool_layers_.push_back({kv + one * layer, block_tokens, kv_bits == 8, unit});
    pool_ = std::make_unique<Pool>(threads);
}

Program::~Program() {
    if (pool_ && pool_->forked()) (void)pool_.release();
}

void Program::Unmap::operator()(uint8_t* data) const { munmap(data, bytes); }

// Zero pages, backed by memory as they are touched; large ones where the system has them on request, since decoding
// reads all weights once a step, and small pages cost it a walk of the page tables every 4 KB.
uint8_t* Program::map(int64_t bytes) {
    const int64_t whole = (bytes + 4095) / 4096 * 4096 + HUGE_PAGE;
    void* data = mmap(nullptr, (size_t)whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    maps_.emplace_back((uint8_t*)data, Unmap{(size_t)whole});
    uint8_t* aligned = (uint8_t*)(((uintptr_t)data + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
#if defined(MADV_HUGEPAGE)
    madvise(aligned, (size_t)(whole - (aligned - (uint8_t*)data)), MADV_HUGEPAGE);
#endif
    return aligned;
}

// A weight's place, one after another.
uint8_t* Program::allocate(int64_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > arena_left_) {
        arena_left_ = std::max(bytes, ARENA);
        arena_ = map(arena_left_);
    }
    uint8_t* data = arena_;
    arena_ += bytes, arena_left_ -= bytes;
    return data;
}

int Program::add_vector(int n, const float* values) {
    vectors_.emplace_back(values, values + n);
    return (int)vectors_.size() - 1;
}

int Program::add_rope(int half, const float* inverse_frequencies, float factor) {
    ropes_.push_back({{inverse_frequencies, inverse_frequencies + half}, factor, {}, {}});
    return (int)ropes_.size() - 1;
}

void Program::set_profile(bool on) {
    profiling_ = on;
    profile_ = {};
}

void Program::reserve(int rows) {
    if (rows <= reserved_) return;
    buffers_.resize(widths_.size());
    for (size_t i = 0; i < widths_.size(); i++) buffers_[i].resize((size_t)widths_[i] * rows + STRIP);
    int64_t codes = 0, groups = 0;
    for (const Weight& w : weights_) {
        codes = std::max<int64_t>(codes, w.k);
        if (w.group) groups = std::max<int64_t>(groups, w.k / w.group);
    }
    const int64_t all = rows + SPARE_ROWS;
    codes_.resize((size_t)(codes * all) + 64);
    if (kernels_.linear_pairs) halves_.resize((size_t)(codes * all) + 64);
    scales_.resize((size_t)(groups * all));
    weighted_.resize((size_t)(groups * all));
    zeros_.resize((size_t)(groups * all));
    made_.resize((size_t)(codes * std::max(rows, pool_->threads())));
    reserved_ = rows;
}

void Program::over_rows(int rows, int64_t cost, const std::function<void(int, int)>& task) {
    if (rows == 1 || cost * rows < WORTH) {
        for (int row = 0; row < rows; row++) task(row, 0);
        return;
    }
    const int parts = std::min(rows, 4 * pool_->threads());
    pool_->run(parts, [&](int part, int worker) {
        for (int row = (int)((int64_t)rows * part / parts); row < (int64_t)rows * (part + 1) / parts; row++)
            task(row, worker);
    });
}

void Program::product(const Node& n, int rows, const int32_t* picked, float* out, int64_t stride) {
    const Weight& w = weights_[n.weight];
    const float* x = at(n.in[0]);
    const int64_t sx = this->stride(n.in[0]);
    auto row_of = [=](int row) { return x + (picked ? picked[row] : row) * sx; };
    Rows from{x, sx, {}, 0};
    if (n.before == Before::norm) {
        const float* norm = vectors_[n.norm].data();
        from.cost = w.k;
        from.make = [=](int row, float* made) {
            kernels_.rms_norm(row_of(row), norm, made, 1, w.k, n.eps);
            return made;
        };
    } else if (n.before == Before::gate) {
        const float* up = at(n.in[1]);
        const int64_t su = this->stride(n.in[1]);
        from.cost = (int64_t)w.k * 8;
        from.make = [=](int row, float* made) {
            kernels_.gate(row_of(row), up + row * su, made, w.k, n.flag);
            return made;
        };
    } else if (picked) {
        from.make = [=](int row, float*) { return row_of(row); };
    }
    const float* bias = n.bias < 0 ? nullptr : vectors_[n.bias].data();
    const Place& last = n.in[n.inputs - 1];
    product(w, from, rows, out, stride, {bias, n.adds ? at(last) : nullptr, n.adds ? this->stride(last) : 0},
            n.op == Op::head && n.value <= 0);
}

void Program::product(const Weight& w, const Rows& from, int rows, float* out, int64_t stride, const Summands& more,
                      bool head) {
    const bool quantized = is_quantized(w.kind);
    if (!head && rows > first_fast_ && quantized && w.k % FAST_K == 0 && FAST_BLOCK % w.group == 0) {
        fast_product(w, from, first_fast_, rows, out, stride, more);
        rows = first_fast_;
        if (rows == 0) return;
    }
    const Quantized q{codes_.data(), scales_.data(), zeros_.data(), weighted_.data()};
    const float* x = from.x;
    int64_t x_stride = from.stride;
    if (quantized) {
        over_rows(rows, w.k + from.cost, [&](int row, int worker) {
            float* made = made_.data() + (int64_t)worker * w.k;
            kernels_.quantize(from.make ? from.make(row, made) : x + row * x_stride, w, q, row);
        });
    } else if (w.kind == Kind::pairs) {
        over_rows(rows, w.k + from.cost, [&](int row, int worker) {
            float* made = made_.data() + (int64_t)worker * w.k;
            kernels_.to_bf16(from.make ? from.make(row, made) : x + row * x_stride, halves_.data() + (int64_t)row * w.k, w.k);
        });
    } else if (from.make) {
        over_rows(rows, w.k + from.cost, [&](int row, int) {
            float* made = made_.data() + (int64_t)row * w.k;
            const float* found = from.make(row, made);
            if (found != made) std::memcpy(made, found, sizeof(float) * (size_t)w.k);
        });
        x = made_.data(), x_stride = w.k;
    }
    over_strips(w, rows, head, [&](int first, int last) {
        if (quantized)
            kernels_.linear_quantized(w, first, last, q, rows, out, stride, more);
        else if (w.kind == Kind::pairs)
            kernels_.linear_pairs(w, first, last, halves_.data(), rows, out, stride, more);
        else
            kernels_.linear_float(w, first, last, x, x_stride, rows, out, stride, more);
        if (head) find_maxima(out, rows, stride, first * STRIP, last * STRIP, 0);
    });
}

// Rows from `first` on in 16 bits, weights rounded again to 8: the planes lie where codes would.
void Program::fast_product(const Weight& w, const Rows& from, int first, int rows, float* out, int64_t stride,
                           const Summands& more) {
    const int count = rows - first;
    const int64_t size = (int64_t)(count + SPARE_ROWS) * w.k;
    planes_.resize((size_t)(2 * size));
    scales_.resize(std::max(scales_.size(), (size_t)((count + SPARE_ROWS) * fast_blocks(w.k))));
    const Planes planes{planes_.data(), planes_.data() + size, scales_.data()};
    over_rows(count, w.k + from.cost, [&](int row, int worker) {
        float* made = made_.data() + (int64_t)worker * w.k;
        const float* x = from.make ? from.make(first + row, made) : from.x + (first + row) * from.stride;
        kernels_.split(x, w.k, planes, row);
    });
    const Summands after{more.bias, more.rows ? more.rows + first * more.stride : nullptr, more.stride};
    over_strips(w, count, false, [&](int begin, int end) {
        kernels_.linear_fast(w, begin, end, planes, count, out + first * stride, stride, after);
    });
}

// task(first, last) over the strips, in parts of about 64 KB of weights, so that a slow core leaves the others most of
// the work; few for small products. Parts of a head end where spans of logits do, whose largest are found meanwhile.
template <typename Task>
void Program::over_strips(const Weight& w, int rows, bool head, const Task& task) {
    const int strips = w.strips(), whole = head ? SPAN_OF_LOGITS / STRIP : 1, units = ceil_div(strips, whole);
    const int64_t bytes = w.strip_bytes * strips;
    int parts = (int)std::min<int64_t>(units, std::max<int64_t>(2 * pool_->threads(), bytes / (64 * 1024)));
    if ((int64_t)w.n * w.k * rows < WORTH) parts = 1;
    pool_->run(parts, [&](int part, int) {
        const int first = (int)((int64_t)units * part / parts) * whole;
        task(first, std::min(strips, (int)((int64_t)units * (part + 1) / parts) * whole));
    });
}

// The first of the last rows that are all of chunks of at least FAST_ROWS; rows that decode stay exact.
int Program::first_fast(const Batch& batch) const {
    if (!fast_) return INT_MAX;
    int first = batch.rows;
    for (int s = batch.sequences - 1; s >= 0 && batch.starts[s + 1] - batch.starts[s] >= FAST_ROWS; s--)
        first = batch.starts[s];
    return first;
}

void Program::tables_of_ropes(const Batch& batch) {
    for (RopeTable& rope : ropes_) {
        const int half = (int)rope.inverse.size();
        rope.cos.resize((size_t)half * batch.rows);
        rope.sin.resize((size_t)half * batch.rows);
        over_rows(batch.rows, 32 * half, [&](int row, int) {
            for (int i = 0; i < half; i++) {
                const float angle = (float)batch.positions[row] * rope.inverse[i];
                rope.cos[(size_t)row * half + i] = std::cos(angle) * rope.factor;
                rope.sin[(size_t)row * half + i] = std::sin(angle) * rope.factor;
            }
        });
    }
}

void Program::run(const Batch& batch, float* logits) {
    check(batch);
    reserve(batch.rows);
    tables_of_ropes(batch);
    first_fast_ = first_fast(batch);
    const int rows = batch.rows;
    for (const Node& n : nodes_) {
        auto began = profiling_ ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point{};
        float* out = n.op == Op::head ? nullptr : at(n.out);
        const int64_t so = n.op == Op::head ? 0 : stride(n.out);
        switch (n.op) {
            case Op::embed:
                over_rows(rows, n.width * 4, [&](int row, int) {
                    kernels_.embed(weights_[n.weight], batch.token_ids[row], n.value, out + row * so);
                });
                break;
            case Op::rms_norm: {
                const float *x = at(n.in[0]), *weight = vectors_[n.norm].data();
                const int64_t sx = stride(n.in[0]);
                over_rows(rows, n.width * n.heads, [&](int row, int) {
                    kernels_.rms_norm(x + row * sx, weight, out + row * so, n.heads, n.width, n.eps);
                });
                break;
            }
            case Op::linear:
                product(n, rows, nullptr, out, so);
                break;
            case Op::rope: {
                const float* x = at(n.in[0]);
                const int64_t sx = stride(n.in[0]);
                over_rows(rows, n.width * n.heads,
                          [&](int row, int) { rotate(n.q_rope, row, x + row * sx, out + row * so, n.heads, n.width); });
                break;
            }
            case Op::attend:
                attend(n, batch);
                break;
            case Op::gate:
            case Op::add: {
                const float *a = at(n.in[0]), *b = at(n.in[1]);
                const int64_t sa = stride(n.in[0]), sb = stride(n.in[1]);
                over_rows(rows, n.op == Op::gate ? n.width * 8 : n.width, [&](int row, int) {
                    if (n.op == Op::gate)
                        kernels_.gate(a + row * sa, b + row * sb, out + row * so, n.width, n.flag);
                    else
                        kernels_.add(a + row * sa, b + row * sb, out + row * so, n.width);
                });
                break;
            }
            case Op::head:
                head(n, batch, logits);
                break;
        }
        if (profiling_) {
            std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
            profile_.seconds[(int)n.op] += spent.count();
            profile_.calls[(int)n.op]++;
        }
    }
}

void Program::rotate(int rope, int row, const float* x, float* out, int heads, int width) const {
    const RopeTable& table = ropes_[rope];
    const int64_t half = width / 2;
    kernels_.rotate(x, table.cos.data() + row * half, table.sin.data() + row * half, out, heads, width);
}

void Program::attend(const Node& n, const Batch& batch) {
    const Layer& layer = pool_layers_[n.layer];
    const Heads& h = n.shape;
    const float *q = at(n.in[0]), *k = at(n.in[1]), *v = at(n.in[2]);
    int64_t sq = stride(n.in[0]);
    const int64_t sk = stride(n.in[1]), sv = stride(n.in[2]);
    const int q_width = h.heads * h.width, k_width = h.kv_heads * h.width;
    const bool moves = layer.bytes || n.q_rope >= 0;  // the queries change before they are used
    if (moves) queries_.resize((size_t)(batch.rows + (layer.bytes ? pool_->threads() : 0)) * q_width);
    keys_.resize((size_t)pool_->threads() * k_width);
    owners_.resize((size_t)batch.rows);
    for (int s = 0; s < batch.sequences; s++)
        std::fill(owners_.begin() + batch.starts[s], owners_.begin() + batch.starts[s + 1], s);
    over_rows(batch.rows, 4 * k_width + (moves ? 4 * q_width : 0), [&](int row, int worker) {
        const int32_t* table = batch.tables + (int64_t)owners_[row] * batch.table_width;
        const int position = batch.positions[row];
        const float* key = k + row * sk;
        if (n.k_rope >= 0) {
            float* turned = keys_.data() + (int64_t)worker * k_width;
            rotate(n.k_rope, row, key, turned, h.kv_heads, h.width);
            key = turned;
        }
        kernels_.store_kv(layer, h, table[position / block_tokens_], position % block_tokens_, key, v + row * sv);
        const float* query = q + row * sq;
        float* moved = queries_.data() + (int64_t)row * q_width;
        if (n.q_rope >= 0) {
            float* turned = layer.bytes ? queries_.data() + (int64_t)(batch.rows + worker) * q_width : moved;
            rotate(n.q_rope, row, query, turned, h.heads, h.width);
            query = turned;
        }
        if (layer.bytes) kernels_.spread(query, moved, h.heads, h.width);
    });
    if (moves) q = queries_.data(), sq = q_width;
    std::vector<int> decodes;
    for (int s = 0; s < batch.sequences; s++) {
        if (batch.starts[s + 1] - batch.starts[s] == 1)
            decodes.push_back(s);
        else
            attend_chunk(n, batch, s, q, sq);
    }
    if (!decodes.empty()) attend_decodes(n, batch, decodes, q, sq);
}

// One row each: the parts are (sequence, KV head, span), so that even a single sequence keeps all threads busy.
void Program::attend_decodes(const Node& n, const Batch& batch, const std::vector<int>& sequences, const float* q,
                             int64_t sq) {
    const Heads& h = n.shape;
    const Layer& layer = pool_layers_[n.layer];
    const int group = h.heads / h.kv_heads, count = (int)sequences.size();
    std::vector<int> offset(count + 1, 0);  // first span of each sequence among all
    std::vector<std::pair<int, int>> owner;
    int64_t context = 0;
    for (int i = 0; i < count; i++) {
        const int length = batch.lengths[sequences[i]];
        const int from = h.window ? std::max(0, length - h.window) / SPAN : 0, to = ceil_div(length, SPAN);
        offset[i + 1] = offset[i] + (to - from);
        for (int span = from; span < to; span++) owner.emplace_back(i, span);
        context += length;
    }
    const int spans = offset[count];
    parts_.resize((size_t)spans * h.heads);
    part_values_.resize((size_t)spans * h.heads * h.width);
    float* out = at(n.out);
    const int64_t so = stride(n.out);
    const int tasks = spans * h.kv_heads;
    auto one = [&](int task, int) {
        const int place = task / h.kv_heads, kv = task % h.kv_heads;
        const auto [i, span] = owner[place];
        const int s = sequences[i], row = batch.starts[s];
        const int64_t at_head = (int64_t)place * h.heads + (int64_t)kv * group;
        kernels_.attend_span(layer, h, batch.tables + (int64_t)s * batch.table_width, kv, span,
                             q + row * sq + (int64_t)kv * group * h.width, sq, 1, batch.positions[row],
                             part_values_.data() + at_head * h.width, 0, parts_.data() + at_head, 0);
    };
    const bool share = context * h.heads * h.width * 2 >= WORTH;
    if (share)
        pool_->run(tasks, one);
    else
        for (int task = 0; task < tasks; task++) one(task, 0);
    over_rows(count, (int64_t)h.heads * h.width * 4, [&](int i, int) {
        const int row = batch.starts[sequences[i]];
        for (int head = 0; head < h.heads; head++) {
            Partial total{0, 0};
            float* values = out + row * so + (int64_t)head * h.width;
            for (int place = offset[i]; place < offset[i + 1]; place++) {
                const int64_t at_head = (int64_t)place * h.heads + head;
                kernels_.merge(&total, values, &parts_[at_head], part_values_.data() + at_head * h.width, h.width);
            }
            kernels_.finish(&total, values, h.width);
        }
    });
}

// Many rows of one sequence: the parts are (KV head, few rows), which go over the spans in the same order.
void Program::attend_chunk(const Node& n, const Batch& batch, int s, const float* q, int64_t sq) {
    const Heads& h = n.shape;
    const Layer& layer = pool_layers_[n.layer];
    const int group = h.heads / h.kv_heads, first = batch.starts[s], rows = batch.starts[s + 1] - first;
    const int64_t part = (int64_t)CHUNK_ROWS * group;
    parts_.resize((size_t)(pool_->threads() * part * 2));
    part_values_.resize((size_t)(pool_->threads() * part * h.width));
    float* out = at(n.out);
    const int64_t so = stride(n.out);
    const int tiles = ceil_div(rows, CHUNK_ROWS);
    pool_->run(tiles * h.kv_heads, [&](int task, int worker) {
        // The last rows see most: they go first, so that no thread starts a long part at the end.
        const int tile = tiles - 1 - task / h.kv_heads, kv = task % h.kv_heads;
        const int row = first + tile * CHUNK_ROWS, count = std::min(CHUNK_ROWS, first + rows - row);
        const int position = batch.positions[row], last = position + count - 1;
        Partial *total = parts_.data() + worker * part * 2, *state = total + part;
        float* values = part_values_.data() + worker * part * h.width;
        for (int64_t i = 0; i < part; i++) total[i] = {0, 0};
        const int64_t column = (int64_t)kv * group * h.width;
        const int from = h.window ? std::max(0, position - h.window + 1) / SPAN : 0;
        for (int span = from; span <= last / SPAN; span++) {
            kernels_.attend_span(layer, h, batch.tables + (int64_t)s * batch.table_width, kv, span, q + row * sq + column,
                                 sq, count, position, values, (int64_t)group * h.width, state, group);
            for (int r = 0; r < count; r++)
                for (int i = 0; i < group; i++)
                    kernels_.merge(&total[r * group + i], out + (row + r) * so + column + (int64_t)i * h.width,
                                   &state[r * group + i], values + ((int64_t)r * group + i) * h.width, h.width);
        }
        for (int r = 0; r < count; r++)
            for (int i = 0; i < group; i++)
                kernels_.finish(&total[r * group + i], out + (row + r) * so + column + (int64_t)i * h.width, h.width);
    });
}

void Program::head(const Node& n, const Batch& batch, float* logits) {
    maxima_of_ = nullptr;
    first_fast_ = INT_MAX;  // logits are exact
    if (batch.logits == 0) return;
    maxima_.resize((size_t)batch.logits * ceil_div(n.width, SPAN_OF_LOGITS));
    product(n, batch.logits, batch.logit_rows, logits, n.width);
    if (n.value > 0)
        over_rows(batch.logits, (int64_t)n.width * 8,
                  [&](int i, int) {
                      kernels_.softcap(logits + (int64_t)i * n.width, n.width, n.value);
                      find_maxima(logits + (int64_t)i * n.width, 1, n.width, 0, n.width, i);
                  });
    maxima_of_ = logits;
}

void Program::linear(int weight, const float* x, int rows, float* out) {
    const Weight& w = this->weight(weight);
    reserve(rows);
    first_fast_ = fast_ && rows >= FAST_ROWS ? 0 : INT_MAX;
    product(w, {x, w.k, {}, 0}, rows, out, w.n, {nullptr, nullptr, 0});
}

void Program::embed_rows(int weight, const int32_t* ids, int rows, float* out) {
    const Weight& w = this->weight(weight);
    for (int row = 0; row < rows; row++) index(ids[row], (size_t)w.n, "token id");
    for (int row = 0; row < rows; row++) kernels_.embed(w, ids[row], 1.0f, out + (int64_t)row * w.k);
}

}  // namespace headway

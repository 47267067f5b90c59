// A Plan in native form: Ops over buffers that are allocated once. One call runs a whole step.
#pragma once

#include <climits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace headway {

// This step's rows: see kernels/ops.py, Batch.
struct Batch {
    const int32_t *token_ids, *positions, *starts, *lengths, *tables, *logit_rows;
    int32_t rows, sequences, table_width, logits, vocabulary;
};

struct Place {
    int32_t buffer, column;
};

enum class Op : int32_t { embed, rms_norm, linear, rope, attend, gate, add, head };

// What a product does to a row first, so that no other pass over memory is needed.
enum class Before : int32_t { nothing, norm, gate };

constexpr int MOST_INPUTS = 3;

struct Node {
    Op op;
    Place in[MOST_INPUTS];  // linear: its input, or two for a gate before it, then what it adds
    Place out;
    int32_t inputs;  // how many of them are read
    int32_t width;   // of the output (per head for rms_norm and rope)
    int32_t heads;   // rms_norm, rope: heads a row
    int32_t weight;  // index into weights; -1: none, as for all that follow
    int32_t bias, norm;      // indices into vectors
    int32_t q_rope, k_rope;  // indices into ropes; rope has the first only
    Before before;           // linear, head (no gate)
    bool adds;               // linear: the last input is added to the result
    int32_t layer, flag;     // flag: a gate by GELU, not SiLU
    float value;             // embed: scale; head: softcap
    float eps;               // of a norm
    Heads shape;
};

constexpr int OPS = 8;

// Time per kind of Op.
struct Profile {
    double seconds[OPS];
    int64_t calls[OPS];
};

extern const char* const OP_NAMES[OPS];

// Rows of a tensor of a GGUF file, each of so many bytes.
struct Blocks {
    const uint8_t* data;
    int64_t rows, bytes;
};

constexpr int64_t MOST_ROWS = 1 << 28;

// One token to be drawn: see engine/sampler.py.
struct Draw {
    int32_t row;
    float temperature;
    int32_t top_k;
    float top_p, min_p;
    double u;
};

class Program {
  public:
    struct Scratch {  // a thread's, for draws
        std::vector<float> maxima, logits, weights, values, order;
        std::vector<double> sums;
        std::vector<int32_t> ids, counts;
    };

    Program(const Kernels& kernels, int threads, int layers, int n_blocks, int block_tokens, int kv_heads, int width,
            int kv_bits);
    ~Program();
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // Repack; codes [n, k] unsigned, scale and minimum [n, k / group]. Returns the weight's index.
    int add_quantized(int n, int k, int group, int bits, int zero, const uint8_t* codes, const float* scale,
                      const float* minimum);
    // The same from a file's blocks; rows of all parts, one after another. Throws std::invalid_argument where they do
    // not fit the form (q4_0 ... q6_k).
    int add_blocks(const char* form, int k, const std::vector<Blocks>& parts);
    int add_dense(int n, int k, Kind kind, const void* values);
    int add_vector(int n, const float* values);  // norms and biases
    int add_rope(int half, const float* inverse_frequencies, float factor);
    // All of these throw std::invalid_argument, and change nothing, where a size or an index does not fit.
    void set_buffers(std::vector<int32_t> widths);
    // Whether rows of long chunks take the fast way; false where the kernels have none, or none is wanted.
    bool set_fast(bool wanted) { return fast_ = wanted && kernels_.linear_fast; }
    void add_node(const Node& node);

    void run(const Batch& batch, float* logits);
    // One token for each draw, from rows of logits: those of the last run, or others.
    void draw(const float* logits, int vocabulary, const std::vector<Draw>& draws, int32_t* tokens);
    // Single Ops, for tests.
    void linear(int weight, const float* x, int rows, float* out);
    void embed_rows(int weight, const int32_t* ids, int rows, float* out);

    // The machine's limits on all threads, measured now: bytes read from memory, and operations on 4-bit codes, a second.
    double read_rate();
    double product_rate();

    // Held by whoever calls any of the above: one caller at a time, a second one is refused.
    std::mutex& busy() { return busy_; }

    const Weight& weight(int number) const { return weights_[index(number, weights_.size(), "weight")]; }
    int64_t weight_bytes() const { return weight_bytes_; }
    const Profile& profile() const { return profile_; }
    void set_profile(bool on);
    const Kernels& kernels() const { return kernels_; }

  private:
    // The rows of an input of a product: as they lie, or made by `make` into the buffer that it is given.
    struct Rows {
        const float* x;
        int64_t stride;
        std::function<const float*(int row, float* made)> make;
        int64_t cost;
    };

    void check(const Node& node) const;
    void check(const Batch& batch) const;
    int index(int number, size_t count, const char* what) const;
    float* at(const Place& place) { return buffers_[place.buffer].data() + place.column; }
    int64_t stride(const Place& place) const { return widths_[place.buffer]; }
    void reserve(int rows);
    // task(row, worker)
    void over_rows(int rows, int64_t cost, const std::function<void(int, int)>& task);
    // Row i of the product's input is what `before` makes of row picked[i], or i, of the node's.
    void product(const Node& node, int rows, const int32_t* picked, float* out, int64_t stride);
    void product(const Weight& w, const Rows& x, int rows, float* out, int64_t stride, const Summands& more,
                 bool head = false);
    void fast_product(const Weight& w, const Rows& x, int first, int rows, float* out, int64_t stride, const Summands& more);
    int first_fast(const Batch& batch) const;
    template <typename Task>
    void over_strips(const Weight& w, int rows, bool head, const Task& task);
    void find_maxima(const float* logits, int rows, int64_t stride, int first, int last, int from_row);
    void rotate(int rope, int row, const float* x, float* out, int heads, int width) const;
    void attend(const Node& node, const Batch& batch);
    void attend_decodes(const Node& node, const Batch& batch, const std::vector<int>& sequences, const float* q, int64_t sq);
    void attend_chunk(const Node& node, const Batch& batch, int sequence, const float* q, int64_t sq);
    void head(const Node& node, const Batch& batch, float* logits);
    void tables_of_ropes(const Batch& batch);
    // A weight without its data; `most` is the largest size of its scales and minima.
    Weight quantized(int n, int k, int group, int bits, int zero, bool minimum, float most);
    uint8_t* map(int64_t bytes);
    uint8_t* allocate(int64_t bytes);

    const Kernels& kernels_;
    std::unique_ptr<Pool> pool_;
    int layers_, n_blocks_, block_tokens_, kv_heads_, width_;
    int rows_of_table_ = INT_MAX;  // token ids are below it
    std::vector<Layer> pool_layers_;
    std::vector<Weight> weights_;
    struct Unmap {
        size_t bytes;
        void operator()(uint8_t* data) const;
    };
    std::vector<std::unique_ptr<uint8_t, Unmap>> maps_;
    uint8_t* arena_ = nullptr;
    int64_t arena_left_ = 0;
    std::vector<std::vector<float>> vectors_;
    struct RopeTable {
        std::vector<float> inverse;
        float factor;
        std::vector<float> cos, sin;
    };
    std::vector<RopeTable> ropes_;
    std::vector<int32_t> widths_;
    std::vector<std::vector<float>> buffers_;
    std::vector<Node> nodes_;
    std::vector<int8_t> codes_, planes_;
    std::vector<uint16_t> halves_;
    std::vector<float> scales_, weighted_, made_, queries_, keys_, part_values_;
    std::vector<int32_t> zeros_, owners_;
    std::vector<Partial> parts_;
    std::vector<float> maxima_;         // of the head's results, by row and span
    const float* maxima_of_ = nullptr;  // the logits that they belong to
    std::vector<Scratch> scratch_;
    int reserved_ = 0;
    bool fast_ = false;
    int first_fast_ = INT_MAX;  // of this step's rows: they and those that follow take the fast way
    int64_t weight_bytes_ = 0;
    std::mutex busy_;
    bool profiling_ = false;
    Profile profile_{};
};

const Kernels* find_kernels(const char* name);  // "" picks the best; nullptr: not here
std::vector<const char*> available_kernels();
// Whether products of both are the same bits, and one's own for few and for many rows.
bool agree(const Kernels& one, const Kernels& other);

}  // namespace headway

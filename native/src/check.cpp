// What a Plan or a Batch must be, so that no Op reads or writes outside its arrays: checked before anything runs.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "program.h"

namespace headway {
namespace {

constexpr int INPUTS[OPS] = {0, 1, 1, 1, 3, 2, 2, 1};
constexpr int WIDEST = 1 << 24, LONGEST = 1 << 28;

[[noreturn]] void wrong(const std::string& what) { throw std::invalid_argument("native kernels: " + what); }

}  // namespace

const char* const OP_NAMES[OPS] = {"embed", "rms_norm", "linear", "rope", "attend", "gate", "add", "head"};

int Program::index(int number, size_t count, const char* what) const {
    if (number < 0 || (size_t)number >= count)
        wrong("no " + std::string(what) + " " + std::to_string(number) + " among " + std::to_string(count));
    return number;
}

void Program::set_buffers(std::vector<int32_t> widths) {
    if (!nodes_.empty()) wrong("buffers after the first Op");
    for (int32_t width : widths)
        if (width < 1 || width > WIDEST) wrong("a buffer of width " + std::to_string(width));
    widths_ = std::move(widths);
}

void Program::add_node(const Node& node) {
    check(node);
    nodes_.push_back(node);
    if (node.op == Op::embed) rows_of_table_ = std::min(rows_of_table_, weights_[node.weight].n);
}

void Program::check(const Node& n) const {
    const int op = index((int)n.op, OPS, "Op");
    const std::string name = OP_NAMES[op];
    auto require = [&](bool right, const char* what) {
        if (!right) wrong(name + ": " + what + " does not fit");
    };
    auto fits = [&](const Place& place, int64_t width) {
        index(place.buffer, widths_.size(), "buffer");
        require(place.column >= 0 && place.column + width <= widths_[place.buffer], "a place");
    };
    const bool product = n.op == Op::linear || n.op == Op::head;
    require(n.before >= Before::nothing && n.before <= Before::gate, "what comes before");
    require(n.before == Before::nothing || product, "what comes before");
    require(n.before != Before::gate || n.op == Op::linear, "a gate before it");
    require(!n.adds || n.op == Op::linear, "a sum");
    require(n.inputs == INPUTS[op] + (n.before == Before::gate) + n.adds, "the number of inputs");
    auto vector = [&](int number) { return (int64_t)vectors_[index(number, vectors_.size(), "vector")].size(); };
    auto rope = [&](int number) { return 2 * (int64_t)ropes_[index(number, ropes_.size(), "rope")].inverse.size(); };
    require(n.width >= 1 && n.width <= WIDEST && n.heads >= 1 && n.heads <= WIDEST, "the width");
    const int64_t whole = (int64_t)n.width * n.heads;
    if (n.op != Op::rms_norm && n.op != Op::rope) require(n.heads == 1, "the number of heads");
    if (n.op == Op::head)
        require(nodes_.empty() || nodes_.back().op != Op::head, "a second head");
    else
        fits(n.out, whole);
    switch (n.op) {
        case Op::embed:
            require(weight(n.weight).k == n.width, "the table");
            break;
        case Op::rms_norm:
            fits(n.in[0], whole);
            require(vector(n.norm) == n.width, "the norm");
            break;
        case Op::linear:
        case Op::head: {
            const Weight& w = weight(n.weight);
            require(w.n == n.width, "the weight");
            fits(n.in[0], w.k);
            if (n.before == Before::gate) fits(n.in[1], w.k);
            if (n.before == Before::norm) require(vector(n.norm) == w.k, "the norm");
            if (n.adds) fits(n.in[n.inputs - 1], n.width);
            if (n.bias != -1) require(vector(n.bias) == n.width, "the bias");
            break;
        }
        case Op::rope:
            fits(n.in[0], whole);
            require(rope(n.q_rope) == n.width, "the rope");
            break;
        case Op::attend: {
            const Heads& h = n.shape;
            index(n.layer, (size_t)layers_, "layer");
            require(h.kv_heads == kv_heads_ && h.width == width_, "the KV cache");
            require(h.heads >= 1 && h.heads % kv_heads_ == 0 && (int64_t)h.heads * h.width == n.width, "the heads");
            require(h.window >= 0, "the window");
            fits(n.in[0], n.width);
            fits(n.in[1], (int64_t)h.kv_heads * h.width);
            fits(n.in[2], (int64_t)h.kv_heads * h.width);
            for (int number : {n.q_rope, n.k_rope})
                if (number != -1) require(rope(number) == h.width, "the rope");
            break;
        }
        case Op::gate:
        case Op::add:
            fits(n.in[0], n.width);
            fits(n.in[1], n.width);
            break;
    }
}

void Program::check(const Batch& b) const {
    if (nodes_.empty() || nodes_.back().op != Op::head) wrong("no head to end the Plan");
    if (b.vocabulary != nodes_.back().width) wrong("logits of another width than the head");
    if (b.rows < 1 || b.sequences < 1) wrong("an empty batch");
    if (b.logits > b.rows) wrong("more logits than rows");
    for (int row = 0; row < b.rows; row++) index(b.token_ids[row], (size_t)rows_of_table_, "token id");
    for (int i = 0; i < b.logits; i++) index(b.logit_rows[i], (size_t)b.rows, "row");
    if (b.starts[0] != 0 || b.starts[b.sequences] != b.rows) wrong("starts that do not cover the rows");
    for (int s = 0; s < b.sequences; s++) {
        const int64_t first = b.starts[s], last = b.starts[s + 1], length = b.lengths[s];
        if (first >= last || last > b.rows) wrong("starts that do not rise");
        if (length < last - first) wrong("a sequence shorter than its rows");
        if (length > LONGEST) wrong("a context of " + std::to_string(length) + " tokens");
        for (int64_t row = first; row < last; row++)
            if (b.positions[row] != length - (last - row)) wrong("positions that do not end at the length");
        const int64_t blocks = (length + block_tokens_ - 1) / block_tokens_;
        if (blocks > b.table_width) wrong("a table shorter than its sequence");
        for (int64_t i = 0; i < blocks; i++)
            index(b.tables[s * (int64_t)b.table_width + i], (size_t)n_blocks_, "block");
    }
}

}  // namespace headway

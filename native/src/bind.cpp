// The only file that knows Python: checks arrays, releases the GIL, calls the Program.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cxxabi.h>
#include <unistd.h>

#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;
using headway::Batch;
using headway::Before;
using headway::Kind;
using headway::Node;
using headway::Op;
using headway::Place;
using headway::Program;

namespace {

// Arguments of these types are taken as they are (noconvert below): a converted copy would lose what is written to it.
template <typename T, int Dims>
using In = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <typename T, int Dims>
using Out = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

constexpr size_t MOST_ROWS = headway::MOST_ROWS, MOST_COLUMNS = 1 << 24;
constexpr int WIDEST_GROUP = 1 << 15;  // sums of a group stay inside 32 bits: 255 x 127 x group

void require(bool right, const char* what) {
    if (!right) throw std::invalid_argument(std::string("native kernels: ") + what);
}

// Runs without the GIL. When Python ends meanwhile, taking the GIL back ends this thread by unwinding its stack, which
// C++ frames answer with an abort: the thread is parked instead, until the process is gone.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() {
#if defined(__GLIBCXX__)
        try {
            PyEval_RestoreThread(state_);
        } catch (abi::__forced_unwind&) {
            for (;;) pause();
        }
#else
        PyEval_RestoreThread(state_);
#endif
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

  private:
    PyThreadState* state_;
};

// The Program for one caller: without the GIL another thread could come in.
class Alone {
  public:
    explicit Alone(Program& program) : lock_(program.busy(), std::try_to_lock) {
        if (!lock_) throw std::runtime_error("native kernels: this program is in use by another thread");
    }

  private:
    std::unique_lock<std::mutex> lock_;
    WithoutGil released_;
};

const headway::Kernels& named(const std::string& isa) {
    const headway::Kernels* found = headway::find_kernels(isa.c_str());
    if (!found) throw std::invalid_argument("native kernels: no instruction set " + isa + " here");
    return *found;
}

void check_matrix(size_t n, size_t k) {
    require(n >= 1 && n <= MOST_ROWS && k >= 1 && k <= MOST_COLUMNS, "a weight of impossible size");
}

int add_quantized(Program& p, In<uint8_t, 2> codes, In<float, 2> scale, std::optional<In<float, 2>> minimum, int group,
                  int bits, int zero) {
    check_matrix(codes.shape(0), codes.shape(1));
    const int n = (int)codes.shape(0), k = (int)codes.shape(1);
    require(bits == 4 || bits == 8, "codes of 4 or 8 bits only");
    require(zero >= 0 && zero < 1 << bits, "the zero point is no code");
    require(group >= 16 && group <= WIDEST_GROUP && group % 16 == 0 && k % group == 0, "the group does not fit");
    const size_t groups = (size_t)(k / group);
    require(scale.shape(0) == (size_t)n && scale.shape(1) == groups, "the scales do not fit the codes");
    require(!minimum || (minimum->shape(0) == (size_t)n && minimum->shape(1) == groups), "the minima do not fit the codes");
    require(!minimum || zero == 0, "either a zero point or minima");
    const float* low = minimum ? minimum->data() : nullptr;
    Alone alone(p);
    return p.add_quantized(n, k, group, bits, zero, codes.data(), scale.data(), low);
}

int add_blocks(Program& p, const std::string& form, int k, const std::vector<In<uint8_t, 2>>& parts) {
    std::vector<headway::Blocks> blocks;
    for (const auto& part : parts) blocks.push_back({part.data(), (int64_t)part.shape(0), (int64_t)part.shape(1)});
    require(k >= 1 && (size_t)k <= MOST_COLUMNS, "a weight of impossible size");
    Alone alone(p);
    return p.add_blocks(form.c_str(), k, blocks);
}

template <typename T, Kind KIND>
int add_dense(Program& p, In<T, 2> w) {
    check_matrix(w.shape(0), w.shape(1));
    Alone alone(p);
    return p.add_dense((int)w.shape(0), (int)w.shape(1), KIND, w.data());
}

int add_vector(Program& p, In<float, 1> values) {
    require(values.size() >= 1 && values.size() <= MOST_COLUMNS, "a vector of impossible size");
    Alone alone(p);
    return p.add_vector((int)values.size(), values.data());
}

int add_rope(Program& p, In<float, 1> frequencies, float factor) {
    require(frequencies.size() >= 1 && frequencies.size() <= MOST_COLUMNS, "frequencies of impossible size");
    Alone alone(p);
    return p.add_rope((int)frequencies.size(), frequencies.data(), factor);
}

void add_node(Program& p, Op op, const std::vector<std::pair<int, int>>& inputs, std::pair<int, int> out, int width,
              int heads, int weight, int bias, int norm, std::pair<int, int> ropes, Before before, bool adds, int layer,
              int flag, float value, float eps, const std::vector<int>& shape, float scale, float cap) {
    Node n{};
    n.op = op;
    n.inputs = (int)inputs.size();
    for (size_t i = 0; i < inputs.size() && i < headway::MOST_INPUTS; i++) n.in[i] = {inputs[i].first, inputs[i].second};
    n.out = {out.first, out.second};
    n.width = width, n.heads = heads, n.weight = weight, n.bias = bias, n.norm = norm;
    n.q_rope = ropes.first, n.k_rope = ropes.second;
    n.before = before, n.adds = adds, n.layer = layer, n.flag = flag, n.value = value, n.eps = eps;
    require(shape.empty() || shape.size() == 4, "a shape is heads, kv_heads, width, window");
    if (!shape.empty()) n.shape = {shape[0], shape[1], shape[2], scale, cap, shape[3]};
    Alone alone(p);
    p.add_node(n);
}

void run(Program& p, In<int32_t, 1> token_ids, In<int32_t, 1> positions, In<int32_t, 1> starts, In<int32_t, 1> lengths,
         In<int32_t, 2> tables, In<int32_t, 1> logit_rows, Out<float, 2> logits) {
    require(token_ids.size() == positions.size(), "as many positions as token ids");
    require(starts.size() == lengths.size() + 1, "one start more than lengths");
    require(tables.shape(0) == lengths.size(), "as many tables as lengths");
    require(logits.shape(0) >= logit_rows.size(), "too few rows for the logits");
    require(token_ids.size() <= MOST_ROWS && logits.shape(1) <= MOST_ROWS && tables.shape(1) <= MOST_ROWS,
            "a batch of impossible size");
    Batch batch{token_ids.data(),          positions.data(),        starts.data(),
                lengths.data(),            tables.data(),           logit_rows.data(),
                (int32_t)token_ids.size(), (int32_t)lengths.size(), (int32_t)tables.shape(1),
                (int32_t)logit_rows.size(), (int32_t)logits.shape(1)};
    Alone alone(p);
    p.run(batch, logits.data());
}

void draw(Program& p, In<float, 2> logits, In<int32_t, 1> rows, In<float, 1> temperature, In<int32_t, 1> top_k,
          In<float, 1> top_p, In<float, 1> min_p, In<double, 1> u, Out<int32_t, 1> tokens) {
    const size_t count = rows.size();
    require(temperature.size() == count && top_k.size() == count && top_p.size() == count && min_p.size() == count &&
                u.size() == count && tokens.size() == count,
            "as many of each setting as rows");
    require(logits.shape(1) >= 1 && logits.shape(1) <= MOST_ROWS && count <= MOST_ROWS, "draws of impossible size");
    std::vector<headway::Draw> draws(count);
    for (size_t i = 0; i < count; i++) {
        require(rows.data()[i] >= 0 && (size_t)rows.data()[i] < logits.shape(0), "no such row of logits");
        require(top_p.data()[i] >= 0 && min_p.data()[i] <= 1 && u.data()[i] >= 0 && u.data()[i] < 1 &&
                    temperature.data()[i] >= 0,
                "a draw that cannot be");
        draws[i] = {rows.data()[i],  temperature.data()[i], top_k.data()[i],
                    top_p.data()[i], min_p.data()[i],       u.data()[i]};
    }
    Alone alone(p);
    p.draw(logits.data(), (int)logits.shape(1), draws, tokens.data());
}

void linear(Program& p, int weight, In<float, 2> x, Out<float, 2> out) {
    require(x.shape(0) >= 1 && x.shape(0) <= MOST_ROWS && x.shape(0) == out.shape(0), "as many rows in as out");
    Alone alone(p);
    require((int64_t)x.shape(1) == p.weight(weight).k && (int64_t)out.shape(1) == p.weight(weight).n,
            "the weight does not fit");
    p.linear(weight, x.data(), (int)x.shape(0), out.data());
}

void embed(Program& p, int weight, In<int32_t, 1> ids, Out<float, 2> out) {
    require(ids.size() <= MOST_ROWS && ids.size() == out.shape(0), "as many rows as ids");
    Alone alone(p);
    require((int64_t)out.shape(1) == p.weight(weight).k, "the weight does not fit");
    p.embed_rows(weight, ids.data(), (int)ids.size(), out.data());
}

void set_buffers(Program& p, std::vector<int32_t> widths) {
    Alone alone(p);
    p.set_buffers(std::move(widths));
}

bool set_fast(Program& p, bool wanted) {
    Alone alone(p);
    return p.set_fast(wanted);
}

void set_profile(Program& p, bool on) {
    Alone alone(p);
    p.set_profile(on);
}

headway::Profile read_profile(Program& p) {
    Alone alone(p);
    return p.profile();
}

double read_rate(Program& p) {
    Alone alone(p);
    return p.read_rate();
}

double product_rate(Program& p) {
    Alone alone(p);
    return p.product_rate();
}

nb::dict profile(Program& p) {
    const headway::Profile found = read_profile(p);
    nb::dict out;
    for (int i = 0; i < headway::OPS; i++)
        out[headway::OP_NAMES[i]] = nb::make_tuple(found.seconds[i], found.calls[i]);
    return out;
}

void start(Program* self, const std::string& isa, int threads, int layers, int n_blocks, int block_tokens, int kv_heads,
           int width, int kv_bits) {
    new (self) Program(named(isa), threads, layers, n_blocks, block_tokens, kv_heads, width, kv_bits);
}

std::vector<std::string> available() {
    const auto names = headway::available_kernels();
    return {names.begin(), names.end()};
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels: repacked weights, a recorded Plan, one call a step.";
    nb::set_leak_warnings(false);  // a process may end while its engine is alive
    m.def("available", &available);
    nb::enum_<Op> ops(m, "Op");
    for (int i = 0; i < headway::OPS; i++) ops.value(headway::OP_NAMES[i], (Op)i);
    nb::enum_<Before>(m, "Before")
        .value("nothing", Before::nothing)
        .value("norm", Before::norm)
        .value("gate", Before::gate);
    const auto as_is = [](const char* name) { return nb::arg(name).noconvert(); };
    nb::class_<Program>(m, "Program")
        .def("__init__", &start, "isa"_a, "threads"_a, "layers"_a, "n_blocks"_a, "block_tokens"_a, "kv_heads"_a, "width"_a,
             "kv_bits"_a = 16)
        .def("add_quantized", &add_quantized, as_is("codes"), as_is("scale"), as_is("minimum").none(), "group"_a, "bits"_a,
             "zero"_a)
        .def("add_blocks", &add_blocks, "form"_a, "columns"_a, as_is("parts"))
        .def("add_f32", &add_dense<float, Kind::f32>, as_is("weight"))
        .def("add_bf16", &add_dense<uint16_t, Kind::bf16>, as_is("weight"))
        .def("add_f16", &add_dense<uint16_t, Kind::f16>, as_is("weight"))
        .def("add_vector", &add_vector, as_is("values"))
        .def("add_rope", &add_rope, as_is("frequencies"), "factor"_a)
        .def("set_buffers", &set_buffers, "widths"_a)
        .def("add_node", &add_node, "op"_a, "inputs"_a, "out"_a, "width"_a, "heads"_a = 1, "weight"_a = -1, "bias"_a = -1,
             "norm"_a = -1, "ropes"_a = std::pair<int, int>(-1, -1), "before"_a = Before::nothing, "adds"_a = false,
             "layer"_a = 0, "flag"_a = 0, "value"_a = 0.0f, "eps"_a = 0.0f, "shape"_a = std::vector<int>{}, "scale"_a = 1.0f, "cap"_a = 0.0f)
        .def("run", &run, as_is("token_ids"), as_is("positions"), as_is("starts"), as_is("lengths"), as_is("tables"),
             as_is("logit_rows"), as_is("logits"))
        .def("draw", &draw, as_is("logits"), as_is("rows"), as_is("temperature"), as_is("top_k"), as_is("top_p"),
             as_is("min_p"), as_is("u"), as_is("tokens"))
        .def("linear", &linear, "weight"_a, as_is("x"), as_is("out"))
        .def("embed", &embed, "weight"_a, as_is("ids"), as_is("out"))
        .def_prop_ro("weight_bytes", &Program::weight_bytes)
        .def_prop_ro("isa", [](const Program& p) { return std::string(p.kernels().name); })
        .def("set_fast", &set_fast, "wanted"_a)
        .def("set_profile", &set_profile, "on"_a)
        .def("profile", &profile)
        .def("read_rate", &read_rate)
        .def("product_rate", &product_rate);
}

// The only file that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;
using headway::Batch;
using headway::Heads;
using headway::Node;
using headway::Op;
using headway::Place;
using headway::Program;

namespace {

template <typename T, int Dims>
using In = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <typename T, int Dims>
using Out = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

const headway::Kernels& named(const std::string& isa) {
    const headway::Kernels* found = headway::find_kernels(isa.c_str());
    if (!found) throw std::invalid_argument("no kernels for " + isa);
    return *found;
}

int add_quantized(Program& p, In<uint8_t, 2> codes, In<float, 2> scale, nb::object minimum, int group, int bits, int zero) {
    const int n = (int)codes.shape(0), k = (int)codes.shape(1);
    if (group < 16 || group % 16 || k % group || (bits != 4 && bits != 8) || scale.shape(0) != (size_t)n ||
        scale.shape(1) != (size_t)(k / group))
        throw std::invalid_argument("quantized weight: shapes do not fit");
    const float* low = nullptr;
    In<float, 2> array;
    if (!minimum.is_none()) {
        array = nb::cast<In<float, 2>>(minimum);
        if (array.shape(0) != scale.shape(0) || array.shape(1) != scale.shape(1))
            throw std::invalid_argument("quantized weight: the minima do not fit");
        low = array.data();
    }
    nb::gil_scoped_release release;
    return p.add_quantized(n, k, group, bits, zero, codes.data(), scale.data(), low);
}

void run(Program& p, In<int32_t, 1> token_ids, In<int32_t, 1> positions, In<int32_t, 1> starts, In<int32_t, 1> lengths,
         In<int32_t, 2> tables, In<int32_t, 1> logit_rows, Out<float, 2> logits) {
    Batch batch{token_ids.data(),         positions.data(),         starts.data(),
                lengths.data(),           tables.data(),            logit_rows.data(),
                (int32_t)token_ids.size(), (int32_t)lengths.size(), (int32_t)tables.shape(1),
                (int32_t)logit_rows.size()};
    if (logits.shape(0) < logit_rows.size()) throw std::invalid_argument("too few rows for the logits");
    float* out = logits.data();
    nb::gil_scoped_release release;
    p.run(batch, out);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels: repacked weights, a recorded Plan, one call a step.";
    m.def("available", [] {
        std::vector<std::string> names;
        for (const char* name : headway::available_kernels()) names.emplace_back(name);
        return names;
    });
    nb::enum_<Op>(m, "Op")
        .value("embed", Op::embed)
        .value("rms_norm", Op::rms_norm)
        .value("linear", Op::linear)
        .value("rope", Op::rope)
        .value("attend", Op::attend)
        .value("gate", Op::gate)
        .value("add", Op::add)
        .value("head", Op::head);
    nb::class_<Program>(m, "Program")
        .def("__init__",
             [](Program* self, const std::string& isa, int threads, int layers, int n_blocks, int block_tokens,
                int kv_heads, int width) {
                 new (self) Program(named(isa), threads, layers, n_blocks, block_tokens, kv_heads, width);
             },
             "isa"_a, "threads"_a, "layers"_a, "n_blocks"_a, "block_tokens"_a, "kv_heads"_a, "width"_a)
        .def("add_quantized", &add_quantized, "codes"_a, "scale"_a, "minimum"_a.none(), "group"_a, "bits"_a, "zero"_a)
        .def("add_f32",
             [](Program& p, In<float, 2> w) {
                 nb::gil_scoped_release release;
                 return p.add_dense((int)w.shape(0), (int)w.shape(1), w.data(), nullptr);
             })
        .def("add_bf16",
             [](Program& p, In<uint16_t, 2> w) {
                 nb::gil_scoped_release release;
                 return p.add_dense((int)w.shape(0), (int)w.shape(1), nullptr, w.data());
             })
        .def("add_vector", [](Program& p, In<float, 1> v) { return p.add_vector((int)v.size(), v.data()); })
        .def("add_rope",
             [](Program& p, In<float, 1> f, float factor) { return p.add_rope((int)f.size(), f.data(), factor); })
        .def("set_buffers", &Program::set_buffers)
        .def("add_node",
             [](Program& p, Op op, std::vector<std::pair<int, int>> inputs, std::pair<int, int> out, int width, int heads,
                int weight, int bias, int layer, int flag, float value, std::vector<int> shape, float scale, float cap) {
                 Node n{};
                 n.op = op;
                 Place* places[3] = {&n.a, &n.b, &n.c};
                 for (size_t i = 0; i < inputs.size() && i < 3; i++) *places[i] = {inputs[i].first, inputs[i].second};
                 n.out = {out.first, out.second};
                 n.width = width, n.heads = heads, n.weight = weight, n.bias = bias, n.layer = layer, n.flag = flag;
                 n.value = value;
                 if (shape.size() == 4) n.shape = {shape[0], shape[1], shape[2], scale, cap, shape[3]};
                 p.add_node(n);
             },
             "op"_a, "inputs"_a, "out"_a, "width"_a, "heads"_a = 1, "weight"_a = -1, "bias"_a = -1, "layer"_a = 0,
             "flag"_a = 0, "value"_a = 0.0f, "shape"_a = std::vector<int>{}, "scale"_a = 1.0f, "cap"_a = 0.0f)
        .def("run", &run)
        .def("linear",
             [](Program& p, int weight, In<float, 2> x, Out<float, 2> out) {
                 nb::gil_scoped_release release;
                 p.linear(weight, x.data(), (int)x.shape(0), out.data());
             })
        .def("embed",
             [](Program& p, int weight, In<int32_t, 1> ids, Out<float, 2> out) {
                 p.embed_rows(weight, ids.data(), (int)ids.size(), out.data());
             })
        .def_prop_ro("weight_bytes", &Program::weight_bytes)
        .def_prop_ro("isa", [](const Program& p) { return std::string(p.kernels().name); })
        .def("set_profile", &Program::set_profile)
        .def("profile", [](const Program& p) {
            nb::dict out;
            const char* names[] = {"embed", "rms_norm", "linear", "rope", "attend", "gate", "add", "head"};
            for (int i = 0; i < 8; i++)
                out[names[i]] = nb::make_tuple(p.profile().seconds[i], p.profile().calls[i]);
            return out;
        });
}

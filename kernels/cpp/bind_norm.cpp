#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

#include "arrays.h"
#include "norm.h"

namespace nb = nanobind;
using namespace zg;

namespace {

struct Rows {
  int64_t rows, width, stride;
};

// Rows of floats, of the shape of `like` if one is given.
template <class A>
Rows rows_of(const A& array, const char* name, const Rows* like = nullptr) {
  check_rows<float>(array, name);
  const int64_t rows = static_cast<int64_t>(array.shape(0)), width = static_cast<int64_t>(array.shape(1));
  if (like != nullptr && (rows != like->rows || width != like->width))
    refuse(std::string(name) + " " + shape_of(array) + ": must be [" + std::to_string(like->rows) + ", " + std::to_string(like->width) + "]");
  return {rows, width, rows > 1 ? array.stride(0) : width};
}

template <class A>
void check_vector(const A& array, const char* name, int64_t length) {
  check_whole<float>(array, name, 1);
  if (static_cast<int64_t>(array.shape(0)) != length)
    refuse(std::string(name) + " " + shape_of(array) + ": must be [" + std::to_string(length) + "]");
}

const float* read(const Input& array) { return static_cast<const float*>(array.data()); }
float* write(const Array& array) { return static_cast<float*>(array.data()); }

void check_eps(float eps) {
  if (!(eps >= 0.0f)) refuse("eps = " + std::to_string(eps) + ": must be 0 or more");
}

void call(int threads, void (*kernel)(Team&, Work&, const NormArgs&), const NormArgs& args) {
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { kernel(team, work, args); });
}

void rms_norm(const Input& x, const Input& weight, float eps, const Array& y, int threads) {
  check_threads(threads);
  check_eps(eps);
  const Rows of_x = rows_of(x, "x"), of_y = rows_of(y, "y", &of_x);
  check_vector(weight, "weight", of_x.width);
  // Without an addition the kernel only reads x.
  call(threads, norm_kernels().rms_norm,
       {const_cast<float*>(read(x)), of_x.rows, of_x.width, of_x.stride, nullptr, 0, read(weight), eps, write(y), of_y.stride});
}

void add_rms_norm(const Array& x, const Input& added, const Input& weight, float eps, const Array& y, int threads) {
  check_threads(threads);
  check_eps(eps);
  const Rows of_x = rows_of(x, "x"), of_added = rows_of(added, "added", &of_x), of_y = rows_of(y, "y", &of_x);
  check_vector(weight, "weight", of_x.width);
  call(threads, norm_kernels().rms_norm,
       {write(x), of_x.rows, of_x.width, of_x.stride, read(added), of_added.stride, read(weight), eps, write(y), of_y.stride});
}

void rms_norm_backward(const Input& x, const Input& weight, float eps, const Input& grad, const Array& grad_x, const Array& grad_weight,
                       bool accumulate, int threads) {
  check_threads(threads);
  check_eps(eps);
  const Rows of_x = rows_of(x, "x"), of_grad = rows_of(grad, "grad", &of_x), of_grad_x = rows_of(grad_x, "grad_x", &of_x);
  check_vector(weight, "weight", of_x.width);
  check_vector(grad_weight, "grad_weight", of_x.width);
  std::vector<float> partial(static_cast<size_t>(norm_blocks(of_x.rows) * of_x.width));
  const NormBackwardArgs args{read(x), of_x.rows, of_x.width, of_x.stride, read(weight), eps, read(grad), of_grad.stride,
                              write(grad_x), of_grad_x.stride, accumulate, write(grad_weight), partial.data()};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { norm_kernels().rms_norm_backward(team, work, args); });
}

void silu_mul(const Input& gate, const Input& up, const Array& y, int threads) {
  check_threads(threads);
  const Rows of_gate = rows_of(gate, "gate"), of_up = rows_of(up, "up", &of_gate), of_y = rows_of(y, "y", &of_gate);
  const SiluArgs args{read(gate), of_gate.rows, of_gate.width, of_gate.stride, read(up), of_up.stride, write(y), of_y.stride};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { norm_kernels().silu_mul(team, work, args); });
}

void silu_mul_backward(const Input& gate, const Input& up, const Input& grad, const Array& grad_gate, const Array& grad_up, int threads) {
  check_threads(threads);
  const Rows g = rows_of(gate, "gate"), u = rows_of(up, "up", &g), d = rows_of(grad, "grad", &g);
  const Rows dg = rows_of(grad_gate, "grad_gate", &g), du = rows_of(grad_up, "grad_up", &g);
  const SiluBackwardArgs args{read(gate), g.rows, g.width, g.stride, read(up), u.stride, read(grad), d.stride,
                              write(grad_gate), dg.stride, write(grad_up), du.stride};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { norm_kernels().silu_mul_backward(team, work, args); });
}

const int64_t* check_ids(const Input& ids, int64_t vocabulary) {
  check_whole<int64_t>(ids, "ids", 1);
  const int64_t* values = static_cast<const int64_t*>(ids.data());
  for (size_t row = 0; row < ids.shape(0); ++row)
    if (values[row] < 0 || values[row] >= vocabulary)
      refuse("ids " + shape_of(ids) + ": token " + std::to_string(values[row]) + " at " + std::to_string(row) + " is outside 0 to " +
             std::to_string(vocabulary - 1));
  return values;
}

void embedding(const Input& ids, const Input& table, const Array& y, int threads) {
  check_threads(threads);
  const bool bf16 = is_bf16(table);
  check_weight_type(table, "table");
  if (!bf16)
    check_rows<float>(table, "table");
  else if (table.ndim() != 2 || (table.shape(1) > 1 && table.stride(1) != 1))
    refuse("table " + shape_of(table) + ": must have 2 dimensions, rows contiguous");
  const int64_t vocabulary = static_cast<int64_t>(table.shape(0)), width = static_cast<int64_t>(table.shape(1));
  const int64_t* values = check_ids(ids, vocabulary);
  const Rows wanted{static_cast<int64_t>(ids.shape(0)), width, 0};
  const Rows of_y = rows_of(y, "y", &wanted);
  const EmbeddingArgs args{values, wanted.rows, width, table.data(), bf16, vocabulary > 1 ? table.stride(0) : width, write(y), of_y.stride};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { norm_kernels().embedding(team, work, args); });
}

void embedding_backward(const Input& ids, const Input& grad, const Array& grad_table, int threads) {
  check_threads(threads);
  const Rows of_table = rows_of(grad_table, "grad_table"), of_grad = rows_of(grad, "grad");
  const int64_t* values = check_ids(ids, of_table.rows);
  if (of_grad.rows != static_cast<int64_t>(ids.shape(0)) || of_grad.width != of_table.width)
    refuse("grad " + shape_of(grad) + ": must be [" + std::to_string(ids.shape(0)) + ", " + std::to_string(of_table.width) + "]");
  const EmbeddingBackwardArgs args{values, of_grad.rows, of_grad.width, read(grad), of_grad.stride, write(grad_table), of_table.stride};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { norm_kernels().embedding_backward(team, work, args); });
}

template <auto Which>
void map(const Input& x, const Array& y, int threads) {
  check_threads(threads);
  check_whole<float>(x, "x", 1);
  check_vector(y, "y", static_cast<int64_t>(x.shape(0)));
  const MapArgs args{read(x), static_cast<int64_t>(x.shape(0)), write(y)};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { (norm_kernels().*Which)(team, work, args); });
}

}  // namespace

void bind_norm(nb::module_& module) {
  module.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("y"), nb::arg("threads"),
             "Write x / sqrt(mean(x^2) + eps) * weight into y, all [rows, width].");
  module.def("add_rms_norm", &add_rms_norm, nb::arg("x"), nb::arg("added"), nb::arg("weight"), nb::arg("eps"), nb::arg("y"), nb::arg("threads"),
             "x += added, then as rms_norm.");
  module.def("rms_norm_backward", &rms_norm_backward, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("grad"), nb::arg("grad_x"),
             nb::arg("grad_weight"), nb::arg("accumulate"), nb::arg("threads"),
             "Write grad_x (add to it if `accumulate`) and add to grad_weight.");
  module.def("silu_mul", &silu_mul, nb::arg("gate"), nb::arg("up"), nb::arg("y"), nb::arg("threads"), "Write silu(gate) * up into y.");
  module.def("silu_mul_backward", &silu_mul_backward, nb::arg("gate"), nb::arg("up"), nb::arg("grad"), nb::arg("grad_gate"),
             nb::arg("grad_up"), nb::arg("threads"), "Write both gradients of silu_mul.");
  module.def("embedding", &embedding, nb::arg("ids"), nb::arg("table"), nb::arg("y"), nb::arg("threads"),
             "Write the rows of a float32 or bfloat16 table that the int64 ids name into y, as float32.");
  module.def("embedding_backward", &embedding_backward, nb::arg("ids"), nb::arg("grad"), nb::arg("grad_table"), nb::arg("threads"),
             "Add the rows of grad to those of grad_table that the ids name, in order.");
  module.def("exp", &map<&NormKernels::exp>, nb::arg("x"), nb::arg("y"), nb::arg("threads"), "Write e^x into y, both flat float32.");
  module.def("log", &map<&NormKernels::log>, nb::arg("x"), nb::arg("y"), nb::arg("threads"), "Write the natural logarithm of x >= 0 into y.");
}

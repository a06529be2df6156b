#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "arrays.h"
#include "bind_heads.h"
#include "cache.h"
#include "rotary.h"

namespace nb = nanobind;
using namespace zg;

namespace {

RotaryArgs angles(const Input& positions, const Input& cos, const Input& sin, int64_t rows, int64_t dim) {
  if (dim < 2 || dim % 2 != 0 || dim > MOST_HEAD_DIM)
    refuse("head size " + std::to_string(dim) + ": must be even, 2 to " + std::to_string(MOST_HEAD_DIM));
  check_whole<int64_t>(positions, "positions", 1);
  check_whole<float>(cos, "cos", 2);
  check_whole<float>(sin, "sin", 2);
  if (static_cast<int64_t>(positions.shape(0)) != rows) refuse("positions " + shape_of(positions) + ": must be [" + std::to_string(rows) + "]");
  if (static_cast<int64_t>(cos.shape(1)) != dim / 2) refuse("cos " + shape_of(cos) + ": must be [positions, " + std::to_string(dim / 2) + "]");
  if (sin.shape(0) != cos.shape(0) || sin.shape(1) != cos.shape(1)) refuse("sin " + shape_of(sin) + ": cos is " + shape_of(cos));
  RotaryArgs args{};
  args.rows = rows, args.head_dim = dim;
  args.positions = static_cast<const int64_t*>(positions.data());
  args.cos = floats_of(cos), args.sin = floats_of(sin);
  for (int64_t row = 0; row < rows; ++row)
    if (args.positions[row] < 0 || args.positions[row] >= static_cast<int64_t>(cos.shape(0)))
      refuse("positions " + shape_of(positions) + ": " + std::to_string(args.positions[row]) + ", the table is " + shape_of(cos));
  return args;
}

void start(const RotaryArgs& args, int threads) {
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { rotary_kernels().rotary(team, work, args); });
}

HeadRows side(const Input& x, const float* norm, float* y, int64_t y_stride) {
  return {static_cast<int64_t>(x.shape(1)), floats_of(x), row_stride(x), norm, y, y_stride};
}

// Rows that are read in one place and written in another: the same memory, or memory that does not meet.
void check_apart(const Input& x, const Array& y, const char* name) {
  const auto extent = [](const auto& array) {
    return array.size() == 0 ? 0 : (static_cast<int64_t>(array.shape(0)) - 1) * row_stride(array) + static_cast<int64_t>(array.shape(1) * array.shape(2));
  };
  if (x.data() == y.data() && row_stride(x) == row_stride(y)) return;
  const float *a = floats_of(x), *b = floats_of(y);
  if (a < b + extent(y) && b < a + extent(x)) refuse(std::string(name) + " " + shape_of(y) + ": overlaps the input without being it");
}

void rotary(const Input& x, const Input& positions, const Input& cos, const Input& sin, const Array& out, bool inverse, int threads) {
  check_threads(threads);
  check_heads(x, "x");
  const int64_t rows = static_cast<int64_t>(x.shape(0)), dim = static_cast<int64_t>(x.shape(2));
  check_heads(out, "out");
  check_shape(out, "out", rows, static_cast<int64_t>(x.shape(1)), dim);
  check_apart(x, out, "out");
  RotaryArgs args = angles(positions, cos, sin, rows, dim);
  args.inverse = inverse;
  args.q = side(x, nullptr, writable(out), row_stride(out));
  start(args, threads);
}

const float* norm_of(const std::optional<Input>& weight, const char* name, int64_t dim) {
  if (!weight) return nullptr;
  check_whole<float>(*weight, name, 1);
  if (static_cast<int64_t>(weight->shape(0)) != dim) refuse(std::string(name) + " " + shape_of(*weight) + ": must be [" + std::to_string(dim) + "]");
  return floats_of(*weight);
}

void rotary_cache(const Input& q, const Input& k, const Input& v, const Input& positions, const Input& cos, const Input& sin,
                  const std::optional<Input>& q_norm, const std::optional<Input>& k_norm, float eps, Cache& cache, int64_t layer,
                  const Input& slots, const Array& q_out, int threads) {
  check_threads(threads);
  check_heads(q, "q");
  const int64_t rows = static_cast<int64_t>(q.shape(0)), dim = cache.head_dim;
  check_shape(q, "q", rows, static_cast<int64_t>(q.shape(1)), dim);
  check_heads(k, "k");
  check_shape(k, "k", rows, cache.kv_heads, dim);
  check_heads(v, "v");
  check_shape(v, "v", rows, cache.kv_heads, dim);
  check_heads(q_out, "q_out");
  check_shape(q_out, "q_out", rows, static_cast<int64_t>(q.shape(1)), dim);
  check_apart(q, q_out, "q_out");
  if (layer < 0 || layer >= cache.layers) refuse("layer = " + std::to_string(layer) + ": the cache has " + std::to_string(cache.layers));
  RotaryArgs args = angles(positions, cos, sin, rows, dim);
  args.eps = eps;
  args.q = side(q, norm_of(q_norm, "q_norm", dim), writable(q_out), row_stride(q_out));
  args.k = side(k, norm_of(k_norm, "k_norm", dim), nullptr, 0);
  args.cache_keys = cache.layer_keys(layer), args.cache_values = cache.layer_values(layer), args.page_size = cache.page_size;
  args.slots = check_slots(cache, slots, static_cast<size_t>(rows));
  args.v = floats_of(v), args.v_stride = row_stride(v);
  start(args, threads);
}

}  // namespace

void bind_rotary(nb::module_& module) {
  module.def("rotary", &rotary, nb::arg("x"), nb::arg("positions"), nb::arg("cos"), nb::arg("sin"), nb::arg("out"), nb::arg("inverse"),
             nb::arg("threads"),
             "Rotate the halves of heads x [R, H, D] by the angles of tables [T, D/2] at positions [R]; `inverse` for the gradient.");
  module.def("rotary_cache", &rotary_cache, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("positions"), nb::arg("cos"), nb::arg("sin"),
             nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("eps"), nb::arg("cache"), nb::arg("layer"), nb::arg("slots"),
             nb::arg("q_out"), nb::arg("threads"),
             "Norm (where a weight is given) and rotate q into q_out (which may be q), k likewise into the cache's slots, v into them as it is.");
}

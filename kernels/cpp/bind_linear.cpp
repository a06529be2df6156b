#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <optional>

#include "arrays.h"
#include "linear.h"
#include "matches.h"

namespace nb = nanobind;
using namespace zg;

namespace {

// The weight as what `packed` was or is to be packed from.
PackArgs checked(Packed& packed, const Input& weight, int threads) {
  check_threads(threads);
  check_weight_type(weight, "weight");
  if (is_bf16(weight) != (packed.kind == Kind::bf16))
    refuse("weight " + shape_of(weight) + ": " + name_of(weight.dtype()) + ", the packed one is the other of float32 and bfloat16");
  if (weight.ndim() != 2) refuse("weight " + shape_of(weight) + ": must have 2 dimensions");
  if (static_cast<int64_t>(weight.shape(0)) != packed.out_features || static_cast<int64_t>(weight.shape(1)) != packed.in_features)
    refuse("weight " + shape_of(weight) + ": the packed one is [" + std::to_string(packed.out_features) + ", " +
           std::to_string(packed.in_features) + "]");
  return PackArgs{&packed, weight.data(), weight.stride(0), weight.stride(1)};
}

void repack(Packed& packed, const Input& weight, int threads) {
  const PackArgs args = checked(packed, weight, threads);
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { linear_kernels().pack(team, work, args); });
}

bool matches(Packed& packed, const Input& weight, int threads) {
  const PackArgs args = checked(packed, weight, threads);
  std::atomic<bool> same{true};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { compare_packed(team, work, args, same); });
  return same.load();
}

std::shared_ptr<Packed> pack(const Input& weight, int segments, int threads) {
  if (weight.ndim() != 2) refuse("weight " + shape_of(weight) + ": must have 2 dimensions");
  const int64_t depth = static_cast<int64_t>(weight.shape(1));
  if (segments != 1 && segments != 2 && segments != 4 && segments != 8) refuse("segments = " + std::to_string(segments) + ": must be 1, 2, 4 or 8");
  if (depth % segments != 0) refuse("weight " + shape_of(weight) + ": " + std::to_string(segments) + " segments do not divide its columns");
  const Kind kind = is_bf16(weight) ? Kind::bf16 : Kind::f32;
  auto packed = std::make_shared<Packed>(static_cast<int64_t>(weight.shape(0)), depth, kind, segments);
  repack(*packed, weight, threads);
  return packed;
}

void linear(const Input& x, const Packed& weight, const std::optional<Input>& bias, const Array& y, int threads) {
  check_threads(threads);
  check_rows<float>(x, "x");
  check_rows<float>(y, "y");
  if (static_cast<int64_t>(x.shape(1)) != weight.in_features)
    refuse("x " + shape_of(x) + ": the weight has " + std::to_string(weight.in_features) + " inputs");
  if (y.shape(0) != x.shape(0) || static_cast<int64_t>(y.shape(1)) != weight.out_features)
    refuse("y " + shape_of(y) + ": must be [" + std::to_string(x.shape(0)) + ", " + std::to_string(weight.out_features) + "]");
  if (bias) {
    check_whole<float>(*bias, "bias", 1);
    if (static_cast<int64_t>(bias->shape(0)) != weight.out_features)
      refuse("bias " + shape_of(*bias) + ": must be [" + std::to_string(weight.out_features) + "]");
  }
  const int64_t rows = static_cast<int64_t>(x.shape(0));
  const LinearArgs args{static_cast<const float*>(x.data()), rows, rows > 1 ? x.stride(0) : weight.in_features, &weight,
                        bias ? static_cast<const float*>(bias->data()) : nullptr,
                        const_cast<float*>(static_cast<const float*>(y.data())), rows > 1 ? y.stride(0) : weight.out_features};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { linear_kernels().linear(team, work, args); });
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<Packed>(module, "Packed", "A weight in the layout that `linear` reads.")
      .def_prop_ro("shape", [](const Packed& packed) { return nb::make_tuple(packed.out_features, packed.in_features); })
      .def_ro("segments", &Packed::segments)
      .def_prop_ro("bytes", &Packed::bytes)
      .def("repack", &repack, nb::arg("weight"), nb::arg("threads"), "Take over new values of the same shape and type.")
      .def("matches", &matches, nb::arg("weight"), nb::arg("threads"), "Whether it holds this weight, bit for bit.");
  module.def("pack", &pack, nb::arg("weight"), nb::arg("segments"), nb::arg("threads"), "Pack a float32 or bfloat16 weight [N, K], of any strides.");
  module.def("linear", &linear, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("y"), nb::arg("threads"),
             "Write x @ weight.T + bias into y.");
}

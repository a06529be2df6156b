// Tensors in the pool's memory, handed out as DLPack capsules.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "pool.h"

namespace zg {
namespace {

// As DLPack defines it, up to version 0.
struct Managed {
  nb::dlpack::dltensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct Held {
  Managed managed;
  Pool::Block block;
  std::vector<int64_t> shape, strides;
};

void give_back(Managed* managed) {
  const std::unique_ptr<Held> held(static_cast<Held*>(managed->context));
  pool().give(held->block);
}

// A capsule that nobody took in has kept its name.
void drop(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  Managed* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

nb::object empty(const std::vector<int64_t>& shape) {
  size_t floats = 1;
  for (const int64_t size : shape) {
    if (size < 0 || (size > 0 && floats > std::numeric_limits<int64_t>::max() / sizeof(float) / static_cast<size_t>(size)))
      refuse("empty: size " + std::to_string(size) + " is negative or too large");
    floats *= static_cast<size_t>(size);
  }
  auto held = std::make_unique<Held>();
  held->shape = shape;
  held->strides.assign(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) held->strides[i - 1] = held->strides[i] * shape[i];
  held->block = pool().take(floats * sizeof(float) + 1);  // never an empty mapping
  Managed& managed = held->managed;
  managed.tensor.data = held->block.data;
  managed.tensor.device = {nb::device::cpu::value, 0};
  managed.tensor.ndim = static_cast<int32_t>(shape.size());
  managed.tensor.dtype = nb::dtype<float>();
  managed.tensor.shape = held->shape.data();
  managed.tensor.strides = held->strides.data();
  managed.tensor.byte_offset = 0;
  managed.context = held.get();
  managed.deleter = give_back;
  PyObject* const capsule = PyCapsule_New(&managed, "dltensor", drop);
  if (capsule == nullptr) {
    pool().give(held->block);
    throw nb::python_error();
  }
  held.release();
  return nb::steal(capsule);
}

}  // namespace
}  // namespace zg

void bind_pool(nanobind::module_& module) {
  module.def("empty", &zg::empty, nanobind::arg("shape"), "A DLPack capsule of float32 in pooled memory, with any contents.");
  module.def("trim_pool", [] { zg::pool().trim(); }, "Give pooled memory that nobody uses back to the system.");
  module.def(
      "pool_bytes", [] { return std::make_pair(zg::pool().used_bytes(), zg::pool().idle_bytes()); },
      "Bytes of pooled memory: in use, and idle.");
}

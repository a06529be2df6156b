// The Python module: what each family binds, and the choice of path.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>

#include "paths.h"

namespace nb = nanobind;

void bind_linear(nb::module_& module);
void bind_norm(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_program(nb::module_& module);
void bind_rotary(nb::module_& module);
void bind_lm_head(nb::module_& module);
void bind_adamw(nb::module_& module);
void bind_pool(nb::module_& module);

NB_MODULE(_kernels, module) {
  if (const char* forced = std::getenv("ZEROGAP_CPU_PATH"); forced != nullptr && *forced != '\0') zg::choose_path(forced);
  module.def("path", [] { return zg::path_name(zg::path()); }, "The CPU path in use: avx512, avx2 or generic.");
  module.def("paths_here", &zg::paths_here, "The paths that this machine runs, best first.");
  module.def("choose_path", &zg::choose_path, nb::arg("name"), "Use another path from now on; all give the same bits.");
  bind_linear(module);
  bind_norm(module);
  bind_attention(module);
  bind_program(module);
  bind_rotary(module);
  bind_lm_head(module);
  bind_adamw(module);
  bind_pool(module);
}

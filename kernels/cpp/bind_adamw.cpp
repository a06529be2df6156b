#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cmath>
#include <vector>

#include "adamw.h"
#include "arrays.h"

namespace nb = nanobind;
using namespace zg;

namespace {

// A contiguous array of any shape, flat.
template <class A>
int64_t flat(const A& array, const char* name) {
  check_whole<float>(array, name, array.ndim());
  return static_cast<int64_t>(array.size());
}

template <class A>
void check_count(const A& array, const char* name, int64_t count, const Array& param) {
  if (flat(array, name) != count) refuse(std::string(name) + " " + shape_of(array) + ": must have the elements of param " + shape_of(param));
}

void adamw_step(const Array& param, const Input& grad, const Array& mean, const Array& square, int64_t step, double learning_rate, double beta1,
                double beta2, double epsilon, double weight_decay, double grad_scale, int threads) {
  check_threads(threads);
  const int64_t count = flat(param, "param");
  check_count(grad, "grad", count, param);
  check_count(mean, "mean", count, param);
  check_count(square, "square", count, param);
  if (step < 1) refuse("step = " + std::to_string(step) + ": must be 1 or more");
  if (!(beta1 >= 0.0 && beta1 < 1.0 && beta2 >= 0.0 && beta2 < 1.0))
    refuse("beta1 = " + std::to_string(beta1) + ", beta2 = " + std::to_string(beta2) + ": must be in [0, 1)");
  const AdamWArgs args{static_cast<float*>(param.data()),
                       static_cast<const float*>(grad.data()),
                       static_cast<float*>(mean.data()),
                       static_cast<float*>(square.data()),
                       count,
                       static_cast<float>(grad_scale),
                       static_cast<float>(1.0 - learning_rate * weight_decay),
                       static_cast<float>(1.0 - beta1),
                       static_cast<float>(beta2),
                       static_cast<float>(1.0 - beta2),
                       static_cast<float>(learning_rate / (1.0 - std::pow(beta1, static_cast<double>(step)))),
                       static_cast<float>(std::sqrt(1.0 - std::pow(beta2, static_cast<double>(step)))),
                       static_cast<float>(epsilon)};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { adamw_kernels().step(team, work, args); });
}

double sum_of_squares(const Input& x, int threads) {
  check_threads(threads);
  const int64_t count = flat(x, "x");
  std::vector<double> partial(static_cast<size_t>(squares_blocks(count)));
  double sum = 0.0;
  const SquaresArgs args{static_cast<const float*>(x.data()), count, partial.data(), &sum};
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { adamw_kernels().sum_of_squares(team, work, args); });
  return sum;
}

}  // namespace

void bind_adamw(nb::module_& module) {
  using nb::arg;
  module.def("adamw_step", &adamw_step, arg("param"), arg("grad"), arg("mean"), arg("square"), arg("step"), arg("learning_rate"), arg("beta1"),
             arg("beta2"), arg("epsilon"), arg("weight_decay"), arg("grad_scale"), arg("threads"),
             "One update of a parameter and its two moments in place; step is 1 for the first, grad_scale clips.");
  module.def("sum_of_squares", &sum_of_squares, arg("x"), arg("threads"), "The float64 sum of squares of a contiguous float32 array.");
}

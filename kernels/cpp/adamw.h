// AdamW (arXiv 1711.05101) and the sum of squares of a gradient, each one pass over flat arrays.
//
// Per element, each operation rounded once, as torch's plain loop does it:
//   g = grad * grad_scale; param = param * decay; m = m + (g - m) * mean_share; v = v * square_keep + square_share * (g * g), the sum by FMA;
//   param = param - step_size * (m / (sqrt(v) / root_correction + epsilon)).
// Sum of squares: blocks of SQUARES_BLOCK elements, in each 16 float64 lanes in ascending order and their tree, then the blocks in
// ascending order: it depends on the values and their number only.
#pragma once

#include <cstdint>

#include "paths.h"
#include "team.h"

namespace zg {

constexpr int64_t SQUARES_BLOCK = 4096;

struct AdamWArgs {
  float* param;
  const float* grad;
  float *mean, *square;  // the gradient's running mean and running square
  int64_t count;
  float grad_scale;       // clipping
  float decay;            // 1 - learning_rate * weight_decay
  float mean_share;       // 1 - beta1
  float square_keep, square_share;  // beta2 and 1 - beta2, each rounded from float64
  float step_size;        // learning_rate / (1 - beta1^step)
  float root_correction;  // sqrt(1 - beta2^step)
  float epsilon;
};

struct SquaresArgs {
  const float* x;
  int64_t count;
  double* partial;  // [squares_blocks(count)]
  double* sum;
};
static ZG_SHARED int64_t squares_blocks(int64_t count) { return (count + SQUARES_BLOCK - 1) / SQUARES_BLOCK; }

struct AdamWKernels {
  void (*step)(Team&, Work&, const AdamWArgs&);
  void (*sum_of_squares)(Team&, Work&, const SquaresArgs&);  // has a barrier inside
};
ZG_TABLES(AdamWKernels, adamw_kernels)

}  // namespace zg

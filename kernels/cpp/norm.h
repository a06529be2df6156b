// RMSNorm, residual addition, gated SiLU and token embedding, forward and backward.
//
// Order of operations, the same on every path and for every row count:
// - rms_norm: lane j of 16 sums x[j]^2, x[j+16]^2, ... by FMA in ascending order, the lanes meet in `tree_sum`; mean = sum / K,
//   scale = 1 / sqrt(mean + eps), y = (x * scale) * weight: each a single rounding.
// - silu_mul: (sigmoid(gate) * gate) * up, with sigmoid(g) = 1 / (1 + exp(-g)).
// - weight gradients: blocks of GRADIENT_ROWS rows are summed in ascending order, then the blocks in ascending order.
#pragma once

#include <cstdint>

#include "paths.h"
#include "team.h"

namespace zg {

constexpr int64_t GRADIENT_ROWS = 64;

struct NormArgs {
  float* x;  // [rows, width]; changed only if something is added
  int64_t rows, width, x_stride;
  const float* added;  // [rows, width] or null: x becomes x + added before the norm
  int64_t added_stride;
  const float* weight;  // [width]
  float eps;
  float* y;  // [rows, width]
  int64_t y_stride;
};

struct NormBackwardArgs {
  const float* x;  // what the norm saw: after the addition
  int64_t rows, width, x_stride;
  const float* weight;
  float eps;
  const float* grad;  // of y
  int64_t grad_stride;
  float* grad_x;  // written, or added to where `accumulate` says so (the residual's own gradient)
  int64_t grad_x_stride;
  bool accumulate;
  float* grad_weight;  // [width], added to
  float* partial;      // [norm_blocks(rows), width]: memory for the blocks' sums
};
static ZG_SHARED int64_t norm_blocks(int64_t rows) { return (rows + GRADIENT_ROWS - 1) / GRADIENT_ROWS; }

struct SiluArgs {
  const float* gate;  // [rows, width]
  int64_t rows, width, gate_stride;
  const float* up;
  int64_t up_stride;
  float* y;  // may be gate or up itself
  int64_t y_stride;
};

struct SiluBackwardArgs {
  const float* gate;
  int64_t rows, width, gate_stride;
  const float* up;
  int64_t up_stride;
  const float* grad;  // of y
  int64_t grad_stride;
  float* grad_gate;
  int64_t grad_gate_stride;
  float* grad_up;
  int64_t grad_up_stride;
};

struct EmbeddingArgs {
  const int64_t* ids;  // [rows], each below the table's rows: the caller's promise
  int64_t rows, width;
  const void* table;  // [vocabulary, width], float or bf16
  bool bf16;
  int64_t table_stride;
  float* y;
  int64_t y_stride;
};

struct EmbeddingBackwardArgs {
  const int64_t* ids;
  int64_t rows, width;
  const float* grad;  // [rows, width]
  int64_t grad_stride;
  float* grad_table;  // [vocabulary, width], added to, rows in ascending order
  int64_t table_stride;
};

struct MapArgs {  // one function over a flat array
  const float* x;
  int64_t count;
  float* y;
};

struct NormKernels {
  void (*rms_norm)(Team&, Work&, const NormArgs&);
  void (*rms_norm_backward)(Team&, Work&, const NormBackwardArgs&);  // has a barrier inside
  void (*silu_mul)(Team&, Work&, const SiluArgs&);
  void (*silu_mul_backward)(Team&, Work&, const SiluBackwardArgs&);
  void (*embedding)(Team&, Work&, const EmbeddingArgs&);
  void (*embedding_backward)(Team&, Work&, const EmbeddingBackwardArgs&);
  void (*exp)(Team&, Work&, const MapArgs&);
  void (*log)(Team&, Work&, const MapArgs&);
};
ZG_TABLES(NormKernels, norm_kernels)

}  // namespace zg

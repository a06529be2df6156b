// Rotary position embedding, with the norm of queries and keys before it and the write into the cache after it.
//
// Per head of a row, each step rounded once:
// 1. with a norm weight: lane l of 16 sums x[l]^2, x[l + 16]^2, ... by FMAs in order from +0, the lanes meet by tree_sum;
//    factor = 1 / sqrt(sum / D + eps); x = (x * factor) * weight;
// 2. halves are rotated: first = first * cos - second * sin, second = second * cos + first * sin: both products rounded, no FMA.
// The fused form gives the bits of its parts.
#pragma once

#include <cstdint>

#include "paths.h"
#include "team.h"

namespace zg {

struct HeadRows {
  int64_t heads;
  const float* x;  // [rows, heads, D], rows `stride` apart
  int64_t stride;
  const float* norm;  // weight [D] or null
  float* y;           // may be x; null: not written
  int64_t y_stride;
};

struct RotaryArgs {
  int64_t rows, head_dim;
  const int64_t* positions;  // [rows]
  const float *cos, *sin;    // [positions, D/2]
  bool inverse;              // by the negative angle: the gradient
  float eps;
  HeadRows q, k;  // a side without heads is left out
  // Where keys (rotated) and values go as well: one layer of a Cache, or null. Slots of rows differ.
  float *cache_keys, *cache_values;
  int64_t page_size;
  const int64_t* slots;  // [rows]
  const float* v;        // [rows, G, D]
  int64_t v_stride;
};

struct RotaryKernels {
  void (*rotary)(Team&, Work&, const RotaryArgs&);
};
ZG_TABLES(RotaryKernels, rotary_kernels)

constexpr int64_t MOST_HEAD_DIM = 1024;

}  // namespace zg

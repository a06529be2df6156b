// Linear layers over packed weights.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "paths.h"
#include "team.h"

namespace zg {

constexpr int64_t PANEL = 16;  // columns of a panel
constexpr int MOST_SEGMENTS = 8;

enum class Kind { f32, bf16 };

// A weight [N, K] in panels: panel p holds columns 16p to 16p + 15 of the transposed weight as [K][16], zero beyond N.
struct Packed {
  int64_t out_features = 0, in_features = 0;
  Kind kind = Kind::f32;
  int segments = 1;  // K is cut into this many equal parts, whose sums meet in a balanced tree
  void* data = nullptr;

  Packed(int64_t out_features, int64_t in_features, Kind kind, int segments);
  ~Packed();
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;
  ZG_SHARED int64_t panels() const { return (out_features + PANEL - 1) / PANEL; }
  ZG_SHARED size_t bytes() const { return static_cast<size_t>(panels() * PANEL * in_features) * (kind == Kind::f32 ? 4 : 2); }
};

struct LinearArgs {
  const float* x;  // [rows, K], rows `x_stride` apart
  int64_t rows, x_stride;
  const Packed* weight;
  const float* bias;  // [N] or null: added after the tree
  float* y;           // [rows, N], rows `y_stride` apart
  int64_t y_stride;
  const Packed* next = nullptr;  // of the linear layer after this one, of the same kind: its memory is fetched ahead
};

struct PackArgs {
  Packed* packed;
  const void* weight;  // [N, K], float or bf16 as the kind says; element (n, k) at n * row + k * column
  int64_t row, column;
};

struct LinearKernels {
  void (*linear)(Team&, Work&, const LinearArgs&);
  void (*pack)(Team&, Work&, const PackArgs&);
};
ZG_TABLES(LinearKernels, linear_kernels)

}  // namespace zg

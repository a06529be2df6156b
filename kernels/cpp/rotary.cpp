#include "rotary.h"

#include "cache.h"
#include "lanes.h"

namespace zg {
namespace ZG_PATH {
namespace {

constexpr int64_t ROWS_AT_ONCE = 4;

ZG_INLINE int lanes_left(int64_t left) { return left < LANES ? static_cast<int>(left) : LANES; }
ZG_INLINE F16 load_lanes(const float* x, int count) { return count == LANES ? load(x) : load_some(x, count); }
ZG_INLINE void store_lanes(float* x, F16 value, int count) {
  if (count == LANES)
    store(x, value);
  else
    store_some(x, value, count);
}

void normalise(float* x, const float* weight, int64_t dim, float eps) {
  F16 squares = set(0.0f);
  for (int64_t d = 0; d < dim; d += LANES) {
    const F16 part = load_lanes(x + d, lanes_left(dim - d));
    squares = fma(part, part, squares);
  }
  const float mean = tree_sum(squares) / static_cast<float>(dim);
  const F16 factor = set(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t d = 0; d < dim; d += LANES) {
    const int count = lanes_left(dim - d);
    store_lanes(x + d, load_lanes(x + d, count) * factor * load_lanes(weight + d, count), count);
  }
}

void rotate(float* x, const float* cos, const float* sin, int64_t half, bool inverse) {
  for (int64_t d = 0; d < half; d += LANES) {
    const int count = lanes_left(half - d);
    const F16 first = load_lanes(x + d, count), second = load_lanes(x + half + d, count);
    const F16 c = load_lanes(cos + d, count), angle = load_lanes(sin + d, count);
    const F16 s = inverse ? set(-0.0f) - angle : angle;
    store_lanes(x + d, first * c - second * s, count);
    store_lanes(x + half + d, second * c + first * s, count);
  }
}

void head(const RotaryArgs& args, const HeadRows& side, int64_t row, int64_t h, float* to) {
  const float* from = side.x + row * side.stride + h * args.head_dim;
  const int64_t half = args.head_dim / 2;
  std::memcpy(to, from, static_cast<size_t>(args.head_dim) * sizeof(float));
  if (side.norm != nullptr) normalise(to, side.norm, args.head_dim, args.eps);
  rotate(to, args.cos + args.positions[row] * half, args.sin + args.positions[row] * half, half, args.inverse);
  if (side.y != nullptr) std::memcpy(side.y + row * side.y_stride + h * args.head_dim, to, static_cast<size_t>(args.head_dim) * sizeof(float));
}

void cache_head(const RotaryArgs& args, int64_t row, int64_t h, const float* key) {
  const int64_t dim = args.head_dim, width = up(dim, KEY_PANEL), slot = args.slots[row];
  const KeyPlace place = key_place(args.page_size, args.k.heads, dim, slot, h);
  for (int64_t d = 0; d < dim; ++d) args.cache_keys[place.offset + d * place.step] = key[d];
  const int64_t value = ((slot / args.page_size * args.k.heads + h) * args.page_size + slot % args.page_size) * width;
  std::memcpy(args.cache_values + value, args.v + row * args.v_stride + h * dim, static_cast<size_t>(dim) * sizeof(float));
}

void rotary(Team&, Work& work, const RotaryArgs& args) {
  float result[MOST_HEAD_DIM];
  const int64_t tasks = (args.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  for (int64_t task = work.next(); task < tasks; task = work.next()) {
    const int64_t first = task * ROWS_AT_ONCE, end = first + ROWS_AT_ONCE < args.rows ? first + ROWS_AT_ONCE : args.rows;
    for (int64_t row = first; row < end; ++row) {
      for (int64_t h = 0; h < args.q.heads; ++h) head(args, args.q, row, h, result);
      for (int64_t h = 0; h < args.k.heads; ++h) {
        head(args, args.k, row, h, result);
        if (args.cache_keys != nullptr) cache_head(args, row, h, result);
      }
    }
  }
}

}  // namespace

extern const RotaryKernels rotary_kernels{rotary};

}  // namespace ZG_PATH
}  // namespace zg

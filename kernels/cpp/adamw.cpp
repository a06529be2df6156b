// See adamw.h for the order of operations.
#include "adamw.h"

#include "lanes.h"

namespace zg {
namespace ZG_PATH {
namespace {

constexpr int64_t TASK_ELEMENTS = 1 << 16;

ZG_INLINE void step_lanes(const AdamWArgs& args, float* param, const float* grad, float* mean, float* square, int count) {
  const bool whole = count == LANES;
  const F16 g = (whole ? load(grad) : load_some(grad, count)) * set(args.grad_scale);
  F16 m = whole ? load(mean) : load_some(mean, count), v = whole ? load(square) : load_some(square, count);
  F16 p = (whole ? load(param) : load_some(param, count)) * set(args.decay);
  m = m + (g - m) * set(args.mean_share);
  v = fma(set(args.square_share), g * g, v * set(args.square_keep));
  p = p - set(args.step_size) * (m / (sqrt(v) / set(args.root_correction) + set(args.epsilon)));
  if (whole) {
    store(mean, m), store(square, v), store(param, p);
  } else {
    store_some(mean, m, count), store_some(square, v, count), store_some(param, p, count);
  }
}

void step(Team&, Work& work, const AdamWArgs& args) {
  for (int64_t begin = work.next() * TASK_ELEMENTS; begin < args.count; begin = work.next() * TASK_ELEMENTS) {
    const int64_t end = begin + TASK_ELEMENTS < args.count ? begin + TASK_ELEMENTS : args.count;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) step_lanes(args, args.param + i, args.grad + i, args.mean + i, args.square + i, LANES);
    if (i < end) step_lanes(args, args.param + i, args.grad + i, args.mean + i, args.square + i, static_cast<int>(end - i));
  }
}

double block_squares(const float* x, int64_t count) {
  double lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int j = 0; j < LANES; ++j) lanes[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  for (int j = 0; i + j < count; ++j) lanes[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  for (int width = LANES / 2; width >= 1; width /= 2)
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  return lanes[0];
}

void sum_of_squares(Team& team, Work& work, const SquaresArgs& args) {
  const int64_t blocks = squares_blocks(args.count);
  for (int64_t block = work.next(); block < blocks; block = work.next()) {
    const int64_t begin = block * SQUARES_BLOCK;
    args.partial[block] = block_squares(args.x + begin, args.count - begin < SQUARES_BLOCK ? args.count - begin : SQUARES_BLOCK);
  }
  team.barrier();
  if (team.index != 0) return;
  double sum = 0.0;
  for (int64_t block = 0; block < blocks; ++block) sum += args.partial[block];
  *args.sum = sum;
}

}  // namespace

extern const AdamWKernels adamw_kernels{step, sum_of_squares};

}  // namespace ZG_PATH
}  // namespace zg

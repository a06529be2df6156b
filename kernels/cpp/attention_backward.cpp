// Gradients of attention, recomputed from q, k and v: with w = exp(score - maximum) / sum and delta = grad_out . out,
// grad_score = w * (grad_out . v - delta). Any correct order would do; this one is fixed by the plan alone.
#include "attention.h"
#include "lanes_math.h"
#include "sequence.h"

namespace zg {
namespace ZG_PATH {
namespace {

constexpr int64_t BLOCK_PANELS = KEY_BLOCK / KEY_PANEL;
constexpr int64_t ROW_TILE = 32;  // rows of a chunk that pass over the keys together

// One chunk and one key/value head; L positions rounded up to panels, M = rows * share.
struct Pass {
  const AttentionBackwardArgs& args;
  const Chunk& chunk;
  int64_t group, share, dim, width, length, padded;
  float *key_panels, *value_panels;  // [L/16][D][16]
  float *keys, *grad_k, *grad_v;     // [L][width]
  float *q, *grad_out, *grad_q;      // [M][width]
  float *weights, *grad_scores;      // [M][KEY_BLOCK]
  float *delta, *greatest, *inverse;  // [M]
};

int64_t pass_floats(int64_t padded, int64_t height, int64_t dim, int64_t width) {
  return 2 * padded * dim + 3 * padded * width + height * (3 * width + 2 * KEY_BLOCK) + 3 * up(height, LANES);
}

void lay_pass(Pass& pass, float* memory, int64_t height) {
  const auto take = [&](int64_t floats) {
    float* from = memory;
    memory += up(floats, LANES);
    return from;
  };
  pass.key_panels = take(pass.padded * pass.dim);
  pass.value_panels = take(pass.padded * pass.dim);
  pass.keys = take(pass.padded * pass.width);
  pass.grad_k = take(pass.padded * pass.width);
  pass.grad_v = take(pass.padded * pass.width);
  pass.q = take(height * pass.width);
  pass.grad_out = take(height * pass.width);
  pass.grad_q = take(height * pass.width);
  pass.weights = take(height * KEY_BLOCK);
  pass.grad_scores = take(height * KEY_BLOCK);
  pass.delta = take(height);
  pass.greatest = take(height);
  pass.inverse = take(height);
}

void gather(Pass& pass) {
  const AttentionBackwardArgs& args = pass.args;
  const int32_t* table = args.plan.tables + pass.chunk.table;
  for (int64_t j = 0; j < pass.padded; ++j) {
    const bool real = j < pass.length;
    const int64_t slot = real ? slot_of(table, args.plan.page_size, j) : 0;
    const float* k = args.k + slot * args.k_stride + pass.group * pass.dim;
    const float* v = args.v + slot * args.v_stride + pass.group * pass.dim;
    float* keys = pass.keys + j * pass.width;
    const int64_t panel = j / KEY_PANEL * KEY_PANEL * pass.dim + j % KEY_PANEL;
    for (int64_t d = 0; d < pass.width; ++d) keys[d] = real && d < pass.dim ? k[d] : 0.0f;
    for (int64_t d = 0; d < pass.dim; ++d) pass.key_panels[panel + d * KEY_PANEL] = keys[d];
    for (int64_t d = 0; d < pass.dim; ++d) pass.value_panels[panel + d * KEY_PANEL] = real ? v[d] : 0.0f;
  }
  for (int64_t i = 0; i < pass.padded * pass.width; i += LANES) {
    store(pass.grad_k + i, set(0.0f));
    store(pass.grad_v + i, set(0.0f));
  }
}

void load_rows(Pass& pass, int64_t first, int64_t height) {
  const AttentionBackwardArgs& args = pass.args;
  for (int64_t m = 0; m < height; ++m) {
    const int64_t row = pass.chunk.first_row + first + m / pass.share, head = pass.group * pass.share + m % pass.share;
    const float* q = args.q + row * args.q_stride + head * pass.dim;
    const float* out = args.out + row * args.out_stride + head * pass.dim;
    const float* grad = args.grad_out + row * args.grad_out_stride + head * pass.dim;
    F16 delta = set(0.0f);
    for (int64_t d = 0; d < pass.width; d += LANES) {
      const int count = static_cast<int>(pass.dim - d < LANES ? pass.dim - d : LANES);
      const F16 g = count == LANES ? load(grad + d) : load_some(grad + d, count);
      const F16 o = count == LANES ? load(out + d) : load_some(out + d, count);
      const F16 x = count == LANES ? load(q + d) : load_some(q + d, count);
      delta = fma(g, o, delta);
      store(pass.grad_out + m * pass.width + d, g);
      store(pass.q + m * pass.width + d, x * set(args.scale));
      store(pass.grad_q + m * pass.width + d, set(0.0f));
    }
    const float* stats = args.stats + (row * args.heads + head) * 2;
    pass.delta[m] = tree_sum(delta);
    pass.greatest[m] = stats[0];
    pass.inverse[m] = 1.0f / stats[1];
  }
}

// Scores to weights and, beside them, grad_out . v to the gradients of the scores.
void differentiate(Pass& pass, int64_t first_position, int64_t height, int64_t block, int64_t panels) {
  int32_t ascending[LANES];
  for (int j = 0; j < LANES; ++j) ascending[j] = j;
  const I16 lane = loadi(ascending);
  for (int64_t m = 0; m < height; ++m) {
    const int64_t seen = first_position + m / pass.share - block + 1;
    const F16 greatest = set(pass.greatest[m]), inverse = set(pass.inverse[m]), delta = set(pass.delta[m]);
    for (int64_t p = 0; p < panels; ++p) {
      float* weights = pass.weights + m * KEY_BLOCK + p * KEY_PANEL;
      float* grads = pass.grad_scores + m * KEY_BLOCK + p * KEY_PANEL;
      F16 weight = exp(load(weights) - greatest) * inverse;
      F16 grad = weight * (load(grads) - delta);
      const int64_t visible = seen - p * KEY_PANEL;
      if (visible < KEY_PANEL) {
        const I16 mask = lane < seti(static_cast<int32_t>(visible < 0 ? 0 : visible));
        weight = select(mask, weight, set(0.0f));
        grad = select(mask, grad, set(0.0f));
      }
      store(weights, weight);
      store(grads, grad);
    }
  }
}

void pass_rows(Pass& pass, int64_t first, int64_t rows) {
  const int64_t height = rows * pass.share, width = pass.width, panels_wide = width / LANES;
  const int64_t first_position = pass.chunk.start + first, end = first_position + rows;
  load_rows(pass, first, height);
  const Run depth{nullptr, pass.dim}, q_rows{pass.q, height}, grad_rows{pass.grad_out, height};
  for (int64_t block = 0; block < end; block += KEY_BLOCK) {
    const int64_t stop = block + KEY_BLOCK < end ? block + KEY_BLOCK : end;
    const int64_t panels = (stop - block + KEY_PANEL - 1) / KEY_PANEL, keys = panels * KEY_PANEL;
    const float *key_panels[BLOCK_PANELS], *value_panels[BLOCK_PANELS];
    for (int64_t p = 0; p < panels; ++p) {
      key_panels[p] = pass.key_panels + (block + p * KEY_PANEL) * pass.dim;
      value_panels[p] = pass.value_panels + (block + p * KEY_PANEL) * pass.dim;
    }
    product({pass.q, width, 1, key_panels, &depth, 1, KEY_PANEL, pass.weights, KEY_BLOCK, false, nullptr, nullptr}, height, panels);
    product({pass.grad_out, width, 1, value_panels, &depth, 1, KEY_PANEL, pass.grad_scores, KEY_BLOCK, false, nullptr, nullptr}, height, panels);
    differentiate(pass, first_position, height, block, panels);
    product({pass.weights, 1, KEY_BLOCK, nullptr, &grad_rows, 1, width, pass.grad_v + block * width, width, true, nullptr, nullptr}, keys, panels_wide);
    product({pass.grad_scores, 1, KEY_BLOCK, nullptr, &q_rows, 1, width, pass.grad_k + block * width, width, true, nullptr, nullptr}, keys, panels_wide);
    const Run key_rows{pass.keys + block * width, keys};
    product({pass.grad_scores, KEY_BLOCK, 1, nullptr, &key_rows, 1, width, pass.grad_q, width, true, nullptr, nullptr}, height, panels_wide);
  }
  for (int64_t m = 0; m < height; ++m) {
    float* to = pass.args.grad_q + (pass.chunk.first_row + first + m / pass.share) * pass.args.grad_q_stride +
                (pass.group * pass.share + m % pass.share) * pass.dim;
    for (int64_t d = 0; d < pass.dim; ++d) to[d] = pass.grad_q[m * width + d] * pass.args.scale;
  }
}

void pass_chunk(Team& team, const AttentionBackwardArgs& args, const Chunk& chunk, int64_t group) {
  const int64_t share = args.heads / args.kv_heads, length = chunk.start + chunk.count, padded = up(length, KEY_PANEL);
  const int64_t most = (chunk.count < ROW_TILE ? chunk.count : ROW_TILE) * share;
  Pass pass{args, chunk, group, share, args.head_dim, up(args.head_dim, LANES), length, padded,
            nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  lay_pass(pass, team.scratch(static_cast<size_t>(pass_floats(padded, most, pass.dim, pass.width))), most);
  gather(pass);
  for (int64_t first = 0; first < chunk.count; first += ROW_TILE)
    pass_rows(pass, first, first + ROW_TILE < chunk.count ? ROW_TILE : chunk.count - first);
  const int32_t* table = args.plan.tables + chunk.table;
  for (int64_t j = 0; j < length; ++j) {
    const int64_t slot = slot_of(table, args.plan.page_size, j);
    float* k = args.grad_k + slot * args.grad_k_stride + group * pass.dim;
    float* v = args.grad_v + slot * args.grad_v_stride + group * pass.dim;
    for (int64_t d = 0; d < pass.dim; ++d) k[d] = k[d] + pass.grad_k[j * pass.width + d];
    for (int64_t d = 0; d < pass.dim; ++d) v[d] = v[d] + pass.grad_v[j * pass.width + d];
  }
}

}  // namespace

void attention_backward(Team& team, Work& work, const AttentionBackwardArgs& args) {
  // A slot's gradient is the sum over its chunks, from +0.
  const int64_t floats = args.kv_heads * args.head_dim;
  for (int64_t slot = team.index; slot < args.slots; slot += team.count) {
    float *k = args.grad_k + slot * args.grad_k_stride, *v = args.grad_v + slot * args.grad_v_stride;
    for (int64_t i = 0; i < floats; ++i) k[i] = v[i] = 0.0f;
  }
  team.barrier();
  for (int64_t task = work.next(); task < args.plan.group_count * args.kv_heads; task = work.next()) {
    const int64_t first = args.plan.group_firsts[task / args.kv_heads], end = args.plan.group_firsts[task / args.kv_heads + 1];
    for (int64_t i = first; i < end; ++i) pass_chunk(team, args, args.plan.chunks[args.plan.group_members[i]], task % args.kv_heads);
  }
}

}  // namespace ZG_PATH
}  // namespace zg

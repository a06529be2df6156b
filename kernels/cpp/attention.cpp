// The forward; see attention.h for the order of operations.
#include "attention.h"

#include "lanes_math.h"
#include "sequence.h"

namespace zg {
namespace ZG_PATH {
namespace {

constexpr int64_t BLOCK_PANELS = KEY_BLOCK / KEY_PANEL;
constexpr int32_t NO_PAGES[1] = {0};

// Rows of one sequence times the heads of one group: tile row m is head m % share of row m / share.
struct Tile {
  int64_t rows, share, head_dim, width, first_position;
  Sequence sequence;
  float *q, *scores, *out, *lanes, *greatest, *factor;
  float *joined, *joined_greatest, *joined_sum;  // of the splits so far
  float* panels;                                 // keys gathered from small pages
  int64_t height() const { return rows * share; }
  int64_t position(int64_t m) const { return first_position + m / share; }
};

int64_t tile_floats(int64_t height, int64_t head_dim, int64_t width) {
  return up(height * head_dim, LANES) + height * (KEY_BLOCK + 2 * width + LANES) + 4 * up(height, LANES) + KEY_BLOCK * head_dim;
}

void lay_tile(Tile& tile, float* memory, int64_t height) {
  const auto take = [&](int64_t floats) {
    float* from = memory;
    memory += up(floats, LANES);
    return from;
  };
  tile.q = take(height * tile.head_dim);
  tile.scores = take(height * KEY_BLOCK);
  tile.out = take(height * tile.width);
  tile.lanes = take(height * LANES);
  tile.greatest = take(height);
  tile.factor = take(height);
  tile.joined = take(height * tile.width);
  tile.joined_greatest = take(height);
  tile.joined_sum = take(height);
  tile.panels = take(KEY_BLOCK * tile.head_dim);
}

float exp_of(float x) {
  float lanes[LANES];
  store(lanes, exp(set(x)));
  return lanes[0];
}

// Scores to weights, maxima, factors and sums for the keys from `first`, of which `panels` panels were multiplied.
void weigh(Tile& tile, int64_t first, int64_t panels, bool fresh) {
  int32_t ascending[LANES];
  for (int j = 0; j < LANES; ++j) ascending[j] = j;
  const I16 lane = loadi(ascending);
  const F16 none = set(-__builtin_inff());
  for (int64_t m = 0; m < tile.height(); ++m) {
    const int64_t seen = tile.position(m) - first + 1;  // keys of the block that this row sees
    float* scores = tile.scores + m * KEY_BLOCK;
    float* lanes = tile.lanes + m * LANES;
    if (fresh) {
      tile.greatest[m] = -__builtin_inff();
      store(lanes, set(0.0f));
    }
    tile.factor[m] = 1.0f;
    if (seen <= 0) continue;
    const int64_t used = seen < panels * KEY_PANEL ? (seen + KEY_PANEL - 1) / KEY_PANEL : panels;
    F16 best = none;
    for (int64_t p = 0; p < used; ++p) {
      F16 score = load(scores + p * KEY_PANEL);
      const int64_t visible = seen - p * KEY_PANEL;
      if (visible < KEY_PANEL) {
        score = select(lane < seti(static_cast<int32_t>(visible)), score, none);
        store(scores + p * KEY_PANEL, score);
      }
      best = max(best, score);
    }
    const float old = tile.greatest[m], block = greatest(best);
    const float now = old > block ? old : block;
    F16 sum = load(lanes);
    if (now != old) {
      tile.greatest[m] = now;
      const F16 factor = exp(set(old) - set(now));
      float stored[LANES];
      store(stored, factor);
      tile.factor[m] = stored[0];
      sum = sum * factor;
    }
    for (int64_t p = 0; p < used; ++p) {
      const F16 weight = exp(load(scores + p * KEY_PANEL) - set(now));
      store(scores + p * KEY_PANEL, weight);
      sum = sum + weight;
    }
    store(lanes, sum);
  }
}

// out = out * factor + weights * values, over the visible keys of [first, end).
void add_values(Tile& tile, int64_t first, int64_t end, bool fresh) {
  Run runs[KEY_BLOCK];
  const int64_t panels = tile.width / LANES;
  // Keys that all rows see meet the whole tile; the last few meet row by row those that see them.
  const int64_t common = end < tile.first_position + 1 ? end : tile.first_position + 1;
  const int run_count = value_runs(tile.sequence, first, common, runs);
  product({tile.scores, KEY_BLOCK, 1, nullptr, runs, run_count, tile.width, tile.out, tile.width, !fresh, tile.factor}, tile.height(), panels);
  const int64_t from = first > common ? first : common;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t last = tile.first_position + row + 1, stop = last < end ? last : end;
    if (stop <= from) continue;
    const int count = value_runs(tile.sequence, from, stop, runs);
    const int64_t m = row * tile.share;
    product({tile.scores + m * KEY_BLOCK + (from - first), KEY_BLOCK, 1, nullptr, runs, count, tile.width, tile.out + m * tile.width,
             tile.width, true, nullptr},
            tile.share, panels);
  }
}

// Keys [first, end) of one split: fills out, greatest and lanes.
void walk(Tile& tile, int64_t first, int64_t end) {
  const float* panels[BLOCK_PANELS];
  const Run depth{nullptr, tile.head_dim};
  for (int64_t block = first; block < end; block += KEY_BLOCK) {
    const int64_t stop = block + KEY_BLOCK < end ? block + KEY_BLOCK : end;
    const int64_t count = (stop - block + KEY_PANEL - 1) / KEY_PANEL;
    for (int64_t p = 0; p < count; ++p)
      panels[p] = key_panel(tile.sequence, block + p * KEY_PANEL, end, tile.panels + p * KEY_PANEL * tile.head_dim);
    product({tile.q, tile.head_dim, 1, panels, &depth, 1, KEY_PANEL, tile.scores, KEY_BLOCK, false, nullptr}, tile.height(), count);
    weigh(tile, block, count, block == first);
    add_values(tile, block, stop, block == first);
  }
}

// Adds the next split to those so far: (out, greatest, sum) of one row and head.
void join(float* out, float& greatest, float& sum, const float* its_out, float its_greatest, float its_sum, int64_t width) {
  const float now = greatest > its_greatest ? greatest : its_greatest;
  const float a = exp_of(greatest - now), b = exp_of(its_greatest - now);
  greatest = now;
  sum = sum * a + its_sum * b;
  const F16 old_factor = set(a), its_factor = set(b);
  for (int64_t d = 0; d < width; d += LANES) store(out + d, fma(load(out + d), old_factor, load(its_out + d) * its_factor));
}

void finish(const AttentionArgs& args, int64_t row, int64_t head, const float* out, float greatest, float sum) {
  const F16 divisor = set(sum);
  float* to = args.out + row * args.out_stride + head * args.head_dim;
  for (int64_t d = 0; d < args.head_dim; d += LANES) {
    const F16 value = load(out + d) / divisor;
    if (args.head_dim - d >= LANES)
      store(to + d, value);
    else
      store_some(to + d, value, static_cast<int>(args.head_dim - d));
  }
  if (args.stats != nullptr) {
    float* stats = args.stats + (row * args.heads + head) * 2;
    stats[0] = greatest;
    stats[1] = sum;
  }
}

Sequence sequence_of(const AttentionArgs& args, const Chunk& chunk, int64_t group) {
  const int64_t dim = args.head_dim, width = up(dim, LANES), size = args.plan.page_size;
  if (!args.packed)
    return {args.keys + group * size * dim, args.values + group * size * width, args.plan.tables + chunk.table, size,
            args.kv_heads * size * dim,     args.kv_heads * size * width,       dim,                            width};
  const int64_t length = up(chunk.start + chunk.count, KEY_PANEL);
  const float* keys = args.workspace + chunk.before * args.kv_heads * dim + group * length * dim;
  const float* values = args.workspace + args.plan.padded * args.kv_heads * dim + chunk.before * args.kv_heads * width + group * length * width;
  return {keys, values, NO_PAGES, length, 0, 0, dim, width};
}

float* partials_of(const AttentionArgs& args) {
  return args.workspace + (args.packed ? args.plan.padded * args.kv_heads * (args.head_dim + up(args.head_dim, LANES)) : 0);
}

// Packed rows to panels and values of each chunk, 16 positions at a time.
void lay_out(Team& team, const AttentionArgs& args) {
  const int64_t dim = args.head_dim, width = up(dim, LANES);
  int64_t turn = 0;
  for (int64_t c = 0; c < args.plan.chunk_count; ++c) {
    const Chunk& chunk = args.plan.chunks[c];
    const int64_t length = chunk.count == 0 ? 0 : chunk.start + chunk.count;
    const int32_t* table = args.plan.tables + chunk.table;
    for (int64_t first = 0; first < length; first += KEY_PANEL) {
      if (turn++ % team.count != team.index) continue;
      for (int64_t group = 0; group < args.kv_heads; ++group) {
        const Sequence to = sequence_of(args, chunk, group);
        float* keys = const_cast<float*>(to.keys) + first * dim;
        float* values = const_cast<float*>(to.values) + first * width;
        for (int64_t lane = 0; lane < KEY_PANEL; ++lane) {
          const bool real = first + lane < length;
          const int64_t slot = real ? slot_of(table, args.plan.page_size, first + lane) : 0;
          const float* k = args.keys + slot * args.k_stride + group * dim;
          const float* v = args.values + slot * args.v_stride + group * dim;
          for (int64_t d = 0; d < dim; ++d) keys[d * KEY_PANEL + lane] = real ? k[d] : 0.0f;
          for (int64_t d = 0; d < width; ++d) values[lane * width + d] = real && d < dim ? v[d] : 0.0f;
        }
      }
    }
  }
}

void attend(Team& team, const AttentionArgs& args, const Item& item, int64_t group) {
  const Chunk& chunk = args.plan.chunks[item.chunk];
  const int64_t share = args.heads / args.kv_heads, dim = args.head_dim, width = up(dim, LANES);
  Tile tile{};
  tile.rows = item.count, tile.share = share, tile.head_dim = dim, tile.width = width;
  tile.first_position = chunk.start + item.first;
  tile.sequence = sequence_of(args, chunk, group);
  const int64_t height = tile.height();
  lay_tile(tile, team.scratch(static_cast<size_t>(tile_floats(height, dim, width))), height);
  const int64_t first_row = chunk.first_row + item.first;
  for (int64_t m = 0; m < height; ++m) {
    const float* q = args.q + (first_row + m / share) * args.q_stride + (group * share + m % share) * dim;
    for (int64_t d = 0; d < dim; ++d) tile.q[m * dim + d] = q[d] * args.scale;
  }
  const int64_t end = tile.first_position + item.count;  // keys that the last row sees
  if (item.split >= 0) {
    const int64_t first = item.split * SPLIT;
    walk(tile, first, first + SPLIT < end ? first + SPLIT : end);
    float* partials = partials_of(args);
    for (int64_t m = 0; m < height; ++m) {
      float* to = partials + ((item.partial + m / share) * args.heads + group * share + m % share) * (width + LANES);
      for (int64_t d = 0; d < width; d += LANES) store(to + d, load(tile.out + m * width + d));
      to[width] = tile.greatest[m];
      to[width + 1] = tree_sum(load(tile.lanes + m * LANES));
    }
    return;
  }
  for (int64_t first = 0; first < end; first += SPLIT) {
    walk(tile, first, first + SPLIT < end ? first + SPLIT : end);
    for (int64_t m = 0; m < height; ++m) {
      if (tile.position(m) < first) continue;  // sees nothing of this split
      const float sum = tree_sum(load(tile.lanes + m * LANES));
      const float* out = tile.out + m * width;
      if (first > 0) {
        join(tile.joined + m * width, tile.joined_greatest[m], tile.joined_sum[m], out, tile.greatest[m], sum, width);
        continue;
      }
      for (int64_t d = 0; d < width; d += LANES) store(tile.joined + m * width + d, load(out + d));
      tile.joined_greatest[m] = tile.greatest[m];
      tile.joined_sum[m] = sum;
    }
  }
  for (int64_t m = 0; m < height; ++m)
    finish(args, first_row + m / share, group * share + m % share, tile.joined + m * width, tile.joined_greatest[m], tile.joined_sum[m]);
}

void join_splits(const AttentionArgs& args, const Join& row, int64_t head) {
  const int64_t width = up(args.head_dim, LANES), place = width + LANES;
  float* first = partials_of(args) + (row.partial * args.heads + head) * place;
  for (int64_t split = 1; split < row.splits; ++split) {
    const float* its = first + split * row.step * args.heads * place;
    join(first, first[width], first[width + 1], its, its[width], its[width + 1], width);
  }
  finish(args, row.row, head, first, first[width], first[width + 1]);
}

void attention(Team& team, Work& work, const AttentionArgs& args) {
  if (args.packed) {
    lay_out(team, args);
    team.barrier();
  }
  for (int64_t task = work.next(); task < args.plan.item_count * args.kv_heads; task = work.next())
    attend(team, args, args.plan.items[task / args.kv_heads], task % args.kv_heads);
  if (args.plan.join_count == 0) return;
  team.barrier();
  for (int64_t task = team.index; task < args.plan.join_count * args.heads; task += team.count)
    join_splits(args, args.plan.joins[task / args.heads], task % args.heads);
}

}  // namespace

extern const AttentionKernels attention_kernels{attention, attention_backward};

}  // namespace ZG_PATH
}  // namespace zg

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

ZG_INLINE I16 lane_numbers() {
  int32_t ascending[LANES];
  for (int j = 0; j < LANES; ++j) ascending[j] = j;
  return loadi(ascending);
}

// Panels of the block's `panels` of which a row sees a key, if it sees so many keys from the block's first on.
ZG_INLINE int64_t panels_seen(int64_t keys, int64_t panels) {
  return keys <= 0 ? 0 : keys >= panels * KEY_PANEL ? panels : (keys + KEY_PANEL - 1) / KEY_PANEL;
}

// New maximum of tile row m and, in `factor`, the exponent old - new.
ZG_INLINE void find_greatest(Tile& tile, int64_t m, int64_t keys, int64_t used, bool fresh) {
  float* scores = tile.scores + m * KEY_BLOCK;
  const float old = fresh ? -__builtin_inff() : tile.greatest[m];
  tile.factor[m] = 0.0f;
  tile.greatest[m] = old;
  if (used == 0) return;
  float* last = scores + (used - 1) * KEY_PANEL;
  const int64_t left = keys - (used - 1) * KEY_PANEL;
  F16 best = load(last);
  if (left < KEY_PANEL) {
    best = select(lane_numbers() < seti(static_cast<int32_t>(left)), best, set(-__builtin_inff()));
    store(last, best);
  }
  for (int64_t p = 0; p + 1 < used; ++p) best = max(best, load(scores + p * KEY_PANEL));
  const float block = greatest(best);
  const float now = old > block ? old : block;
  tile.greatest[m] = now;
  if (!fresh) tile.factor[m] = old - now;
}

ZG_INLINE void weigh_row(Tile& tile, int64_t m, int64_t used, bool fresh) {
  float* scores = tile.scores + m * KEY_BLOCK;
  const F16 now = set(tile.greatest[m]);
  F16 sum = fresh ? set(0.0f) : load(tile.lanes + m * LANES) * set(tile.factor[m]);
  for (int64_t p = 0; p < used; ++p) {
    const F16 weight = exp(load(scores + p * KEY_PANEL) - now);
    store(scores + p * KEY_PANEL, weight);
    sum = sum + weight;
  }
  store(tile.lanes + m * LANES, sum);
}

// Scores to weights, maxima, factors and sums for the keys from `first`, of which `panels` panels were multiplied. Each
// step is done for all rows before the next, since the steps of one row wait for each other.
void weigh(Tile& tile, int64_t first, int64_t panels, bool fresh) {
  for (int64_t row = 0, m = 0; row < tile.rows; ++row) {
    const int64_t keys = tile.first_position + row - first + 1, used = panels_seen(keys, panels);
    for (int64_t head = 0; head < tile.share; ++head, ++m) find_greatest(tile, m, keys, used, fresh);
  }
  for (int64_t m = 0; m < tile.height(); m += LANES) store(tile.factor + m, exp(load(tile.factor + m)));
  for (int64_t row = 0, m = 0; row < tile.rows; ++row) {
    const int64_t used = panels_seen(tile.first_position + row - first + 1, panels);
    for (int64_t head = 0; head < tile.share; ++head, ++m) weigh_row(tile, m, used, fresh);
  }
}

// out = out * factor + weights * values, over the visible keys of [first, end).
void add_values(Tile& tile, int64_t first, int64_t end, bool fresh, Ahead* ahead) {
  Run runs[KEY_BLOCK];
  const int64_t panels = tile.width / LANES;
  // Keys that all rows see meet the whole tile; the last few meet row by row those that see them.
  const int64_t common = end < tile.first_position + 1 ? end : tile.first_position + 1;
  const int run_count = value_runs(tile.sequence, first, common, runs);
  product({tile.scores, KEY_BLOCK, 1, nullptr, runs, run_count, tile.width, tile.out, tile.width, !fresh, tile.factor, ahead}, tile.height(),
          panels);
  const int64_t from = first > common ? first : common;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t last = tile.first_position + row + 1, stop = last < end ? last : end;
    if (stop <= from) continue;
    const int count = value_runs(tile.sequence, from, stop, runs);
    const int64_t m = row * tile.share;
    product({tile.scores + m * KEY_BLOCK + (from - first), KEY_BLOCK, 1, nullptr, runs, count, tile.width, tile.out + m * tile.width,
             tile.width, true, nullptr, nullptr},
            tile.share, panels);
  }
}

// Memory of a block of keys, in the order in which it is read.
struct Block {
  Run keys[BLOCK_PANELS], values[KEY_BLOCK];
  int key_runs = 0, value_runs = 0;
};

// Where the keys (in place, or gathered into `scratch`) and values of [first, stop) lie.
void find_block(const Sequence& sequence, int64_t first, int64_t stop, int64_t end, float* scratch, Block& block) {
  const int64_t size = KEY_PANEL * sequence.head_dim;
  block.key_runs = block.value_runs = 0;
  for (int64_t key = first; key < stop; key += KEY_PANEL, ++block.key_runs)
    block.keys[block.key_runs] = {key_panel(sequence, key, end, scratch + block.key_runs * size), size};
  block.value_runs = value_runs(sequence, first, stop, block.values);
  for (int i = 0; i < block.value_runs; ++i) block.values[i].length *= sequence.width;
}

// Keys [first, end) of one split: fills out, greatest and lanes. While a block is at work the next one is fetched, keys
// with keys and values with values; after the last it is the block `after`.
void walk(Tile& tile, int64_t first, int64_t end, const Block& after) {
  const bool in_place = tile.sequence.page_size % KEY_PANEL == 0;
  const float* panels[BLOCK_PANELS];
  Block blocks[2];
  const auto find = [&](int64_t block, Block& to) {
    find_block(tile.sequence, block, block + KEY_BLOCK < end ? block + KEY_BLOCK : end, end, tile.panels, to);
  };
  int turn = 0;
  for (int64_t block = first; block < end; block += KEY_BLOCK, turn = 1 - turn) {
    const int64_t stop = block + KEY_BLOCK < end ? block + KEY_BLOCK : end;
    if (block == first || !in_place) find(block, blocks[turn]);
    if (stop < end && in_place) find(stop, blocks[1 - turn]);
    const Block& next = stop < end ? blocks[1 - turn] : after;
    for (int p = 0; p < blocks[turn].key_runs; ++p) panels[p] = blocks[turn].keys[p].from;
    const Run depth{nullptr, tile.head_dim};
    Ahead keys{next.keys, next.key_runs, 0}, values{next.values, next.value_runs, 0};
    if (stop < end && !in_place) keys.left = values.left = 0;
    product({tile.q, tile.head_dim, 1, panels, &depth, 1, KEY_PANEL, tile.scores, KEY_BLOCK, false, nullptr, &keys}, tile.height(),
            blocks[turn].key_runs);
    weigh(tile, block, blocks[turn].key_runs, block == first);
    add_values(tile, block, stop, block == first, &values);
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
  const F16 inverse = set(1.0f / sum);
  float* to = args.out + row * args.out_stride + head * args.head_dim;
  for (int64_t d = 0; d < args.head_dim; d += LANES) {
    const F16 value = load(out + d) * inverse;
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
        const float *k[KEY_PANEL], *v[KEY_PANEL];
        const int64_t count = length - first < KEY_PANEL ? length - first : KEY_PANEL;
        for (int64_t lane = 0; lane < count; ++lane) {
          const int64_t slot = slot_of(table, args.plan.page_size, first + lane);
          k[lane] = args.keys + slot * args.k_stride + group * dim;
          v[lane] = args.values + slot * args.v_stride + group * dim;
        }
        transpose_rows(k, count, dim, keys);
        for (int64_t lane = 0; lane < KEY_PANEL; ++lane)
          for (int64_t d = 0; d < width; d += LANES)
            store(values + lane * width + d, lane < count ? load_lanes(v[lane] + d, dim - d) : set(0.0f));
      }
    }
  }
}

// The first block of a task, where keys lie in whole panels.
void first_block(const AttentionArgs& args, int64_t task, Block& block) {
  if (args.packed || task >= args.plan.item_count * args.kv_heads || args.plan.page_size % KEY_PANEL != 0) return;
  const Item& item = args.plan.items[task / args.kv_heads];
  const Chunk& chunk = args.plan.chunks[item.chunk];
  const int64_t first = item.split > 0 ? item.split * SPLIT : 0, end = chunk.start + item.first + item.count;
  find_block(sequence_of(args, chunk, task % args.kv_heads), first, first + KEY_BLOCK < end ? first + KEY_BLOCK : end, end, nullptr, block);
}

void attend(Team& team, const AttentionArgs& args, const Item& item, int64_t group, const Block& after) {
  const Chunk& chunk = args.plan.chunks[item.chunk];
  const int64_t share = args.heads / args.kv_heads, dim = args.head_dim, width = up(dim, LANES);
  Tile tile{};
  tile.rows = item.count, tile.share = share, tile.head_dim = dim, tile.width = width;
  tile.first_position = chunk.start + item.first;
  tile.sequence = sequence_of(args, chunk, group);
  const int64_t height = tile.height();
  lay_tile(tile, team.scratch(static_cast<size_t>(tile_floats(height, dim, width))), height);
  const int64_t first_row = chunk.first_row + item.first;
  const F16 scale = set(args.scale);
  for (int64_t row = 0; row < item.count; ++row) {
    // The heads of a group lie side by side.
    const float* q = args.q + (first_row + row) * args.q_stride + group * share * dim;
    float* to = tile.q + row * share * dim;
    int64_t d = 0;
    for (; d + LANES <= share * dim; d += LANES) store(to + d, load(q + d) * scale);
    for (; d < share * dim; ++d) to[d] = q[d] * args.scale;
  }
  const int64_t end = tile.first_position + item.count;  // keys that the last row sees
  if (item.split >= 0) {
    const int64_t first = item.split * SPLIT;
    walk(tile, first, first + SPLIT < end ? first + SPLIT : end, after);
    float* partials = partials_of(args);
    for (int64_t m = 0; m < height; ++m) {
      float* to = partials + ((item.partial + m / share) * args.heads + group * share + m % share) * (width + LANES);
      for (int64_t d = 0; d < width; d += LANES) store(to + d, load(tile.out + m * width + d));
      to[width] = tile.greatest[m];
      to[width + 1] = tree_sum(load(tile.lanes + m * LANES));
    }
    return;
  }
  walk(tile, 0, SPLIT < end ? SPLIT : end, after);
  float* out = tile.out;
  for (int64_t m = 0; m < height; ++m) tile.joined_sum[m] = tree_sum(load(tile.lanes + m * LANES));
  if (end > SPLIT) {
    for (int64_t i = 0; i < height * width; i += LANES) store(tile.joined + i, load(tile.out + i));
    for (int64_t m = 0; m < height; ++m) tile.joined_greatest[m] = tile.greatest[m];
    out = tile.joined;
  }
  for (int64_t first = SPLIT; first < end; first += SPLIT) {
    walk(tile, first, first + SPLIT < end ? first + SPLIT : end, {});
    for (int64_t m = 0; m < height; ++m) {
      if (tile.position(m) < first) continue;  // sees nothing of this split
      const float sum = tree_sum(load(tile.lanes + m * LANES));
      join(out + m * width, tile.joined_greatest[m], tile.joined_sum[m], tile.out + m * width, tile.greatest[m], sum, width);
    }
  }
  const float* greatest = end > SPLIT ? tile.joined_greatest : tile.greatest;
  for (int64_t m = 0; m < height; ++m)
    finish(args, first_row + m / share, group * share + m % share, out + m * width, greatest[m], tile.joined_sum[m]);
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
  for (int64_t task = work.next(); task < args.plan.item_count * args.kv_heads; task = work.next()) {
    Block after;
    first_block(args, work.upcoming(), after);
    attend(team, args, args.plan.items[task / args.kv_heads], task % args.kv_heads, after);
  }
  if (args.plan.join_count == 0) return;
  team.barrier();
  for (int64_t task = team.index; task < args.plan.join_count * args.heads; task += team.count)
    join_splits(args, args.plan.joins[task / args.heads], task % args.heads);
}

}  // namespace

extern const AttentionKernels attention_kernels{attention, attention_backward};

}  // namespace ZG_PATH
}  // namespace zg

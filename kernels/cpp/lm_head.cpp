// See lm_head.h for the order of operations.
#include "lm_head.h"

#include "draw.h"

namespace zg {
namespace ZG_PATH {
namespace {

ZG_INLINE float log_of(float x) {
  float lanes[LANES];
  store(lanes, log(set(x)));
  return lanes[0];
}

// Greatest of `width` logits, a multiple of 16; NaN if one is NaN.
ZG_INLINE float peak_of(const float* l, int64_t width) {
  F16 most = set(-INFINITE);
  I16 bad = seti(0);
  for (int64_t k = 0; k < width; k += LANES) {
    const F16 x = load(l + k);
    most = max(x, most);
    bad = bad | ((x == x) == seti(0));
  }
  return mask_word(bad) != 0 ? __builtin_nanf("") : peak(most);
}

// sum of exp(l - peak), and if `dot` is wanted the sum of exp(l - peak) * (l - peak). `sparse` skips lanes that are all -inf: they would
// add +0.
template <bool sparse>
ZG_INLINE void sums_of(const float* l, int64_t width, float peak, float* sum, float* dot) {
  const F16 base = set(peak == -INFINITE ? 0.0f : peak);  // -inf less -inf would be NaN
  F16 weights = set(0.0f), products = set(0.0f);
  for (int64_t k = 0; k < width; k += LANES) {
    const F16 x = load(l + k);
    if (sparse && mask_word(x == set(-INFINITE)) == 0xffffu) continue;
    const F16 shifted = x - base, weight = exp(shifted);
    weights = weights + weight;
    if (dot != nullptr) products = products + select(weight == set(0.0f), set(0.0f), weight * shifted);
  }
  *sum = tree_sum(weights);
  if (dot != nullptr) *dot = tree_sum(products);
}

// Per row of a tile: its blocks' statistics, and where its logits are if they are kept.
struct Memory {
  HeadLayout layout;
  float *table, *peaks, *sums, *dots, *target_logit;
  float* kept;  // logits of all rows, in place of the table of a tile
  int64_t kept_stride;

  // Logits of row `r` of the tile that starts at row `first`, where they outlive their block.
  float* logits(int64_t first, int64_t r) const { return kept != nullptr ? kept + (first + r) * kept_stride : table + r * layout.table_stride; }
  int64_t stride() const { return kept != nullptr ? kept_stride : layout.table_stride; }

  explicit Memory(const HeadArgs& args) : layout(head_layout(args.of.vocabulary)), kept(args.logits), kept_stride(args.logits_stride) {
    const int64_t rows = args.of.rows < ROWS_AT_ONCE ? args.of.rows : ROWS_AT_ONCE;
    table = args.workspace;
    peaks = table + rows * layout.table_stride;
    sums = peaks + rows * layout.stats_stride;
    dots = sums + rows * layout.stats_stride;
    target_logit = dots + rows * layout.stats_stride;
  }
};

ZG_INLINE bool ranked(const HeadArgs& args, int64_t row) {
  const bool top_k = args.top_k[row] > 0 && args.top_k[row] < args.of.vocabulary;
  return args.of.replay == nullptr && args.of.temperature[row] > 0.0 && (top_k || args.top_p[row] < 1.0);
}
ZG_INLINE bool filtered(const HeadArgs& args, int64_t row) {
  return ranked(args, row) || (args.of.replay == nullptr && args.of.temperature[row] > 0.0 && args.min_p[row] > 0.0);
}

// Whether the tile's logits must outlive their block: to draw, to filter, to list, for the backward.
bool needs_table(const HeadArgs& args, int64_t first, int64_t rows) {
  if (args.target == nullptr || args.top_count != nullptr || args.logits != nullptr) return true;
  for (int64_t row = first; row < first + rows; ++row)
    if (filtered(args, row)) return true;
  return false;
}

// Rows [begin, end) of the tile that starts at row `first`.
void block_task(Team& team, const HeadArgs& args, const Memory& memory, bool table, int64_t first, int64_t begin, int64_t end, int64_t block) {
  const int64_t stride = table ? memory.stride() : BLOCK + LANES;
  float* l = table ? memory.logits(first, begin) + block * BLOCK : team.scratch(static_cast<size_t>(ROWS_AT_ONCE * stride));
  block_logits(args.of, first + begin, end - begin, block, l, stride);
  const int64_t width = block_width(block, args.of.vocabulary);
  for (int64_t r = begin; r < end; ++r, l += stride) {
    const int64_t at = r * memory.layout.stats_stride + block;
    memory.peaks[at] = peak_of(l, width);
    if (!filtered(args, first + r))  // a filter changes what is to be summed
      sums_of<false>(l, width, memory.peaks[at], &memory.sums[at], args.entropy != nullptr ? &memory.dots[at] : nullptr);
    if (!table) {
      const int64_t k = args.target[first + r] - block * BLOCK;
      if (k >= 0 && k < width) memory.target_logit[r] = l[k];
    }
  }
}

// Sum of all weights of a row whose statistics are those of its whole vocabulary.
float whole_total(const HeadArgs& args, const HeadLayout& layout, const float* l, float peak, const float* peaks) {
  F16 totals = set(0.0f);
  float sums[LANES];
  for (int64_t first = 0; first < layout.stats_stride; first += LANES) {
    for (int64_t block = first; block < first + LANES; ++block) {
      sums[block - first] = 0.0f;
      if (block < layout.blocks)
        sums_of<false>(l + block * BLOCK, block_width(block, args.of.vocabulary), peaks[block], &sums[block - first], nullptr);
    }
    totals = fma(load(sums), exp(load(peaks + first) - set(peak)), totals);
  }
  return tree_sum(totals);
}

// Greatest block peak, NaN if one is NaN; `stats_stride` entries, those beyond the last block -inf.
ZG_INLINE float row_peak(const HeadLayout& layout, float* peaks) {
  for (int64_t block = layout.blocks; block < layout.stats_stride; ++block) peaks[block] = -INFINITE;
  return peak_of(peaks, layout.stats_stride);
}

// Applies the filters of one row to its logits, and takes its statistics anew. Returns how many tokens are kept.
int64_t filter(Team& team, const HeadArgs& args, const HeadLayout& layout, int64_t row, float* l, float peak, float* peaks, float* sums,
               float* dots, uint8_t* bits_out) {
  const int64_t vocabulary = args.of.vocabulary, width = (vocabulary + LANES - 1) / LANES * LANES;
  Cut cut = NO_CUT;
  if (ranked(args, row)) {
    const Ranked tokens{l, width, peak, 0.0f};
    static_assert(sizeof(Candidate) == 4 * sizeof(float));
    Candidate* room = reinterpret_cast<Candidate*>(team.scratch(static_cast<size_t>(width) * 4, 1));
    if (args.top_k[row] > 0 && args.top_k[row] < vocabulary) cut = find_cut<false>(tokens, cut, static_cast<double>(args.top_k[row]), room);
    if (args.top_p[row] < 1.0) cut = find_cut<true>(tokens, cut, args.top_p[row] > 0.0 ? args.top_p[row] : 0.0, room);
  }
  const float floor = args.min_p[row] > 0.0 ? static_cast<float>(args.min_p[row]) : 0.0f;
  int64_t kept = 0;
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const int64_t first = block * BLOCK, size = block_width(block, vocabulary);
    I16 any = seti(0);
    for (int64_t k = first; k < first + size; k += LANES) {
      const F16 x = load(l + k), d = set(0.0f) - (x - set(peak));
      const I16 id = lane_numbers() + seti(static_cast<int32_t>(k));
      I16 keep = within_cut(cut, bits(d), id) & (id < seti(static_cast<int32_t>(vocabulary)));
      if (floor > 0.0f && mask_word(keep) != 0) keep = keep & (exp(set(0.0f) - d) >= set(floor));
      store(l + k, select(keep, x, set(-INFINITE)));
      any = any | keep;
      const uint32_t word = mask_word(keep);
      kept += __builtin_popcount(word);
      if (bits_out != nullptr) {
        const uint32_t swapped = swap_bits(word);
        bits_out[k / 8] = static_cast<uint8_t>(swapped);
        if (k + 8 < vocabulary) bits_out[k / 8 + 1] = static_cast<uint8_t>(swapped >> 8);
      }
    }
    if (mask_word(any) == 0) {
      peaks[block] = -INFINITE;
      sums[block] = dots[block] = 0.0f;
    } else {
      peaks[block] = peak_of(l + first, size);
      sums_of<true>(l + first, size, peaks[block], &sums[block], args.entropy != nullptr ? &dots[block] : nullptr);
    }
  }
  return kept;
}

// The kept set of a row that no filter changed: all tokens, or the replayed ones.
int64_t write_unfiltered(const HeadArgs& args, int64_t row, uint8_t* to) {
  const int64_t bytes = (args.of.vocabulary + 7) / 8;
  const KeptSet whole{};
  const KeptSet& kept = args.of.replay == nullptr ? whole : args.of.replay[row];
  if (kept.form == KeptSet::Form::ids) {
    std::memset(to, 0, static_cast<size_t>(bytes));
    const int32_t* ids = static_cast<const int32_t*>(kept.data);
    for (int64_t i = 0; i < kept.count; ++i) to[ids[i] / 8] = static_cast<uint8_t>(to[ids[i] / 8] | 128 >> ids[i] % 8);
    return kept.count;
  }
  if (kept.form == KeptSet::Form::bits)
    std::memcpy(to, kept.data, static_cast<size_t>(bytes));
  else
    std::memset(to, 255, static_cast<size_t>(bytes));
  if (args.of.vocabulary % 8 != 0) to[bytes - 1] = static_cast<uint8_t>(to[bytes - 1] & (255 << (8 - args.of.vocabulary % 8)));
  int64_t count = 0;
  for (int64_t i = 0; i < bytes; ++i) count += __builtin_popcount(to[i]);
  return count;
}

void row_task(Team& team, const HeadArgs& args, const Memory& memory, bool table, int64_t first, int64_t r) {
  const HeadLayout& layout = memory.layout;
  const int64_t row = first + r;
  float* l = memory.logits(first, r);
  float* peaks = memory.peaks + r * layout.stats_stride;
  float* sums = memory.sums + r * layout.stats_stride;
  float* dots = memory.dots + r * layout.stats_stride;
  float peak = row_peak(layout, peaks);
  uint8_t* bits_out = args.kept_bits == nullptr ? nullptr : args.kept_bits + row * args.kept_stride;
  int64_t kept = -1;
  float whole = 0.0f;
  if (filtered(args, row)) {
    if (args.mass != nullptr) whole = whole_total(args, layout, l, peak, peaks);
    // A row with a logit that is NaN or +inf has no distribution: its log-prob will be NaN.
    if (peak - peak == 0.0f)
      kept = filter(team, args, layout, row, l, peak, peaks, sums, dots, bits_out);
    else
      for (int64_t block = 0; block < layout.blocks; ++block)
        sums_of<false>(l + block * BLOCK, block_width(block, args.of.vocabulary), peaks[block], &sums[block],
                       args.entropy != nullptr ? &dots[block] : nullptr);
    peak = row_peak(layout, peaks);
  }
  if (bits_out != nullptr) args.kept_count[row] = kept >= 0 ? kept : write_unfiltered(args, row, bits_out);

  for (int64_t block = layout.blocks; block < layout.stats_stride; ++block) sums[block] = dots[block] = 0.0f;
  float* factors = team.scratch(static_cast<size_t>(layout.stats_stride), 2);
  F16 totals = set(0.0f), products = set(0.0f);
  for (int64_t b = 0; b < layout.stats_stride; b += LANES) {
    const F16 shift = load(peaks + b) - set(peak), factor = exp(shift), sum = load(sums + b);
    store(factors + b, factor);
    totals = fma(sum, factor, totals);
    if (args.entropy != nullptr)
      products = products + select(factor == set(0.0f), set(0.0f), (load(dots + b) + sum * shift) * factor);
  }
  const float total = tree_sum(totals), log_total = log_of(total);
  if (args.entropy != nullptr) args.entropy[row] = log_total - tree_sum(products) / total;
  if (args.peak != nullptr) args.peak[row] = peak;
  if (args.total != nullptr) args.total[row] = total;
  if (args.mass != nullptr) args.mass[row] = filtered(args, row) ? total / whole : 1.0f;  // every filter keeps the greatest

  float logit = memory.target_logit[r];
  if (args.target == nullptr) {
    const int64_t token = args.of.temperature[row] == 0.0 ? most_likely(layout, l, peaks, peak)
                                                          : draw(layout, args.of.vocabulary, l, peaks, sums, factors, args.uniform[row]);
    args.token[row] = token;
    logit = l[token];
  } else if (table) {
    logit = l[args.target[row]];
  }
  args.logprob[row] = (logit - peak) - log_total;
  if (args.top_count != nullptr) list_top(team, args, row, l, peak, log_total);
}

void head(Team& team, Work& work, const HeadArgs& args) {
  const Memory memory(args);
  const int64_t blocks = memory.layout.blocks;
  // A small vocabulary has too few blocks for all members: its tasks are cut by rows too.
  const int64_t cut = blocks < 16 ? 12 : ROWS_AT_ONCE;
  // One count of tasks runs through all phases: a member that took a task of a later phase keeps it until the barriers
  // before it are passed.
  int64_t task = work.next(), phase = 0;
  for (int64_t first = 0; first < args.of.rows; first += ROWS_AT_ONCE) {
    const int64_t rows = first + ROWS_AT_ONCE < args.of.rows ? ROWS_AT_ONCE : args.of.rows - first;
    const bool table = needs_table(args, first, rows);
    if (first > 0) team.barrier();  // the tile before has been read
    const int64_t cuts = (rows + cut - 1) / cut;
    for (; task < phase + blocks * cuts; task = work.next()) {
      const int64_t begin = (task - phase) / blocks * cut, end = begin + cut < rows ? begin + cut : rows;
      block_task(team, args, memory, table, first, begin, end, (task - phase) % blocks);
    }
    phase += blocks * cuts;
    team.barrier();
    for (; task < phase + rows; task = work.next()) row_task(team, args, memory, table, first, task - phase);
    phase += rows;
  }
}

void backward(Team& team, Work& work, const HeadBackwardArgs& args) {
  const int64_t vocabulary = args.of.vocabulary, blocks = (vocabulary + BLOCK - 1) / BLOCK, stride = BLOCK + LANES;
  const int64_t tiles = (args.of.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  float* scratch = args.in_place ? nullptr : team.scratch(static_cast<size_t>(ROWS_AT_ONCE * stride));
  for (int64_t task = work.next(); task < tiles * blocks; task = work.next()) {
    const int64_t first = task / blocks * ROWS_AT_ONCE, block = task % blocks;
    const int64_t rows = first + ROWS_AT_ONCE < args.of.rows ? ROWS_AT_ONCE : args.of.rows - first;
    if (!args.in_place) block_logits(args.of, first, rows, block, scratch, stride);
    const int64_t width = block_width(block, vocabulary);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = first + r;
      const float slope = args.grad[row] / temperature_of(args.of, row);
      const F16 factor = set((0.0f - slope) / args.total[row]), peak = set(args.peak[row]);
      float* to = args.grad_logits + row * args.grad_stride + block * BLOCK;
      const float* l = args.in_place ? to : scratch + r * stride;
      for (int64_t k = 0; k < width; k += LANES) {
        const int64_t left = vocabulary - block * BLOCK - k;
        if (left >= LANES)
          store(to + k, exp(load(l + k) - peak) * factor);
        else
          store_some(to + k, exp(load_some(l + k, static_cast<int>(left)) - peak) * factor, static_cast<int>(left));
      }
      const int64_t target = args.target[row] - block * BLOCK;
      if (target >= 0 && target < width) to[target] += slope;
    }
  }
}

}  // namespace

extern const HeadKernels head_kernels{head, backward};

}  // namespace ZG_PATH
}  // namespace zg

// A row's token and its most probable tokens, from its logits and the statistics of their blocks.
#pragma once

#include "nucleus.h"

namespace zg {
namespace ZG_PATH {
namespace {

// The token at which the cumulative distribution passes `uniform`, in id order: blocks first, then tokens of the block.
int64_t draw(const HeadLayout& layout, int64_t vocabulary, const float* l, const float* peaks, const float* sums, const float* factors,
             double uniform) {
  double total = 0.0;
  for (int64_t block = 0; block < layout.blocks; ++block) total += static_cast<double>(sums[block]) * factors[block];
  const double aim = uniform * total;
  double before = 0.0, start = 0.0;
  int64_t chosen = -1;
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const double mass = static_cast<double>(sums[block]) * factors[block];
    if (!(mass > 0.0)) continue;
    chosen = block;  // uniform * total can round up to the total: the last block with weight is meant then
    start = before;
    before += mass;
    if (aim < before) break;
  }
  if (chosen < 0) return 0;  // nothing can be sampled or a logit is NaN: the log-prob says so
  const int64_t first = chosen * BLOCK, width = block_width(chosen, vocabulary);
  const double rest = (aim - start) / factors[chosen];
  double sum = 0.0;
  int64_t token = first;
  for (int64_t k = first; k < first + width; k += LANES) {
    float weight[LANES];
    store(weight, exp(load(l + k) - set(peaks[chosen])));
    for (int j = 0; j < LANES; ++j) {
      if (!(weight[j] > 0.0f)) continue;
      sum += weight[j];
      token = k + j;
      if (rest < sum) return token;
    }
  }
  return token;
}

// The lowest id of the highest logit.
int64_t most_likely(const HeadLayout& layout, const float* l, const float* peaks, float peak) {
  for (int64_t block = 0; block < layout.blocks; ++block) {
    if (peaks[block] != peak) continue;
    for (int64_t k = block * BLOCK; k < (block + 1) * BLOCK; ++k)
      if (l[k] == peak) return k;
  }
  return 0;
}

// Sorts ascending.
void heap_sort(uint64_t* values, int64_t count) {
  for (int64_t start = count / 2 - 1, end = count; end > 1;) {
    int64_t root;
    if (start >= 0) {
      root = start--;
    } else {
      --end;
      const uint64_t top = values[0];
      values[0] = values[end];
      values[end] = top;
      root = 0;
    }
    for (int64_t child = 2 * root + 1; child < end; child = 2 * root + 1) {
      if (child + 1 < end && values[child] < values[child + 1]) ++child;
      if (values[child] <= values[root]) break;
      const uint64_t lower = values[root];
      values[root] = values[child];
      values[child] = lower;
      root = child;
    }
  }
}

// Lists the most probable tokens that can be sampled, by falling log-prob and then rising id.
void list_top(Team& team, const HeadArgs& args, int64_t row, const float* l, float peak, float log_total) {
  int64_t* ids = args.top_ids + row * args.top_width;
  float* logprobs = args.top_logprobs + row * args.top_width;
  for (int64_t i = 0; i < args.top_width; ++i) ids[i] = -1, logprobs[i] = -INFINITE;
  int64_t wanted = args.top_count[row] < args.top_width ? args.top_count[row] : args.top_width;
  const int64_t vocabulary = args.of.vocabulary, width = (vocabulary + LANES - 1) / LANES * LANES;
  if (wanted <= 0 || !(log_total < INFINITE)) return;
  if (wanted > vocabulary) wanted = vocabulary;
  const Ranked tokens{l, width, peak, log_total};
  Candidate* room = reinterpret_cast<Candidate*>(team.scratch(static_cast<size_t>(width) * 4, 1));
  const Cut cut = wanted < vocabulary ? find_cut<false>(tokens, NO_CUT, static_cast<double>(wanted), room) : NO_CUT;
  uint64_t* order = reinterpret_cast<uint64_t*>(room);
  int64_t count = 0;
  for (int64_t k = 0; k < width; k += LANES) {
    const I16 key = bits(distance(tokens, k));
    const I16 possible = load(l + k) > set(-INFINITE);
    int32_t keys[LANES];
    storei(keys, key);
    for (uint32_t word = mask_word(possible & within_cut(cut, key, lane_numbers() + seti(static_cast<int32_t>(k)))); word != 0; word &= word - 1) {
      const int j = __builtin_ctz(word);
      order[count++] = static_cast<uint64_t>(keys[j]) << 32 | static_cast<uint64_t>(k + j);
    }
  }
  heap_sort(order, count);
  for (int64_t i = 0; i < count; ++i) {
    ids[i] = static_cast<int64_t>(order[i] & 0xffffffffu);
    logprobs[i] = (l[ids[i]] - peak) - log_total;
  }
}

}  // namespace
}  // namespace ZG_PATH
}  // namespace zg

// From hidden rows to tokens and their log-probs: one definition for the engine, which draws, and the trainer, which scores.
//
// The vocabulary is walked in blocks of BLOCK tokens. Of each block: peak m = greatest logit, sum s = sum of exp(l - m), lane
// j of 16 adding tokens j, j + 16, ... in ascending order, the lanes meeting in `tree_sum`. Of a row: M = greatest m; total = sum
// of s * exp(m - M), lane j of 16 taking blocks j, j + 16, ... by FMA, then `tree_sum`; log-prob of token t = (l[t] - M) - log(total).
// A token outside the kept set has the logit -inf, so its weight is +0. How many rows and threads take part decides where
// a block's logits lie, nothing else.
//
// Filters (temperature, suppressed tokens, top-k, top-p within the top k, min-p; ties by logit and then lower id) follow
// `zerogap.ops.portable.sampling`. The masses that top-p compares are sums of whole numbers, floor(exp(l - M) * 2^42), which no order
// of addition can change.
#pragma once

#include <cstdint>

#include "linear.h"

namespace zg {

constexpr int64_t BLOCK = 1024;
constexpr int64_t ROWS_AT_ONCE = 64;

// A recorded kept set that replaces top-k, top-p and min-p.
struct KeptSet {
  enum class Form { whole, ids, bits } form = Form::whole;
  const void* data = nullptr;  // int32 ids, ascending; or one bit per token, the first in the highest bit (numpy.packbits)
  int64_t count = 0;           // of ids
};

// What the rows' scaled logits are made of.
struct LogitArgs {
  int64_t rows, vocabulary;
  const float* hidden;  // [rows, K]
  int64_t hidden_stride;
  const Packed* head;   // [vocabulary, K], one segment
  const float* logits;  // [rows, vocabulary]: taken instead of hidden and head if head is null
  int64_t logits_stride;
  const double* temperature;        // [rows]; 0 is greedy, whose log-prob stands at temperature 1
  const int64_t* suppressed_start;  // [rows + 1] into suppressed, or null: tokens that a row may not sample
  const int64_t* suppressed;
  const KeptSet* replay;  // [rows] or null
};

struct HeadArgs {
  LogitArgs of;
  const int64_t* top_k;  // [rows]; 0 or less is off
  const double* top_p;   // [rows]; 1 or more is off
  const double* min_p;   // [rows]; 0 is off; relative to the most likely token

  const int64_t* target;  // [rows]: score these tokens; or null: draw
  const double* uniform;  // [rows] in [0, 1), to draw with
  int64_t* token;         // [rows], drawn

  float* logprob;  // [rows]; NaN if a logit that counts is NaN or +inf
  float* entropy;  // [rows] in nats, or null
  float* mass;     // [rows] or null: share of the whole distribution that the filters keep; 1 without filters. Not for replay
  float* peak;     // [rows] or null: M and total, which the backward takes
  float* total;

  float* logits;  // [rows, logits_stride] or null: the scaled logits, -inf outside the kept set, for the backward
  int64_t logits_stride;  // at least the vocabulary, in whole lanes

  uint8_t* kept_bits;  // [rows, kept_stride] or null: the kept set as one bit per token
  int64_t kept_stride;
  int64_t* kept_count;  // [rows], with kept_bits

  const int64_t* top_count;  // [rows] or null: how many of the most probable tokens to list, at most top_width
  int64_t top_width;
  int64_t* top_ids;  // [rows, top_width], highest first, equal ones by lower id; -1 where fewer can be sampled
  float* top_logprobs;

  float* workspace;  // [head_workspace(rows, vocabulary)]
};

struct HeadBackwardArgs {
  LogitArgs of;           // replay: the kept sets of the forward
  const int64_t* target;  // [rows]
  const float* peak;      // [rows], from the forward
  const float* total;
  const float* grad;   // [rows], of the log-probs
  float* grad_logits;  // [rows, vocabulary], before the temperature: written
  int64_t grad_stride;
  bool in_place;  // grad_logits holds the scaled logits that the forward wrote, else they are computed again: the same bits
};

struct HeadLayout {
  int64_t blocks, stats_stride, table_stride;
};
static ZG_SHARED HeadLayout head_layout(int64_t vocabulary) {
  const int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
  // 16 floats more than whole pages: the rows of a tile must not fall on the same cache lines.
  return {blocks, (blocks + 15) / 16 * 16, blocks * BLOCK + 16};
}
static ZG_SHARED int64_t head_workspace(int64_t rows, int64_t vocabulary) {
  const HeadLayout layout = head_layout(vocabulary);
  return (rows < ROWS_AT_ONCE ? rows : ROWS_AT_ONCE) * (layout.table_stride + 3 * layout.stats_stride + 1);
}

struct HeadKernels {
  void (*head)(Team&, Work&, const HeadArgs&);  // has barriers inside
  void (*backward)(Team&, Work&, const HeadBackwardArgs&);
};
ZG_TABLES(HeadKernels, head_kernels)

}  // namespace zg

// Scaled logits of a tile of rows over one block of the vocabulary.
#pragma once

#include "lanes_math.h"
#include "lm_head.h"
#include "tile.h"

namespace zg {
namespace ZG_PATH {
namespace {

constexpr float INFINITE = __builtin_inff();

template <int MR, int NP, class Load>
void head_tile(const LogitArgs& args, int64_t row, int64_t panel, float* to, int64_t stride) {
  const typename Load::Element* panels[NP];
  for (int p = 0; p < NP; ++p)
    panels[p] = static_cast<const typename Load::Element*>(args.head->data) + (panel + p) * args.head->in_features * PANEL;
  F16 acc[MR][NP];
  clear(acc);
  multiply<MR, NP, Load>(acc, args.hidden + row * args.hidden_stride, args.hidden_stride, 1, panels, PANEL, args.head->in_features);
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < NP; ++p) store(to + m * stride + p * PANEL, acc[m][p]);
}

template <int MR, class Load>
void head_strip(const LogitArgs& args, int64_t row, int64_t panel, int64_t end, float* to, int64_t stride) {
  constexpr int NP = panels_for(MR);
  for (; panel + NP <= end; panel += NP, to += NP * PANEL) head_tile<MR, NP, Load>(args, row, panel, to, stride);
  for (; panel < end; ++panel, to += PANEL) head_tile<MR, 1, Load>(args, row, panel, to, stride);
}

template <class Load>
void head_product(const LogitArgs& args, int64_t row, int64_t rows, int64_t panel, int64_t end, float* to, int64_t stride) {
  constexpr int64_t PANELS = 16;  // that stay in the second-level cache while the rows pass
  for (; panel < end; panel += PANELS, to += PANELS * PANEL) {
    const int64_t stop = panel + PANELS < end ? panel + PANELS : end;
    int64_t done = 0;
    for (; done + MOST_ROWS <= rows; done += MOST_ROWS) head_strip<MOST_ROWS, Load>(args, row + done, panel, stop, to + done * stride, stride);
    switch (rows - done) {
#define ZG_ROWS(n) \
  case n:          \
    if constexpr (n < MOST_ROWS) head_strip<n, Load>(args, row + done, panel, stop, to + done * stride, stride); \
    break;
      ZG_ROWS(1) ZG_ROWS(2) ZG_ROWS(3) ZG_ROWS(4) ZG_ROWS(5) ZG_ROWS(6) ZG_ROWS(7)
#undef ZG_ROWS
    }
  }
}

// 16 bits of a kept set from token `id` on, a multiple of 16, as a mask word: the file's highest bit is the first token.
ZG_INLINE uint32_t swap_bits(uint32_t word) {
  word = ((word >> 1) & 0x5555u) | ((word & 0x5555u) << 1);
  word = ((word >> 2) & 0x3333u) | ((word & 0x3333u) << 2);
  return ((word >> 4) & 0x0f0fu) | ((word & 0x0f0fu) << 4);
}
ZG_INLINE uint32_t kept_word(const uint8_t* bits, int64_t id, int64_t vocabulary) {
  uint32_t word = bits[id / 8];
  if (id + 8 < vocabulary) word |= static_cast<uint32_t>(bits[id / 8 + 1]) << 8;
  return swap_bits(word);
}

// Sets the logits [first, first + count) of one row to -inf outside the kept set; `count` is a multiple of 16.
ZG_INLINE void keep_only(const KeptSet& kept, float* l, int64_t first, int64_t count, int64_t vocabulary) {
  if (kept.form == KeptSet::Form::bits) {
    const uint8_t* bits = static_cast<const uint8_t*>(kept.data);
    for (int64_t k = 0; k < count && first + k < vocabulary; k += LANES)
      store(l + k, select(mask_of(kept_word(bits, first + k, vocabulary)), load(l + k), set(-INFINITE)));
  } else if (kept.form == KeptSet::Form::ids) {
    const int32_t* ids = static_cast<const int32_t*>(kept.data);
    int64_t low = 0, high = kept.count;  // the first id of the range
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ids[middle] < first)
        low = middle + 1;
      else
        high = middle;
    }
    int64_t next = first;
    for (; low < kept.count && ids[low] < first + count; ++low) {
      for (; next < ids[low]; ++next) l[next - first] = -INFINITE;
      next = ids[low] + 1;
    }
    for (; next < first + count; ++next) l[next - first] = -INFINITE;
  }
}

// Columns of block `block`, rounded up to whole lanes.
ZG_INLINE int64_t block_width(int64_t block, int64_t vocabulary) {
  const int64_t left = (vocabulary - block * BLOCK + LANES - 1) / LANES * LANES;
  return left < BLOCK ? left : BLOCK;
}

ZG_INLINE float temperature_of(const LogitArgs& args, int64_t row) {
  return args.temperature[row] == 0.0 ? 1.0f : static_cast<float>(args.temperature[row]);
}

// Writes the scaled logits of `rows` rows over one block: divided by the temperature; -inf for suppressed tokens, outside a
// replayed kept set and beyond the vocabulary.
ZG_INLINE void block_logits(const LogitArgs& args, int64_t row, int64_t rows, int64_t block, float* to, int64_t stride) {
  const int64_t first = block * BLOCK, width = block_width(block, args.vocabulary);
  const int64_t held = args.vocabulary - first < width ? args.vocabulary - first : width;
  if (args.head == nullptr) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * stride, args.logits + (row + r) * args.logits_stride + first, held * sizeof(float));
  } else if (args.head->kind == Kind::f32) {
    head_product<LoadF32>(args, row, rows, first / PANEL, (first + width) / PANEL, to, stride);
  } else {
    head_product<LoadBF16>(args, row, rows, first / PANEL, (first + width) / PANEL, to, stride);
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* l = to + r * stride;
    for (int64_t k = held; k < width; ++k) l[k] = -INFINITE;
    const float temperature = temperature_of(args, row + r);
    if (temperature != 1.0f)  // x / 1 is x
      for (int64_t k = 0; k < width; k += LANES) store(l + k, load(l + k) / set(temperature));
    if (args.suppressed_start != nullptr)
      for (int64_t i = args.suppressed_start[row + r]; i < args.suppressed_start[row + r + 1]; ++i) {
        const int64_t k = args.suppressed[i] - first;
        if (k >= 0 && k < held) l[k] = -INFINITE;
      }
    if (args.replay != nullptr) keep_only(args.replay[row + r], l, first, width, args.vocabulary);
  }
}

}  // namespace
}  // namespace ZG_PATH
}  // namespace zg

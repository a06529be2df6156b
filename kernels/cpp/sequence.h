// How attention reads the keys and values of one sequence: panels of 16 keys, runs of values.
#pragma once

#include "attention.h"
#include "cache.h"
#include "products.h"

namespace zg {
namespace ZG_PATH {

// Of one key/value head; pages as in Cache. Packed keys are laid out as one long page.
struct Sequence {
  const float* keys;  // of this head in page 0
  const float* values;
  const int32_t* table;
  int64_t page_size, key_page, value_page, head_dim, width;
};

// 16 keys from position `first`, a multiple of 16, as [D][16]: in place, or gathered into `scratch` where a panel is
// cut by pages. Lanes from position `end` on hold anything.
ZG_INLINE const float* key_panel(const Sequence& x, int64_t first, int64_t end, float* scratch) {
  if (x.page_size % KEY_PANEL == 0) return x.keys + x.table[first / x.page_size] * x.key_page + first % x.page_size * x.head_dim;
  for (int64_t lane = 0; lane < KEY_PANEL; ++lane) {
    const int64_t key = first + lane;
    if (key >= end) {
      for (int64_t d = 0; d < x.head_dim; ++d) scratch[d * KEY_PANEL + lane] = 0.0f;
      continue;
    }
    const KeyPlace place = key_place(x.page_size, 1, x.head_dim, key % x.page_size, 0);
    const float* from = x.keys + x.table[key / x.page_size] * x.key_page + place.offset;
    for (int64_t d = 0; d < x.head_dim; ++d) scratch[d * KEY_PANEL + lane] = from[d * place.step];
  }
  return scratch;
}

// The values of positions [first, end), at most KEY_BLOCK of them, in ascending order.
ZG_INLINE int value_runs(const Sequence& x, int64_t first, int64_t end, Run* runs) {
  int count = 0;
  while (first < end) {
    const int64_t place = first % x.page_size;
    const int64_t left = x.page_size - place, length = left < end - first ? left : end - first;
    runs[count++] = {x.values + x.table[first / x.page_size] * x.value_page + place * x.width, length};
    first += length;
  }
  return count;
}

// Up to 16 lanes of which `left` exist, the rest 0.
ZG_INLINE F16 load_lanes(const float* x, int64_t left) { return left >= LANES ? load(x) : load_some(x, static_cast<int>(left)); }

// Up to 16 rows of `dim` elements to a panel [dim][16]; lanes without a row are 0.
static inline void transpose_rows(const float* const* rows, int64_t count, int64_t dim, float* panel) {
  for (int64_t d = 0; d < dim; d += LANES) {
    float square[LANES][LANES];
    for (int64_t n = 0; n < LANES; ++n) store(square[n], n < count ? load_lanes(rows[n] + d, dim - d) : set(0.0f));
    const int64_t used = dim - d < LANES ? dim - d : LANES;
    for (int64_t i = 0; i < used; ++i) {
      float column[LANES];
#pragma GCC unroll 16
      for (int n = 0; n < LANES; ++n) column[n] = square[n][i];
      store(panel + (d + i) * LANES, load(column));
    }
  }
}

// Slot of a position.
ZG_INLINE int64_t slot_of(const int32_t* table, int64_t page_size, int64_t position) {
  return table[position / page_size] * page_size + position % page_size;
}

// Greatest of the lanes, order free: +0 where it is -0, and where lanes are NaN anything that a lane holds.
ZG_INLINE float greatest(F16 x) {
  Vf t = x.part[0];
  for (int i = 1; i < PARTS; ++i) t = t > x.part[i] ? t : x.part[i];
#pragma GCC unroll 4
  for (int apart = WIDTH / 2; apart >= 1; apart /= 2) {
    Vi lane;
    for (int j = 0; j < WIDTH; ++j) lane[j] = j ^ apart;
    const Vf other = __builtin_shuffle(t, lane);
    t = t > other ? t : other;
  }
  return t[0] + 0.0f;
}

}  // namespace ZG_PATH
}  // namespace zg

// Small matrix products of attention, over the register tile of tile.h: every element is one FMA chain in ascending depth.
#pragma once

#include "tile.h"

namespace zg {
namespace ZG_PATH {

#if defined(__AVX512F__)
constexpr int product_panels(int) { return 4; }
constexpr int PRODUCT_ROWS = 6;
#elif defined(__AVX2__)
constexpr int product_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int PRODUCT_ROWS = 6;
#else
constexpr int product_panels(int) { return 1; }
constexpr int PRODUCT_ROWS = 4;
#endif

constexpr int FETCH_ROWS = 5;   // with more rows arithmetic is the bound
constexpr int FETCH_STEPS = 4;  // steps of depth between fetches

// Rows of b that lie one after the other.
struct Run {
  const float* from;
  int64_t length;
};

// Memory that the next product reads, fetched meanwhile where few rows make memory the bound; lengths in floats.
struct Ahead {
  const Run* run;
  int left;
  int64_t place;
};
// Four lines of 64 bytes, as many as a tile reads per step.
ZG_INLINE void fetch_lines(Ahead& x) {
  if (x.left == 0) return;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) __builtin_prefetch(x.run->from + x.place + i * LANES, 0, 2);
  x.place += 4 * LANES;
  if (x.place < x.run->length) return;
  ++x.run, --x.left, x.place = 0;
}

// c = a b, or c * factor + a b with c and factor read first. b is given in panels of 16 columns ([depth][16] each), or as
// runs of rows `b_step` apart, whose columns come in steps of 16.
struct Product {
  const float* a;
  int64_t a_row, a_step;
  const float* const* panels;
  const Run* runs;  // with panels: one run, whose `from` is not read
  int run_count;
  int64_t b_step;
  float* c;
  int64_t c_row;
  bool add;
  const float* factor;     // per row, or null
  Ahead* ahead = nullptr;  // or null
};

template <int MR, int NP>
static void product_tile(const Product& x, int64_t row, int64_t panel) {
  F16 acc[MR][NP];
  float* c = x.c + row * x.c_row + panel * LANES;
  if (!x.add) {
    clear(acc);
  } else {
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
      for (int p = 0; p < NP; ++p) acc[m][p] = load(c + m * x.c_row + p * LANES);
    if (x.factor != nullptr) {
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
        const F16 factor = set(x.factor[row + m]);
#pragma GCC unroll 16
        for (int p = 0; p < NP; ++p) acc[m][p] = acc[m][p] * factor;
      }
    }
  }
  const float* a = x.a + row * x.a_row;
  for (int run = 0; run < x.run_count; ++run) {
    const float* b[NP];
    for (int p = 0; p < NP; ++p) b[p] = x.panels != nullptr ? x.panels[panel + p] : x.runs[run].from + (panel + p) * LANES;
    if constexpr (MR <= FETCH_ROWS) {
      if (x.ahead != nullptr && x.ahead->left > 0) {
        for (int64_t k = 0; k < x.runs[run].length; k += FETCH_STEPS) {
          for (int i = 0; i < FETCH_STEPS; ++i) fetch_lines(*x.ahead);
          const int64_t steps = x.runs[run].length - k < FETCH_STEPS ? x.runs[run].length - k : FETCH_STEPS;
          multiply<MR, NP, LoadF32>(acc, a + k * x.a_step, x.a_row, x.a_step, b, x.b_step, steps);
          for (int p = 0; p < NP; ++p) b[p] += steps * x.b_step;
        }
        a += x.runs[run].length * x.a_step;
        continue;
      }
    }
    multiply<MR, NP, LoadF32>(acc, a, x.a_row, x.a_step, b, x.b_step, x.runs[run].length);
    a += x.runs[run].length * x.a_step;
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
    for (int p = 0; p < NP; ++p) store(c + m * x.c_row + p * LANES, acc[m][p]);
}

template <int MR>
static void product_rows(const Product& x, int64_t row, int64_t panels) {
  constexpr int NP = product_panels(MR);
  int64_t panel = 0;
  for (; panel + NP <= panels; panel += NP) product_tile<MR, NP>(x, row, panel);
  if constexpr (NP > 2)
    for (; panel + 2 <= panels; panel += 2) product_tile<MR, 2>(x, row, panel);
  if constexpr (NP > 1)
    for (; panel < panels; ++panel) product_tile<MR, 1>(x, row, panel);
}

// All of c: `rows` rows and `panels` panels of 16 columns.
static inline void product(const Product& x, int64_t rows, int64_t panels) {
  int64_t row = 0;
  for (; row + PRODUCT_ROWS <= rows; row += PRODUCT_ROWS) product_rows<PRODUCT_ROWS>(x, row, panels);
  switch (rows - row) {
    case 5:
      if constexpr (PRODUCT_ROWS > 5) product_rows<5>(x, row, panels);
      break;
    case 4:
      if constexpr (PRODUCT_ROWS > 4) product_rows<4>(x, row, panels);
      break;
    case 3:
      product_rows<3>(x, row, panels);
      break;
    case 2:
      product_rows<2>(x, row, panels);
      break;
    case 1:
      product_rows<1>(x, row, panels);
      break;
  }
}

}  // namespace ZG_PATH
}  // namespace zg

// The register tile of every matrix product: MR rows by NP panels of 16 columns, K in ascending order, one FMA each.
//
// Element (m, n) is the chain ((0 + a[m,0] b[0,n]) + a[m,1] b[1,n]) + ..., each step rounded once: its bits depend on row m
// of a and column n of b alone, whatever MR, NP and the path are. All loops over the tile are unrolled, or the
// accumulators would live in memory.
#pragma once

#include "lanes.h"

namespace zg {
namespace ZG_PATH {

struct LoadF32 {
  using Element = float;
  ZG_INLINE F16 at(const float* p) { return load(p); }
};
struct LoadBF16 {
  using Element = uint16_t;
  ZG_INLINE F16 at(const uint16_t* p) { return load_bf16(p); }
};

// acc[m][p] += a[m * a_row + k * a_step] * b[p][k * b_step .. + 16] for k in 0..depth. Where AHEAD, what lies `ahead`
// elements beyond each b is fetched towards the cache on the way.
template <int MR, int NP, class Load, int FETCHED = 0>
ZG_INLINE void multiply(F16 (&acc)[MR][NP], const float* a, int64_t a_row, int64_t a_step,
                        const typename Load::Element* const (&b)[NP], int64_t b_step, int64_t depth,
                        int64_t ahead = 0) {
  for (int64_t k = 0; k < depth; ++k) {
    F16 column[NP];
#pragma GCC unroll 16
    for (int p = 0; p < NP; ++p) column[p] = Load::at(b[p] + k * b_step);
#pragma GCC unroll 16
    for (int p = 0; p < FETCHED; ++p) __builtin_prefetch(b[p] + k * b_step + ahead, 0, 2);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const F16 x = set(a[m * a_row + k * a_step]);
#pragma GCC unroll 16
      for (int p = 0; p < NP; ++p) acc[m][p] = fma(x, column[p], acc[m][p]);
    }
  }
}

// Panels that a tile of so many rows of a packed weight takes at once: as many accumulators as the registers hold.
#if defined(__AVX512F__)
constexpr int panels_for(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 6 : rows <= 6 ? 4 : 3; }
constexpr int MOST_ROWS = 8;
#elif defined(__AVX2__)
constexpr int panels_for(int rows) { return rows == 1 ? 5 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }
constexpr int MOST_ROWS = 6;
#else
constexpr int panels_for(int) { return 1; }
constexpr int MOST_ROWS = 4;
#endif

template <int MR, int NP>
ZG_INLINE void clear(F16 (&acc)[MR][NP]) {
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
    for (int p = 0; p < NP; ++p) acc[m][p] = set(0.0f);
}

}  // namespace ZG_PATH
}  // namespace zg

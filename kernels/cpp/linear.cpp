// y = x W^T + b. See tile.h for the order of one element; segments of K meet neighbours first in a balanced tree.
#include "linear.h"

#include "tile.h"

namespace zg {
namespace ZG_PATH {
namespace {

// Panels that a tile of so many rows takes at once: as many accumulators as the registers hold.
#if defined(__AVX512F__)
constexpr int panels_for(int rows) { return rows <= 2 ? 8 : rows == 3 ? 6 : rows <= 4 ? 6 : rows <= 6 ? 4 : rows <= 8 ? 3 : 2; }
constexpr int MOST_ROWS = 12;
#elif defined(__AVX2__)
constexpr int panels_for(int rows) { return rows == 1 ? 5 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }
constexpr int MOST_ROWS = 6;
#else
constexpr int panels_for(int) { return 1; }
constexpr int MOST_ROWS = 4;
#endif

constexpr int64_t ROW_BLOCK = 96;  // rows of a task: they stay in the second-level cache while panels pass
constexpr int64_t COLUMN_TASKS = 4;  // tasks per member over the columns

// Where AHEAD, the next NP panels are fetched from memory while these are at work.
template <int MR, int NP, class Load, bool AHEAD>
void tile(const LinearArgs& args, int64_t row, int64_t panel) {
  const Packed& weight = *args.weight;
  const int64_t width = weight.in_features / weight.segments;
  const typename Load::Element* panels[NP];
  for (int p = 0; p < NP; ++p)
    panels[p] = static_cast<const typename Load::Element*>(weight.data) + (panel + p) * weight.in_features * PANEL;
  const float* x = args.x + row * args.x_stride;
  F16 acc[MR][NP];
  if (weight.segments == 1) {
    clear(acc);
    multiply<MR, NP, Load, AHEAD>(acc, x, args.x_stride, 1, panels, PANEL, width, NP * weight.in_features * PANEL);
  } else {
    F16 held[3][MR][NP];  // sums of 1, 2 and 4 segments that wait for their neighbour
    for (int segment = 0; segment < weight.segments; ++segment) {
      clear(acc);
      multiply<MR, NP, Load, AHEAD>(acc, x, args.x_stride, 1, panels, PANEL, width, NP * weight.in_features * PANEL);
      x += width;
      for (int p = 0; p < NP; ++p) panels[p] += width * PANEL;
      int level = 0;
      for (int s = segment; s & 1; s >>= 1, ++level)
        for (int m = 0; m < MR; ++m)
          for (int p = 0; p < NP; ++p) acc[m][p] = held[level][m][p] + acc[m][p];
      if (segment + 1 < weight.segments)
        for (int m = 0; m < MR; ++m)
          for (int p = 0; p < NP; ++p) held[level][m][p] = acc[m][p];
    }
  }
  for (int p = 0; p < NP; ++p) {
    const int64_t column = (panel + p) * PANEL;
    const int count = static_cast<int>(args.weight->out_features - column < PANEL ? args.weight->out_features - column : PANEL);
    const F16 bias = args.bias == nullptr ? set(0.0f) : count == PANEL ? load(args.bias + column) : load_some(args.bias + column, count);
    for (int m = 0; m < MR; ++m) {
      F16 y = acc[m][p];
      if (args.bias != nullptr) y = y + bias;
      float* to = args.y + (row + m) * args.y_stride + column;
      if (count == PANEL)
        store(to, y);
      else
        store_some(to, y, count);
    }
  }
}

template <int NP, class Load, bool AHEAD>
void tile_of(int rows, const LinearArgs& args, int64_t row, int64_t panel) {
  switch (rows) {
#define ZG_ROWS(n)                                                                              \
  case n:                                                                                       \
    if constexpr (n <= MOST_ROWS && NP <= panels_for(n)) tile<n, NP, Load, AHEAD>(args, row, panel); \
    break;
    ZG_ROWS(1) ZG_ROWS(2) ZG_ROWS(3) ZG_ROWS(4) ZG_ROWS(5) ZG_ROWS(6)
    ZG_ROWS(7) ZG_ROWS(8) ZG_ROWS(9) ZG_ROWS(10) ZG_ROWS(11) ZG_ROWS(12)
#undef ZG_ROWS
  }
}

// Rows [first, last) against panels [begin, end): a few panels at a time meet all rows while they are in cache.
template <int NP, class Load>
void block(const LinearArgs& args, int64_t first, int64_t last, int64_t begin, int64_t end) {
  const int64_t tiles = (last - first + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t panel = begin; panel < end;) {
    const bool whole = panel + NP <= end;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = first + (last - first) * t / tiles;
      const int rows = static_cast<int>(first + (last - first) * (t + 1) / tiles - row);
      if (!whole)
        tile_of<1, Load, false>(rows, args, row, panel);
      else if (t == 0 && panel + 2 * NP <= end)
        tile_of<NP, Load, true>(rows, args, row, panel);
      else
        tile_of<NP, Load, false>(rows, args, row, panel);
    }
    panel += whole ? NP : 1;
  }
}

template <class Load>
void linear_of(Team& team, Work& work, const LinearArgs& args) {
  const int64_t panels = args.weight->panels();
  const int64_t row_tasks = (args.rows + ROW_BLOCK - 1) / ROW_BLOCK;
  constexpr int64_t UNIT = 8;
  const int64_t wanted = (panels + COLUMN_TASKS * team.count - 1) / (COLUMN_TASKS * team.count);
  const int64_t columns = (wanted + UNIT - 1) / UNIT * UNIT;
  const int64_t column_tasks = (panels + columns - 1) / columns;
  for (int64_t task = work.next(); task < row_tasks * column_tasks; task = work.next()) {
    const int64_t at = task / column_tasks, first = args.rows * at / row_tasks, last = args.rows * (at + 1) / row_tasks;
    const int64_t begin = task % column_tasks * columns, end = begin + columns < panels ? begin + columns : panels;
    const int64_t rows = last - first, tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    switch (panels_for(static_cast<int>((rows + tiles - 1) / tiles))) {
      case 8:
        block<8, Load>(args, first, last, begin, end);
        break;
      case 6:
        block<6, Load>(args, first, last, begin, end);
        break;
      case 5:
        block<5, Load>(args, first, last, begin, end);
        break;
      case 4:
        block<4, Load>(args, first, last, begin, end);
        break;
      case 3:
        block<3, Load>(args, first, last, begin, end);
        break;
      case 2:
        block<2, Load>(args, first, last, begin, end);
        break;
      default:
        block<1, Load>(args, first, last, begin, end);
    }
  }
}

void linear(Team& team, Work& work, const LinearArgs& args) {
  if (args.rows == 0) return;
  if (args.weight->kind == Kind::f32)
    linear_of<LoadF32>(team, work, args);
  else
    linear_of<LoadBF16>(team, work, args);
}

template <class Element>
void pack_panel(const PackArgs& args, int64_t panel) {
  const Packed& packed = *args.packed;
  const int64_t depth = packed.in_features, first = panel * PANEL;
  const int64_t count = packed.out_features - first < PANEL ? packed.out_features - first : PANEL;
  const Element* from = static_cast<const Element*>(args.weight) + first * args.stride;
  Element* to = static_cast<Element*>(packed.data) + panel * depth * PANEL;
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t n = 0; n < PANEL; ++n) to[k * PANEL + n] = n < count ? from[n * args.stride + k] : Element{0};
}

void pack(Team&, Work& work, const PackArgs& args) {
  for (int64_t panel = work.next(); panel < args.packed->panels(); panel = work.next()) {
    if (args.packed->kind == Kind::f32)
      pack_panel<uint32_t>(args, panel);
    else
      pack_panel<uint16_t>(args, panel);
  }
}

}  // namespace

extern const LinearKernels linear_kernels{linear, pack};

}  // namespace ZG_PATH
}  // namespace zg

// y = x W^T + b. See tile.h for the order of one element; segments of K meet neighbours first in a balanced tree.
#include "linear.h"

#include "tile.h"

namespace zg {
namespace ZG_PATH {
namespace {

constexpr int64_t ROW_BLOCK = 96;           // most rows of a task: they stay in the second-level cache while panels pass
constexpr int64_t BLOCK_FLOATS = 1 << 17;  // of these rows
constexpr int64_t COLUMN_TASKS = 4, STREAMS = 2;  // tasks per member over the columns
// With so few rows that memory is the bound, so many bytes of a group's panels are fetched ahead, taken together: just
// before the processor's own prefetching, which further fetches would disturb.
constexpr int64_t BYTES_AHEAD = 96 * 64, FEW_ROWS = 2;  // the latter for each byte of an element

// As much memory as the first FETCH of these panels take (all, if ALL), `ahead` elements beyond them, is fetched meanwhile.
constexpr int ALL = -1;
template <int MR, int NP, class Load, int FETCH>
void tile(const LinearArgs& args, int64_t row, int64_t panel, int64_t ahead) {
  constexpr int FETCHED = FETCH == ALL || FETCH > NP ? NP : FETCH;
  const Packed& weight = *args.weight;
  const int64_t width = weight.in_features / weight.segments;
  const typename Load::Element* panels[NP];
  for (int p = 0; p < NP; ++p)
    panels[p] = static_cast<const typename Load::Element*>(weight.data) + (panel + p) * weight.in_features * PANEL;
  const float* x = args.x + row * args.x_stride;
  F16 acc[MR][NP];
  if (weight.segments == 1) {
    clear(acc);
    multiply<MR, NP, Load, FETCHED>(acc, x, args.x_stride, 1, panels, PANEL, width, ahead);
  } else {
    F16 held[3][MR][NP];  // sums of 1, 2 and 4 segments that wait for their neighbour
    for (int segment = 0; segment < weight.segments; ++segment) {
      clear(acc);
      multiply<MR, NP, Load, FETCHED>(acc, x, args.x_stride, 1, panels, PANEL, width, ahead);
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

// The tile of a size known only now.
template <int MR, class Load, int FETCH>
void tile_of_panels(int panels, const LinearArgs& args, int64_t row, int64_t panel, int64_t ahead) {
  switch (panels) {
#define ZG_PANELS(n)                                                                   \
  case n:                                                                              \
    if constexpr (n <= panels_for(MR)) tile<MR, n, Load, FETCH>(args, row, panel, ahead); \
    break;
    ZG_PANELS(1) ZG_PANELS(2) ZG_PANELS(3) ZG_PANELS(4) ZG_PANELS(5) ZG_PANELS(6) ZG_PANELS(7) ZG_PANELS(8)
#undef ZG_PANELS
  }
}
template <class Load, int FETCH>
void tile_of(int rows, int panels, const LinearArgs& args, int64_t row, int64_t panel, int64_t ahead) {
  switch (rows) {
#define ZG_ROWS(n)                                                                                     \
  case n:                                                                                              \
    if constexpr (n <= MOST_ROWS) tile_of_panels<n, Load, FETCH>(panels, args, row, panel, ahead); \
    break;
    ZG_ROWS(1) ZG_ROWS(2) ZG_ROWS(3) ZG_ROWS(4) ZG_ROWS(5) ZG_ROWS(6) ZG_ROWS(7) ZG_ROWS(8)
#undef ZG_ROWS
  }
}

// Rows [first, last) against panels [begin, end): a few panels at a time meet all rows while they are in cache, and the
// next few are fetched meanwhile, spread over the tiles, since memory gives no more in the time of one; the last time it
// is what comes `after` this task. Groups of panels are of nearly equal size: a single one at the end would starve.
template <class Load>
void block(const LinearArgs& args, int64_t first, int64_t last, int64_t begin, int64_t end, const typename Load::Element* after) {
  using Element = typename Load::Element;
  const int64_t panel_size = args.weight->in_features * PANEL;
  const int64_t tiles = (last - first + MOST_ROWS - 1) / MOST_ROWS;
  const int most = panels_for(static_cast<int>((last - first + tiles - 1) / tiles));
  const int64_t groups = (end - begin + most - 1) / most;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t panel = begin + (end - begin) * g / groups, next = begin + (end - begin) * (g + 1) / groups;
    const int panels = static_cast<int>(next - panel);
    int64_t ahead = panels * panel_size;
    if (g + 1 == groups) {
      const uintptr_t here = reinterpret_cast<uintptr_t>(static_cast<const Element*>(args.weight->data) + panel * panel_size);
      ahead = after == nullptr ? 0 : static_cast<int64_t>(reinterpret_cast<uintptr_t>(after) - here) / static_cast<int64_t>(sizeof(Element));
    }
    if (last - first <= FEW_ROWS * static_cast<int64_t>(sizeof(Element))) ahead = BYTES_AHEAD / panels / static_cast<int64_t>(sizeof(Element));
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = first + (last - first) * t / tiles;
      const int rows = static_cast<int>(first + (last - first) * (t + 1) / tiles - row);
      const int from = static_cast<int>(panels * t / tiles), fetched = static_cast<int>(panels * (t + 1) / tiles) - from;
      const int64_t beyond = ahead + from * panel_size;
      if (ahead == 0 || fetched == 0)
        tile_of<Load, 0>(rows, panels, args, row, panel, 0);
      else if (fetched == 1)
        tile_of<Load, 1>(rows, panels, args, row, panel, beyond);
      else if (fetched == 2)
        tile_of<Load, 2>(rows, panels, args, row, panel, beyond);
      else
        tile_of<Load, ALL>(rows, panels, args, row, panel, beyond);
    }
  }
}

// How a call is cut into tasks: blocks of rows against runs of panels.
struct Cut {
  int64_t panels, row_tasks, column_tasks;

  Cut(const Packed& weight, int64_t rows, int members) : panels(weight.panels()) {
    const int64_t fitting = BLOCK_FLOATS / (weight.in_features + 1) / MOST_ROWS * MOST_ROWS;
    const int64_t at_once = fitting < MOST_ROWS ? MOST_ROWS : fitting < ROW_BLOCK ? fitting : ROW_BLOCK;
    row_tasks = (rows + at_once - 1) / at_once;
    // With few rows the weight is streamed from memory: long runs. With many, shorter tasks even out the members' ends.
    const int64_t wanted = members * (row_tasks == 1 ? STREAMS : COLUMN_TASKS);
    column_tasks = wanted < panels ? wanted : panels;
  }
  int64_t tasks() const { return row_tasks * column_tasks; }
  int64_t begin(int64_t task) const { return panels * (task % column_tasks) / column_tasks; }
  int64_t end(int64_t task) const { return panels * (task % column_tasks + 1) / column_tasks; }
};

template <class Load>
void linear_of(Team& team, Work& work, const LinearArgs& args) {
  using Element = typename Load::Element;
  const Cut cut(*args.weight, args.rows, team.count);
  for (int64_t task = work.next(); task < cut.tasks(); task = work.next()) {
    const int64_t r = task / cut.column_tasks, upcoming = work.upcoming();
    const Element* after = nullptr;
    if (upcoming < cut.tasks()) {
      after = static_cast<const Element*>(args.weight->data) + cut.begin(upcoming) * args.weight->in_features * PANEL;
    } else if (args.next != nullptr) {
      const Cut then(*args.next, args.rows, team.count);
      const int64_t first = upcoming - cut.tasks() < then.tasks() ? upcoming - cut.tasks() : 0;
      after = static_cast<const Element*>(args.next->data) + then.begin(first) * args.next->in_features * PANEL;
    }
    block<Load>(args, args.rows * r / cut.row_tasks, args.rows * (r + 1) / cut.row_tasks, cut.begin(task), cut.end(task), after);
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
  const Element* from = static_cast<const Element*>(args.weight) + first * args.row;
  Element* to = static_cast<Element*>(packed.data) + panel * depth * PANEL;
  if (args.row == 1 && count == PANEL) {  // a transposed matrix: its columns lie side by side
    for (int64_t k = 0; k < depth; ++k) std::memcpy(to + k * PANEL, from + k * args.column, PANEL * sizeof(Element));
    return;
  }
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t n = 0; n < PANEL; ++n) to[k * PANEL + n] = n < count ? from[n * args.row + k * args.column] : Element{0};
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

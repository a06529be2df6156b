#include <sys/mman.h>

#include <new>

#include "matches.h"

namespace zg {

Packed::Packed(int64_t out_features, int64_t in_features, Kind kind, int segments)
    : out_features(out_features), in_features(in_features), kind(kind), segments(segments) {
  // Huge pages spare address lookups when a weight is streamed.
  constexpr size_t HUGE_PAGE = size_t{1} << 21;
  const size_t unit = bytes() >= HUGE_PAGE ? HUGE_PAGE : 4096;
  data = std::aligned_alloc(unit, (bytes() + unit) / unit * unit);
  if (data == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (unit == HUGE_PAGE) madvise(data, bytes(), MADV_HUGEPAGE);
#endif
}

Packed::~Packed() { std::free(data); }
namespace {

template <class Element>
bool same_panel(const PackArgs& args, int64_t panel) {
  const Packed& packed = *args.packed;
  const int64_t depth = packed.in_features, first = panel * PANEL;
  const int64_t count = packed.out_features - first < PANEL ? packed.out_features - first : PANEL;
  const Element* weight = static_cast<const Element*>(args.weight) + first * args.row;
  const Element* held = static_cast<const Element*>(packed.data) + panel * depth * PANEL;
  Element differs = 0;
  for (int64_t k = 0; k < depth; ++k, held += PANEL)
    for (int64_t n = 0; n < PANEL; ++n)
      differs = static_cast<Element>(differs | (held[n] ^ (n < count ? weight[n * args.row + k * args.column] : Element{0})));
  return differs == 0;
}

}  // namespace

void compare_packed(Team&, Work& work, const PackArgs& args, std::atomic<bool>& same) {
  for (int64_t panel = work.next(); panel < args.packed->panels() && same.load(std::memory_order_relaxed); panel = work.next()) {
    const bool held = args.packed->kind == Kind::f32 ? same_panel<uint32_t>(args, panel) : same_panel<uint16_t>(args, panel);
    if (!held) same.store(false, std::memory_order_relaxed);
  }
}

}  // namespace zg

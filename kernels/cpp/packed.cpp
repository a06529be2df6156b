#include <sys/mman.h>

#include <new>

#include "linear.h"

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

}  // namespace zg

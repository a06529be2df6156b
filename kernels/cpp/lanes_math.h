// exp and log over 16 lanes, from single IEEE operations and explicit FMAs: the same bits on every path.
#pragma once

#include "lanes.h"

namespace zg {
namespace ZG_PATH {

// e^x. Error below 1 unit in the last place within +-87; +0 below -87 (-inf too), e^87 above; NaN stays NaN.
ZG_INLINE F16 exp(F16 x) {
  const F16 limit = set(87.0f);
  const I16 tiny = x < set(-87.0f);
  F16 r = select(limit < x, limit, x);  // a NaN is neither and passes
  r = select(tiny, set(0.0f), r);
  // Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low bits.
  const F16 magic = set(12582912.0f);
  const F16 shifted = fma(r, set(1.44269504088896341f), magic);
  const F16 n = shifted - magic;
  r = fma(n, set(-0.693359375f), r);
  r = fma(n, set(2.12194440e-4f), r);
  F16 p = set(1.0f / 5040.0f);
  p = fma(p, r, set(1.0f / 720.0f));
  p = fma(p, r, set(1.0f / 120.0f));
  p = fma(p, r, set(1.0f / 24.0f));
  p = fma(p, r, set(1.0f / 6.0f));
  p = fma(p, r, set(0.5f));
  p = fma(p, r, set(1.0f));
  p = fma(p, r, set(1.0f));
  const I16 power = bits(shifted) - bits(magic);
  const F16 scaled = floats(bits(p) + (power << 23));
  // The integer trick would turn a NaN's bits into something else.
  const F16 value = select(x == x, scaled, x);
  return select(tiny, set(0.0f), value);
}

// Natural logarithm of x >= 0: -inf at 0, inf at inf, NaN stays NaN. Subnormal numbers count as they are.
ZG_INLINE F16 log(F16 x) {
  const I16 small = x < set(1.17549435e-38f);
  const F16 normal = select(small, x * set(8388608.0f), x);
  const I16 word = bits(normal);
  // Mantissa in [sqrt(1/2), sqrt(2)).
  const I16 offset = word - seti(0x3f3504f3);
  const I16 power = (offset >> 23) - select(small, seti(23), seti(0));
  const F16 m = floats((offset & seti(0x007fffff)) + seti(0x3f3504f3));
  const F16 s = (m - set(1.0f)) / (m + set(1.0f));
  const F16 square = s * s;
  F16 q = set(2.0f / 11.0f);
  q = fma(q, square, set(2.0f / 9.0f));
  q = fma(q, square, set(2.0f / 7.0f));
  q = fma(q, square, set(2.0f / 5.0f));
  q = fma(q, square, set(2.0f / 3.0f));
  const F16 e = to_float(power);
  // log m = 2s + s * (s^2 * q): the large parts are added last.
  F16 value = fma(s * square, q, e * set(-2.12194440e-4f));
  value = fma(set(2.0f), s, value);
  value = fma(e, set(0.693359375f), value);
  value = select(x == set(__builtin_inff()), x, value);
  value = select(x == set(0.0f), set(-__builtin_inff()), value);
  return select(x == x, value, x);
}

ZG_INLINE F16 sigmoid(F16 x) { return set(1.0f) / (set(1.0f) + exp(set(0.0f) - x)); }

}  // namespace ZG_PATH
}  // namespace zg

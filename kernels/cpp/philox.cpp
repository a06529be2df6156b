#include "philox.h"

namespace zg {

double philox_uniform(uint64_t seed, uint64_t step, uint64_t prompt, uint64_t sample, uint64_t position) {
  uint64_t key0 = seed, key1 = step, c0 = 1, c1 = position, c2 = sample, c3 = prompt;
  for (int round = 0; round < 10; ++round) {
    const unsigned __int128 a = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * c0, b = static_cast<unsigned __int128>(0xCA5A826395121157u) * c2;
    const uint64_t was1 = c1, was3 = c3;
    c0 = static_cast<uint64_t>(b >> 64) ^ was1 ^ key0;
    c1 = static_cast<uint64_t>(b);
    c2 = static_cast<uint64_t>(a >> 64) ^ was3 ^ key1;
    c3 = static_cast<uint64_t>(a);
    key0 += 0x9E3779B97F4A7C15u;
    key1 += 0xBB67AE8584CAA73Bu;
  }
  return static_cast<double>(c0 >> 11) * 0x1p-53;
}

}  // namespace zg

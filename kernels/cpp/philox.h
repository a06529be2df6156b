// Philox 4x64 with 10 rounds (Salmon et al. 2011): the words of numpy.random.Philox.
#pragma once

#include <cstdint>

namespace zg {

// The number in [0, 1) of a key (step, prompt, sample, position); depends on nothing else.
double philox_uniform(uint64_t seed, uint64_t step, uint64_t prompt, uint64_t sample, uint64_t position);

}  // namespace zg

// Whether a packed weight still holds the values of the weight it was packed from.
#pragma once

#include <atomic>

#include "linear.h"

namespace zg {

// Compare every element's bits, and the zeros beyond N; clears `same` where one differs.
void compare_packed(Team& team, Work& work, const PackArgs& args, std::atomic<bool>& same);

}  // namespace zg

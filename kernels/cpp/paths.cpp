#include "paths.h"

#include <cstdlib>
#include <stdexcept>

namespace zg {
namespace {

bool runs_here(Path path) {
#if defined(ZG_HAVE_X86)
  __builtin_cpu_init();
  switch (path) {
    case Path::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
    case Path::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    default:
      return true;
  }
#else
  return path == Path::generic;
#endif
}

constexpr Path ALL[] = {Path::avx512, Path::avx2, Path::generic};

Path best() {
  for (Path path : ALL)
    if (runs_here(path)) return path;
  return Path::generic;
}

Path& current() {
  static Path chosen = best();
  return chosen;
}

}  // namespace

Path path() { return current(); }

std::string path_name(Path path) {
  switch (path) {
    case Path::avx512:
      return "avx512";
    case Path::avx2:
      return "avx2";
    default:
      return "generic";
  }
}

std::vector<std::string> paths_here() {
  std::vector<std::string> names;
  for (Path path : ALL)
    if (runs_here(path)) names.push_back(path_name(path));
  return names;
}

void choose_path(const std::string& name) {
  for (Path path : ALL) {
    if (path_name(path) != name) continue;
    if (!runs_here(path)) throw std::invalid_argument("CPU path '" + name + "' does not run on this machine");
    current() = path;
    return;
  }
  throw std::invalid_argument("CPU path '" + name + "' is none of avx512, avx2, generic");
}

}  // namespace zg

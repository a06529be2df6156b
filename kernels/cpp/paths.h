// Which instruction set runs: chosen once, when the module loads.
//
// Every family of kernels has one table of function pointers per path. ZEROGAP_CPU_PATH=avx512|avx2|generic forces one.
#pragma once

#include <string>
#include <vector>

// Every function that a header of the families holds, and that is not of a path's own namespace: never a symbol of its own,
// since the linker might keep the copy that was compiled with another path's instructions (tools/check_isolation.py).
#define ZG_SHARED inline __attribute__((always_inline))

namespace zg {

enum class Path { generic, avx2, avx512 };

Path path();                        // in use
void choose_path(const std::string& name);  // throws std::invalid_argument if unknown or not run by this machine
std::string path_name(Path path);
std::vector<std::string> paths_here();  // that were built and this machine runs, best first

// Declares the tables `zg::<path>::name` and a function that returns that of the path in use.
#if defined(ZG_HAVE_X86)
#define ZG_TABLES(Type, name)                            \
  namespace generic { extern const Type name; }          \
  namespace avx2 { extern const Type name; }             \
  namespace avx512 { extern const Type name; }           \
  static ZG_SHARED const Type& name() {                  \
    switch (path()) {                                    \
      case Path::avx512: return avx512::name;            \
      case Path::avx2: return avx2::name;                \
      default: return generic::name;                     \
    }                                                    \
  }
#else
#define ZG_TABLES(Type, name)                            \
  namespace generic { extern const Type name; }          \
  static ZG_SHARED const Type& name() { return generic::name; }
#endif

}  // namespace zg

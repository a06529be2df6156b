// Checks of rows of heads [R, H, D] that come from Python.
#pragma once

#include <cstdint>
#include <string>

#include "arrays.h"
#include "cache.h"

namespace zg {

// Heads of a row lie side by side, elements of a head too; rows may be further apart.
template <class A>
void check_heads(const A& array, const char* name) {
  check_type<float>(array, name);
  if (array.ndim() != 3) refuse(std::string(name) + " " + shape_of(array) + ": must have 3 dimensions [rows, heads, head size]");
  if (array.size() == 0) return;  // strides of nothing mean nothing
  const int64_t heads = static_cast<int64_t>(array.shape(1)), dim = static_cast<int64_t>(array.shape(2));
  if ((dim > 1 && array.stride(2) != 1) || (heads > 1 && dim > 0 && array.stride(1) != dim))
    refuse(std::string(name) + " " + shape_of(array) + ": the heads of a row must be contiguous");
  if (array.shape(0) > 1 && array.stride(0) < heads * dim) refuse(std::string(name) + " " + shape_of(array) + ": rows overlap");
}

template <class A>
void check_shape(const A& array, const char* name, int64_t rows, int64_t heads, int64_t dim) {
  if (static_cast<int64_t>(array.shape(0)) != rows || static_cast<int64_t>(array.shape(1)) != heads || static_cast<int64_t>(array.shape(2)) != dim)
    refuse(std::string(name) + " " + shape_of(array) + ": must be [" + std::to_string(rows) + ", " + std::to_string(heads) + ", " +
           std::to_string(dim) + "]");
}

template <class A>
int64_t row_stride(const A& array) {
  return array.shape(0) > 1 ? array.stride(0) : static_cast<int64_t>(array.shape(1) * array.shape(2));
}

template <class A>
const float* floats_of(const A& array) {
  return static_cast<const float*>(array.data());
}
inline float* writable(const Array& array) { return static_cast<float*>(array.data()); }

inline const int64_t* check_slots(const Cache& cache, const Input& slots, size_t rows) {
  check_whole<int64_t>(slots, "slots", 1);
  if (slots.shape(0) != rows) refuse("slots " + shape_of(slots) + ": must be [" + std::to_string(rows) + "]");
  const int64_t* numbers = static_cast<const int64_t*>(slots.data());
  for (size_t i = 0; i < rows; ++i)
    if (numbers[i] < 0 || numbers[i] >= cache.slots())
      refuse("slots " + shape_of(slots) + ": slot " + std::to_string(numbers[i]) + ", the cache has " + std::to_string(cache.slots()));
  return numbers;
}

}  // namespace zg

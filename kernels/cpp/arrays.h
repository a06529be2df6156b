// Arrays from Python (torch, numpy, anything with DLPack), checked: a wrong one is refused with its shape.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

namespace zg {

namespace nb = nanobind;
using Array = nb::ndarray<nb::device::cpu>;  // any dtype, shape and strides: `check` judges
using Input = nb::ndarray<nb::device::cpu, nb::ro>;

template <class A>
std::string shape_of(const A& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + "]";
}

inline std::string name_of(nb::dlpack::dtype type) {
  const char* const kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  return (type.code < 7 ? kinds[type.code] : "type " + std::to_string(type.code) + " of bits ") + std::to_string(type.bits);
}

[[noreturn]] inline void refuse(const std::string& text) { throw std::invalid_argument(text); }

template <class A>
void check_aligned(const A& array, const char* name, size_t unit) {
  if (array.size() > 0 && reinterpret_cast<uintptr_t>(array.data()) % unit != 0)
    refuse(std::string(name) + " " + shape_of(array) + ": its memory is not aligned to its elements");
}

template <class T, class A>
void check_type(const A& array, const char* name) {
  if (array.dtype() != nb::dtype<T>())
    refuse(std::string(name) + " " + shape_of(array) + ": wrong dtype " + name_of(array.dtype()) + ", must be " + name_of(nb::dtype<T>()));
  check_aligned(array, name, alignof(T));
}

template <class A>
bool is_bf16(const A& array) {
  return array.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && array.dtype().bits == 16;
}

// float32 or bfloat16, as weights are.
template <class A>
void check_weight_type(const A& array, const char* name) {
  if (!is_bf16(array)) return check_type<float>(array, name);
  check_aligned(array, name, alignof(uint16_t));
}

// Rows [R, K] whose elements lie side by side; rows may be further apart than K.
template <class T, class A>
void check_rows(const A& array, const char* name) {
  check_type<T>(array, name);
  if (array.ndim() != 2) refuse(std::string(name) + " " + shape_of(array) + ": must have 2 dimensions");
  if (array.shape(0) == 0) return;  // strides of nothing mean nothing
  if (array.shape(1) > 1 && array.stride(1) != 1) refuse(std::string(name) + " " + shape_of(array) + ": elements of a row must be contiguous");
  if (array.shape(0) > 1 && array.stride(0) < static_cast<int64_t>(array.shape(1)))
    refuse(std::string(name) + " " + shape_of(array) + ": rows overlap");
}

// A contiguous array of `dims` dimensions.
template <class T, class A>
void check_whole(const A& array, const char* name, size_t dims) {
  check_type<T>(array, name);
  if (array.ndim() != dims)
    refuse(std::string(name) + " " + shape_of(array) + ": must have " + std::to_string(dims) + " dimensions");
  if (array.size() == 0) return;
  int64_t step = 1;
  for (size_t i = dims; i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != step) refuse(std::string(name) + " " + shape_of(array) + ": must be contiguous");
    step *= static_cast<int64_t>(array.shape(i));
  }
}

inline void check_threads(int threads) {
  if (threads < 1 || threads > 1024) refuse("threads = " + std::to_string(threads) + ": must be 1 to 1024");
}

}  // namespace zg

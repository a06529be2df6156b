// Sixteen virtual lanes of float32: one source, the same bits on every instruction set.
//
// A kernel says what each of 16 lanes does; a path gives them as one register of 16 (AVX-512), two of 8 (AVX2) or four
// of 4 (generic). Every operation is a single IEEE operation per lane, so how lanes are laid out cannot change a bit.
// Files of one path are compiled with that path's switches and live in a namespace of their own (ZG_PATH): an inline
// function shared between paths could be linked with the wrong instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef ZG_PATH
#error "compile with -DZG_PATH=avx512, avx2 or generic"
#endif
#define ZG_INLINE static inline __attribute__((always_inline))

namespace zg {
namespace ZG_PATH {

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = LANES / WIDTH;

typedef float Vf __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Vi __attribute__((vector_size(WIDTH * 4)));

struct F16 {
  Vf part[PARTS];
};
struct I16 {  // integers, and the masks of comparisons: all bits set where true
  Vi part[PARTS];
};

#define ZG_EACH for (int i = 0; i < PARTS; ++i)

ZG_INLINE Vf vf_set(float x) {
#if defined(__AVX512F__)
  return (Vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Vf)_mm256_set1_ps(x);
#else
  return Vf{x, x, x, x};
#endif
}

ZG_INLINE Vi vi_set(int32_t x) {
#if defined(__AVX512F__)
  return (Vi)_mm512_set1_epi32(x);
#elif defined(__AVX2__)
  return (Vi)_mm256_set1_epi32(x);
#else
  return Vi{x, x, x, x};
#endif
}

ZG_INLINE Vf vf_fma(Vf a, Vf b, Vf c) {
#if defined(__AVX512F__)
  return (Vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int j = 0; j < WIDTH; ++j) c[j] = __builtin_fmaf(a[j], b[j], c[j]);
  return c;
#endif
}

ZG_INLINE Vf vf_sqrt(Vf x) {
#if defined(__AVX512F__)
  return (Vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Vf)_mm256_sqrt_ps((__m256)x);
#else
  for (int j = 0; j < WIDTH; ++j) x[j] = __builtin_sqrtf(x[j]);
  return x;
#endif
}

ZG_INLINE F16 set(float x) {
  F16 r;
  ZG_EACH r.part[i] = vf_set(x);
  return r;
}
ZG_INLINE I16 seti(int32_t x) {
  I16 r;
  ZG_EACH r.part[i] = vi_set(x);
  return r;
}
ZG_INLINE F16 load(const float* p) {
  F16 r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}
ZG_INLINE void store(float* p, F16 x) { std::memcpy(p, &x, sizeof(x)); }
ZG_INLINE I16 loadi(const int32_t* p) {
  I16 r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}
ZG_INLINE void storei(int32_t* p, I16 x) { std::memcpy(p, &x, sizeof(x)); }

// The first `count` lanes from memory, the rest `other`: never reads beyond.
ZG_INLINE F16 load_some(const float* p, int count, float other = 0.0f) {
  float buffer[LANES];
  for (int j = 0; j < LANES; ++j) buffer[j] = j < count ? p[j] : other;
  return load(buffer);
}
ZG_INLINE void store_some(float* p, F16 x, int count) {
  float buffer[LANES];
  store(buffer, x);
  for (int j = 0; j < count; ++j) p[j] = buffer[j];
}

ZG_INLINE F16 load_bf16(const uint16_t* p) {
  F16 r;
#if defined(__AVX512F__)
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  r.part[0] = (Vf)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
  for (int i = 0; i < PARTS; ++i) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + i * WIDTH)));
    r.part[i] = (Vf)_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
#else
  uint32_t words[LANES];
  for (int j = 0; j < LANES; ++j) words[j] = (uint32_t)p[j] << 16;
  std::memcpy(&r, words, sizeof(r));
#endif
  return r;
}

ZG_INLINE F16 operator+(F16 a, F16 b) {
  ZG_EACH a.part[i] = a.part[i] + b.part[i];
  return a;
}
ZG_INLINE F16 operator-(F16 a, F16 b) {
  ZG_EACH a.part[i] = a.part[i] - b.part[i];
  return a;
}
ZG_INLINE F16 operator*(F16 a, F16 b) {
  ZG_EACH a.part[i] = a.part[i] * b.part[i];
  return a;
}
ZG_INLINE F16 operator/(F16 a, F16 b) {
  ZG_EACH a.part[i] = a.part[i] / b.part[i];
  return a;
}
ZG_INLINE F16 fma(F16 a, F16 b, F16 c) {  // a * b + c, rounded once
  ZG_EACH c.part[i] = vf_fma(a.part[i], b.part[i], c.part[i]);
  return c;
}
ZG_INLINE F16 sqrt(F16 x) {
  ZG_EACH x.part[i] = vf_sqrt(x.part[i]);
  return x;
}

ZG_INLINE I16 operator+(I16 a, I16 b) {
  ZG_EACH a.part[i] = a.part[i] + b.part[i];
  return a;
}
ZG_INLINE I16 operator-(I16 a, I16 b) {
  ZG_EACH a.part[i] = a.part[i] - b.part[i];
  return a;
}
ZG_INLINE I16 operator&(I16 a, I16 b) {
  ZG_EACH a.part[i] = a.part[i] & b.part[i];
  return a;
}
ZG_INLINE I16 operator|(I16 a, I16 b) {
  ZG_EACH a.part[i] = a.part[i] | b.part[i];
  return a;
}
ZG_INLINE I16 operator<<(I16 a, int n) {
  ZG_EACH a.part[i] = a.part[i] << n;
  return a;
}
ZG_INLINE I16 operator>>(I16 a, int n) {  // arithmetic
  ZG_EACH a.part[i] = a.part[i] >> n;
  return a;
}

ZG_INLINE I16 operator<(F16 a, F16 b) {
  I16 r;
  ZG_EACH r.part[i] = a.part[i] < b.part[i];
  return r;
}
ZG_INLINE I16 operator>(F16 a, F16 b) { return b < a; }
ZG_INLINE I16 operator<=(F16 a, F16 b) {
  I16 r;
  ZG_EACH r.part[i] = a.part[i] <= b.part[i];
  return r;
}
ZG_INLINE I16 operator>=(F16 a, F16 b) { return b <= a; }
ZG_INLINE I16 operator==(F16 a, F16 b) {
  I16 r;
  ZG_EACH r.part[i] = a.part[i] == b.part[i];
  return r;
}
ZG_INLINE I16 operator<(I16 a, I16 b) {
  I16 r;
  ZG_EACH r.part[i] = a.part[i] < b.part[i];
  return r;
}
ZG_INLINE I16 operator>(I16 a, I16 b) { return b < a; }
ZG_INLINE I16 operator==(I16 a, I16 b) {
  I16 r;
  ZG_EACH r.part[i] = a.part[i] == b.part[i];
  return r;
}

ZG_INLINE F16 select(I16 mask, F16 yes, F16 no) {
  ZG_EACH yes.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
  return yes;
}
ZG_INLINE I16 select(I16 mask, I16 yes, I16 no) {
  ZG_EACH yes.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
  return yes;
}
// The greater and the lesser; the second where either is NaN.
ZG_INLINE F16 max(F16 a, F16 b) {
  ZG_EACH a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return a;
}
ZG_INLINE F16 min(F16 a, F16 b) {
  ZG_EACH a.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
  return a;
}

ZG_INLINE I16 bits(F16 x) {
  I16 r;
  std::memcpy(&r, &x, sizeof(r));
  return r;
}
ZG_INLINE F16 floats(I16 x) {
  F16 r;
  std::memcpy(&r, &x, sizeof(r));
  return r;
}
ZG_INLINE F16 to_float(I16 x) {
  F16 r;
  ZG_EACH r.part[i] = __builtin_convertvector(x.part[i], Vf);
  return r;
}
ZG_INLINE I16 to_int(F16 x) {  // towards zero; the value must fit
  I16 r;
  ZG_EACH r.part[i] = __builtin_convertvector(x.part[i], Vi);
  return r;
}

// Sum of the lanes in a fixed balanced tree: lane j meets lane j + 8, then + 4, + 2, + 1.
ZG_INLINE float tree_sum(F16 x) {
  float t[LANES];
  store(t, x);
  for (int width = LANES / 2; width >= 1; width /= 2)
    for (int j = 0; j < width; ++j) t[j] = t[j] + t[j + width];
  return t[0];
}
// Greatest lane; NaN if any lane is NaN.
ZG_INLINE float peak(F16 x) {
  float t[LANES];
  store(t, x);
  float best = t[0];
  for (int j = 1; j < LANES; ++j) best = (t[j] > best || t[j] != t[j]) ? t[j] : best;
  return best;
}

}  // namespace ZG_PATH
}  // namespace zg

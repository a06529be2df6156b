#include "cache.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace zg {

namespace {

// Fresh pages of the system are zero, and take memory only once they are written.
float* map_zero(int64_t floats) {
  const size_t bytes = static_cast<size_t>(floats) * sizeof(float);
  if (bytes == 0) return nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return static_cast<float*>(memory);
}

void unmap(float* memory, int64_t floats) {
  if (memory != nullptr) munmap(memory, static_cast<size_t>(floats) * sizeof(float));
}

}  // namespace

Cache::Cache(int64_t layers, int64_t pages, int64_t page_size, int64_t kv_heads, int64_t head_dim)
    : layers(layers), pages(pages), page_size(page_size), kv_heads(kv_heads), head_dim(head_dim) {
  keys = map_zero(layers * pages * key_page());
  try {
    values = map_zero(layers * pages * value_page());
  } catch (...) {
    unmap(keys, layers * pages * key_page());
    throw;
  }
}

Cache::~Cache() {
  unmap(keys, layers * pages * key_page());
  unmap(values, layers * pages * value_page());
}

void Cache::store(int64_t layer, const int64_t* slots, int64_t count, const float* k, int64_t k_stride, const float* v, int64_t v_stride) {
  for (int64_t row = 0; row < count; ++row) {
    const int64_t page = slots[row] / page_size, place = slots[row] % page_size;
    for (int64_t head = 0; head < kv_heads; ++head) {
      const KeyPlace to = key_place(page_size, kv_heads, head_dim, slots[row], head);
      const float* from = k + row * k_stride + head * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) layer_keys(layer)[to.offset + d * to.step] = from[d];
      std::memcpy(layer_values(layer) + ((page * kv_heads + head) * page_size + place) * width(), v + row * v_stride + head * head_dim,
                  static_cast<size_t>(head_dim) * sizeof(float));
    }
  }
}

void Cache::load(int64_t layer, const int64_t* slots, int64_t count, float* k, float* v) const {
  for (int64_t row = 0; row < count; ++row) {
    const int64_t page = slots[row] / page_size, place = slots[row] % page_size;
    for (int64_t head = 0; head < kv_heads; ++head) {
      const KeyPlace from = key_place(page_size, kv_heads, head_dim, slots[row], head);
      const int64_t to = (row * kv_heads + head) * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) k[to + d] = layer_keys(layer)[from.offset + d * from.step];
      std::memcpy(v + to, layer_values(layer) + ((page * kv_heads + head) * page_size + place) * width(),
                  static_cast<size_t>(head_dim) * sizeof(float));
    }
  }
}

void Cache::clear_page(int64_t page) {
  for (int64_t layer = 0; layer < layers; ++layer) {
    std::memset(layer_keys(layer) + page * key_page(), 0, static_cast<size_t>(key_page()) * sizeof(float));
    std::memset(layer_values(layer) + page * value_page(), 0, static_cast<size_t>(value_page()) * sizeof(float));
  }
}

void Cache::copy_page(int64_t from, int64_t to) {
  for (int64_t layer = 0; layer < layers; ++layer) {
    float *k = layer_keys(layer), *v = layer_values(layer);
    std::memmove(k + to * key_page(), k + from * key_page(), static_cast<size_t>(key_page()) * sizeof(float));
    std::memmove(v + to * value_page(), v + from * value_page(), static_cast<size_t>(value_page()) * sizeof(float));
  }
}

}  // namespace zg

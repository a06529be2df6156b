// Keys and values of all layers in pages of the engine's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace zg {

// Keys [layer][page][G][P/16][D][16]: panels of 16 keys, the last of a page as narrow as the page leaves it.
// Values [layer][page][G][P][D rounded up to 16], the rest 0. Zero at the start. A slot is page * P + place in the page.
struct Cache {
  int64_t layers, pages, page_size, kv_heads, head_dim;
  float* keys = nullptr;
  float* values = nullptr;

  Cache(int64_t layers, int64_t pages, int64_t page_size, int64_t kv_heads, int64_t head_dim);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  ZG_SHARED int64_t width() const { return up(head_dim, KEY_PANEL); }
  ZG_SHARED int64_t slots() const { return pages * page_size; }
  ZG_SHARED int64_t key_page() const { return kv_heads * page_size * head_dim; }  // floats of a page
  ZG_SHARED int64_t value_page() const { return kv_heads * page_size * width(); }
  ZG_SHARED float* layer_keys(int64_t layer) const { return keys + layer * pages * key_page(); }
  ZG_SHARED float* layer_values(int64_t layer) const { return values + layer * pages * value_page(); }
  static ZG_SHARED size_t page_bytes(int64_t layers, int64_t page_size, int64_t kv_heads, int64_t head_dim) {
    return static_cast<size_t>(layers * page_size * kv_heads * (head_dim + up(head_dim, KEY_PANEL))) * sizeof(float);
  }

  // Rows [count][G][D], `stride` floats apart, to and from slots.
  void store(int64_t layer, const int64_t* slots, int64_t count, const float* k, int64_t k_stride, const float* v, int64_t v_stride);
  void load(int64_t layer, const int64_t* slots, int64_t count, float* k, float* v) const;
  // The other pages are not touched; all layers at once.
  void clear_page(int64_t page);
  void copy_page(int64_t from, int64_t to);
};

// Where element d of the key in a slot lies: `key_at(...)[d * step]`, the panel's width apart.
struct KeyPlace {
  int64_t offset, step;
};
static ZG_SHARED KeyPlace key_place(int64_t page_size, int64_t kv_heads, int64_t head_dim, int64_t slot, int64_t head) {
  const int64_t page = slot / page_size, place = slot % page_size, panel = place / KEY_PANEL * KEY_PANEL;
  const int64_t left = page_size - panel;
  return {((page * kv_heads + head) * page_size + panel) * head_dim + place - panel, left < KEY_PANEL ? left : KEY_PANEL};
}

}  // namespace zg

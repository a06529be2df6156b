#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "arrays.h"
#include "bind_heads.h"
#include "cache.h"
#include "plan.h"
#include "pool.h"

namespace nb = nanobind;
using namespace zg;

namespace {

constexpr int64_t POOLED_FLOATS = 1 << 16;  // smaller memory is the system allocator's

struct Give {
  size_t pooled;  // bytes of the pool's block, 0 if it is none
  void operator()(float* memory) const {
    if (pooled > 0)
      pool().give({memory, pooled});
    else
      std::free(memory);
  }
};
using Memory = std::unique_ptr<float[], Give>;

// Memory of one call. From the heap it would leave holes of its size between what lives longer.
Memory take(int64_t floats) {
  const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 64) / 64 * 64;
  if (floats >= POOLED_FLOATS) {
    const Pool::Block block = pool().take(bytes);
    return Memory(static_cast<float*>(block.data), Give{block.bytes});
  }
  void* memory = std::aligned_alloc(64, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return Memory(static_cast<float*>(memory), Give{0});
}

template <class T>
std::vector<T> vector_of(const Input& array, const char* name) {
  check_whole<T>(array, name, 1);
  const T* from = static_cast<const T*>(array.data());
  return std::vector<T>(from, from + array.shape(0));
}

void new_plan(Plan* plan, const Input& start, const Input& count, const Input& first_row, const Input& table_offset, const Input& tables,
              int64_t page_size) {
  new (plan) Plan(vector_of<int64_t>(start, "start"), vector_of<int64_t>(count, "count"), vector_of<int64_t>(first_row, "first_row"),
                  vector_of<int64_t>(table_offset, "table_offset"), vector_of<int32_t>(tables, "tables"), page_size);
}

void new_cache(Cache* cache, int64_t layers, int64_t pages, int64_t page_size, int64_t kv_heads, int64_t head_dim) {
  const auto text = [&] {
    return "Cache of " + std::to_string(layers) + " layers, " + std::to_string(pages) + " pages of " + std::to_string(page_size) + ", " +
           std::to_string(kv_heads) + " heads of " + std::to_string(head_dim);
  };
  if (layers < 0 || pages < 0 || page_size < 1 || kv_heads < 1 || head_dim < 1) refuse(text() + ": sizes must be at least 1 (layers and pages 0)");
  int64_t floats = 2;
  for (const int64_t size : {layers, pages, page_size, kv_heads, up(head_dim, KEY_PANEL)})
    if (__builtin_mul_overflow(floats, size, &floats) || floats > (int64_t{1} << 60)) refuse(text() + ": more memory than there are addresses");
  if (pages > INT32_MAX) refuse(text() + ": pages are numbered in 32 bits");
  new (cache) Cache(layers, pages, page_size, kv_heads, head_dim);
}

void check_layer(const Cache& cache, int64_t layer) {
  if (layer < 0 || layer >= cache.layers)
    refuse("layer = " + std::to_string(layer) + ": the cache has " + std::to_string(cache.layers));
}

void check_pages(const Cache& cache, const std::vector<int64_t>& pages) {
  for (const int64_t page : pages)
    if (page < 0 || page >= cache.pages) refuse("page " + std::to_string(page) + ": the cache has " + std::to_string(cache.pages));
}

void store(Cache& cache, int64_t layer, const Input& slots, const Input& k, const Input& v) {
  check_layer(cache, layer);
  check_heads(k, "k");
  check_heads(v, "v");
  check_shape(k, "k", static_cast<int64_t>(k.shape(0)), cache.kv_heads, cache.head_dim);
  check_shape(v, "v", static_cast<int64_t>(k.shape(0)), cache.kv_heads, cache.head_dim);
  const int64_t* numbers = check_slots(cache, slots, k.shape(0));
  nb::gil_scoped_release released;
  cache.store(layer, numbers, static_cast<int64_t>(k.shape(0)), floats_of(k), row_stride(k), floats_of(v), row_stride(v));
}

void load(const Cache& cache, int64_t layer, const Input& slots, const Array& k, const Array& v) {
  check_layer(cache, layer);
  check_whole<float>(k, "k", 3);
  check_whole<float>(v, "v", 3);
  check_shape(k, "k", static_cast<int64_t>(k.shape(0)), cache.kv_heads, cache.head_dim);
  check_shape(v, "v", static_cast<int64_t>(k.shape(0)), cache.kv_heads, cache.head_dim);
  const int64_t* numbers = check_slots(cache, slots, k.shape(0));
  nb::gil_scoped_release released;
  cache.load(layer, numbers, static_cast<int64_t>(k.shape(0)), writable(k), writable(v));
}

// The shapes that forward and backward share, judged once: q and what has its shape, and the plan's rows.
struct Heads {
  int64_t rows, heads, kv_heads, dim;
};

Heads check_queries(const Input& q, const Plan& plan, int64_t kv_heads, int64_t dim) {
  check_heads(q, "q");
  const int64_t rows = static_cast<int64_t>(q.shape(0)), heads = static_cast<int64_t>(q.shape(1));
  if (static_cast<int64_t>(q.shape(2)) != dim) refuse("q " + shape_of(q) + ": keys and values have heads of " + std::to_string(dim));
  if (dim < 1 || heads < 1 || kv_heads < 1 || heads % kv_heads != 0)
    refuse("q " + shape_of(q) + ": " + std::to_string(heads) + " heads cannot share " + std::to_string(kv_heads) + " key/value heads equally");
  if (plan.rows() > rows) refuse("q " + shape_of(q) + ": the plan has " + std::to_string(plan.rows()) + " rows");
  return {rows, heads, kv_heads, dim};
}

float* check_stats(const Array& stats, const Heads& of) {
  check_whole<float>(stats, "stats", 3);
  check_shape(stats, "stats", of.rows, of.heads, 2);
  return writable(stats);
}

void forward(const AttentionArgs& base, const Input& q, const Plan& plan, const Heads& of, float scale, const Array& out,
             const std::optional<Array>& stats, int threads) {
  check_threads(threads);
  check_heads(out, "out");
  check_shape(out, "out", of.rows, of.heads, of.dim);
  AttentionArgs args = base;
  args.plan = plan.view();
  args.heads = of.heads, args.kv_heads = of.kv_heads, args.head_dim = of.dim, args.scale = scale;
  args.q = floats_of(q), args.q_stride = row_stride(q);
  args.out = writable(out), args.out_stride = row_stride(out);
  args.stats = stats ? check_stats(*stats, of) : nullptr;
  const Memory workspace = take(attention_workspace(args.plan, of.heads, of.kv_heads, of.dim, args.packed));
  args.workspace = workspace.get();
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { attention_kernels().attention(team, work, args); });
}

void attention(const Input& q, const Cache& cache, int64_t layer, const Plan& plan, float scale, const Array& out,
               const std::optional<Array>& stats, int threads) {
  check_layer(cache, layer);
  if (plan.page_size() != cache.page_size)
    refuse("plan: pages of " + std::to_string(plan.page_size()) + ", the cache's have " + std::to_string(cache.page_size));
  if (plan.pages() > cache.pages)
    refuse("plan: page " + std::to_string(plan.pages() - 1) + ", the cache has " + std::to_string(cache.pages));
  const Heads of = check_queries(q, plan, cache.kv_heads, cache.head_dim);
  AttentionArgs args{};
  args.keys = cache.layer_keys(layer), args.values = cache.layer_values(layer);
  forward(args, q, plan, of, scale, out, stats, threads);
}

Heads check_packed(const Input& q, const Input& k, const Input& v, const Plan& plan) {
  check_heads(k, "k");
  check_heads(v, "v");
  const int64_t slots = static_cast<int64_t>(k.shape(0));
  check_shape(v, "v", slots, static_cast<int64_t>(k.shape(1)), static_cast<int64_t>(k.shape(2)));
  // Only whole pages, so that every slot the plan can name is a row.
  if (plan.pages() > slots / plan.page_size())
    refuse("k " + shape_of(k) + ": the plan's pages need " + std::to_string(plan.pages() * plan.page_size()) + " rows");
  return check_queries(q, plan, static_cast<int64_t>(k.shape(1)), static_cast<int64_t>(k.shape(2)));
}

void attention_packed(const Input& q, const Input& k, const Input& v, const Plan& plan, float scale, const Array& out,
                      const std::optional<Array>& stats, int threads) {
  const Heads of = check_packed(q, k, v, plan);
  AttentionArgs args{};
  args.packed = true;
  args.keys = floats_of(k), args.values = floats_of(v), args.k_stride = row_stride(k), args.v_stride = row_stride(v);
  forward(args, q, plan, of, scale, out, stats, threads);
}

void attention_backward(const Input& q, const Input& k, const Input& v, const Input& out, const Array& stats, const Input& grad_out, Plan& plan,
                        float scale, const Array& grad_q, const Array& grad_k, const Array& grad_v, int threads) {
  check_threads(threads);
  const Heads of = check_packed(q, k, v, plan);
  const int64_t slots = static_cast<int64_t>(k.shape(0));
  check_heads(out, "out");
  check_shape(out, "out", of.rows, of.heads, of.dim);
  check_heads(grad_out, "grad_out");
  check_shape(grad_out, "grad_out", of.rows, of.heads, of.dim);
  check_heads(grad_q, "grad_q");
  check_shape(grad_q, "grad_q", of.rows, of.heads, of.dim);
  check_heads(grad_k, "grad_k");
  check_shape(grad_k, "grad_k", slots, of.kv_heads, of.dim);
  check_heads(grad_v, "grad_v");
  check_shape(grad_v, "grad_v", slots, of.kv_heads, of.dim);
  AttentionBackwardArgs args{};
  args.plan = plan.backward_view();
  args.heads = of.heads, args.kv_heads = of.kv_heads, args.head_dim = of.dim, args.scale = scale, args.slots = slots;
  args.q = floats_of(q), args.k = floats_of(k), args.v = floats_of(v), args.out = floats_of(out), args.grad_out = floats_of(grad_out);
  args.q_stride = row_stride(q), args.k_stride = row_stride(k), args.v_stride = row_stride(v), args.out_stride = row_stride(out);
  args.grad_out_stride = row_stride(grad_out), args.stats = check_stats(stats, of);
  args.grad_q = writable(grad_q), args.grad_k = writable(grad_k), args.grad_v = writable(grad_v);
  args.grad_q_stride = row_stride(grad_q), args.grad_k_stride = row_stride(grad_k), args.grad_v_stride = row_stride(grad_v);
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { attention_kernels().backward(team, work, args); });
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<Plan>(module, "Plan", "Which rows meet which keys; built once per batch and shared by all layers.")
      .def("__init__", &new_plan, nb::arg("start"), nb::arg("count"), nb::arg("first_row"), nb::arg("table_offset"), nb::arg("tables"),
           nb::arg("page_size"),
           "Chunk i: rows first_row[i] to first_row[i] + count[i] - 1 are positions from start[i] of one sequence, whose block table\n"
           "begins at tables[table_offset[i]]. All int64 but the tables, which are int32.")
      .def_prop_ro("rows", &Plan::rows)
      .def_prop_ro("pages", &Plan::pages)
      .def_prop_ro("page_size", &Plan::page_size)
      .def(
          "parts",
          [](const Plan& plan, int count, int64_t least) {
            std::vector<std::pair<int64_t, int64_t>> parts;
            for (const Part& part : plan.parts(count, least)) parts.emplace_back(part.first_row, part.rows);
            return parts;
          },
          nb::arg("count"), nb::arg("least"),
          "First row and rows of `count` parts that need nothing of each other, each of `least` rows or more; empty where there are none.");
  nb::class_<Cache>(module, "Cache", "Keys and values of all layers in pages; zero at the start.")
      .def("__init__", &new_cache, nb::arg("layers"), nb::arg("pages"), nb::arg("page_size"), nb::arg("kv_heads"), nb::arg("head_dim"))
      .def_ro("layers", &Cache::layers)
      .def_ro("pages", &Cache::pages)
      .def_ro("page_size", &Cache::page_size)
      .def_ro("kv_heads", &Cache::kv_heads)
      .def_ro("head_dim", &Cache::head_dim)
      .def_static("page_bytes", &Cache::page_bytes, nb::arg("layers"), nb::arg("page_size"), nb::arg("kv_heads"), nb::arg("head_dim"),
                  "Memory of one page over all layers, in bytes.")
      .def("store", &store, nb::arg("layer"), nb::arg("slots"), nb::arg("k"), nb::arg("v"), "Write rows [R, G, D] into slots (int64).")
      .def("load", &load, nb::arg("layer"), nb::arg("slots"), nb::arg("k"), nb::arg("v"), "Read slots into k and v [R, G, D].")
      .def(
          "clear_pages",
          [](Cache& cache, const std::vector<int64_t>& pages) {
            check_pages(cache, pages);
            for (const int64_t page : pages) cache.clear_page(page);
          },
          nb::arg("pages"), "Zero pages in all layers.")
      .def(
          "copy_page",
          [](Cache& cache, int64_t from, int64_t to) {
            check_pages(cache, {from, to});
            cache.copy_page(from, to);
          },
          nb::arg("source"), nb::arg("target"), "Copy a page in all layers.");
  module.def("attention", &attention, nb::arg("q"), nb::arg("cache"), nb::arg("layer"), nb::arg("plan"), nb::arg("scale"), nb::arg("out"),
             nb::arg("stats").none(), nb::arg("threads"),
             "Write softmax(q k^T * scale) v of the plan's rows into out [R, H, D]; maximum and sum into stats [R, H, 2], if given.");
  module.def("attention_packed", &attention_packed, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("plan"), nb::arg("scale"),
             nb::arg("out"), nb::arg("stats").none(), nb::arg("threads"), "The same, bit for bit, with keys and values by slot [S, G, D].");
  module.def("attention_backward", &attention_backward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("stats"),
             nb::arg("grad_out"), nb::arg("plan"), nb::arg("scale"), nb::arg("grad_q"), nb::arg("grad_k"), nb::arg("grad_v"),
             nb::arg("threads"), "Write the gradients of attention_packed.");
}

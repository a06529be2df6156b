// Causal attention over keys and values by absolute position: one entry for decode, chunked prefill and training.
//
// The bits of a row depend on its query and on the keys and values at positions 0..p of its sequence, p its own:
//
// 1. score(j) = the chain of FMAs (q[d] * scale) * k_j[d] over d ascending, from +0; q[d] * scale is rounded first. Keys
//    beyond p score -inf and weigh +0: whatever stands there is selected away, never multiplied.
// 2. Keys are walked in blocks of KEY_BLOCK absolute positions, blocks in splits of SPLIT positions. Per block:
//    new = max(old, greatest score); factor = exp(old - new); weight(j) = exp(score(j) - new), as in lanes_math.h. The sum is
//    kept in 16 lanes, lane l for the keys l mod 16: lane * factor rounded, then plus its (up to four) weights in ascending
//    order. out[d] = out[d] * factor rounded, then one FMA of weight(j) * v_j[d] per visible key, ascending.
// 3. At the end of a split the lanes meet by tree_sum. Splits are joined in order: new = max(old, its); a = exp(old - new),
//    b = exp(its - new); sum = sum * a + its sum * b (two products, then the sum, each rounded); out[d] = fma(out[d], a, its
//    out[d] * b). A row in one split is joined with nothing.
// 4. out[d] * (1 / sum), the inverse rounded first.
//
// How rows are tiled, which splits run in parallel, page size and panels in place or gathered: none of it is seen above.
// The bits of a NaN are promised to nobody.
#pragma once

#include <cstdint>

#include "paths.h"
#include "team.h"

namespace zg {

constexpr int64_t KEY_BLOCK = 64;
constexpr int64_t SPLIT = 1024;
constexpr int64_t QUERY_TILE = 16;  // rows of a sequence that share loads of keys and values
constexpr int64_t KEY_PANEL = 16;   // keys of a panel [D][16]

static ZG_SHARED constexpr int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Rows [first_row, first_row + count) of a batch: the tokens of one sequence from position `start`.
struct Chunk {
  int64_t start, count, first_row;
  int64_t table;   // where its block table begins: entry i is the page of positions [i * page_size, (i + 1) * page_size)
  int64_t before;  // positions of the chunks before it, each rounded up to panels: where its packed keys begin
};

// A piece of work: some rows of a chunk against all their keys, or against one split of them.
struct Item {
  int64_t chunk, first, count;  // rows [first, first + count) of the chunk
  int64_t split;                // -1: all splits, one after another
  int64_t partial;              // where the results of a single split go, one place per row
};

// A row whose splits ran apart: split s lies at `partial + s * step`.
struct Join {
  int64_t row, partial, step, splits;
};

// What the kernels see of a Plan.
struct PlanView {
  const Chunk* chunks;
  int64_t chunk_count;
  const Item* items;
  int64_t item_count;
  const Join* joins;
  int64_t join_count, partials;
  const int32_t* tables;
  int64_t page_size, padded;  // padded: positions of all chunks, each rounded up to panels
  // Chunks that share pages, directly or through others: group i is members[firsts[i]] to members[firsts[i + 1] - 1].
  const int64_t* group_firsts;
  const int64_t* group_members;
  int64_t group_count;
};

struct AttentionArgs {
  PlanView plan;
  int64_t heads, kv_heads, head_dim;
  float scale;
  const float* q;  // [rows, H, D], rows `q_stride` apart
  int64_t q_stride;
  // Paged: one layer of a Cache. Packed: rows [slots, G, D], rows `k_stride` and `v_stride` apart.
  bool packed;
  const float* keys;
  const float* values;
  int64_t k_stride, v_stride;
  float* out;  // [rows, H, D], rows `out_stride` apart
  int64_t out_stride;
  float* stats;      // [rows, H, 2] or null: maximum and sum, for the backward
  float* workspace;  // of attention_workspace() floats, 64-byte aligned
};

// Gradients of packed attention. A group of chunks that share slots is one task per key/value head, chunks in the order
// of the plan: neither threads nor their number change a bit.
struct AttentionBackwardArgs {
  PlanView plan;
  int64_t heads, kv_heads, head_dim;
  float scale;
  const float *q, *k, *v, *out, *grad_out;  // q, out, grad_out [rows, H, D]; k, v [slots, G, D]
  int64_t q_stride, k_stride, v_stride, out_stride, grad_out_stride;
  const float* stats;  // of the forward
  int64_t slots;
  float *grad_q, *grad_k, *grad_v;  // written, not added to; rows that no chunk names stay as they are in grad_q
  int64_t grad_q_stride, grad_k_stride, grad_v_stride;
};

struct AttentionKernels {
  void (*attention)(Team&, Work&, const AttentionArgs&);
  void (*backward)(Team&, Work&, const AttentionBackwardArgs&);
};
ZG_TABLES(AttentionKernels, attention_kernels)

// Floats of workspace that a forward needs.
int64_t attention_workspace(const PlanView& plan, int64_t heads, int64_t kv_heads, int64_t head_dim, bool packed);

#ifdef ZG_PATH
namespace ZG_PATH {
void attention_backward(Team&, Work&, const AttentionBackwardArgs&);
}
#endif

}  // namespace zg

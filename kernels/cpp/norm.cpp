// See norm.h for the order of operations.
#include "norm.h"

#include "lanes_math.h"

namespace zg {
namespace ZG_PATH {
namespace {

constexpr int64_t TASK_ELEMENTS = 8192;  // so that handing out tasks costs little beside them

int64_t rows_per_task(int64_t width) { return width >= TASK_ELEMENTS ? 1 : TASK_ELEMENTS / (width > 0 ? width : 1); }

// Calls f(row) for every row, in tasks of neighbouring rows.
template <class F>
ZG_INLINE void each_row(Work& work, int64_t rows, int64_t width, F f) {
  const int64_t size = rows_per_task(width);
  for (int64_t first = work.next() * size; first < rows; first = work.next() * size)
    for (int64_t row = first; row < rows && row < first + size; ++row) f(row);
}

// Calls f(column, count) for columns in groups of 16, count < 16 in the last only.
template <class F>
ZG_INLINE void each_group(int64_t width, F f) {
  int64_t k = 0;
  for (; k + LANES <= width; k += LANES) f(k, LANES);
  if (k < width) f(k, static_cast<int>(width - k));
}
ZG_INLINE F16 take(const float* p, int count) { return count == LANES ? load(p) : load_some(p, count); }
ZG_INLINE void put(float* p, F16 x, int count) {
  if (count == LANES)
    store(p, x);
  else
    store_some(p, x, count);
}

// 1 / sqrt(sum / width + eps) in single operations: of one lane, so that no compiler picks another square root.
ZG_INLINE float scale_of(F16 squares, int64_t width, float eps) {
  const F16 mean = set(tree_sum(squares)) / set(static_cast<float>(width));
  float lanes[LANES];
  store(lanes, set(1.0f) / sqrt(mean + set(eps)));
  return lanes[0];
}

void rms_norm(Team&, Work& work, const NormArgs& args) {
  each_row(work, args.rows, args.width, [&](int64_t row) {
    float* x = args.x + row * args.x_stride;
    const float* added = args.added + row * args.added_stride;
    float* y = args.y + row * args.y_stride;
    F16 squares = set(0.0f);
    if (args.added == nullptr)
      each_group(args.width, [&](int64_t k, int count) {
        const F16 value = take(x + k, count);
        squares = fma(value, value, squares);
      });
    else
      each_group(args.width, [&](int64_t k, int count) {
        const F16 value = take(x + k, count) + take(added + k, count);
        put(x + k, value, count);
        squares = fma(value, value, squares);
      });
    const F16 scale = set(scale_of(squares, args.width, args.eps));
    each_group(args.width, [&](int64_t k, int count) { put(y + k, take(x + k, count) * scale * take(args.weight + k, count), count); });
  });
}

// One row: its input gradient, and its share of the weight gradient added to `partial`.
ZG_INLINE void norm_row_backward(const NormBackwardArgs& args, int64_t row, float* partial) {
  const float* x = args.x + row * args.x_stride;
  const float* grad = args.grad + row * args.grad_stride;
  float* grad_x = args.grad_x + row * args.grad_x_stride;
  F16 squares = set(0.0f), products = set(0.0f);
  each_group(args.width, [&](int64_t k, int count) {
    const F16 value = take(x + k, count);
    squares = fma(value, value, squares);
    products = fma(take(grad + k, count) * take(args.weight + k, count), value, products);
  });
  const float scale = scale_of(squares, args.width, args.eps);
  const F16 scales = set(scale);
  // Mean of (gradient of the normalised value) * (normalised value).
  const F16 mean = set(tree_sum(products)) * scales / set(static_cast<float>(args.width));
  each_group(args.width, [&](int64_t k, int count) {
    const F16 g = take(grad + k, count), normal = take(x + k, count) * scales;
    const F16 slope = (g * take(args.weight + k, count) - normal * mean) * scales;
    put(grad_x + k, args.accumulate ? take(grad_x + k, count) + slope : slope, count);
    put(partial + k, fma(g, normal, take(partial + k, count)), count);
  });
}

// Members take neighbouring columns: each column is one sum, whoever makes it.
ZG_INLINE void columns_of(const Team& team, int64_t width, int64_t& begin, int64_t& end) {
  const int64_t groups = (width + LANES - 1) / LANES, each = (groups + team.count - 1) / team.count;
  begin = team.index * each * LANES;
  end = begin + each * LANES < width ? begin + each * LANES : width;
}

void rms_norm_backward(Team& team, Work& work, const NormBackwardArgs& args) {
  const int64_t blocks = norm_blocks(args.rows);
  for (int64_t block = work.next(); block < blocks; block = work.next()) {
    float* partial = args.partial + block * args.width;
    for (int64_t k = 0; k < args.width; ++k) partial[k] = 0.0f;
    const int64_t end = (block + 1) * GRADIENT_ROWS < args.rows ? (block + 1) * GRADIENT_ROWS : args.rows;
    for (int64_t row = block * GRADIENT_ROWS; row < end; ++row) norm_row_backward(args, row, partial);
  }
  team.barrier();
  int64_t begin, end;
  columns_of(team, args.width, begin, end);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t k = begin; k < end; ++k) args.grad_weight[k] += args.partial[block * args.width + k];
}

void silu_mul(Team&, Work& work, const SiluArgs& args) {
  each_row(work, args.rows, args.width, [&](int64_t row) {
    const float* gate = args.gate + row * args.gate_stride;
    const float* up = args.up + row * args.up_stride;
    float* y = args.y + row * args.y_stride;
    each_group(args.width, [&](int64_t k, int count) {
      const F16 g = take(gate + k, count);
      put(y + k, sigmoid(g) * g * take(up + k, count), count);
    });
  });
}

void silu_mul_backward(Team&, Work& work, const SiluBackwardArgs& args) {
  each_row(work, args.rows, args.width, [&](int64_t row) {
    const float* gate = args.gate + row * args.gate_stride;
    const float* up = args.up + row * args.up_stride;
    const float* grad = args.grad + row * args.grad_stride;
    float* grad_gate = args.grad_gate + row * args.grad_gate_stride;
    float* grad_up = args.grad_up + row * args.grad_up_stride;
    each_group(args.width, [&](int64_t k, int count) {
      const F16 g = take(gate + k, count), u = take(up + k, count), d = take(grad + k, count);
      const F16 slope = sigmoid(g), silu = g * slope;
      put(grad_gate + k, d * u * (slope + silu * (set(1.0f) - slope)), count);
      put(grad_up + k, d * silu, count);
    });
  });
}

void embedding(Team&, Work& work, const EmbeddingArgs& args) {
  each_row(work, args.rows, args.width, [&](int64_t row) {
    const int64_t offset = args.ids[row] * args.table_stride;
    float* y = args.y + row * args.y_stride;
    if (!args.bf16) {
      const float* from = static_cast<const float*>(args.table) + offset;
      each_group(args.width, [&](int64_t k, int count) { put(y + k, take(from + k, count), count); });
      return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(args.table) + offset;
    each_group(args.width, [&](int64_t k, int count) {
      if (count == LANES) {
        store(y + k, load_bf16(from + k));
      } else {
        uint16_t words[LANES] = {};
        for (int j = 0; j < count; ++j) words[j] = from[k + j];
        store_some(y + k, load_bf16(words), count);
      }
    });
  });
}

void embedding_backward(Team&, Work& work, const EmbeddingBackwardArgs& args) {
  constexpr int64_t COLUMNS = 4 * LANES;  // of a task: all rows pass, so a table element is one sum in row order
  for (int64_t begin = work.next() * COLUMNS; begin < args.width; begin = work.next() * COLUMNS) {
    const int64_t width = begin + COLUMNS < args.width ? COLUMNS : args.width - begin;
    for (int64_t row = 0; row < args.rows; ++row) {
      const float* grad = args.grad + row * args.grad_stride + begin;
      float* to = args.grad_table + args.ids[row] * args.table_stride + begin;
      each_group(width, [&](int64_t k, int count) { put(to + k, take(to + k, count) + take(grad + k, count), count); });
    }
  }
}

template <class F>
ZG_INLINE void map(Work& work, const MapArgs& args, F f) {
  for (int64_t begin = work.next() * TASK_ELEMENTS; begin < args.count; begin = work.next() * TASK_ELEMENTS) {
    const int64_t size = begin + TASK_ELEMENTS < args.count ? TASK_ELEMENTS : args.count - begin;
    each_group(size, [&](int64_t k, int count) { put(args.y + begin + k, f(take(args.x + begin + k, count)), count); });
  }
}
void map_exp(Team&, Work& work, const MapArgs& args) {
  map(work, args, [](F16 x) { return exp(x); });
}
void map_log(Team&, Work& work, const MapArgs& args) {
  map(work, args, [](F16 x) { return log(x); });
}

}  // namespace

extern const NormKernels norm_kernels{rms_norm,  rms_norm_backward,  silu_mul, silu_mul_backward,
                                      embedding, embedding_backward, map_exp,  map_log};

}  // namespace ZG_PATH
}  // namespace zg

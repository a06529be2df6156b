#include "program.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <set>
#include <stdexcept>
#include <string>

#include "norm.h"
#include "rotary.h"

namespace zg {
namespace {

// Rows for each member of the team from which on every member takes rows of its own through the whole forward, without
// barriers and without reading what another has in its cache (which costs a fifth of the time). Each then reads all
// weights, so the more members share the memory, the more rows each needs: this many for each of the team.
constexpr int64_t LEAST_ROWS = 6;

std::vector<int> reads_of(const Instruction& what) {
  std::vector<int> values;
  for (const int value : {what.a, what.b, what.c})
    if (value >= 0) values.push_back(value);
  return values;
}

void grow(float*& memory, int64_t& have, int64_t want) {
  if (have >= want) return;
  std::free(memory);
  have = 0;
  memory = static_cast<float*>(std::aligned_alloc(64, (static_cast<size_t>(want) * sizeof(float) + 4095) / 4096 * 4096));
  if (memory == nullptr) throw std::bad_alloc();
  have = want;
}

}  // namespace

Program::Program(std::vector<int64_t> widths, std::vector<Instruction> instructions) : widths_(std::move(widths)) {
  for (Instruction& what : instructions) {
    if (what.op == Op::embedding) vocabulary_ = std::min(vocabulary_, what.table_rows);
    if (what.op == Op::rotary || what.op == Op::attention) layers_ = std::max(layers_, what.layer + 1);
    steps_.push_back(std::make_unique<Step>(std::move(what)));
  }
  if (steps_.empty()) throw std::invalid_argument("a program needs instructions");
  last_ = steps_.back()->what.out;
  check();
  lay_out();
  const Packed* next = nullptr;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    if ((*step)->what.op != Op::linear) continue;
    const Packed* own = (*step)->what.packed.get();
    (*step)->next = next != nullptr && next->kind == own->kind ? next : nullptr;
    next = own;
  }
}

Program::~Program() {
  std::free(memory_);
  std::free(workspace_);
}

int64_t Program::out_width() const { return widths_[last_]; }

bool Program::fits(const Cache& cache) const {
  return std::all_of(steps_.begin(), steps_.end(), [&](const auto& step) {
    const Instruction& what = step->what;
    if (what.op != Op::rotary && what.op != Op::attention) return true;
    const bool queries = widths_[what.a] == what.heads * cache.head_dim && what.heads % cache.kv_heads == 0;
    return queries && what.layer < cache.layers && (what.op == Op::attention || widths_[what.b] == cache.kv_heads * cache.head_dim);
  });
}

int64_t Program::barriers() const {
  return std::count_if(steps_.begin(), steps_.end(), [](const auto& step) { return step->barrier; });
}

int64_t Program::row_floats() const {
  int64_t floats = 0;
  for (const int64_t width : place_widths_) floats += width;
  return floats;
}

void Program::check() const {
  std::vector<bool> made(widths_.size(), false);
  const auto fail = [](size_t number, const std::string& text) {
    throw std::invalid_argument("instruction " + std::to_string(number) + ": " + text);
  };
  for (size_t number = 0; number < steps_.size(); ++number) {
    const Instruction& what = steps_[number]->what;
    for (const int value : reads_of(what))
      if (value >= static_cast<int>(widths_.size()) || !made[value]) fail(number, "reads value " + std::to_string(value) + ", which was not made");
    for (const int value : {what.out, what.sum}) {
      if (value < 0) continue;
      if (value >= static_cast<int>(widths_.size()) || made[value]) fail(number, "makes value " + std::to_string(value) + " again or beyond the list");
      made[value] = true;
    }
    const auto width = [&](int value) { return value < 0 ? -1 : widths_[value]; };
    switch (what.op) {
      case Op::embedding:
        if (what.out < 0 || what.weight == nullptr) fail(number, "an embedding needs a table and a result");
        break;
      case Op::linear:
        if (!what.packed || width(what.a) != what.packed->in_features || width(what.out) != what.packed->out_features)
          fail(number, "widths do not fit the weight");
        break;
      case Op::add:
      case Op::add_rms_norm:
        if (width(what.a) < 0 || width(what.a) != width(what.b) || width(what.a) != width(what.sum)) fail(number, "widths of a sum differ");
        if (what.op == Op::add_rms_norm && (width(what.out) != width(what.a) || what.weight == nullptr)) fail(number, "widths of a norm differ");
        break;
      case Op::rms_norm:
        if (width(what.out) < 0 || width(what.a) != width(what.out) || what.weight == nullptr) fail(number, "widths of a norm differ");
        break;
      case Op::rotary:
        if (width(what.a) < 0 || width(what.a) != width(what.out) || width(what.b) < 0 || width(what.b) != width(what.c) || what.heads < 1 ||
            width(what.a) % what.heads != 0)
          fail(number, "widths of queries, keys and values do not fit");
        break;
      case Op::attention:
        if (width(what.a) < 0 || width(what.a) != width(what.out) || what.heads < 1 || width(what.a) % what.heads != 0)
          fail(number, "widths of attention do not fit");
        break;
      case Op::silu_mul:
        if (width(what.out) < 0 || width(what.a) != width(what.out) || width(what.b) != width(what.out)) fail(number, "widths of a gate differ");
        break;
    }
  }
  if (last_ < 0) throw std::invalid_argument("the last instruction makes no value");
}

// Gives values memory, used again once nobody reads it any more, and finds where members must wait for each other.
void Program::lay_out() {
  const int count = static_cast<int>(steps_.size());
  std::vector<int> last_read(widths_.size(), -1);
  for (int number = 0; number < count; ++number)
    for (const int value : reads_of(steps_[number]->what)) last_read[value] = number;
  last_read[last_] = count;
  place_of_.assign(widths_.size(), -1);
  std::vector<int> vacant;  // oldest first: the longer ago it was used, the less is there to wait for
  std::set<int> reading, writing;
  const auto take = [&](int value) {
    for (size_t i = 0; i < vacant.size(); ++i)
      if (place_widths_[vacant[i]] == widths_[value]) {
        place_of_[value] = vacant[i];
        vacant.erase(vacant.begin() + static_cast<std::ptrdiff_t>(i));
        return;
      }
    place_of_[value] = static_cast<int>(place_widths_.size());
    place_widths_.push_back(widths_[value]);
  };
  for (int number = 0; number < count; ++number) {
    Step& step = *steps_[number];
    const Instruction& what = step.what;
    if (what.sum >= 0) {
      if (last_read[what.a] != number) throw std::invalid_argument("instruction " + std::to_string(number) + ": the first summand is read again later");
      place_of_[what.sum] = place_of_[what.a];
    }
    if (what.out >= 0) take(what.out);
    std::set<int> reads, writes;
    for (const int value : reads_of(what)) reads.insert(place_of_[value]);
    for (const int value : {what.out, what.sum})
      if (value >= 0) writes.insert(place_of_[value]);
    if (what.op == Op::rotary) writes.insert(-2);  // the cache
    if (what.op == Op::attention) reads.insert(-2), writes.insert(-3);  // the workspace
    const auto meets = [](const std::set<int>& a, const std::set<int>& b) {
      return std::any_of(a.begin(), a.end(), [&](int place) { return b.count(place) > 0; });
    };
    step.barrier = meets(reads, writing) || meets(writes, writing) || meets(writes, reading);
    if (step.barrier) reading.clear(), writing.clear();
    reading.insert(reads.begin(), reads.end());
    writing.insert(writes.begin(), writes.end());
    for (const int value : reads_of(what))
      if (last_read[value] == number && !(what.sum >= 0 && value == what.a) &&
          std::find(vacant.begin(), vacant.end(), place_of_[value]) == vacant.end())
        vacant.push_back(place_of_[value]);
    for (const int value : {what.out, what.sum})
      if (value >= 0 && last_read[value] < 0) vacant.push_back(place_of_[value]);
  }
}

void Program::run(const RunInput& input, int threads) {
  if (input.rows == 0) return;
  const std::lock_guard<std::mutex> turn(turn_);
  const int64_t unit = 16;  // places begin at cache lines
  const auto floats = [&](int64_t width) { return (input.rows * width + unit - 1) / unit * unit; };
  int64_t total = 0, workspace = 0;
  for (const int64_t width : place_widths_) total += floats(width);
  grow(memory_, memory_floats_, total);
  places_.clear();
  float* next = memory_;
  for (const int64_t width : place_widths_) places_.push_back(next), next += floats(width);
  for (const auto& step : steps_) {
    step->work.reset();
    if (step->what.op == Op::attention)
      workspace = std::max(workspace, attention_workspace(input.plan->view(), step->what.heads, input.cache->kv_heads, input.cache->head_dim, false));
  }
  grow(workspace_, workspace_floats_, workspace);
  std::vector<Part> parts;
  if (input.plan->rows() == input.rows) parts = input.plan->parts(threads, LEAST_ROWS * threads);
  const PlanView whole = input.plan->view();
  zg::run(threads, [&](Team& team) {
    if (!parts.empty()) {
      const Part& part = parts[static_cast<size_t>(team.index)];
      const PlanView view = input.plan->view(part);
      Team alone{0, 1, nullptr};
      for (const auto& step : steps_) {
        Work work;
        execute(alone, work, input, *step, view, part.first_row, part.rows);
      }
      return;
    }
    for (const auto& step : steps_) {
      if (step->barrier) team.barrier();
      execute(team, step->work, input, *step, whole, 0, input.rows);
    }
  });
  // The last value shares its place with others, so it is copied out.
  std::copy_n(at(last_), input.rows * widths_[last_], input.out);
}

void Program::execute(Team& team, Work& work, const RunInput& input, const Step& step, const PlanView& plan, int64_t first, int64_t rows) {
  const Instruction& what = step.what;
  const auto width = [&](int value) { return widths_[value]; };
  const auto at = [&](int value) { return this->at(value) + first * widths_[value]; };
  switch (what.op) {
    case Op::embedding:
      norm_kernels().embedding(team, work,
                               {input.tokens + first, rows, width(what.out), what.weight, what.bf16, what.table_stride, at(what.out), width(what.out)});
      break;
    case Op::linear:
      linear_kernels().linear(team, work,
                              {at(what.a), rows, width(what.a), what.packed.get(), static_cast<const float*>(what.weight), at(what.out), width(what.out), step.next});
      break;
    case Op::add: {
      float* sum = at(what.sum);
      const float* added = at(what.b);
      const int64_t elements = rows * width(what.a), size = 8192;
      for (int64_t from = work.next() * size; from < elements; from = work.next() * size)
        for (int64_t i = from; i < std::min(from + size, elements); ++i) sum[i] = sum[i] + added[i];
      break;
    }
    case Op::rms_norm:
    case Op::add_rms_norm: {
      const bool adds = what.op == Op::add_rms_norm;
      norm_kernels().rms_norm(team, work,
                              {at(what.a), rows, width(what.a), width(what.a), adds ? at(what.b) : nullptr, width(what.a),
                               static_cast<const float*>(what.weight), what.eps, at(what.out), width(what.out)});
      break;
    }
    case Op::rotary: {
      const Cache& cache = *input.cache;
      RotaryArgs args{};
      args.rows = rows, args.head_dim = cache.head_dim, args.positions = input.positions + first, args.cos = input.cos, args.sin = input.sin;
      args.eps = what.eps;
      args.q = {what.heads, at(what.a), width(what.a), what.q_norm, at(what.out), width(what.out)};
      args.k = {cache.kv_heads, at(what.b), width(what.b), what.k_norm, nullptr, 0};
      args.cache_keys = cache.layer_keys(what.layer), args.cache_values = cache.layer_values(what.layer), args.page_size = cache.page_size;
      args.slots = input.slots + first, args.v = at(what.c), args.v_stride = width(what.c);
      rotary_kernels().rotary(team, work, args);
      break;
    }
    case Op::attention: {
      const Cache& cache = *input.cache;
      AttentionArgs args{};
      args.plan = plan;
      args.heads = what.heads, args.kv_heads = cache.kv_heads, args.head_dim = cache.head_dim, args.scale = what.scale;
      // The plan counts rows from the batch's first.
      args.q = this->at(what.a), args.q_stride = width(what.a);
      args.keys = cache.layer_keys(what.layer), args.values = cache.layer_values(what.layer);
      args.out = this->at(what.out), args.out_stride = width(what.out);
      args.workspace = workspace_;
      attention_kernels().attention(team, work, args);
      break;
    }
    case Op::silu_mul:
      norm_kernels().silu_mul(team, work,
                              {at(what.a), rows, width(what.a), width(what.a), at(what.b), width(what.b), at(what.out), width(what.out)});
      break;
  }
}

}  // namespace zg

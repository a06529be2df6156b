#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdlib>
#include <new>
#include <optional>
#include <vector>

#include "arrays.h"
#include "lm_head.h"
#include "philox.h"

namespace nb = nanobind;
using namespace zg;

namespace {

using Wanted = std::optional<Array>;
using Given = std::optional<Input>;
using Replay = std::optional<std::vector<Given>>;

constexpr int64_t MOST_TOKENS = int64_t{1} << 20;  // so that masses add up without overflow

template <class T, class A>
T* vector_of(const A& array, const char* name, int64_t length) {
  check_whole<std::remove_const_t<T>>(array, name, 1);
  if (static_cast<int64_t>(array.shape(0)) != length)
    refuse(std::string(name) + " " + shape_of(array) + ": must be [" + std::to_string(length) + "]");
  return static_cast<T*>(const_cast<void*>(static_cast<const void*>(array.data())));
}
template <class T, class A>
T* vector_or_null(const std::optional<A>& array, const char* name, int64_t length) {
  return array ? vector_of<T>(*array, name, length) : nullptr;
}

void check_tokens(const int64_t* ids, int64_t count, int64_t vocabulary, const char* name) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= vocabulary)
      refuse(std::string(name) + ": token " + std::to_string(ids[i]) + " at " + std::to_string(i) + " is outside 0 to " +
             std::to_string(vocabulary - 1));
}

KeptSet kept_set(const Given& given, int64_t row, int64_t vocabulary) {
  if (!given) return {};
  const std::string name = "replay of row " + std::to_string(row);
  if (given->dtype() == nb::dtype<uint8_t>()) {
    const uint8_t* bits = vector_of<const uint8_t>(*given, name.c_str(), (vocabulary + 7) / 8);
    return {KeptSet::Form::bits, bits, 0};
  }
  check_whole<int32_t>(*given, name.c_str(), 1);
  const int64_t count = static_cast<int64_t>(given->shape(0));
  const int32_t* ids = static_cast<const int32_t*>(given->data());
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= vocabulary || (i > 0 && ids[i] <= ids[i - 1]))
      refuse(name + " " + shape_of(*given) + ": ids must ascend from 0 to " + std::to_string(vocabulary - 1) + ", not " +
             std::to_string(ids[i]) + " at " + std::to_string(i));
  return {KeptSet::Form::ids, ids, count};
}

// What the rows' logits are made of; holds the kept sets that the arguments point to.
struct Logits {
  LogitArgs args{};
  std::vector<KeptSet> kept;

  Logits(const Input& x, const Packed* head, const Input& temperature, const Given& suppressed_start, const Given& suppressed,
         const Replay& replay) {
    check_rows<float>(x, "x");
    args.rows = static_cast<int64_t>(x.shape(0));
    const int64_t width = static_cast<int64_t>(x.shape(1)), stride = args.rows > 1 ? x.stride(0) : width;
    args.vocabulary = head == nullptr ? width : head->out_features;
    if (args.vocabulary < 1 || args.vocabulary > MOST_TOKENS)
      refuse("vocabulary of " + std::to_string(args.vocabulary) + " tokens: must be 1 to " + std::to_string(MOST_TOKENS));
    if (head == nullptr) {
      args.logits = static_cast<const float*>(x.data());
      args.logits_stride = stride;
    } else {
      if (width != head->in_features) refuse("x " + shape_of(x) + ": the LM head has " + std::to_string(head->in_features) + " inputs");
      if (head->segments != 1) refuse("the LM head has " + std::to_string(head->segments) + " segments: must be packed with 1");
      args.hidden = static_cast<const float*>(x.data());
      args.hidden_stride = stride;
      args.head = head;
    }
    args.temperature = vector_of<const double>(temperature, "temperature", args.rows);
    for (int64_t row = 0; row < args.rows; ++row)
      if (!(args.temperature[row] >= 0.0)) refuse("temperature " + std::to_string(args.temperature[row]) + " of row " + std::to_string(row) + ": must be 0 or more");
    if (suppressed_start.has_value() != suppressed.has_value()) refuse("suppressed and suppressed_start: give both or none");
    if (suppressed) {
      args.suppressed_start = vector_of<const int64_t>(*suppressed_start, "suppressed_start", args.rows + 1);
      check_whole<int64_t>(*suppressed, "suppressed", 1);
      args.suppressed = static_cast<const int64_t*>(suppressed->data());
      const int64_t count = static_cast<int64_t>(suppressed->shape(0));
      for (int64_t row = 0; row <= args.rows; ++row)
        if (args.suppressed_start[row] < (row > 0 ? args.suppressed_start[row - 1] : 0) || args.suppressed_start[row] > count)
          refuse("suppressed_start [" + std::to_string(args.rows + 1) + "]: must ascend from 0 to " + std::to_string(count));
      check_tokens(args.suppressed, count, args.vocabulary, "suppressed");
    }
    if (replay) {
      if (static_cast<int64_t>(replay->size()) != args.rows)
        refuse("replay [" + std::to_string(replay->size()) + "]: must be [" + std::to_string(args.rows) + "]");
      for (int64_t row = 0; row < args.rows; ++row) kept.push_back(kept_set((*replay)[static_cast<size_t>(row)], row, args.vocabulary));
      args.replay = kept.data();
    }
  }
};

// The table of logits lives on between calls: fresh pages of its size cost more than reading it.
float* workspace(int64_t floats) {
  struct Memory {
    void* data = nullptr;
    int64_t floats = 0;
    ~Memory() { std::free(data); }
  };
  static thread_local Memory memory;
  if (memory.floats < floats) {
    std::free(memory.data);
    memory.floats = 0;
    memory.data = std::aligned_alloc(4096, (static_cast<size_t>(floats) * sizeof(float) + 4095) / 4096 * 4096);
    if (memory.data == nullptr) throw std::bad_alloc();
    memory.floats = floats;
  }
  return static_cast<float*>(memory.data);
}

struct Settings {
  const Input &top_k, &top_p, &min_p;
};
struct Results {
  const Array& logprob;
  const Wanted &entropy, &mass, &peak, &total, &logits, &kept_bits, &kept_count;
};

void head(const LogitArgs& of, const Settings& settings, const Results& results, HeadArgs& args, int threads) {
  check_threads(threads);
  args.of = of;
  args.top_k = vector_of<const int64_t>(settings.top_k, "top_k", of.rows);
  args.top_p = vector_of<const double>(settings.top_p, "top_p", of.rows);
  args.min_p = vector_of<const double>(settings.min_p, "min_p", of.rows);
  for (int64_t row = 0; row < of.rows; ++row) {
    if (std::isnan(args.top_p[row])) refuse("top_p of row " + std::to_string(row) + " is NaN");
    if (!(args.min_p[row] <= 1.0)) refuse("min_p " + std::to_string(args.min_p[row]) + " of row " + std::to_string(row) + ": must be at most 1");
  }
  args.logprob = vector_of<float>(results.logprob, "logprob", of.rows);
  args.entropy = vector_or_null<float>(results.entropy, "entropy", of.rows);
  args.mass = vector_or_null<float>(results.mass, "mass", of.rows);
  if (args.mass != nullptr && of.replay != nullptr) refuse("mass: a replayed kept set does not say what it left out");
  args.peak = vector_or_null<float>(results.peak, "peak", of.rows);
  args.total = vector_or_null<float>(results.total, "total", of.rows);
  if (results.logits) {
    const Array& logits = *results.logits;
    check_rows<float>(logits, "logits");
    const int64_t width = (of.vocabulary + PANEL - 1) / PANEL * PANEL;
    if (static_cast<int64_t>(logits.shape(0)) != of.rows || static_cast<int64_t>(logits.shape(1)) < width)
      refuse("logits " + shape_of(logits) + ": must be [" + std::to_string(of.rows) + ", " + std::to_string(width) + " or more]");
    args.logits = static_cast<float*>(logits.data());
    args.logits_stride = of.rows > 1 ? logits.stride(0) : static_cast<int64_t>(logits.shape(1));
  }
  if (results.kept_bits.has_value() != results.kept_count.has_value()) refuse("kept_bits and kept_count: give both or none");
  if (results.kept_bits) {
    const Array& bits = *results.kept_bits;
    check_rows<uint8_t>(bits, "kept_bits");
    const int64_t bytes = (of.vocabulary + 7) / 8;
    if (static_cast<int64_t>(bits.shape(0)) != of.rows || static_cast<int64_t>(bits.shape(1)) != bytes)
      refuse("kept_bits " + shape_of(bits) + ": must be [" + std::to_string(of.rows) + ", " + std::to_string(bytes) + "]");
    args.kept_bits = static_cast<uint8_t*>(bits.data());
    args.kept_stride = of.rows > 1 ? bits.stride(0) : bytes;
    args.kept_count = vector_of<int64_t>(*results.kept_count, "kept_count", of.rows);
  }
  args.workspace = workspace(head_workspace(of.rows, of.vocabulary));
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { head_kernels().head(team, work, args); });
}

void token_logprobs(const Input& x, const Packed* packed, const Input& target, const Input& temperature, const Input& top_k,
                    const Input& top_p, const Input& min_p, const Array& logprob, int threads, const Given& suppressed_start,
                    const Given& suppressed, const Replay& replay, const Wanted& entropy, const Wanted& mass, const Wanted& peak, const Wanted& total,
                    const Wanted& kept_logits, const Wanted& kept_bits, const Wanted& kept_count) {
  const Logits logits(x, packed, temperature, suppressed_start, suppressed, replay);
  HeadArgs args{};
  args.target = vector_of<const int64_t>(target, "target", logits.args.rows);
  check_tokens(args.target, logits.args.rows, logits.args.vocabulary, "target");
  head(logits.args, {top_k, top_p, min_p}, {logprob, entropy, mass, peak, total, kept_logits, kept_bits, kept_count}, args, threads);
}

void sample(const Input& x, const Packed* packed, const Input& uniform, const Input& temperature, const Input& top_k, const Input& top_p,
            const Input& min_p, const Array& token, const Array& logprob, int threads, const Given& suppressed_start, const Given& suppressed,
            const Replay& replay, const Wanted& entropy, const Wanted& kept_bits, const Wanted& kept_count, const Given& top_count,
            const Wanted& top_ids, const Wanted& top_logprobs) {
  const Logits logits(x, packed, temperature, suppressed_start, suppressed, replay);
  const int64_t rows = logits.args.rows;
  HeadArgs args{};
  args.uniform = vector_of<const double>(uniform, "uniform", rows);
  for (int64_t row = 0; row < rows; ++row)
    if (!(args.uniform[row] >= 0.0 && args.uniform[row] < 1.0))
      refuse("uniform " + std::to_string(args.uniform[row]) + " of row " + std::to_string(row) + ": must be in [0, 1)");
  args.token = vector_of<int64_t>(token, "token", rows);
  if (top_count.has_value() != top_ids.has_value() || top_count.has_value() != top_logprobs.has_value())
    refuse("top_count, top_ids and top_logprobs: give all or none");
  if (top_count) {
    args.top_count = vector_of<const int64_t>(*top_count, "top_count", rows);
    check_whole<int64_t>(*top_ids, "top_ids", 2);
    check_whole<float>(*top_logprobs, "top_logprobs", 2);
    args.top_width = static_cast<int64_t>(top_ids->shape(1));
    for (const Array* array : {&*top_ids, &*top_logprobs})
      if (static_cast<int64_t>(array->shape(0)) != rows || static_cast<int64_t>(array->shape(1)) != args.top_width)
        refuse("top_ids and top_logprobs " + shape_of(*array) + ": must both be [" + std::to_string(rows) + ", most tokens to list]");
    args.top_ids = static_cast<int64_t*>(top_ids->data());
    args.top_logprobs = static_cast<float*>(top_logprobs->data());
  }
  const Wanted none;
  head(logits.args, {top_k, top_p, min_p}, {logprob, entropy, none, none, none, none, kept_bits, kept_count}, args, threads);
}

void token_logprobs_backward(const Input& x, const Packed* packed, const Input& target, const Input& temperature, const Input& peak,
                             const Input& total, const Input& grad, const Array& grad_logits, int threads, const Given& suppressed_start,
                             const Given& suppressed, const Replay& replay, bool in_place) {
  check_threads(threads);
  const Logits logits(x, packed, temperature, suppressed_start, suppressed, replay);
  const LogitArgs& of = logits.args;
  check_rows<float>(grad_logits, "grad_logits");
  if (static_cast<int64_t>(grad_logits.shape(0)) != of.rows || static_cast<int64_t>(grad_logits.shape(1)) != of.vocabulary)
    refuse("grad_logits " + shape_of(grad_logits) + ": must be [" + std::to_string(of.rows) + ", " + std::to_string(of.vocabulary) + "]");
  const HeadBackwardArgs args{of,
                              vector_of<const int64_t>(target, "target", of.rows),
                              vector_of<const float>(peak, "peak", of.rows),
                              vector_of<const float>(total, "total", of.rows),
                              vector_of<const float>(grad, "grad", of.rows),
                              static_cast<float*>(grad_logits.data()),
                              of.rows > 1 ? grad_logits.stride(0) : of.vocabulary,
                              in_place};
  check_tokens(args.target, of.rows, of.vocabulary, "target");
  Work work;
  nb::gil_scoped_release released;
  run(threads, [&](Team& team) { head_kernels().backward(team, work, args); });
}

void uniform(uint64_t seed, const Input& keys, const Array& numbers) {
  check_whole<int64_t>(keys, "keys", 2);
  if (keys.shape(1) != 4) refuse("keys " + shape_of(keys) + ": must be [rows, 4]: step, prompt, sample, position");
  const int64_t rows = static_cast<int64_t>(keys.shape(0));
  double* to = vector_of<double>(numbers, "numbers", rows);
  const uint64_t* key = static_cast<const uint64_t*>(keys.data());
  for (int64_t row = 0; row < rows; ++row, key += 4) to[row] = philox_uniform(seed, key[0], key[1], key[2], key[3]);
}

void kept_ids(const Input& bits, const Array& ids) {
  check_whole<uint8_t>(bits, "bits", 1);
  check_whole<int32_t>(ids, "ids", 1);
  const uint8_t* from = static_cast<const uint8_t*>(bits.data());
  int32_t* to = static_cast<int32_t*>(ids.data());
  size_t count = 0;
  for (size_t i = 0; i < bits.shape(0); ++i)
    for (int j = 0; from[i] != 0 && j < 8; ++j) {
      if (!(from[i] & 128 >> j)) continue;
      if (count == ids.shape(0)) refuse("ids " + shape_of(ids) + ": the set has more");
      to[count++] = static_cast<int32_t>(8 * i) + j;
    }
  if (count != ids.shape(0)) refuse("ids " + shape_of(ids) + ": the set has " + std::to_string(count));
}

}  // namespace

void bind_lm_head(nb::module_& module) {
  using nb::arg;
  module.def("sample", &sample, arg("x"), arg("head").none(), arg("uniform"), arg("temperature"), arg("top_k"), arg("top_p"), arg("min_p"),
             arg("token"), arg("logprob"), arg("threads"), nb::kw_only(), arg("suppressed_start") = nb::none(), arg("suppressed") = nb::none(),
             arg("replay") = nb::none(), arg("entropy") = nb::none(), arg("kept_bits") = nb::none(), arg("kept_count") = nb::none(),
             arg("top_count") = nb::none(), arg("top_ids") = nb::none(), arg("top_logprobs") = nb::none(),
             "Draw a token of each row of hidden values (or of logits, if head is None), and write it and its log-prob.");
  module.def("token_logprobs", &token_logprobs, arg("x"), arg("head").none(), arg("target"), arg("temperature"), arg("top_k"), arg("top_p"),
             arg("min_p"), arg("logprob"), arg("threads"), nb::kw_only(), arg("suppressed_start") = nb::none(), arg("suppressed") = nb::none(),
             arg("replay") = nb::none(), arg("entropy") = nb::none(), arg("mass") = nb::none(), arg("peak") = nb::none(), arg("total") = nb::none(),
             arg("logits") = nb::none(), arg("kept_bits") = nb::none(), arg("kept_count") = nb::none(),
             "Write the log-probs of given tokens, by the code that `sample` runs; peak, total and the scaled logits are for the backward.");
  module.def("token_logprobs_backward", &token_logprobs_backward, arg("x"), arg("head").none(), arg("target"), arg("temperature"), arg("peak"),
             arg("total"), arg("grad"), arg("grad_logits"), arg("threads"), nb::kw_only(), arg("suppressed_start") = nb::none(),
             arg("suppressed") = nb::none(), arg("replay") = nb::none(), arg("in_place") = false,
             "Write the gradient of the logits (before the temperature); replay has the kept sets of the forward. In place: over the "
             "scaled logits that the forward wrote, with the same bits.");
  module.def("uniform", &uniform, arg("seed"), arg("keys"), arg("numbers"),
             "Write one number in [0, 1) per key [rows, 4] of step, prompt, sample and position, int64.");
  module.def("kept_ids", &kept_ids, arg("bits"), arg("ids"), "Write the ids of a kept set held as bits, int32, ascending.");
}

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <vector>

#include "arrays.h"
#include "program.h"

namespace nb = nanobind;
using namespace zg;

namespace {

// What a Program is made from; holds on to the arrays whose memory the instructions name.
struct Builder {
  std::vector<int64_t> widths;
  std::vector<Instruction> instructions;
  std::vector<Input> held;

  // A vector of floats as long as a value is wide; of any length if the value is negative.
  const float* vector(const Input& array, const char* name, int value) {
    check_whole<float>(array, name, 1);
    if (value >= static_cast<int>(widths.size()) || (value >= 0 && widths[value] != static_cast<int64_t>(array.shape(0))))
      refuse(std::string(name) + " " + shape_of(array) + ": does not fit value " + std::to_string(value));
    held.push_back(array);
    return static_cast<const float*>(array.data());
  }
  Instruction& add(Op op) {
    instructions.emplace_back();
    instructions.back().op = op;
    return instructions.back();
  }
};

struct Held {
  std::vector<Input> arrays;
  std::unique_ptr<Program> program;
};

const int64_t* check_below(const Input& numbers, const char* name, int64_t rows, int64_t end) {
  check_whole<int64_t>(numbers, name, 1);
  if (static_cast<int64_t>(numbers.shape(0)) != rows) refuse(std::string(name) + " " + shape_of(numbers) + ": must be [" + std::to_string(rows) + "]");
  const int64_t* values = static_cast<const int64_t*>(numbers.data());
  for (int64_t row = 0; row < rows; ++row)
    if (values[row] < 0 || values[row] >= end)
      refuse(std::string(name) + ": " + std::to_string(values[row]) + " at row " + std::to_string(row) + " is outside 0 to " + std::to_string(end - 1));
  return values;
}

void run_program(Held& held, const Input& tokens, const Input& positions, const Input& slots, const Input& cos, const Input& sin, const Plan& plan,
                 Cache& cache, const Array& out, int threads) {
  check_threads(threads);
  Program& program = *held.program;
  const int64_t rows = static_cast<int64_t>(tokens.shape(0));
  check_whole<float>(cos, "cos", 2);
  check_whole<float>(sin, "sin", 2);
  if (static_cast<int64_t>(cos.shape(1)) * 2 != cache.head_dim || cos.shape(0) != sin.shape(0) || cos.shape(1) != sin.shape(1))
    refuse("cos " + shape_of(cos) + ", sin " + shape_of(sin) + ": must be [positions, " + std::to_string(cache.head_dim / 2) + "]");
  if (!program.fits(cache)) refuse("the cache's layers or heads are not those of the program");
  if (plan.page_size() != cache.page_size || plan.pages() > cache.pages) refuse("the plan's pages are not those of the cache");
  if (plan.rows() != rows) refuse("tokens " + shape_of(tokens) + ": the plan has " + std::to_string(plan.rows()) + " rows");
  check_whole<float>(out, "out", 2);
  if (static_cast<int64_t>(out.shape(0)) != rows || static_cast<int64_t>(out.shape(1)) != program.out_width())
    refuse("out " + shape_of(out) + ": must be [" + std::to_string(rows) + ", " + std::to_string(program.out_width()) + "]");
  const RunInput input{rows,
                       check_below(tokens, "tokens", rows, program.vocabulary()),
                       check_below(slots, "slots", rows, cache.slots()),
                       check_below(positions, "positions", rows, static_cast<int64_t>(cos.shape(0))),
                       static_cast<const float*>(cos.data()),
                       static_cast<const float*>(sin.data()),
                       &plan,
                       &cache,
                       static_cast<float*>(out.data())};
  nb::gil_scoped_release released;
  program.run(input, threads);
}

}  // namespace

void bind_program(nb::module_& module) {
  nb::class_<Builder>(module, "ProgramBuilder", "Takes the instructions of a forward down, one after the other.")
      .def(nb::init<>())
      .def(
          "value",
          [](Builder& b, int64_t width) {
            if (width < 1) refuse("width = " + std::to_string(width) + ": must be at least 1");
            b.widths.push_back(width);
            return static_cast<int>(b.widths.size()) - 1;
          },
          nb::arg("width"), "Declare rows of `width` floats; return their number.")
      .def(
          "embedding",
          [](Builder& b, int out, const Input& table) {
            const bool bf16 = is_bf16(table);
            check_weight_type(table, "table");
            if (table.ndim() != 2 || (table.shape(1) > 1 && table.stride(1) != 1))
              refuse("table " + shape_of(table) + ": must have 2 dimensions, rows contiguous");
            b.held.push_back(table);
            Instruction& what = b.add(Op::embedding);
            what.out = out, what.weight = table.data(), what.bf16 = bf16, what.table_rows = static_cast<int64_t>(table.shape(0));
            what.table_stride = table.shape(0) > 1 ? table.stride(0) : static_cast<int64_t>(table.shape(1));
            if (out < 0 || out >= static_cast<int>(b.widths.size()) || b.widths[out] != static_cast<int64_t>(table.shape(1)))
              refuse("table " + shape_of(table) + ": its rows do not fit the value");
          },
          nb::arg("out"), nb::arg("table"))
      .def(
          "linear",
          [](Builder& b, int out, int x, std::shared_ptr<Packed> weight, const std::optional<Input>& bias) {
            const float* values = bias ? b.vector(*bias, "bias", out) : nullptr;
            if (bias && static_cast<int64_t>(bias->shape(0)) != weight->out_features) refuse("bias " + shape_of(*bias) + ": does not fit the weight");
            Instruction& what = b.add(Op::linear);
            what.a = x, what.out = out, what.packed = std::move(weight), what.weight = values;
          },
          nb::arg("out"), nb::arg("x"), nb::arg("weight"), nb::arg("bias").none())
      .def(
          "rms_norm",
          [](Builder& b, int out, int x, const Input& weight, float eps) {
            const float* values = b.vector(weight, "weight", x);
            Instruction& what = b.add(Op::rms_norm);
            what.a = x, what.out = out, what.weight = values, what.eps = eps;
          },
          nb::arg("out"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"))
      .def(
          "add",
          [](Builder& b, int sum, int x, int added) {
            Instruction& what = b.add(Op::add);
            what.a = x, what.b = added, what.sum = sum;
          },
          nb::arg("sum"), nb::arg("x"), nb::arg("added"), "x is not to be read afterwards.")
      .def(
          "add_rms_norm",
          [](Builder& b, int out, int sum, int x, int added, const Input& weight, float eps) {
            const float* values = b.vector(weight, "weight", x);
            Instruction& what = b.add(Op::add_rms_norm);
            what.a = x, what.b = added, what.sum = sum, what.out = out, what.weight = values, what.eps = eps;
          },
          nb::arg("out"), nb::arg("sum"), nb::arg("x"), nb::arg("added"), nb::arg("weight"), nb::arg("eps"))
      .def(
          "rotary",
          [](Builder& b, int out, int q, int k, int v, int64_t heads, int64_t layer, const std::optional<Input>& q_norm,
             const std::optional<Input>& k_norm, float eps) {
            if (q_norm.has_value() != k_norm.has_value()) refuse("queries and keys have a norm, or neither");
            const float* of_q = q_norm ? b.vector(*q_norm, "q_norm", -1) : nullptr;
            const float* of_k = k_norm ? b.vector(*k_norm, "k_norm", -1) : nullptr;
            if (heads < 1 || layer < 0) refuse("heads and layer must be at least 1 and 0");
            for (const auto& norm : {q_norm, k_norm})
              if (norm && (q < 0 || q >= static_cast<int>(b.widths.size()) || b.widths[q] != heads * static_cast<int64_t>(norm->shape(0))))
                refuse("norm " + shape_of(*norm) + ": does not fit the heads");
            Instruction& what = b.add(Op::rotary);
            what.a = q, what.b = k, what.c = v, what.out = out, what.heads = heads, what.layer = layer;
            what.q_norm = of_q, what.k_norm = of_k, what.eps = eps;
          },
          nb::arg("out"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("heads"), nb::arg("layer"), nb::arg("q_norm").none(),
          nb::arg("k_norm").none(), nb::arg("eps"))
      .def(
          "attention",
          [](Builder& b, int out, int q, int64_t heads, int64_t layer, float scale) {
            if (heads < 1 || layer < 0) refuse("heads and layer must be at least 1 and 0");
            Instruction& what = b.add(Op::attention);
            what.a = q, what.out = out, what.heads = heads, what.layer = layer, what.scale = scale;
          },
          nb::arg("out"), nb::arg("q"), nb::arg("heads"), nb::arg("layer"), nb::arg("scale"))
      .def(
          "silu_mul",
          [](Builder& b, int out, int gate, int up) {
            Instruction& what = b.add(Op::silu_mul);
            what.a = gate, what.b = up, what.out = out;
          },
          nb::arg("out"), nb::arg("gate"), nb::arg("up"))
      .def(
          "build",
          [](Builder& b) {
            auto held = std::make_unique<Held>();
            held->arrays = b.held;
            held->program = std::make_unique<Program>(b.widths, b.instructions);
            return held.release();
          },
          nb::rv_policy::take_ownership, "Make the program.");
  nb::class_<Held>(module, "Program", "A whole forward; see ProgramBuilder.")
      .def_prop_ro("barriers", [](const Held& held) { return held.program->barriers(); })
      .def_prop_ro("row_floats", [](const Held& held) { return held.program->row_floats(); })
      .def("run", &run_program, nb::arg("tokens"), nb::arg("positions"), nb::arg("slots"), nb::arg("cos"), nb::arg("sin"), nb::arg("plan"),
           nb::arg("cache"), nb::arg("out"), nb::arg("threads"),
           "Run the forward over rows: int64 tokens, positions and slots [R], angles [positions, D / 2]; write the last value into out.");
}

// A whole forward as a list of instructions over rows, run by one team from beginning to end.
//
// The list comes from outside: it is what the caller's model definition did, op by op. Nothing here changes a bit: each
// instruction is the kernel that a single call would run. What is gained is the time between kernels.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cache.h"
#include "linear.h"
#include "plan.h"

namespace zg {

// rotary: queries and keys are normed (where a norm is given) and rotated, keys and values go into the cache.
enum class Op { embedding, linear, add, rms_norm, add_rms_norm, rotary, attention, silu_mul };

// Values are numbered; each is rows of `width` floats.
struct Instruction {
  Op op;
  int a = -1, b = -1, c = -1;  // values that are read
  int out = -1;                // value that is made; add and add_rms_norm also change `a`, which goes on as value `sum`
  int sum = -1;
  std::shared_ptr<Packed> packed;
  const void* weight = nullptr;                            // embedding table, norm weight or bias; must outlive the program
  const float *q_norm = nullptr, *k_norm = nullptr;        // of rotary, or null
  int64_t table_rows = 0, table_stride = 0;
  bool bf16 = false;
  float eps = 0.0f, scale = 0.0f;
  int64_t heads = 0, layer = 0;
};

struct RunInput {
  int64_t rows;
  const int64_t* tokens;  // [rows], checked by the caller
  const int64_t* slots;   // [rows], checked by the caller
  const int64_t* positions;  // [rows], below `angles`
  const float *cos, *sin;    // [angles, D / 2]
  const Plan* plan;
  Cache* cache;
  float* out;  // [rows, width of the last value]
};

class Program {
 public:
  // Throws std::invalid_argument if an instruction reads what was not made, or widths do not fit.
  Program(std::vector<int64_t> widths, std::vector<Instruction> instructions);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void run(const RunInput& input, int threads);  // calls from several threads take turns
  int64_t out_width() const;
  int64_t vocabulary() const { return vocabulary_; }  // rows of the smallest embedding table
  int64_t layers() const { return layers_; }          // that the cache must have at least
  bool fits(const Cache& cache) const;  // heads and layers are those of the program
  int64_t barriers() const;
  int64_t row_floats() const;  // memory per row

 private:
  struct Step {
    Instruction what;
    const Packed* next = nullptr;  // weight of the next linear layer
    bool barrier = false;  // before it: it touches memory that an earlier step may still be at
    Work work;
    explicit Step(Instruction what) : what(std::move(what)) {}
  };
  void check() const;
  void lay_out();
  void execute(Team& team, Work& work, const RunInput& input, const Step& step, const PlanView& plan, int64_t first, int64_t rows);
  float* at(int value) const { return places_[place_of_[value]]; }

  std::mutex turn_;
  std::vector<int64_t> widths_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<int> place_of_;          // memory of each value
  std::vector<int64_t> place_widths_;  // floats per row of each memory
  std::vector<float*> places_;         // during a run
  int last_ = -1;                      // value that a run returns
  float *memory_ = nullptr, *workspace_ = nullptr;
  int64_t memory_floats_ = 0, workspace_floats_ = 0, vocabulary_ = INT64_MAX, layers_ = 0;
};

}  // namespace zg

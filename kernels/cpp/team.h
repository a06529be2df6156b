// Threads: a team runs one function on all its members; idle members sleep.
//
// A kernel is `void kernel(Team&, Work&, const Args&)`, called by every member. It hands out its tasks by
// `work.next()`; each output element belongs to exactly one task, so neither the number of members nor who takes which
// task can change a bit. No barrier stands at a kernel's end: who chains kernels puts `team.barrier()` between.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "paths.h"

namespace zg {

// Hands out the tasks of one kernel call, in ascending order.
struct alignas(64) Work {
  std::atomic<int64_t> taken{0};
  ZG_SHARED int64_t next() { return taken.fetch_add(1, std::memory_order_relaxed); }
  ZG_SHARED int64_t upcoming() const { return taken.load(std::memory_order_relaxed); }  // what the next call of next() gives
  ZG_SHARED void reset() { taken.store(0, std::memory_order_relaxed); }
};

struct Barrier;

struct Team {
  int index;  // of this member, 0 is the caller
  int count;
  Barrier* shared;
  void barrier();
  // Memory of this member, 64-byte aligned, kept between calls; a later call with more bytes may move it.
  float* scratch(size_t floats, int which = 0);
};

using Body = void (*)(Team&, void*);

// Run `body(team, context)` on `threads` members; the caller is one of them. Calls from several threads take turns.
// The floating-point mode is round-to-nearest without flush-to-zero while the body runs; the caller's comes back.
void run_team(int threads, Body body, void* context);

template <class F>
void run(int threads, F&& body) {
  run_team(threads, [](Team& team, void* context) { (*static_cast<F*>(context))(team); }, &body);
}

}  // namespace zg

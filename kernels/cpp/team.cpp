#include "team.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zg {

namespace {

constexpr int SPINS = 3000;  // some 50 microseconds: over the gap between two kernels or two calls, then sleep
constexpr int SCRATCHES = 4;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Round to nearest, subnormal numbers kept, no traps: another library may have set this thread differently.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

struct Scratch {
  float* memory = nullptr;
  size_t floats = 0;
  ~Scratch() { free(memory); }
};
thread_local Scratch scratches[SCRATCHES];

}  // namespace

// Members count themselves in; the last opens the next phase. Waiters spin briefly, then sleep.
struct Barrier {
  alignas(64) std::atomic<int> waiting{0};
  alignas(64) std::atomic<uint32_t> phase{0};

  void wait(int members) {
    const uint32_t now = phase.load(std::memory_order_relaxed);
    if (waiting.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
      waiting.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      phase.notify_all();
      return;
    }
    for (int spin = 0; spin < SPINS; ++spin) {
      if (phase.load(std::memory_order_acquire) != now) return;
      relax();
    }
    while (phase.load(std::memory_order_acquire) == now) phase.wait(now, std::memory_order_acquire);
  }
};

void Team::barrier() {
  if (count > 1) shared->wait(count);
}

float* Team::scratch(size_t floats, int which) {
  Scratch& own = scratches[which];
  if (own.floats < floats) {
    free(own.memory);
    own.memory = nullptr;
    own.floats = 0;
    const size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
    void* memory = aligned_alloc(64, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    own.memory = static_cast<float*>(memory);
    own.floats = bytes / sizeof(float);
  }
  return own.memory;
}

namespace {

class Pool {
 public:
  void run(int threads, Body body, void* context) {
    Barrier barrier;
    if (threads <= 1) {
      work(Team{0, 1, &barrier}, body, context);
      return;
    }
    const std::lock_guard<std::mutex> turn(turn_);
    grow(threads - 1);
    {
      const std::lock_guard<std::mutex> guard(lock_);
      body_ = body, context_ = context, barrier_ = &barrier, members_ = threads;
      running_.store(threads - 1, std::memory_order_relaxed);
      job_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_.notify_all();
    work(Team{0, threads, &barrier}, body, context);
    for (int spin = 0; spin < SPINS; ++spin) {
      if (running_.load(std::memory_order_acquire) == 0) return;
      relax();
    }
    std::unique_lock<std::mutex> guard(lock_);
    done_.wait(guard, [&] { return running_.load(std::memory_order_acquire) == 0; });
  }

 private:
  static void work(Team team, Body body, void* context) {
    const FloatMode mode;
    body(team, context);
  }

  void grow(int workers) {
    while (static_cast<int>(threads_.size()) < workers) {
      const int index = static_cast<int>(threads_.size()) + 1;
      const uint64_t seen = job_.load();
      threads_.emplace_back([this, index, seen] { serve(index, seen); });
      threads_.back().detach();
    }
  }

  void serve(int index, uint64_t seen) {
    for (;;) {
      for (int spin = 0; spin < SPINS && job_.load(std::memory_order_acquire) == seen; ++spin) relax();
      Body body;
      void* context;
      Barrier* barrier;
      int members;
      {
        std::unique_lock<std::mutex> guard(lock_);
        // Counted before the job is looked at, under the lock: a caller that sees no sleeper has not missed one.
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(guard, [&] { return job_.load(std::memory_order_relaxed) != seen; });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        seen = job_.load(std::memory_order_relaxed);
        if (index >= members_) continue;
        body = body_, context = context_, barrier = barrier_, members = members_;
      }
      work(Team{index, members, barrier}, body, context);
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const std::lock_guard<std::mutex> guard(lock_);
        done_.notify_one();
      }
    }
  }

  std::mutex turn_, lock_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  std::atomic<uint64_t> job_{0};
  std::atomic<int> running_{0}, sleepers_{0};
  Body body_ = nullptr;
  void* context_ = nullptr;
  Barrier* barrier_ = nullptr;
  int members_ = 0;
};

// Never destroyed: its sleeping threads may outlive static destructors. A forked child has no workers, so it
// starts with a pool of its own.
Pool* pool = nullptr;
std::once_flag once;

void renew() { pool = new Pool; }

}  // namespace

void run_team(int threads, Body body, void* context) {
  std::call_once(once, [] {
    renew();
    pthread_atfork(nullptr, nullptr, renew);
  });
  pool->run(threads, body, context);
}

}  // namespace zg

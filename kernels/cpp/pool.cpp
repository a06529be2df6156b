#include "pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <new>

namespace zg {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t SPARE_SHARE = 16;  // a block may be this part larger than asked for, and all of them than was ever used

}  // namespace

Pool::Block Pool::take(size_t bytes) {
  const std::lock_guard<std::mutex> lock(turn_);
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  const auto found = idle_.lower_bound(bytes);
  if (found != idle_.end() && found->first <= bytes + bytes / SPARE_SHARE) {
    const Block block{found->second, found->first};
    idle_.erase(found);
    idle_bytes_ -= block.bytes;
    use(block.bytes);
    return block;
  }
  use(bytes);
  const size_t most = peak_bytes_ + peak_bytes_ / SPARE_SHARE, mapped = used_bytes_ + idle_bytes_;
  if (mapped > most) release(mapped - most);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    used_bytes_ -= bytes;
    throw std::bad_alloc();
  }
#if defined(MADV_HUGEPAGE)
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return {data, bytes};
}

void Pool::give(Block block) noexcept {
  const std::lock_guard<std::mutex> lock(turn_);
  used_bytes_ -= block.bytes;
  try {
    idle_.emplace(block.bytes, block.data);
    idle_bytes_ += block.bytes;
  } catch (const std::bad_alloc&) {
    munmap(block.data, block.bytes);
  }
}

void Pool::use(size_t bytes) {
  used_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
}

// Unmaps idle blocks, large ones first, until so many bytes are gone or none is left.
void Pool::release(size_t bytes) {
  size_t gone = 0;
  while (gone < bytes && !idle_.empty()) {
    const auto last = std::prev(idle_.end());
    munmap(last->second, last->first);
    gone += last->first;
    idle_bytes_ -= last->first;
    idle_.erase(last);
  }
}

void Pool::trim() noexcept {
  const std::lock_guard<std::mutex> lock(turn_);
  release(idle_bytes_);
}

size_t Pool::idle_bytes() {
  const std::lock_guard<std::mutex> lock(turn_);
  return idle_bytes_;
}

size_t Pool::used_bytes() {
  const std::lock_guard<std::mutex> lock(turn_);
  return used_bytes_;
}

Pool& pool() {
  static Pool* const the = [] {
    // A child of a fork must not wait for a thread that it does not have.
    pthread_atfork([] { pool().turn().lock(); }, [] { pool().turn().unlock(); }, [] { pool().turn().unlock(); });
    return new Pool;
  }();
  return *the;
}

}  // namespace zg

// Memory of tensors that live for a part of a step: activations and gradients, megabytes each, in a few sizes.
//
// The system's allocator cuts such blocks for smaller ones and soon holds half as much again as is in use; giving every
// one back to the system costs a fifth of a step in page faults. Here a block goes back as a whole, for the next of about
// its size; where there is none and more is mapped than was ever in use, idle blocks are given back to the system.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace zg {

class Pool {
 public:
  struct Block {
    void* data;
    size_t bytes;  // of the mapping
  };

  // A block of at least so many bytes, aligned to pages; its contents are anything. Throws std::bad_alloc.
  Block take(size_t bytes);
  void give(Block block) noexcept;
  // Gives what nobody uses back to the system.
  void trim() noexcept;
  size_t idle_bytes();
  size_t used_bytes();

  std::mutex& turn() { return turn_; }

 private:
  void use(size_t bytes);
  void release(size_t bytes);

  std::mutex turn_;
  std::multimap<size_t, void*> idle_;
  size_t idle_bytes_ = 0, used_bytes_ = 0, peak_bytes_ = 0;
};

// One for the process, never destroyed: tensors may outlive everything.
Pool& pool();

}  // namespace zg

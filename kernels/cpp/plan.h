// Which rows meet which keys: built once per batch, shared by all layers.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "attention.h"

namespace zg {

// Whole chunks that need nothing of the other parts' rows, with their items and joins.
struct Part {
  int64_t first_row, rows;
  std::vector<Item> items;
  std::vector<Join> joins;
};

class Plan {
 public:
  // Per chunk: start, count, first row and where its block table begins in `tables`. Throws std::invalid_argument if a
  // table ends too early, a page is negative or two chunks claim one row.
  Plan(const std::vector<int64_t>& starts, const std::vector<int64_t>& counts, const std::vector<int64_t>& first_rows,
       const std::vector<int64_t>& table_offsets, std::vector<int32_t> tables, int64_t page_size);

  PlanView view() const;
  PlanView view(const Part& part) const;
  // Cuts the batch into `count` parts of nearly the same cost and at least `least` rows each; none if it cannot be done: too few
  // or too uneven chunks, rows out of order, or chunks that read what others of this batch write.
  std::vector<Part> parts(int count, int64_t least) const;
  PlanView backward_view();  // with the groups, which are found at the first call
  int64_t rows() const { return rows_; }    // one more than the last row
  int64_t pages() const { return pages_; }  // one more than the greatest page
  int64_t page_size() const { return page_size_; }
  int64_t chunk_count() const { return static_cast<int64_t>(chunks_.size()); }

 private:
  void check_rows() const;
  void lay_items();
  bool apart(const std::vector<int>& part_of) const;
  void find_groups();

  std::vector<Chunk> chunks_;
  std::vector<Item> items_;
  std::vector<Join> joins_;
  std::vector<int32_t> tables_;
  std::once_flag once_;
  std::vector<int64_t> group_firsts_, group_members_;
  int64_t page_size_, rows_ = 0, pages_ = 0, partials_ = 0, padded_ = 0;
};

}  // namespace zg

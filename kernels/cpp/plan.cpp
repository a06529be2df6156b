#include "plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace zg {

namespace {

[[noreturn]] void refuse(size_t chunk, const std::string& text) {
  throw std::invalid_argument("chunk " + std::to_string(chunk) + ": " + text);
}

constexpr int64_t MOST = int64_t{1} << 40;  // positions and rows: sums of them cannot overflow

}  // namespace

Plan::Plan(const std::vector<int64_t>& starts, const std::vector<int64_t>& counts, const std::vector<int64_t>& first_rows,
           const std::vector<int64_t>& table_offsets, std::vector<int32_t> tables, int64_t page_size)
    : tables_(std::move(tables)), page_size_(page_size) {
  if (page_size < 1 || page_size > MOST) throw std::invalid_argument("page_size = " + std::to_string(page_size) + ": must be at least 1");
  const size_t chunks = starts.size();
  if (counts.size() != chunks || first_rows.size() != chunks || table_offsets.size() != chunks)
    throw std::invalid_argument("start, count, first_row and table_offset have " + std::to_string(chunks) + ", " +
                                std::to_string(counts.size()) + ", " + std::to_string(first_rows.size()) + " and " +
                                std::to_string(table_offsets.size()) + " elements: must be as many");
  chunks_.reserve(chunks);
  for (size_t i = 0; i < chunks; ++i) {
    const Chunk chunk{starts[i], counts[i], first_rows[i], table_offsets[i], padded_};
    if (chunk.start < 0 || chunk.count < 0 || chunk.first_row < 0 || chunk.start > MOST || chunk.count > MOST || chunk.first_row > MOST)
      refuse(i, "start " + std::to_string(chunk.start) + ", count " + std::to_string(chunk.count) + ", first row " +
                    std::to_string(chunk.first_row) + ": must be 0 or more");
    const int64_t length = chunk.count == 0 ? 0 : chunk.start + chunk.count;
    const int64_t pages = (length + page_size - 1) / page_size, entries = static_cast<int64_t>(tables_.size());
    if (chunk.table < 0 || chunk.table > entries || pages > entries - chunk.table)
      refuse(i, "needs " + std::to_string(pages) + " pages from entry " + std::to_string(chunk.table) + " of the tables, which have " +
                    std::to_string(entries));
    for (int64_t page = 0; page < pages; ++page) {
      const int32_t number = tables_[static_cast<size_t>(chunk.table + page)];
      if (number < 0) refuse(i, "page " + std::to_string(number) + ": must be 0 or more");
      pages_ = std::max<int64_t>(pages_, int64_t{number} + 1);
    }
    padded_ += up(length, KEY_PANEL);
    rows_ = std::max(rows_, chunk.first_row + chunk.count);
    chunks_.push_back(chunk);
  }
  check_rows();
  lay_items();
}

void Plan::check_rows() const {
  std::vector<size_t> order(chunks_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return chunks_[a].first_row < chunks_[b].first_row; });
  int64_t end = 0;
  for (size_t index : order) {
    const Chunk& chunk = chunks_[index];
    if (chunk.count == 0) continue;
    if (chunk.first_row < end) refuse(index, "row " + std::to_string(chunk.first_row) + " belongs to another chunk too");
    end = chunk.first_row + chunk.count;
  }
}

// Long sequences and late rows first, so that no member is left with a long task at the end.
void Plan::lay_items() {
  std::vector<size_t> order(chunks_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return chunks_[a].start + chunks_[a].count > chunks_[b].start + chunks_[b].count;
  });
  for (size_t index : order) {
    const Chunk& chunk = chunks_[index];
    if (chunk.count == 0) continue;
    const int64_t splits = (chunk.start + chunk.count - 1) / SPLIT + 1;
    // Few rows, many keys: splits run apart. Many rows give tasks enough, and partial results would take memory.
    const bool apart = splits > 1 && chunk.count <= QUERY_TILE;
    if (apart) {
      for (int64_t split = 0; split < splits; ++split)
        items_.push_back({static_cast<int64_t>(index), 0, chunk.count, split, partials_ + split * chunk.count});
      for (int64_t row = 0; row < chunk.count; ++row)
        joins_.push_back({chunk.first_row + row, partials_ + row, chunk.count, (chunk.start + row) / SPLIT + 1});
      partials_ += splits * chunk.count;
      continue;
    }
    for (int64_t first = (chunk.count - 1) / QUERY_TILE * QUERY_TILE; first >= 0; first -= QUERY_TILE)
      items_.push_back({static_cast<int64_t>(index), first, std::min(QUERY_TILE, chunk.count - first), -1, 0});
  }
}

void Plan::find_groups() {
  // Union of chunks by pages; the root is the group's first chunk.
  std::vector<int64_t> root(chunks_.size()), owner(static_cast<size_t>(pages_), -1);
  std::iota(root.begin(), root.end(), int64_t{0});
  const auto find = [&](int64_t i) {
    while (root[static_cast<size_t>(i)] != i) {
      int64_t& parent = root[static_cast<size_t>(i)];
      parent = root[static_cast<size_t>(parent)];
      i = parent;
    }
    return i;
  };
  std::vector<int64_t> cost(chunks_.size(), 0);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    const int64_t length = chunk.count == 0 ? 0 : chunk.start + chunk.count;
    for (int64_t page = 0; page < (length + page_size_ - 1) / page_size_; ++page) {
      int64_t& first = owner[static_cast<size_t>(tables_[static_cast<size_t>(chunk.table + page)])];
      if (first < 0) {
        first = static_cast<int64_t>(i);
        continue;
      }
      const int64_t a = find(first), b = find(static_cast<int64_t>(i));
      root[static_cast<size_t>(std::max(a, b))] = std::min(a, b);
    }
  }
  std::vector<std::vector<int64_t>> groups(chunks_.size());
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    if (chunk.count == 0) continue;
    const size_t group = static_cast<size_t>(find(static_cast<int64_t>(i)));
    groups[group].push_back(static_cast<int64_t>(i));
    cost[group] += chunk.count * (2 * chunk.start + chunk.count);
  }
  std::vector<size_t> order;
  for (size_t i = 0; i < groups.size(); ++i)
    if (!groups[i].empty()) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return cost[a] > cost[b]; });
  group_firsts_.push_back(0);
  for (size_t i : order) {
    group_members_.insert(group_members_.end(), groups[i].begin(), groups[i].end());
    group_firsts_.push_back(static_cast<int64_t>(group_members_.size()));
  }
}

PlanView Plan::view() const {
  PlanView view{};
  view.chunks = chunks_.data();
  view.chunk_count = static_cast<int64_t>(chunks_.size());
  view.items = items_.data();
  view.item_count = static_cast<int64_t>(items_.size());
  view.joins = joins_.data();
  view.join_count = static_cast<int64_t>(joins_.size());
  view.partials = partials_;
  view.tables = tables_.data();
  view.page_size = page_size_;
  view.padded = padded_;
  return view;
}

PlanView Plan::view(const Part& part) const {
  PlanView view = this->view();
  view.items = part.items.data();
  view.item_count = static_cast<int64_t>(part.items.size());
  view.joins = part.joins.data();
  view.join_count = static_cast<int64_t>(part.joins.size());
  return view;
}

// Whether no chunk has a page to which a chunk of another part writes.
bool Plan::apart(const std::vector<int>& part_of) const {
  std::vector<int> writer(static_cast<size_t>(pages_), -1);
  const auto page = [&](const Chunk& chunk, int64_t i) { return static_cast<size_t>(tables_[static_cast<size_t>(chunk.table + i)]); };
  for (size_t c = 0; c < chunks_.size(); ++c) {
    const Chunk& chunk = chunks_[c];
    for (int64_t i = chunk.start / page_size_; i * page_size_ < chunk.start + chunk.count && chunk.count > 0; ++i) {
      int& its = writer[page(chunk, i)];
      if (its >= 0 && its != part_of[c]) return false;
      its = part_of[c];
    }
  }
  for (size_t c = 0; c < chunks_.size(); ++c) {
    const Chunk& chunk = chunks_[c];
    for (int64_t i = 0; i * page_size_ < chunk.start && chunk.count > 0; ++i) {
      const int its = writer[page(chunk, i)];
      if (its >= 0 && its != part_of[c]) return false;
    }
  }
  return true;
}

std::vector<Part> Plan::parts(int count, int64_t least) const {
  if (count < 2 || rows_ < count * least) return {};
  // A row costs what its weights do and what its keys do; 512 keys are taken for as much as the weights of all layers.
  constexpr int64_t WEIGHTS = 512;
  int64_t total = 0, end = 0;
  const auto cost = [](const Chunk& chunk) { return chunk.count * (WEIGHTS + chunk.start + chunk.count / 2); };
  for (const Chunk& chunk : chunks_) {
    if (chunk.first_row != end) return {};
    end += chunk.count;
    total += cost(chunk);
  }
  std::vector<Part> parts(static_cast<size_t>(count));
  std::vector<int> part_of(chunks_.size());
  std::vector<int64_t> costs(static_cast<size_t>(count), 0);
  int64_t before = 0;
  for (size_t c = 0; c < chunks_.size(); ++c) {
    const Chunk& chunk = chunks_[c];
    const int64_t middle = before + cost(chunk) / 2;
    const int part = std::min<int>(count - 1, static_cast<int>(middle / (total / count + 1)));
    part_of[c] = part;
    Part& its = parts[static_cast<size_t>(part)];
    if (its.rows == 0) its.first_row = chunk.first_row;
    its.rows += chunk.count;
    costs[static_cast<size_t>(part)] += cost(chunk);
    before += cost(chunk);
  }
  for (size_t part = 0; part < parts.size(); ++part)
    if (parts[part].rows < least || costs[part] > total / count * 9 / 8) return {};
  if (!apart(part_of)) return {};
  for (const Item& item : items_) parts[static_cast<size_t>(part_of[static_cast<size_t>(item.chunk)])].items.push_back(item);
  for (const Join& join : joins_)
    for (Part& part : parts)
      if (join.row >= part.first_row && join.row < part.first_row + part.rows) part.joins.push_back(join);
  return parts;
}

PlanView Plan::backward_view() {
  std::call_once(once_, [this] { find_groups(); });
  PlanView view = this->view();
  view.group_firsts = group_firsts_.data();
  view.group_members = group_members_.data();
  view.group_count = static_cast<int64_t>(group_firsts_.size()) - 1;
  return view;
}

int64_t attention_workspace(const PlanView& plan, int64_t heads, int64_t kv_heads, int64_t head_dim, bool packed) {
  const int64_t width = up(head_dim, KEY_PANEL);
  const int64_t partials = plan.partials * heads * (width + KEY_PANEL);
  return partials + (packed ? plan.padded * kv_heads * (head_dim + width) : 0);
}

}  // namespace zg

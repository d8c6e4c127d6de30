#include "core/free_lists.h"

#include <algorithm>

namespace mg {

namespace {
constexpr int looks = 16;  // of best_covered
}

Block* FreeLists::best_covered(size_t size, Kind kind, Stream owner, Tag tag, uint64_t cover) const {
  const FreeList* list = known_list(kind, owner, tag);
  if (list == nullptr) return nullptr;
  auto place = list->lower_bound(size);
  for (int i = 0; i < looks && place != list->end(); i++, ++place) {
    if ((*place)->point <= cover) return *place;
  }
  return nullptr;
}

Block* FreeLists::best_settled(size_t size) const {
  Block* best = nullptr;
  for (Kind kind : {Kind::small, Kind::large}) {
    for (auto& [condition, list] : lists(kind)) {
      if (condition.tag != settled) continue;
      Block* found = this->best(size, kind, condition.stream, &condition.tag, 1);
      if (found != nullptr && (best == nullptr || BySize()(found, best))) best = found;
    }
  }
  return best;
}

bool FreeLists::has(const Block* block) const {
  const Lists& of_kind = lists(block->segment->kind);
  auto list = of_kind.find({block->stream, block->tag});
  return list != of_kind.end() && list->second.count(const_cast<Block*>(block)) != 0;
}

size_t FreeLists::blocks() const {
  size_t count = 0;
  for (const Lists& of_kind : lists_) {
    for (auto& [condition, list] : of_kind) count += list.size();
  }
  return count;
}

bool FreeLists::keeps_an_empty_list() const {
  for (const Lists& of_kind : lists_) {
    for (auto& [condition, list] : of_kind) {
      if (list.empty() && condition.tag != settled) return true;
    }
  }
  return false;
}

}  // namespace mg

// The free blocks of plain and of a stream's own expandable segments, where a request finds them.
//
// Why: a free block may be used again only by whoever meets its condition, the stream and tag under which it was freed.
// So there is one list for each condition and kind of size, ordered by size: what a request may have is in few lists, and
// the smallest block that fits is found in each without looking at others.
// In: blocks with their condition set, from the pool. Out: a block that fits, which stays listed until it is removed.
//
// Guarantee: a free block is in exactly one list, that of its kind, stream and tag, and knows its place there, so that it
// is removed without a search. A list under a tag ends with its last block. A settled list stays when it is empty, so the
// one that was asked for last is remembered, and a program that allocates on one stream finds its list without a look-up.
#pragma once

#include <string>
#include <unordered_map>

#include "core/block.h"
#include "core/size_class.h"

namespace mg {

struct Condition {
  Stream stream;
  Tag tag;
  bool operator==(const Condition& other) const { return stream == other.stream && tag == other.tag; }
};

struct ConditionHash {
  size_t operator()(const Condition& c) const {
    return std::hash<Stream>()(c.stream) * 31 + std::hash<Tag>()(c.tag);
  }
};

class FreeLists {
 public:
  using Kind = size_class::Kind;  // small or large

  // A block whose segment, stream and tag are set and that is in no list.
  void add(Block* block) {
    FreeList& list = list_of(block->segment->kind, block->stream, block->tag);
    if (block->node.empty()) {
      block->place = list.insert(block).first;
    } else {
      block->node.value() = block;
      block->place = list.insert(std::move(block->node)).position;
    }
    block->in = &list;
  }

  void remove(Block* block) {
    block->node = block->in->extract(block->place);
    if (block->tag != settled && block->in->empty()) lists(block->segment->kind).erase({block->stream, block->tag});
    block->in = nullptr;
  }

  // The smallest block of at least `size` bytes under one of `tags`; null: there is none.
  Block* best(size_t size, Kind kind, Stream stream, const Tag* tags, size_t count) const {
    Block* best = nullptr;
    for (size_t i = 0; i < count; i++) {
      const FreeList* list = known_list(kind, stream, tags[i]);
      if (list == nullptr) continue;
      auto place = list->lower_bound(size);
      if (place == list->end()) continue;
      if (best == nullptr || BySize()(*place, best)) best = *place;
    }
    return best;
  }

  // The same of another stream's blocks: one that was freed at its point `cover` or before. It looks at few blocks and may
  // miss one.
  Block* best_covered(size_t size, Kind kind, Stream owner, Tag tag, uint64_t cover) const;

  // The smallest settled block of any stream and of either kind.
  Block* best_settled(size_t size) const;

  // For `Pool::verify`.
  bool has(const Block* block) const;
  size_t blocks() const;
  bool keeps_an_empty_list() const;

 private:
  using Lists = std::unordered_map<Condition, FreeList, ConditionHash>;
  Lists& lists(Kind kind) { return lists_[static_cast<size_t>(kind)]; }
  const Lists& lists(Kind kind) const { return lists_[static_cast<size_t>(kind)]; }

  FreeList& list_of(Kind kind, Stream stream, Tag tag) {
    if (tag != settled) return lists(kind)[{stream, tag}];
    Last& last = last_[static_cast<size_t>(kind)];
    if (last.list == nullptr || last.stream != stream) last = {stream, &lists(kind)[{stream, tag}]};
    return *last.list;
  }

  const FreeList* known_list(Kind kind, Stream stream, Tag tag) const {
    const Last& last = last_[static_cast<size_t>(kind)];
    if (tag == settled && last.stream == stream && last.list != nullptr) return last.list;
    auto list = lists(kind).find({stream, tag});
    return list == lists(kind).end() ? nullptr : &list->second;
  }

  struct Last {
    Stream stream = nobody;
    FreeList* list = nullptr;
  };
  Lists lists_[2];  // by kind
  Last last_[2];    // the settled list that was asked for last
};

}  // namespace mg

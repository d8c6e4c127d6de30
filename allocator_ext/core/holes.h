// The free memory of shared segments, which serve captures: holes, and runs of blocks within them.
//
// Why: in a shared segment the streams of a capture take turns. A request may take several neighbours that are free under
// different conditions, if its stream may have each of them; a list for each condition would not show that they lie side
// by side. So free neighbours are kept as one *hole*, whatever their conditions, and a request looks within a hole for a
// *run*: neighbours of which its stream may have each.
//
// An example. A segment holds, from left to right, in KiB:
//
//     address   0     512   1024  1536  2048        4096
//               | A   | B   | C   | live| D         |
//                 512   512   512   512   2048
//     tag         0     7     9           0
//
// A, B, C and D are free; A and D are settled, B was freed by proof in a period with tag 7, C under tag 9. There are two
// holes: 0..1536 (blocks A, B, C) and 2048..4096 (block D). A stream whose tags are 6 and 7 asks for 1024. The smallest
// hole of at least 1024 is 0..1536. In it the stream may have A and B but not C, so the run is A and B: 1024, which fit.
// They become one block under the stricter of their conditions. A stream whose tags are 8 and 9 would find no
// run of 1024 there (A alone, then C alone: 512 each), go on to the next larger hole, and take the beginning of D.
//
// In: free blocks, one at a time, from the pool. Out: runs.
// Guarantee: each free block of a shared segment is in exactly one hole, a hole has no free neighbour, and its first and
// last block know each other and its bytes. So adding a block looks at its two neighbours alone.
#pragma once

#include <cstddef>
#include <map>
#include <set>

#include "core/block.h"
#include "core/placement.h"

namespace mg {

// Neighbours that one stream may have.
struct Run {
  Block* first = nullptr;  // null: there is none
  size_t bytes = 0;
};

class Holes {
 public:
  // A block of a shared segment that is free now; the holes beside it and it are one.
  void add(Block* block);

  // A block that is no longer free. What is left of its hole are two holes, one or none.
  void remove(Block* block);

  // Of the smallest hole that has such a run, the smallest run of blocks that are each `usable` and have `size` bytes
  // together. It looks at `most_looks` blocks and may miss some.
  template <class Usable>
  Run best(size_t size, Usable usable) const {
    size_t looks = most_looks;
    for (auto hole = by_size_.lower_bound({size, nullptr}); hole != by_size_.end(); ++hole) {
      Block *best = nullptr, *start = nullptr;
      size_t bytes = 0, best_bytes = 0;
      for (Block* block = hole->first;; block = block->next) {
        bool free = block != nullptr && block->state == BlockState::free;
        if (free && usable(*block)) {
          if (start == nullptr) start = block;
          bytes += block->size;
        } else {
          if (bytes >= size && (best == nullptr || bytes < best_bytes)) {
            best = start;
            best_bytes = bytes;
          }
          start = nullptr;
          bytes = 0;
        }
        if (!free) break;
        if (looks-- == 0) return {};
      }
      if (best != nullptr) return {best, best_bytes};
    }
    return {};
  }

  // The first block of such a run at the lowest address that has one.
  template <class Usable>
  Block* lowest(size_t size, Usable usable) const {
    size_t looks = most_looks;
    for (auto& [address, hole] : by_address_) {
      Block* start = nullptr;
      size_t bytes = 0;
      for (Block* block = hole; block != nullptr && block->state == BlockState::free; block = block->next) {
        if (looks-- == 0) return nullptr;
        if (hole->hole_bytes < size) break;
        bool fits = usable(*block);
        start = !fits ? nullptr : start != nullptr ? start : block;
        bytes = fits ? bytes + block->size : 0;
        if (bytes >= size) return start;
      }
    }
    return nullptr;
  }

  // What is `usable` up to the ends of pages, and which pages are as a whole (placement.h). It looks at
  // `most_looks_for_ends` blocks.
  template <class Usable>
  Ends ends(Usable usable) const {
    Ends found;
    size_t looks = most_looks_for_ends;
    for (auto& [address, hole] : by_address_) {
      const Block* block = hole;
      while (block != nullptr && block->state == BlockState::free) {
        size_t bytes = 0;
        Address start = block->address;
        for (; block != nullptr && block->state == BlockState::free && usable(*block); block = block->next) {
          if (looks-- == 0) return found;
          bytes += block->size;
        }
        if (bytes != 0) {
          found.add(hole->segment->address, start, start + bytes);
        } else {
          if (looks-- == 0) return found;
          block = block->next;
        }
      }
    }
    return found;
  }

  // The free block in which this address lies. There is one.
  Block* at(Address address) const;

  // For `Pool::verify`.
  bool begins(const Block* block) const;
  size_t count() const { return by_size_.size(); }
  bool alike() const { return by_size_.size() == by_address_.size(); }

 private:
  struct Hole {
    size_t bytes;
    Block* first;
    bool operator<(const Hole& other) const {
      return bytes != other.bytes ? bytes < other.bytes : address() < other.address();
    }
    Address address() const { return first != nullptr ? first->address : 0; }
  };
  // The hole that ends where a block begins, and the one that begins where it ends; no bytes: there is none.
  static Hole before(const Block* block);
  static Hole behind(const Block* block);
  void insert(Block* first, Block* last, size_t bytes);
  void erase(const Hole& hole);

  static constexpr size_t most_looks = 1024, most_looks_for_ends = 4096;
  std::set<Hole> by_size_;
  std::map<Address, Block*> by_address_;  // the first block of each
};

}  // namespace mg

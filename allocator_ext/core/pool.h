// A pool: segments cut into blocks, and the free ones where they can be found.
//
// In: segments from the driver, blocks that may be used again under a condition (stream and tag). Out: blocks that fit.
// Small and large segments have lists of their own. In shared ones streams take turns, and who comes next may have several
// neighbours under different conditions; there the lists are of holes.
// A free block under a condition goes to who meets it; neighbours are one block again as soon as their conditions agree,
// where settled agrees with any of its stream, and what is merged has the stricter one.
// Invariant: `verify` of this file. No driver is called here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/block.h"
#include "core/size_class.h"
#include "core/window.h"

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

class Pool {
 public:
  explicit Pool(PoolId id_) : id(id_) {}
  ~Pool();

  const PoolId id;
  int users = 0;            // begun and not yet released
  bool use_on_oom = false;
  bool captured = false;    // a capture has used it since it was last held by nobody
  size_t limit = 0;         // bytes of segments; 0: none
  size_t reserved = 0;
  size_t tagged = 0;        // free blocks that are not settled
  size_t lent = 0;          // bytes that serve others, until they are over

  using Kind = size_class::Kind;

  // The smallest free block of at least `size` under one of `tags`; none: null. It stays free until it is taken.
  Block* best(size_t size, Kind kind, Stream stream, const Tag* tags, size_t count) const;

  // The same for another stream's blocks, those freed at its point `cover` or before; looks at few and may miss one.
  Block* best_covered(size_t size, Kind kind, Stream owner, Tag tag, uint64_t cover) const;

  // The smallest settled block of any stream and of whichever kind, but none of what captures share.
  Block* best_settled(size_t size) const;

  // A new segment, as one free block of `stream`.
  Block* add_segment(Address address, size_t size, Stream stream, Kind kind);

  // A new expandable segment, nothing of it mapped.
  Segment* add_range(Address address, size_t size, Stream stream, Kind kind);

  // Where `bytes` more of the stream's expandable segments would make free memory for `size`, with what lies before it
  // and is `usable`; null: nowhere.
  struct Room {
    Block* unmapped = nullptr;
    size_t bytes = 0;
  };
  template <class Usable>
  Room room(size_t size, Stream stream, Kind kind, Usable usable) const {
    Room best;
    for (auto& [address, segment] : segments_) {
      if (!segment->expandable || segment->home != stream || segment->kind != kind) continue;
      for (auto& [start, block] : segment->open) {
        size_t has = 0;
        for (const Block* b = block->previous; b != nullptr && has < size && usable(*b); b = b->previous) has += b->size;
        size_t least = size_class::mapped(has < size ? size - has : size_class::grain, size, Kind::shared);
        size_t bytes = std::max(least, std::min(size_class::mapped(least, size, kind), block->size));
        if (bytes <= block->size && (best.unmapped == nullptr || bytes < best.bytes)) best = {block, bytes};
      }
    }
    return best;
  }

  // The first `bytes` of an unmapped block are mapped now; the free block that they are, or are a part of.
  Block* mapped(Block* block, size_t bytes);

  // The first chunk of an expandable segment from `from` on that is free and settled, of whichever streams; 0: none.
  static Address free_chunk(const Segment& segment, Address from);
  // A chunk that was taken is no longer mapped.
  void unmapped(Block* chunk);
  // An expandable segment without mapped memory ends.
  void drop(Segment& segment);

  // Takes a free block out of the lists, cut to `size` where the rest is worth it.
  Block* take(Block* block, size_t size);

  // Takes exactly this range, which is mapped and free and settled, of whichever streams it is in parts.
  Block* take_at(Address address, size_t size);

  // In shared segments: of the smallest hole that has so much, the smallest run of free neighbours that are each `usable`
  // and have `size` bytes together. Looks at few blocks and may miss some.
  struct Run {
    Block* first = nullptr;  // null: there is none
    size_t bytes = 0;
  };
  template <class Usable>
  Run best_shared(size_t size, Usable usable) const {
    size_t looks = most_looks;
    for (auto hole = holes_.lower_bound({size, nullptr}); hole != holes_.end(); ++hole) {
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

  // The same, at the lowest address that has it.
  template <class Usable>
  Block* lowest_shared(size_t size, Usable usable) const {
    size_t looks = most_looks;
    for (auto& [address, hole] : holes_at_) {
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

  // What of shared pages is free and `usable` up to their ends, and which are as a whole; looks at few blocks too.
  template <class Usable>
  Ends ends(Usable usable) const {
    Ends found;
    size_t looks = most_looks_for_ends;
    for (auto& [address, hole] : holes_at_) {
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

  // What of a free block lies from `address` on, to be taken at once.
  Block* from(Block* block, Address address) { return block->address < address ? split(block, address) : block; }

  // The free block of a shared segment that begins here, cut off what lies before it where that is free too.
  Block* free_from(Address address);
  // The free block that begins here, as one with its neighbours where they agree.
  void rejoin(Address address);

  // Windows: window.cc. One whose pages are yet to be mapped; it is kept by its address.
  Window& add_window(Address address, size_t size);
  // Page `page` of a shared segment is mapped as the next of this window; and the last is no longer.
  void add_page(Window& window, Address page);
  void remove_page(Window& window);
  void drop(Window& window);
  // A live block at an address in this window, of pieces that are free or live, in their order: they are lent.
  Block* open(Window& window, Address address, size_t size, const std::vector<Block*>& pieces);
  // The block ends, and is gone; its pieces, which wait to be given.
  std::vector<Block*> close(Window& window);
  // The window of this number, if all of it is still mapped; else null.
  Window* window(uint64_t serial) const;
  const std::map<Address, std::unique_ptr<Window>>& windows() const { return windows_; }
  size_t window_pages = 0;  // in all windows
  // The chunk of a shared segment that begins here; null: there is none.
  Chunk* chunk_at(Address address) const;

  // One free block of `size` out of a run of free ones, under a condition that holds all of theirs; what is left of the
  // last keeps its own.
  Block* gather(Block* first, size_t size, Stream stream, Tag tag);

  // Whether all of this range is mapped memory of the pool, in one segment.
  bool maps(Address address, size_t size) const;

  // Puts a block that was taken back under a condition; the block that it has become a part of.
  Block* give(Block* block, Stream stream, Tag tag, uint64_t point, const std::vector<Node>& markers);

  // A free block, now under this condition of its stream.
  Block* bind(Block* block, Tag tag);

  // A free block that must not be used before `settle`.
  void withhold(Block* block);

  // No capture is under way: what was freed in one is free for its segment's home stream, or for the one on which it was
  // also used outside.
  void settle();

  // Segments of which all is free and settled: taken out of the pool, for the caller to give to the driver, which waits
  // for the device before it takes them.
  std::vector<std::unique_ptr<Segment>> cut_cached(uint64_t not_used_since = UINT64_MAX);
  void put_back(std::unique_ptr<Segment> segment);

  // What is wrong with the pool, or nothing.
  std::string verify() const;

  const std::map<Address, std::unique_ptr<Segment>>& segments() const { return segments_; }

 private:
  using Free = std::unordered_map<Condition, FreeList, ConditionHash>;
  Free& lists(Kind kind) { return lists_[static_cast<size_t>(kind)]; }
  const Free& lists(Kind kind) const { return lists_[static_cast<size_t>(kind)]; }
  // Neighbours that are free, under whichever conditions, in a shared segment.
  struct Hole {
    size_t bytes;
    Block* first;
    bool operator<(const Hole& other) const {
      return bytes != other.bytes ? bytes < other.bytes : address() < other.address();
    }
    Address address() const { return first != nullptr ? first->address : 0; }
  };
  // Settled lists stay when they are empty, so the one that was asked for last is found at once.
  FreeList& list_of(Kind kind, Stream stream, Tag tag);
  const FreeList* known_list(Kind kind, Stream stream, Tag tag) const;
  // A block behind `left` under its condition, in no list; and the end of one.
  Block* behind_of(Block* left, Address at);
  void prepare();
  void retire(Block* block);
  static Hole before(const Block* block);
  static Hole behind(const Block* block);
  void list_hole(Block* first, Block* last, size_t bytes);
  void forget_hole(const Hole& hole);
  void unlist_hole(Block* block);
  void unlist(Block* block);
  void list(Block* block);
  Block* split(Block* block, Address at);
  void absorb(Block* left);
  std::string verify_windows() const;
  static bool agree(const Block* left, const Block* right);
  void fuse(Block* left);
  Block* join(Block* block, bool settled_only = false);

  std::map<Address, std::unique_ptr<Segment>> segments_;
  Free lists_[2];
  static constexpr size_t most_looks = 1024, most_looks_for_ends = 4096;
  std::set<Hole> holes_;                 // all of shared segments
  std::map<Address, Block*> holes_at_;   // the same, by address
  std::map<Address, std::unique_ptr<Window>> windows_;
  uint64_t last_window_ = 0;
  struct Last {
    Stream stream = nobody;
    FreeList* list = nullptr;
  } last_[2];
  std::vector<Block*> spare_;  // blocks of no segment
};

}  // namespace mg

// A pool: segments cut into blocks, and the free ones where they can be found.
//
// In: segments from the driver, blocks that may be used again under a condition (stream and tag). Out: blocks that fit.
// A free block under a condition goes to who meets it; neighbours are one block again as soon as their conditions agree,
// where settled agrees with any of its stream, and what is merged has the stricter one.
// Invariant: `verify` of this file. No driver is called here.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/block.h"
#include "core/size_class.h"

namespace mg {

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->address < b->address;
  }
};

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

  const PoolId id;
  int users = 0;            // begun and not yet released
  bool use_on_oom = false;
  size_t limit = 0;         // bytes of segments; 0: none
  size_t reserved = 0;
  size_t tagged = 0;        // free blocks that are not settled

  // The smallest free block of at least `size` under one of `tags`; none: null. It stays free until it is taken.
  Block* best(size_t size, Stream stream, const Tag* tags, size_t count) const;

  // The same for another stream's blocks, those freed at its point `cover` or before; looks at few and may miss one.
  Block* best_covered(size_t size, Stream owner, Tag tag, uint64_t cover) const;

  // The smallest settled block of any stream.
  Block* best_settled(size_t size) const;

  // A new segment, as one free block of `stream`.
  Block* add_segment(Address address, size_t size, Stream stream, bool small);

  // A new expandable segment, nothing of it mapped.
  Segment* add_range(Address address, size_t size, Stream stream, bool small);

  // Where `bytes` more of the stream's expandable segments would make a free block of `size`; null: nowhere.
  struct Room {
    Block* unmapped = nullptr;
    size_t bytes = 0;
  };
  Room room(size_t size, Stream stream, bool small) const;

  // The first `bytes` of an unmapped block are mapped now; the free block that they are, or are a part of.
  Block* mapped(Block* block, size_t bytes);

  // The first granule of an expandable segment from `from` on that is free and settled, of whichever streams; 0: none.
  static Address free_granule(const Segment& segment, Address from);
  // A granule that was taken is no longer mapped.
  void unmapped(Block* granule);
  // An expandable segment without mapped memory ends.
  void drop(Segment& segment);

  // Takes a free block out of the lists, cut to `size` where the rest is worth it.
  Block* take(Block* block, size_t size);

  // Takes exactly this range, which is mapped and free and settled, of whichever streams it is in parts.
  Block* take_at(Address address, size_t size);

  // Whether all of this range is mapped memory of the pool, in one segment.
  bool maps(Address address, size_t size) const;

  // Puts a block that was taken back under a condition; the block that it has become a part of.
  Block* give(Block* block, Stream stream, Tag tag, uint64_t point, const std::vector<Node>& markers);

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
  using Free = std::unordered_map<Condition, std::set<Block*, BySize>, ConditionHash>;
  Free& lists(const Block* block) { return block->segment->small ? small_ : large_; }
  void unlist(Block* block);
  void list(Block* block);
  Block* split(Block* block, Address at);
  bool merge(Block* left, Block* right);
  Block* join(Block* block);

  std::map<Address, std::unique_ptr<Segment>> segments_;
  Free small_, large_;
};

}  // namespace mg

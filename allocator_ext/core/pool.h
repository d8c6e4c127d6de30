// A pool: segments cut into blocks, and the free ones where they can be found.
//
// In: segments from whoever supplies memory, and blocks that may be used again under a condition (stream and tag). Out:
// blocks that fit a request. The pool cuts blocks and makes neighbours one; where free memory is found is kept by three
// structures, each with a guarantee of its own:
//   FreeLists  free blocks of a stream's own segments, by condition and size (free_lists.h)
//   Holes      free neighbours in shared segments, under whichever conditions (holes.h)
//   Windows    pages of shared segments that are mapped a second time (windows.h)
// A free block under a condition goes to who meets that condition. Neighbours are one block again as soon as their
// conditions agree: a settled block agrees with any of its stream, and what is merged has the stricter condition.
// Guarantee: what `verify` says (verify.cc). No driver is called here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/block.h"
#include "core/free_lists.h"
#include "core/holes.h"
#include "core/host_memory.h"
#include "core/size_class.h"
#include "core/windows.h"

namespace mg {

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
  bool asleep = false;      // nothing of it is handed out, and nothing may be used (sleep.cc)
  bool asleep_with_all = false;
  size_t away = 0;          // bytes of `reserved` that sleep has given to the device
  HostCopy kept;            // contents, while asleep

  using Kind = size_class::Kind;

  // Where free memory is found. What is found stays there until it is taken.
  const FreeLists& lists() const { return lists_; }
  const Holes& holes() const { return holes_; }
  Windows& windows() { return windows_; }
  const Windows& windows() const { return windows_; }

  const std::map<Address, std::unique_ptr<Segment>>& segments() const { return segments_; }

  // A new segment, as one free block of `stream`.
  Block* add_segment(Address address, size_t size, Stream stream, Kind kind);

  // Segments of which all is free and settled: taken out of the pool, for the caller to give to the driver, which waits
  // for the device before it takes them.
  std::vector<std::unique_ptr<Segment>> cut_cached(uint64_t not_used_since = UINT64_MAX);
  void put_back(std::unique_ptr<Segment> segment);

  // A new expandable segment, nothing of it mapped.
  Segment* add_range(Address address, size_t size, Stream stream, Kind kind);

  // Where pages that are mapped now would make free memory for `size` bytes, and how many bytes of them are missing: behind
  // what is free and `usable` and ends at unmapped memory. Of all such places the one where the least is missing; no block:
  // there is none.
  //
  // An example. The pool's large segment of a stream has 20 MiB mapped, of which the last 3 MiB are free, then unmapped
  // memory. A request of 11.5 MiB misses 8.5 MiB there. Whole pages are mapped, so 10 MiB; the request takes the 3 MiB that
  // were free and 8.5 MiB of the new ones, and 1.5 MiB stay free behind it. For a request of 4 MiB only 1 MiB is missing,
  // but requests below 10 MiB are many: 20 MiB are mapped at once, so that the next ones find memory.
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
  // A chunk that was taken is no longer mapped.
  void unmapped(Block* chunk);
  // Calls `each(segment, address, chunk)` for what expandable segments have mapped, or had before the pool slept.
  template <class Each>
  void each_chunk(Each each) const {
    for (auto& [address, segment] : segments_) {
      for (auto& [start, chunk] : segment->chunks) each(*segment, start, chunk);
    }
  }
  // The first chunk of an expandable segment from `from` on that is free and settled, of whichever streams; 0: none.
  static Address free_chunk(const Segment& segment, Address from);
  // The chunk of a shared segment that begins here; null: there is none.
  Chunk* chunk_at(Address address) const;
  // An expandable segment without mapped memory ends.
  void drop(Segment& segment) { segments_.erase(segment.address); }

  // Takes a free block out of where it is found, cut to `size` where the rest is worth it.
  Block* take(Block* block, size_t size);

  // Takes exactly this range, which is mapped and free and settled, of whichever streams it is in parts.
  Block* take_at(Address address, size_t size);

  // What of a free block lies from `address` on, to be taken at once.
  Block* from(Block* block, Address address) { return block->address < address ? split(block, address) : block; }

  // The free block of a shared segment that begins here, cut off what lies before it where that is free too.
  Block* free_from(Address address) { return from(holes_.at(address), address); }
  // The free block that begins here, as one with its neighbours where they agree.
  void rejoin(Address address);

  // One free block of `size` out of a run of free ones, under a condition that holds all of theirs; what is left of the
  // last keeps its own.
  Block* gather(Block* first, size_t size, Stream stream, Tag tag);

  // Whether all of this range is mapped memory of the pool, in one segment.
  bool maps(Address address, size_t size) const;

  // A live block at an address in this window, of pieces that are free or live, in their order: they are lent.
  Block* open(Window& window, Address address, size_t size, const std::vector<Block*>& pieces);
  // The block ends, and is gone; its pieces, which wait to be given.
  std::vector<Block*> close(Window& window);

  // Puts a block that was taken back under a condition; the block that it has become a part of.
  Block* give(Block* block, Stream stream, Tag tag, uint64_t point, const std::vector<Node>& markers);

  // A free block, now under this condition of its stream.
  Block* bind(Block* block, Tag tag);

  // A free block that must not be used before `settle`.
  void withhold(Block* block);

  // No capture is under way: what was freed in one is free for its segment's home stream, or for the one on which it was
  // also used outside.
  void settle();

  // What is wrong with the pool, or nothing.
  std::string verify() const;

 private:
  // A block behind `left` under its condition, in no list; and the end of one.
  Block* behind_of(Block* left, Address at);
  void prepare();
  void retire(Block* block);
  void unlist(Block* block);
  void list(Block* block);
  Block* split(Block* block, Address at);
  void absorb(Block* left);
  std::string verify_windows() const;
  static bool agree(const Block* left, const Block* right);
  void fuse(Block* left);
  Block* join(Block* block, bool settled_only = false);

  std::map<Address, std::unique_ptr<Segment>> segments_;
  FreeLists lists_;
  Holes holes_;
  Windows windows_;
  std::vector<Block*> spare_;  // blocks of no segment
};

}  // namespace mg

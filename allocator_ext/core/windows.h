// Windows: pages of shared segments, mapped a second time side by side, so that free pieces of them are one block.
//
// Why: blocks of many sizes leave pieces at the ends of pages that no request fits into. placement.h says which pages to
// put side by side; here is kept which windows there are and which pages each of them maps.
//
// An example, with the plan {P1, P5} and the offset 1.25 MiB of placement.h for a block of 1.5 MiB. A range of 4 MiB of
// addresses is reserved at W. P1's physical memory is mapped at W and P5's at W + 2 MiB; both stay mapped where they were,
// in the shared segment, which is their *home*. The program gets the address W + 1.25 MiB:
//
//     at home    P1 + 1.25 MiB .. P1 + 2 MiB       lent        P5 .. P5 + 0.75 MiB        lent
//     window     W  + 1.25 MiB .. W  + 2 MiB       the block   W + 2 MiB .. W + 2.75 MiB  the block
//
// At home the two pieces are blocks in the state `lent`: nobody else gets them while the block lives. When the block is
// freed, each piece is freed at home, with the stream, users and birth of the block, as if the program had used two
// blocks. From then on nothing distinguishes them from other free memory of their pages, so no rule of reuse knows of
// windows. The window stays mapped, without a block: a graph that was captured meanwhile writes to W + 1.25 MiB at each
// replay, and that has to reach P1 and P5. It is unmapped before its pages go back to the driver. It gets no second block,
// unless a state of the pool brings back the first one.
//
// Guarantee: a window with a live block maps exactly the pages that its pieces are in, in their order; each page knows how
// many windows map it; numbers of windows are never used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/block.h"
#include "core/size_class.h"

namespace mg {

struct Window {
  uint64_t serial = 0;         // of the pool's, never used again
  Address address = 0;
  size_t size = 0;
  std::vector<Address> pages;  // by their addresses at home; fewer than `size` has: half made, or half unmapped
  std::vector<bool> away;      // while the pool sleeps, of each page: whether it is not mapped here; else empty
  Segment* segment = nullptr;  // of the live block
  std::vector<Block*> pieces;  // of the live block, lent

  bool mapped(size_t page) const { return page >= away.size() || !away[page]; }
  bool whole() const { return pages.size() * size_class::page == size; }
};

// The windows of one pool.
class Windows {
 public:
  using ByAddress = std::map<Address, std::unique_ptr<Window>>;

  // One whose pages are yet to be mapped.
  Window& add(Address address, size_t size);
  void drop(Window& window) { windows_.erase(window.address); }

  // The page at `home`, of which `chunk` is the mapping there, is the next of this window; and its last page is no longer
  // in it. Null: that page is mapped nowhere else any more.
  void add_page(Window& window, Address home, Chunk& chunk);
  void remove_page(Window& window, Chunk* chunk);

  // The window of this number, if all of it is still mapped; else null.
  Window* find(uint64_t serial) const;

  size_t pages() const { return pages_; }  // in all windows
  bool empty() const { return windows_.empty(); }
  ByAddress::const_iterator begin() const { return windows_.begin(); }
  ByAddress::const_iterator end() const { return windows_.end(); }

 private:
  ByAddress windows_;
  size_t pages_ = 0;
  uint64_t last_ = 0;
};

}  // namespace mg

// Windows: pages of what captures share, mapped a second time side by side, so that free pieces of them are one block.
//
// Why: blocks of many sizes leave pieces at the ends of pages that no request fits into. In: what is free at the ends of
// pages, and a request. Out: which pages to put side by side, and where in them the block begins. A block's pieces stay
// what they are at home, in the shared segment: *lent* while the block is live, and at its free each is freed there as a
// block of its own, under the block's own condition. So nothing but a live block ever lies in a window.
// Graphs know the window's addresses, so it stays mapped to the same pages until its pool's memory may go back to the
// driver, and has no second block, but for one that a state brings back.
// Invariant: a window of a live block maps exactly the pages that its pieces are in, in their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/size_class.h"
#include "core/types.h"

namespace mg {

struct Block;
struct Segment;

// Part of one page.
struct Piece {
  Address address;
  size_t size;
};

struct Window {
  uint64_t serial = 0;         // of the pool's, never used again
  Address address = 0;
  size_t size = 0;
  std::vector<Address> pages;  // by their addresses at home; fewer than `size` has: half made, or half unmapped
  Segment* segment = nullptr;  // of the live block
  std::vector<Block*> pieces;  // of the live block, lent

  bool whole() const { return pages.size() * size_class::page == size; }
};

// What a stream may have at the ends of pages. No page is in two of the lists but in `tails` and `heads`.
struct Ends {
  struct End {
    Address page;
    size_t bytes;
  };
  std::vector<End> tails, heads;  // free to the page's end; from its beginning
  std::vector<Address> whole;     // by address

  // A run of free memory, in a segment that begins at `base`.
  void add(Address base, Address start, Address end);
};

// Which pages to put side by side; 0: one that is yet to be mapped.
struct Plan {
  std::vector<Address> pages;
  size_t fresh = 0;
  size_t offset = 0;  // of the block in the first
};

// [the tail of a page or nothing] [whole pages] [the head of a page or nothing] for `size` bytes, with the fewest new
// pages, then what leaves least.
// replace: instead of a place that is there, so only pieces, and little may be left over. fill: nothing new. grow: with new
// pages, but none where new pages alone would do.
enum class Stitch { replace, fill, grow };
std::optional<Plan> choose(Ends& ends, size_t size, Stitch how);

// A block's pieces at home.
std::vector<Piece> pieces_of(const std::vector<Address>& pages, size_t offset, size_t size);

}  // namespace mg

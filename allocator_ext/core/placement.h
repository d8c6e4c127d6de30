// Which pages to put side by side in a window, so that free pieces of them are one block; and where in them it begins.
//
// Pure arithmetic on addresses: no block is touched and no driver is called. In: the free ends of pages that a stream may
// have, and a request. Out: a plan, or nothing where pieces are no better than what there is.
//
// A block in a window is made of [the tail of a page] [whole pages] [the head of a page], each part optional: between two
// pages that lie side by side there is no gap, so only the first page may be used from its middle on, and only the last up
// to its middle. Pages have 2 MiB.
//
// An example. A request of 1.5 MiB finds no hole that is large enough. Of page P1 the last 1 MiB is free (a tail), of page
// P5 the first 0.75 MiB (a head). Together they have 1.75 MiB, so 0.25 MiB will be left over. It is left in the larger of
// the two pieces, at the side where the pages do not meet: the block takes the last 0.75 MiB of P1 and the first 0.75 MiB
// of P5. The plan is the pages {P1, P5} and the offset 1.25 MiB, which is where the block begins in the first:
//
//     page     P1                           P5
//              | in use | free |  block     block  | in use       |
//     offset   0        1      1.25        2       2.75           4  MiB
//
// A second one, of 3 MiB, with page P3 free as a whole and the last 1.25 MiB of P1: the whole page gives 2 MiB, the tail
// the missing 1, and the plan is {P1, P3} with the offset 1 MiB. Without the tail, two pages would be needed, one of them
// mapped anew.
//
// Guarantee: what a plan takes of each page is within what was said to be free there.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "core/size_class.h"
#include "core/types.h"

namespace mg {

// Part of one page.
struct Piece {
  Address address;
  size_t size;
};

// What a stream may have at the ends of pages. A page that is free as a whole is in `whole` alone; one that is free at both
// ends is in `tails` and in `heads`.
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
  size_t fresh = 0;   // how many of them are yet to be mapped
  size_t offset = 0;  // where in the first page the block begins
};

// What a block of pieces is compared with:
//   replace  there is a hole for the request, but it would cut a page that is free as a whole. Only two pieces will do
//            then, with little left over;
//   fill     there is none: all of it from pages that are mapped;
//   grow     pages are mapped anew anyway: fewer of them, with pieces. Where new pages alone would do there is no plan.
enum class Stitch { replace, fill, grow };

// The fewest new pages, then what leaves least.
std::optional<Plan> choose(Ends& ends, size_t size, Stitch how);

// The parts of pages that a block at `offset` in the first of them lies in.
std::vector<Piece> pieces_of(const std::vector<Address>& pages, size_t offset, size_t size);

}  // namespace mg

// The words of the core, and what can be set.
//
//   segment     a range that the driver gave; it belongs to one pool and has a home stream
//   block       a part of a segment: live (handed out) or free; neighbours of one segment are linked
//   window      other addresses of pages that captures share, side by side
//   lent        free memory of such pages that a window's block has
//   borrowed    of a block: its pool, which is open at out-of-memory, serves somebody else with it
//   pool        segments that share free lists; one default pool, and one for each id that torch begins
//   scope       "allocations of these streams go to that pool", from begin to end
//   capture     one capture of the driver, known by its id and graph, from when it is first seen
//   terminals   the nodes that the next operation on a capturing stream would depend on
//   markers     terminals of all streams that used a block, taken when it was freed
//   deferred    freed in a capture, not yet proven
//   parked      freed, and not to be thought of before no capture is under way
//   settled     free with no condition but its stream
//   tag         the condition on a free block: 0 when settled, else one period of one stream in one capture
#pragma once

#include <cstdint>
#include <string>

#include "driver.h"

namespace mg {

using Tag = uint64_t;
constexpr Tag settled = 0;
constexpr Tag withheld = ~Tag{0};  // nobody meets it

// As a block's point: it was in use outside of captures, and only its own stream is known to be behind that.
constexpr uint64_t never_covered = ~uint64_t{0};

// Tags come in pairs, one for each period of a stream in a capture: even for what was used on that stream alone, odd for
// what was proven, which asks for more.
inline bool one_period(Tag a, Tag b) { return a / 2 == b / 2; }

// How much a capture gives back before it ends.
enum class Reuse : int {
  strict = 0,      // what another stream used waits for the end of the capture
  own_stream = 1,  // back to its own stream once its markers precede that stream's terminals
  graph_wide = 2,  // the same, asked of all streams that were capturing at the free
  any_stream = 3,  // also to another stream of the capture, under the same proof
};

struct Config {
  Reuse reuse = Reuse::own_stream;
  bool empty_nodes = false;     // mark frees by empty nodes of their own
  bool verify = false;          // prove each reuse again, by brute force
  double garbage_threshold = 0; // part of the limit above which old cached segments are released; 0: never
  bool expandable = false;      // segments are ranges of addresses that grow in place; captures share one of their own
  bool stitch = true;           // what captures share may be mapped again, so that pieces of pages are one block
  size_t history_entries = 0;
};

struct PoolId {
  uint64_t first = 0;
  uint64_t second = 0;
  bool operator==(const PoolId& other) const { return first == other.first && second == other.second; }
  bool operator!=(const PoolId& other) const { return !(*this == other); }
  bool operator<(const PoolId& other) const {
    return first != other.first ? first < other.first : second < other.second;
  }
};

}  // namespace mg

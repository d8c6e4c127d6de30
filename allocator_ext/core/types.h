// The words of the core, and what can be set.
//
// Memory:
//   segment     a range of addresses that the driver gave; it belongs to one pool and has a home stream
//   chunk       the part of an expandable segment that one call mapped: one physical allocation
//   block       a part of a segment, handed out (live) or free; neighbours of one segment are linked
//   hole        free neighbours of a shared segment, under whichever conditions (holes.h)
//   run         neighbours in a hole of which one stream may have each
//   window      other addresses of pages of shared segments, side by side (windows.h)
//   home        of a segment: the stream that its settled blocks are free for; of a page: where it lies outside of windows
//   lent        the state of a block in a shared segment while a block in a window has its memory
//   borrowed    of a block: its pool, which is open at out-of-memory, serves another pool's request with it
//   pool        segments that share free lists; one default pool, and one for each id that torch begins
//   asleep      of a pool: its pages are the device's, its addresses are reserved, its blocks are what they were (sleep.cc)
//   away        of a chunk, or of a page in a window: not mapped, for its pool sleeps
//   scope       "allocations of these streams go to that pool", from begin to end
// Order in captures:
//   capture     one capture of the driver, known by its id and graph, from when it is first seen
//   terminals   the nodes that the next operation on a capturing stream would depend on
//   view        what is known of one stream in a capture: the nodes that complete before whatever it appends next
//   markers     terminals of all streams that used a block, taken when it was freed
//   period      the time in which a view's proofs hold; a new one begins when dependencies are seen to have been
//               replaced, or when the driver did not answer
//   point       how many different terminals of a stream had been seen at some time
//   cover       the last point of another stream that lies in a stream's past
// After a free:
//   settled     free with no condition but its stream
//   tag         the condition on a free block: 0 when settled, else one period of one stream in one capture
//   deferred    freed in a capture, and waiting for its markers to be in the past of a stream
//   queued      freed by a thread that does not drive the capture: the one that does will look at it
//   parked      freed, and not thought of before no capture is under way
//   unanswered  freed, and used by a stream of which the driver does not tell: it was destroyed, most likely
//   withheld    free, and refused by the verifier: nobody gets it before the captures end
#pragma once

#include <cstdint>
#include <string>

#include "driver.h"

namespace mg {

using Tag = uint64_t;
constexpr Tag settled = 0;
constexpr Tag withheld = ~Tag{0};  // a condition that no request meets

// As a block's point: it was in use outside of captures, and of no other stream than its own is it known that this use
// lies in its past.
constexpr uint64_t never_covered = ~uint64_t{0};

// Each period of a stream in a capture has a pair of tags. The even one is for what was used on that stream alone: its next
// use need only begin later. The odd one is for what was proven: its next use has to come after completion.
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
  bool stitch = false;          // what captures share may be mapped again, so that pieces of pages are one block
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

constexpr const char* asleep_text = "the pool sleeps: wake it before anything is allocated in it";

}  // namespace mg

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

// Rules that a test breaks on purpose; what was built without MG_MUTANTS cannot.
enum class Mutant : int {
  none = 0,
  no_recorded_streams,    // record_stream is not heard
  any_marker,             // one marker that precedes is taken for all
  outsiders_proven,       // a stream outside the capture is taken for one without terminals
  replaced_kept,          // replaced dependencies are not noticed
  partial_as_full,        // programmatic edges prove completion
  old_blocks_proven,      // a block from before the capture counts as allocated in it
  one_tag_for_all,        // what one capture freed is given to another beside it
  cover_not_checked,      // another stream takes what was freed after it last waited
  events_not_awaited,     // outside of captures: other streams' uses are not waited for
  parked_at_once,         // what cannot be proven is given back at once
  surrounding_forgotten,  // a capture that ended before a body of it is taken for one that came before
  proof_forgotten,        // memory that came by proof is given back as if one stream alone had used it
  outside_forgotten,      // what was in use outside of captures goes to any stream
  graphs_borrow,          // a capture takes memory of a pool that others use outside of captures
  old_users_forgotten,    // what other streams did with a block of an earlier capture is taken to be over
  late_frees_heard,       // an owner that has lost its block frees what is there now
  restored_in_captures,   // a pool is restored while a capture uses it
  runs_not_checked,       // whoever may have one block of a run is given its neighbour too
  pieces_not_checked,     // the last piece of a window is taken under whichever condition
  pieces_forget_users,    // of a window's block only the first piece waits for the streams that used it
  stitched_beside_early,  // a window is made where kernels begin early
  windows_end_with_blocks,  // a window is unmapped when its block is freed
  windows_outlive_pages,  // a page is taken for given back while a window maps it
  pieces_not_restored,    // of a window's block only the first piece is taken when a state comes back
  scopes_stop_reclaim,    // an open scope is taken for a capture that is under way
  holes_not_lent,         // of a pool that is open at out-of-memory only the lists are looked at
  lent_beside_graphs,     // what graphs use is lent while one of them may be running
  lent_uncounted,         // a pool that has lent memory says that it has not
  frees_elsewhere_read,   // a free looks at a capture that another thread drives
  frees_elsewhere_lost,   // what another thread has freed waits for the end of the capture
  same_graph_forgotten,   // what an earlier capture left is over for one into the same graph
  unseen_forgotten,       // a capture is taken for the only one though another has begun before it
  silent_streams_lost,    // what a stream used that the driver no longer knows never comes back
};

struct Config {
  Reuse reuse = Reuse::own_stream;
  bool empty_nodes = false;     // mark frees by empty nodes of their own
  bool verify = false;          // prove each reuse again, by brute force
  double garbage_threshold = 0; // part of the limit above which old cached segments are released; 0: never
  bool expandable = false;      // segments are ranges of addresses that grow in place; captures share one of their own
  bool stitch = true;           // what captures share may be mapped again, so that pieces of pages are one block
  size_t history_entries = 0;
  Mutant mutant = Mutant::none;
};

inline bool mutated([[maybe_unused]] const Config& config, [[maybe_unused]] Mutant mutant) {
#ifdef MG_MUTANTS
  return config.mutant == mutant;
#else
  return false;
#endif
}

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

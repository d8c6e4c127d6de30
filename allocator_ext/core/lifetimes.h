// What happens to a block between its free and its next life.
//
// In: a block that the program has freed. Out: the same block in its pool, under the weakest condition that is sure. Which way
// it goes:
//   outside of captures, used on its own stream alone: it is settled at once, for the stream's order covers it;
//   outside of captures, also used on other streams: an event is recorded on each, and it is settled when all have passed;
//   inside a capture, used on its own stream alone: free for that stream under its even tag;
//   inside a capture, used on several of its streams: deferred, until its markers are in a stream's past (capture_graph.h),
//     then free for that stream under its odd tag;
//   freed by a thread that does not drive the capture: queued there, and placed when the driving thread next allocates;
//   whatever cannot be proven: parked until no capture is under way, then as outside of captures;
//   used on a stream of which the driver does not tell: unanswered, asked for ever more seldom.
// No event is queried or recorded on a stream that captures: it would become part of the graph. Where other threads capture,
// events are recorded in the relaxed mode, without which such a call would break their captures (driver_guard.h).
// Guarantee: each block that came in is in exactly one place: its pool, a capture's deferred or queued blocks, the blocks
// with events, `parked_` or `unanswered_`.
// Lock: the device's is held during all calls.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "core/capture_graph.h"
#include "core/history.h"
#include "core/pool.h"
#include "core/stats.h"

namespace mg {

class Lifetimes {
 public:
  Lifetimes(const Driver& driver, const Config& config, Stats& stats, History& history)
      : captures(driver, config), driver_(driver), config_(config), stats_(stats), history_(history) {}
  ~Lifetimes();

  Captures captures;

  // Where `stream` stands, after everything that could be given back has been. `watched`: a capture may be under way.
  Observation tend(Stream stream, bool watched, const std::vector<Pool*>& pools);

  // The end of a block's life.
  void dispose(Block* block, bool watched);

  // Outside of captures: waits for all events; true when a block came back.
  bool await();

  // Blocks that a stream used of which the driver does not tell: it was destroyed, most likely. No event will say when
  // that is over; all work of the device has been waited for, so it is. True when a block came back.
  size_t unanswered() const { return unanswered_bytes_; }
  bool all_is_over();

  bool quiet() const { return !captures.any(); }
  bool idle() const { return parked_.empty() && unanswered_.empty() && pending_.empty() && !captures.any() && !captures.doubtful(); }
  size_t waiting() const { return waiting_; }

 private:
  struct Pending {
    Event event;
    Block* block;
  };
  void place(Block* block, bool queued);
  void release(std::vector<Ready>& ready);
  void give(Block* block, Stream stream, Tag tag, uint64_t point, const std::vector<Node>& markers);
  void park(Block* block);
  bool prove(Block* block, StreamView* own, std::vector<Ready>& ready);
  enum class Events { recorded, later, unanswered };
  Events by_events(Block* block);
  void settle_or_park(Block* block);
  void ask_again();
  void query();
  void passed(Block* block);
  bool event(Event& out);

  const Driver& driver_;
  const Config& config_;
  Stats& stats_;
  History& history_;
  std::vector<Block*> parked_;
  std::unordered_map<Stream, std::deque<Pending>> pending_;
  std::vector<Event> spare_;
  size_t waiting_ = 0;
  std::vector<Block*> unanswered_;
  size_t unanswered_bytes_ = 0;
  uint64_t pause_ = 1, paused_ = 0;  // how many calls until one of them is tried again, and how many have been
};

}  // namespace mg

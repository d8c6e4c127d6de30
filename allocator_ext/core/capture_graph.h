// What is known of captures under way: which nodes complete before anything that a stream can still append.
//
// Why: while a stream captures, nothing runs, so no event tells when a block's last use is over; the graph's own edges
// do. In: streams, asked for when a block is allocated or freed. Out: for each stream of a capture a view of its past,
// and the deferred blocks whose markers this past has come to contain.
//
// An example. Streams A and B capture into one graph. On A kernel k1 writes to block X; B waits for A, and kernel k2 on B
// reads X, so X was recorded on B. Then X is freed:
//
//     A:  k1 ----------------------- wait for B -- allocate
//           \                         /
//     B:     wait for A -- k2 -------
//
// At the free the terminals are {k1} on A and {k2} on B; these two nodes are the markers of X. What A appends next comes
// after k1 but in no order with k2, so A may not have X: it is deferred, with one marker missing for A. When A has waited
// for B, its terminals are {k1, k2}. The next time that A is observed, its view walks back from these, meets k2, for which X
// was waiting, and X is ready for A: whatever uses it next there comes after both uses. For B nothing was missing at the
// free, since B had waited for A before k2; by the rule `any_stream` B may have X at once.
//
// A view grows backwards from the stream's terminals and never walks a known node again, so all views of a capture cost
// (streams) x (nodes + edges); each marker is met once. Two things make a view begin again, at most `patience` times:
// dependencies that were replaced (a former terminal no longer lies before the present ones), and programmatic edges,
// which tell that a node has begun and not that it has completed.
// Guarantee: `completed(n)` only if every path by which the stream's next operation waits contains n's completion, as the
// driver reported it at the last observation.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "core/types.h"

namespace mg {

struct Block;
struct Capture;
struct StreamView;

// A block that waits for its markers, as seen from the streams that may get it.
struct Deferred {
  struct Candidate {
    StreamView* view;
    size_t missing;
  };
  Block* block = nullptr;
  std::vector<Node> markers;
  std::vector<Candidate> candidates;
  bool needs_all = false;  // of the candidates, the first of which then gets it
  bool done = false;
};

struct Ready {
  Block* block;
  StreamView* view;
  Tag tag;  // of the view when this was found: if it is another by now, the proof holds no more
  uint64_t point;
  const std::vector<Node>* markers;  // of its Deferred, which outlives this
};

struct StreamView {
  Stream stream = nullptr;
  Capture* capture = nullptr;
  std::vector<Node> terminals;
  uint64_t point = 0;       // how many different terminals were seen
  uint64_t broken_at = 0;   // the capture's clock when replaced dependencies were last noticed; 0: never
  uint64_t partial_at = 0;  // the same for programmatic edges
  Tag order_tag = settled;  // condition of what was freed on this stream and used on no other
  Tag proof_tag = settled;  // condition of what was freed here by proof

  bool completed(Node node) const {
    auto found = past.find(node);
    return found != past.end() && found->second && !proofless;
  }

  std::unordered_map<Node, bool> past;  // node -> completed, or only begun
  std::unordered_map<Node, std::vector<std::pair<Deferred*, size_t>>> watched;
  std::vector<std::vector<Node>> history;           // terminals by point, kept for other streams to compare with
  std::unordered_map<StreamView*, uint64_t> covers; // another stream -> the last of its points that is in our past
  bool known = false;       // seen since it was made or lost
  bool proofless = false;   // out of patience: no more proofs
  bool orderless = false;   // out of patience: nor reuse
  int restarts = 0;
  // Of `Capture::before`, the nodes that the graph had already: how many, in their order, are in our past; and whether that
  // is not all of them, so that what earlier captures used may be in use beside this stream.
  size_t behind = 0;
  bool apart = false;
};

struct Capture {
  uint64_t serial = 0;  // ours, never used again
  uint64_t id = 0;
  Graph graph = nullptr;
  uint64_t clock = 0;   // counts observations
  bool alone = false;   // no other was under way when it was first seen: none surrounds it
  uint64_t thread = 0;  // that drives it: the last that has allocated in it
  bool looked = false;           // at the nodes of its graph, which had some
  bool continues = false;
  bool within_apart = false;     // it may be a body of one that goes on in a graph
  std::vector<Node> before;      // nodes that its graph had when it was first looked at, maybe of an earlier capture
  std::vector<Block*> queued;    // freed by other threads: for the one that drives it to look at
  Stream witness = nullptr;  // a stream that is in it until it ends
  std::unordered_map<Stream, std::unique_ptr<StreamView>> views;
  std::vector<StreamView*> in_order;  // the same, as they were first seen
  std::list<Deferred> deferred;
};

struct Observation {
  enum Status { outside, inside, elsewhere, unknown } status = outside;
  StreamView* view = nullptr;  // when inside
  Capture* capture = nullptr;  // when elsewhere: in a capture that another thread drives
};

class Captures {
 public:
  Captures(const Driver& driver, const Config& config) : driver_(driver), config_(config) {}

  // Where `stream` stands now. Blocks that its past has come to contain are added to `ready`. `drives`: this thread is
  // about to launch on it, so it is the one that drives the stream's capture from now on.
  Observation observe(Stream stream, std::vector<Ready>& ready, bool drives = false);

  // The same for all streams of `capture` that were seen before.
  void observe_all(Capture& capture, std::vector<Ready>& ready);

  // Waits for `markers`, on behalf of `block`, until one candidate (or all) has them in its past, maybe at once.
  void defer(Block* block, std::vector<Node> markers, const std::vector<StreamView*>& candidates, bool needs_all,
             std::vector<Ready>& ready);

  // Forgets captures that have ended; the blocks that they still deferred are added to `left`.
  void poll(std::vector<Block*>& left);

  // How far `view` contains the past of `other`: the last of its points.
  uint64_t cover(StreamView& view, StreamView& other);

  // One empty node behind the terminals of `view`, as its only terminal; false: nothing has changed.
  bool mark_by_empty_node(StreamView& view, std::vector<Ready>& ready);

  // By a search of its own from the stream's present terminals: `full` asks for completion.
  bool proves(Stream stream, Node marker, bool full);

  bool any() const { return !captures_.empty(); }

  // A capture may be under way that was not seen: one has begun that nothing was heard of, and its scope may be open.
  bool doubtful() const { return doubt_ != 0; }
  // Scopes are numbered as they begin; the newest that there was, and the oldest that is open. `single`: there is one, and
  // it is that of one capture, so no other can be under way.
  void scopes(uint64_t newest, uint64_t oldest, bool single) {
    newest_scope_ = newest;
    single_scope_ = single;
    if (oldest <= doubt_) return;
    doubt_ = 0;
    passed_over_.clear();
  }
  bool under_way(uint64_t serial) const;
  size_t count() const { return captures_.size(); }

  uint64_t nodes_walked = 0;
  uint64_t restarts = 0;

 private:
  struct Terminals;
  Capture& known(const Terminals& now, Stream stream);
  bool driven_here(Stream stream) const;
  bool look_before(StreamView& view);
  bool under_way(const Capture& capture) const;
  bool advance(StreamView& view, const Terminals& now, std::vector<Ready>& ready);
  template <class Reach>
  bool behind(const Terminals& now, Reach reach);
  bool walk(StreamView& view, const Terminals& now, std::vector<Node>& met, std::vector<Node>& fresh, bool& partial);
  void begin_again(StreamView& view);
  void watch_again(StreamView& view, std::vector<Ready>& ready);
  void lose(StreamView& view);
  void completed(StreamView& view, Node node, std::vector<Ready>& ready);
  void satisfied(Deferred& deferred, size_t candidate, std::vector<Ready>& ready);
  bool dependencies(Node node, std::vector<Node>& nodes, std::vector<EdgeData>& edges);
  bool is_full(const EdgeData& edge) const { return edge.full(); }
  void new_period(StreamView& view) {
    view.order_tag = last_tag_ += 2;
    view.proof_tag = view.order_tag + 1;
  }

  const Driver& driver_;
  const Config& config_;
  std::vector<std::unique_ptr<Capture>> captures_;
  uint64_t last_serial_ = 0;
  uint64_t last_id_ = 0;       // of the driver's, of captures that were seen
  std::set<uint64_t> passed_over_;  // captures that began before it and were not seen
  uint64_t doubt_ = 0;         // the newest scope when it arose; 0: there is none
  uint64_t newest_scope_ = 0;
  bool single_scope_ = false;
  Tag last_tag_ = settled;
};

}  // namespace mg

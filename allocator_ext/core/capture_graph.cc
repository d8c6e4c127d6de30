#include "core/capture_graph.h"

#include <algorithm>
#include <unordered_set>

#include "core/threads.h"

namespace mg {

namespace {
constexpr int patience = 32;
constexpr int most_tries = 8;
constexpr uint64_t most_passed_over = 64;
}

struct Captures::Terminals {
  CaptureStatus status = not_capturing;
  uint64_t id = 0;
  Graph graph = nullptr;
  std::vector<Node> nodes;
  std::vector<EdgeData> edges;
  const Node* told = nullptr;
  const EdgeData* told_edges = nullptr;
  size_t count = 0;

  // False when the driver does not tell. Without `nodes` any thread may ask.
  static bool of(const Driver& driver, Stream stream, Terminals& out, bool with_nodes) {
    const Node* nodes = nullptr;
    const EdgeData* edges = nullptr;
    size_t count = 0;
    out.status = not_capturing;
    Result failed = with_nodes ? driver.capture_info(stream, &out.status, &out.id, &out.graph, &nodes, &edges, &count)
                               : driver.capture_info(stream, &out.status, &out.id, &out.graph, nullptr, nullptr, nullptr);
    if (failed == result::capture_implicit) {  // the legacy stream, while another captures: it is in no capture
      out.status = not_capturing;
      return true;
    }
    if (failed != result::success) return false;
    if (out.status != capturing) return out.status == not_capturing;
    out.told = nodes;
    out.told_edges = edges;
    out.count = count;
    return true;
  }

  // For the thread that drives the capture: until the next call on the stream.
  void read() {
    nodes.assign(told, told + count);
    if (told_edges != nullptr) {
      edges.assign(told_edges, told_edges + count);
    } else {
      edges.assign(count, EdgeData{});
    }
  }
};

bool Captures::under_way(uint64_t serial) const {
  return std::any_of(captures_.begin(), captures_.end(), [&](const auto& c) { return c->serial == serial; });
}

// The capture that the driver tells of; one that was not known begins here.
Capture& Captures::known(const Terminals& now, Stream stream) {
  for (auto& known : captures_) {
    if (known->id == now.id && known->graph == now.graph) return *known;
  }
  auto fresh = std::make_unique<Capture>();
  fresh->serial = ++last_serial_;
  fresh->id = now.id;
  fresh->graph = now.graph;
  fresh->witness = stream;
  // The driver counts captures as they begin. One that was passed over may be under way, and this may be a body of it.
  bool next = now.id == last_id_ + 1 || single_scope_;
  passed_over_.erase(now.id);
  if (!next && now.id > last_id_) {
    bool many = now.id - last_id_ > most_passed_over;
    if (many) passed_over_.insert(0);  // which is never seen
    for (uint64_t id = last_id_ + 1; !many && id < now.id; id++) passed_over_.insert(id);
    doubt_ = newest_scope_;
  }
  last_id_ = std::max(last_id_, now.id);
  if (passed_over_.empty()) doubt_ = 0;
  // So may one be that was not seen.
  fresh->within_apart = doubt_ != 0 || std::any_of(captures_.begin(), captures_.end(), [&](const auto& other) {
    return (other->continues || !other->looked) && under_way(*other);
  });
  fresh->alone = captures_.empty() && next && doubt_ == 0;
  captures_.push_back(std::move(fresh));
  return *captures_.back();
}

bool Captures::driven_here(Stream stream) const {
  return std::any_of(captures_.begin(), captures_.end(), [&](const auto& capture) {
    return capture->thread == this_thread() && capture->views.count(stream) != 0;
  });
}

Observation Captures::observe(Stream stream, std::vector<Ready>& ready, bool drives) {
  Terminals now;
  bool with_nodes = drives || driven_here(stream);
  bool told = Terminals::of(driver_, stream, now, with_nodes);
  if (told && now.status == not_capturing) return {Observation::outside, nullptr, nullptr};
  Capture* capture = told ? &known(now, stream) : nullptr;
  if (told && drives) capture->thread = this_thread();
  if (told && capture->thread != this_thread()) return {Observation::elsewhere, nullptr, capture};
  if (told && !with_nodes) told = Terminals::of(driver_, stream, now, true) && now.status == capturing;
  if (!told) {
    for (auto& each : captures_) {
      auto found = each->views.find(stream);
      if (found != each->views.end()) lose(*found->second);
    }
    return {Observation::unknown, nullptr, nullptr};
  }
  now.read();
  capture->clock++;
  auto& view = capture->views[stream];
  if (view == nullptr) {
    view = std::make_unique<StreamView>();
    capture->in_order.push_back(view.get());
    view->stream = stream;
    view->capture = capture;
    new_period(*view);
  }
  if (!advance(*view, now, ready) || !look_before(*view)) {
    lose(*view);
    return {Observation::unknown, nullptr, nullptr};
  }
  return {Observation::inside, view.get(), nullptr};
}

// A capture may go on in the graph of an earlier one, whose nodes need not be behind this one's streams. What earlier
// captures used is over only for a stream that has all in its past that the graph had.
bool Captures::look_before(StreamView& view) {
  Capture& capture = *view.capture;
  if (!capture.looked) {
    size_t count = 0;
    if (driver_.graph_nodes(capture.graph, nullptr, &count) != result::success) return false;
    capture.before.resize(count);
    if (count != 0 && driver_.graph_nodes(capture.graph, capture.before.data(), &count) != result::success) return false;
    capture.looked = true;
    capture.continues = count != 0;
    auto past = [&](Node node) { return view.completed(node); };
    // Who has these terminals in its past has all of that.
    if (std::all_of(capture.before.begin(), capture.before.end(), past)) capture.before = view.terminals;
  }
  while (view.behind < capture.before.size() && view.completed(capture.before[view.behind])) view.behind++;
  view.apart = view.behind < capture.before.size() || capture.within_apart;
  return true;
}

void Captures::observe_all(Capture& capture, std::vector<Ready>& ready) {
  for (size_t i = 0; i < capture.in_order.size(); i++) observe(capture.in_order[i]->stream, ready);
}

bool Captures::advance(StreamView& view, const Terminals& now, std::vector<Ready>& ready) {
  bool same_full = std::all_of(now.edges.begin(), now.edges.end(), [&](const EdgeData& e) { return is_full(e); });
  if (view.known && same_full && now.nodes == view.terminals && !view.orderless) return true;

  // Nothing is concluded from the walk before it is clear that what was known still holds.
  std::vector<Node> met, fresh;
  bool partial = false;
  bool first = !view.known, again = first;
  if (!walk(view, now, met, fresh, partial)) return false;

  bool replaced = view.orderless;
  for (Node old : view.terminals) {
    if (std::find(met.begin(), met.end(), old) == met.end()) replaced = true;
  }
  if (partial) {
    view.partial_at = view.capture->clock;
    view.proof_tag = (last_tag_ += 2) + 1;
  }
  if (replaced) {
    view.broken_at = view.capture->clock;
    new_period(view);
  }
  if ((replaced || partial) && !first) {
    // What is replaced must be forgotten, and what was taken for completed may only have begun.
    if (view.restarts++ < patience) {
      restarts++;
      begin_again(view);
      if (!walk(view, now, met, fresh, partial)) return false;
      again = true;
    } else {
      view.proofless = true;
      view.orderless = view.orderless || replaced;
    }
  }
  if (!view.known || view.terminals != now.nodes) {
    view.terminals = now.nodes;
    view.point++;
    if (config_.reuse == Reuse::any_stream) view.history.push_back(now.nodes);
  }
  view.known = true;
  if (again) {
    watch_again(view, ready);
  } else {
    for (Node node : fresh) completed(view, node, ready);
  }
  return true;
}

// Backwards from `now` along all edges; `reach` is told of each node and edge, and says whether to go on behind it.
template <class Reach>
bool Captures::behind(const Terminals& now, Reach reach) {
  std::vector<Node> steps;
  for (size_t i = 0; i < now.nodes.size(); i++) {
    if (reach(now.nodes[i], now.edges[i])) steps.push_back(now.nodes[i]);
  }
  std::vector<Node> nodes;
  std::vector<EdgeData> edges;
  while (!steps.empty()) {
    Node node = steps.back();
    steps.pop_back();
    nodes_walked++;
    if (!dependencies(node, nodes, edges)) return false;
    for (size_t i = 0; i < nodes.size(); i++) {
      if (reach(nodes[i], edges[i])) steps.push_back(nodes[i]);
    }
  }
  return true;
}

// `met`: nodes among the stream's former terminals that lie behind the present ones, by edges of any kind.
// `fresh`: nodes of which it is new that they complete before.
bool Captures::walk(StreamView& view, const Terminals& now, std::vector<Node>& met, std::vector<Node>& fresh,
                    bool& partial) {
  return behind(now, [&](Node node, const EdgeData& edge) {
    bool full = is_full(edge);
    partial = partial || !full;
    if (std::find(view.terminals.begin(), view.terminals.end(), node) != view.terminals.end()) met.push_back(node);
    auto [place, unknown] = view.past.try_emplace(node, full);
    if (full && (unknown || !place->second)) {
      place->second = true;
      fresh.push_back(node);
    }
    return unknown;  // what a node waited for has completed once it has begun: a known node's past stays as it is
  });
}

bool Captures::dependencies(Node node, std::vector<Node>& nodes, std::vector<EdgeData>& edges) {
  size_t capacity = 8;
  for (;;) {
    nodes.assign(capacity, nullptr);
    edges.assign(capacity, EdgeData{});
    size_t count = capacity;
    if (driver_.node_dependencies(node, nodes.data(), edges.data(), &count) != result::success) return false;
    if (count < capacity) {  // a full answer may be a cut one
      nodes.resize(count);
      edges.resize(count);
      return true;
    }
    capacity *= 4;
  }
}

void Captures::completed(StreamView& view, Node node, std::vector<Ready>& ready) {
  if (view.proofless) return;
  auto found = view.watched.find(node);
  if (found == view.watched.end()) return;
  auto waiting = std::move(found->second);
  view.watched.erase(found);
  for (auto& [deferred, candidate] : waiting) {
    auto& missing = deferred->candidates[candidate].missing;
    missing--;
    if (missing == 0) satisfied(*deferred, candidate, ready);
  }
}

void Captures::satisfied(Deferred& deferred, size_t candidate, std::vector<Ready>& ready) {
  if (deferred.done) return;
  if (deferred.needs_all) {
    for (auto& each : deferred.candidates) {
      if (each.missing != 0) return;
    }
    candidate = 0;
  }
  deferred.done = true;
  StreamView* view = deferred.candidates[candidate].view;
  ready.push_back({deferred.block, view, view->proof_tag, view->point, &deferred.markers});
}

void Captures::defer(Block* block, std::vector<Node> markers, const std::vector<StreamView*>& candidates,
                     bool needs_all, std::vector<Ready>& ready) {
  Capture& capture = *candidates.front()->capture;
  capture.deferred.emplace_back();
  Deferred& deferred = capture.deferred.back();
  deferred.block = block;
  deferred.markers = std::move(markers);
  deferred.needs_all = needs_all;
  for (StreamView* view : candidates) {
    size_t index = deferred.candidates.size();
    deferred.candidates.push_back({view, 0});
    for (Node marker : deferred.markers) {
      if (view->completed(marker)) continue;
      deferred.candidates[index].missing++;
      view->watched[marker].push_back({&deferred, index});
    }
  }
  for (size_t i = 0; i < deferred.candidates.size(); i++) {
    if (deferred.candidates[i].missing == 0 && !deferred.candidates[i].view->proofless) satisfied(deferred, i, ready);
  }
}

void Captures::begin_again(StreamView& view) {
  view.past.clear();
  view.covers.clear();
  view.watched.clear();
  view.behind = 0;
}

void Captures::watch_again(StreamView& view, std::vector<Ready>& ready) {
  view.watched.clear();
  for (Deferred& deferred : view.capture->deferred) {
    if (deferred.done) continue;
    for (size_t i = 0; i < deferred.candidates.size(); i++) {
      auto& candidate = deferred.candidates[i];
      if (candidate.view != &view) continue;
      candidate.missing = 0;
      for (Node marker : deferred.markers) {
        if (view.completed(marker)) continue;
        candidate.missing++;
        view.watched[marker].push_back({&deferred, i});
      }
      if (candidate.missing == 0 && !view.proofless) satisfied(deferred, i, ready);
    }
  }
}

// The driver did not tell: the next observation begins from nothing, and nothing from before counts as ordered.
void Captures::lose(StreamView& view) {
  begin_again(view);
  view.terminals.clear();
  view.known = false;
  view.broken_at = view.partial_at = ++view.capture->clock;
  new_period(view);
}

// Another thread may be capturing on the witness: the nodes are that thread's to look at. An invalidated capture is still
// one. A stream that the driver keeps on not telling of was destroyed, and is in none.
bool Captures::under_way(const Capture& capture) const {
  Terminals now;
  bool told = false;
  for (int tries = 0; !told && tries < most_tries; tries++) {
    told = Terminals::of(driver_, capture.witness, now, false) || now.status == capture_invalidated;
  }
  return told && now.status != not_capturing && now.id == capture.id && now.graph == capture.graph;
}

void Captures::poll(std::vector<Block*>& left) {
  for (size_t i = 0; i < captures_.size();) {
    Capture& capture = *captures_[i];
    bool ended = !under_way(capture);
    if (!ended) {
      i++;
      continue;
    }
    for (Deferred& deferred : capture.deferred) {
      if (!deferred.done) left.push_back(deferred.block);
    }
    left.insert(left.end(), capture.queued.begin(), capture.queued.end());
    captures_.erase(captures_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

uint64_t Captures::cover(StreamView& view, StreamView& other) {
  uint64_t& covered = view.covers[&other];
  while (covered < other.history.size()) {
    const auto& terminals = other.history[covered];
    if (!std::all_of(terminals.begin(), terminals.end(), [&](Node n) { return view.completed(n); })) break;
    covered++;
  }
  return covered;
}

bool Captures::mark_by_empty_node(StreamView& view, std::vector<Ready>& ready) {
  Node node = nullptr;
  if (driver_.add_empty_node(&node, view.capture->graph, view.terminals.data(), view.terminals.size()) !=
      result::success) {
    return false;
  }
  // Should this fail, the node stays behind as a leaf on which nothing waits.
  if (driver_.capture_dependencies(view.stream, &node, nullptr, 1, set_capture_dependencies) != result::success) {
    return false;
  }
  return observe(view.stream, ready).status == Observation::inside;
}

bool Captures::proves(Stream stream, Node marker, bool full) {
  Terminals now;
  if (!Terminals::of(driver_, stream, now, true) || now.status != capturing) return false;
  now.read();
  std::unordered_set<Node> completed, begun;
  bool told = behind(now, [&](Node node, const EdgeData& edge) {
    bool fresh = completed.count(node) == 0 && begun.count(node) == 0;
    (edge.full() ? completed : begun).insert(node);
    return fresh;
  });
  if (!told) return false;
  return completed.count(marker) != 0 || (!full && begun.count(marker) != 0);
}

}  // namespace mg

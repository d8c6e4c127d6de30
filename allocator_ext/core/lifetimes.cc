#include "core/lifetimes.h"

#include <algorithm>

#include "core/relaxed_capture.h"

namespace mg {

namespace {
const std::vector<Node> no_markers;
}

Lifetimes::~Lifetimes() {
  for (auto& [stream, queue] : pending_) {
    for (Pending& pending : queue) driver_.event_destroy(pending.event);
  }
  for (Event event : spare_) driver_.event_destroy(event);
}

Observation Lifetimes::tend(Stream stream, bool watched, const std::vector<Pool*>& pools) {
  Observation seen;
  if (watched) {
    std::vector<Ready> ready;
    size_t before = captures.count();
    seen = captures.observe(stream, ready);
    bool follows = before > 0 && captures.count() > before;
    if (config_.reuse == Reuse::graph_wide && seen.view != nullptr) captures.observe_all(*seen.view->capture, ready);
    release(ready);
    if (captures.count() > (seen.view != nullptr ? 1u : 0u)) {
      std::vector<Block*> left;
      captures.poll(left);
      for (Block* block : left) park(block);
      if (follows && captures.count() == 1 && seen.view != nullptr) {
        // All that was known has ended unnoticed, and this capture has freed nothing yet.
        seen.view->capture->alone = true;
        for (Pool* pool : pools) pool->settle();
      }
    }
  }
  if (captures.any() || seen.status == Observation::unknown) return seen;
  for (Pool* pool : pools) pool->settle();
  if (!parked_.empty()) {
    std::vector<Block*> parked;
    parked.swap(parked_);
    for (Block* block : parked) {
      if (captures.any() || !by_events(block)) parked_.push_back(block);
    }
  }
  if (!pending_.empty()) query();
  return seen;
}

void Lifetimes::dispose(Block* block, bool watched) {
  block->state = BlockState::waiting;
  waiting_++;
  block->users.erase(std::remove(block->users.begin(), block->users.end(), block->stream), block->users.end());
  if (mutated(config_, Mutant::no_recorded_streams)) block->users.clear();
  if (!watched) {
    if (!by_events(block)) park(block);
    return;
  }
  std::vector<Ready> ready;
  Observation own = captures.observe(block->stream, ready);
  bool in_capture = own.status != Observation::outside;
  bool told = own.status != Observation::unknown;
  for (Stream user : block->users) {
    Observation seen = captures.observe(user, ready);
    in_capture = in_capture || seen.status != Observation::outside;
    told = told && seen.status != Observation::unknown;
  }
  if (!in_capture) {
    // What needs no event goes back beside captures of others, unless it comes out of a capture itself: that may have
    // been a body of one that is under way.
    bool waits = captures.any() && (!block->users.empty() || block->capture != 0);
    release(ready);
    if (waits || !by_events(block)) park(block);
    return;
  }
  stats_.freed_in_captures++;
  bool proven = told && own.view != nullptr && prove(block, own.view, ready);
  release(ready);
  if (proven) return;
  if (mutated(config_, Mutant::parked_at_once) && own.view != nullptr) {
    give(block, block->stream, own.view->order_tag, own.view->point, no_markers);
    return;
  }
  park(block);
}

// Takes the block over, for now or once its markers are in a stream's past; false: that can never be proven.
bool Lifetimes::prove(Block* block, StreamView* own, std::vector<Ready>& ready) {
  Capture& capture = *own->capture;
  if (block->capture != capture.serial && !mutated(config_, Mutant::old_blocks_proven)) {
    // Of an earlier capture: graphs that share a pool are launched one after the other, so its uses there are over. Not
    // so if that capture surrounds this one (a conditional body may run again), nor for what ran without a capture.
    // What other streams did with it may have been outside of captures too, and nothing tells when that is over.
    bool alone = capture.alone || mutated(config_, Mutant::surrounding_forgotten);
    if (block->capture == 0 || !alone || captures.count() != 1) return false;
    if (!block->users.empty() && !mutated(config_, Mutant::old_users_forgotten)) return false;
    block->used_outside = !mutated(config_, Mutant::outside_forgotten);
    block->born = 0;
  }
  if (own->broken_at > block->born) return false;
  if (block->users.empty()) {
    // Memory that came by proof goes on needing one: an early kernel may have run past what it was proven by.
    if (mutated(config_, Mutant::proof_forgotten)) block->by_proof = false;
    if (block->by_proof && own->partial_at > block->born) return false;
    give(block, block->stream, block->by_proof ? own->proof_tag : own->order_tag, own->point,
         config_.verify ? own->terminals : no_markers);
    return true;
  }
  if (config_.reuse == Reuse::strict) return false;

  std::vector<StreamView*> views{own};
  for (Stream user : block->users) {
    auto found = capture.views.find(user);
    if (found == capture.views.end() || found->second->known == false) {
      if (mutated(config_, Mutant::outsiders_proven)) continue;
      return false;
    }
    views.push_back(found->second.get());
  }
  for (Stream user : block->users) {
    // A view of this capture is no proof that the stream is in it now.
    std::vector<Ready> unused;
    if (mutated(config_, Mutant::outsiders_proven)) continue;
    Observation seen = captures.observe(user, ready);
    if (seen.view == nullptr || seen.view->capture != &capture) return false;
  }
  for (StreamView* view : views) {
    if (view->broken_at > block->born || view->partial_at > block->born) return false;
  }
  if (config_.empty_nodes) {
    for (StreamView* view : views) captures.mark_by_empty_node(*view, ready);
    for (StreamView* view : views) {
      if (!view->known) return false;
    }
  }
  std::vector<Node> markers;
  for (StreamView* view : views) markers.insert(markers.end(), view->terminals.begin(), view->terminals.end());
  std::sort(markers.begin(), markers.end());
  markers.erase(std::unique(markers.begin(), markers.end()), markers.end());

  std::vector<StreamView*> candidates{own};
  // Where kernels overlap on the own stream, what lived here before is over for that stream alone.
  if (config_.reuse == Reuse::any_stream && own->partial_at == 0 && !block->used_outside) candidates = views;
  if (config_.reuse == Reuse::graph_wide) {
    for (StreamView* view : capture.in_order) {
      if (view != own) candidates.push_back(view);
    }
  }
  captures.defer(block, std::move(markers), candidates, config_.reuse == Reuse::graph_wide, ready);
  return true;
}

void Lifetimes::release(std::vector<Ready>& ready) {
  for (Ready& each : ready) {
    stats_.proven++;
    if (each.view->stream != each.block->stream) stats_.moved++;
    give(each.block, each.view->stream, each.tag, each.point, config_.verify ? *each.markers : no_markers);
  }
  ready.clear();
}

void Lifetimes::give(Block* block, Stream stream, Tag tag, uint64_t point, const std::vector<Node>& markers) {
  waiting_--;
  stats_.active_bytes.add(-static_cast<int64_t>(block->size));
  if (block->used_outside) point = never_covered;
  history_.add(HistoryEntry::free_completed, block->address, block->size, block->stream);
  block->segment->pool->give(block, stream, tag, point, markers);
}

void Lifetimes::park(Block* block) {
  stats_.parked++;
  parked_.push_back(block);
}

// False: nothing has changed, and another time may be better.
bool Lifetimes::by_events(Block* block) {
  Stream home = block->segment->home_of(*block);
  if (block->stream != home) {  // it moved inside a capture that is over, and goes back
    if (std::find(block->users.begin(), block->users.end(), block->stream) == block->users.end()) {
      block->users.push_back(block->stream);
    }
    block->users.erase(std::remove(block->users.begin(), block->users.end(), home), block->users.end());
    block->stream = home;
  }
  if (block->users.empty() || mutated(config_, Mutant::events_not_awaited)) {
    give(block, block->stream, settled, never_covered, no_markers);
    return true;
  }
  std::vector<Ready> none;
  if (captures.observe(block->stream, none).status != Observation::outside) return false;
  for (Stream user : block->users) {
    if (captures.observe(user, none).status != Observation::outside) return false;
  }
  std::vector<Event> events;
  for (Stream user : block->users) {
    Event made = nullptr;
    bool failed = !event(made);
    if (!failed) events.push_back(made);
    if (failed || driver_.event_record(made, user) != result::success) {
      // An event that was recorded is as good as new: its next record replaces this one.
      spare_.insert(spare_.end(), events.begin(), events.end());
      return false;
    }
  }
  for (size_t i = 0; i < events.size(); i++) {
    pending_[block->users[i]].push_back({events[i], block});
    block->events++;
  }
  return true;
}

bool Lifetimes::event(Event& out) {
  if (!spare_.empty()) {
    out = spare_.back();
    spare_.pop_back();
    return true;
  }
  return driver_.event_create(&out, event_without_timing) == result::success;
}

void Lifetimes::passed(Block* block) {
  if (--block->events == 0) give(block, block->stream, settled, never_covered, no_markers);
}

void Lifetimes::query() {
  RelaxedCapture relaxed(driver_);
  if (!relaxed.ok) return;
  for (auto place = pending_.begin(); place != pending_.end();) {
    auto& queue = place->second;
    while (!queue.empty() && driver_.event_query(queue.front().event) == result::success) {
      Pending head = queue.front();
      queue.pop_front();
      spare_.push_back(head.event);
      passed(head.block);
    }
    place = queue.empty() ? pending_.erase(place) : std::next(place);
  }
}

bool Lifetimes::await() {
  bool any = false;
  RelaxedCapture relaxed(driver_);
  if (!relaxed.ok) return false;
  for (auto place = pending_.begin(); place != pending_.end();) {
    auto& queue = place->second;
    while (!queue.empty() && driver_.event_synchronize(queue.front().event) == result::success) {
      Pending head = queue.front();
      queue.pop_front();
      spare_.push_back(head.event);
      passed(head.block);
      any = true;
    }
    place = queue.empty() ? pending_.erase(place) : std::next(place);
  }
  return any;
}

}  // namespace mg

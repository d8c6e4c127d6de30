#include "core/lifetimes.h"

#include <algorithm>
#include <optional>

#include "core/driver_guard.h"

namespace mg {

namespace {
const std::vector<Node> no_markers;
constexpr uint64_t most_pause = 4096;
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
    seen = captures.observe(stream, ready, stream != nullptr);
    bool follows = before > 0 && captures.count() > before;
    if (config_.reuse == Reuse::graph_wide && seen.view != nullptr) captures.observe_all(*seen.view->capture, ready);
    release(ready);
    if (seen.view != nullptr && !seen.view->capture->queued.empty()) {
      std::vector<Block*> queued;
      queued.swap(seen.view->capture->queued);
      for (Block* block : queued) place(block, true);
    }
    if (captures.count() > (seen.view != nullptr ? 1u : 0u)) {
      std::vector<Block*> left;
      captures.poll(left);
      for (Block* block : left) park(block);
      if (follows && captures.count() == 1 && seen.view != nullptr) {
        // All that was known has ended unnoticed, and this capture has freed nothing yet.
        seen.view->capture->alone = !captures.doubtful();
        for (Pool* pool : pools) {
          if (!captures.doubtful()) pool->settle();
        }
      }
    }
  }
  if (captures.any() || captures.doubtful() || seen.status == Observation::unknown) return seen;
  for (Pool* pool : pools) pool->settle();
  if (!parked_.empty()) {
    std::vector<Block*> parked;
    parked.swap(parked_);
    for (Block* block : parked) {
      if (captures.any()) parked_.push_back(block);
      else settle_or_park(block);
    }
  }
  if (!unanswered_.empty()) ask_again();
  if (!pending_.empty()) query();
  return seen;
}

void Lifetimes::dispose(Block* block, bool watched) {
  block->state = BlockState::waiting;
  waiting_++;
  block->users.erase(std::remove(block->users.begin(), block->users.end(), block->stream), block->users.end());
  if (!watched) {
    settle_or_park(block);
    return;
  }
  place(block, false);
}

// `queued`: it was, until the thread that drives the capture came.
void Lifetimes::place(Block* block, bool queued) {
  std::vector<Ready> ready;
  Observation own = captures.observe(block->stream, ready);
  bool in_capture = own.status != Observation::outside;
  bool told = own.status != Observation::unknown;
  Capture* elsewhere = own.capture;
  for (Stream user : block->users) {
    Observation seen = captures.observe(user, ready);
    in_capture = in_capture || seen.status != Observation::outside;
    told = told && seen.status != Observation::unknown;
    told = told && (elsewhere == nullptr || seen.capture == nullptr || seen.capture == elsewhere);
    if (seen.capture != nullptr) elsewhere = seen.capture;
  }
  if (elsewhere != nullptr && told && !queued) {
    release(ready);
    elsewhere->queued.push_back(block);
    return;
  }
  if (!in_capture) {
    // Beside captures of others it goes the ordinary way, unless it comes out of a capture itself: that may have been a
    // body of one that is under way. Events are recorded at once, for later a stream may have been destroyed.
    bool waits = captures.any() && block->capture != 0;
    release(ready);
    if (waits) park(block);
    else settle_or_park(block);
    return;
  }
  stats_.freed_in_captures++;
  bool proven = told && own.view != nullptr && prove(block, own.view, ready);
  release(ready);
  if (!proven) park(block);
}

// Takes the block over, for now or once its markers are in a stream's past; false: that can never be proven.
bool Lifetimes::prove(Block* block, StreamView* own, std::vector<Ready>& ready) {
  Capture& capture = *own->capture;
  if (block->capture != capture.serial) {
    // Of an earlier capture: graphs that share a pool are launched one after the other, so its uses there are over. Not
    // so if that capture surrounds this one (a conditional body may run again), nor for what ran without a capture.
    // What other streams did with it may have been outside of captures too, and nothing tells when that is over.
    if (block->capture == 0 || !capture.alone || captures.count() != 1 || own->apart) return false;
    if (!block->users.empty()) return false;
    block->used_outside = true;
    block->born = 0;
  }
  if (own->broken_at > block->born) return false;
  if (block->users.empty()) {
    // Memory that came by proof goes on needing one: an early kernel may have run past what it was proven by.
    if (block->by_proof && own->partial_at > block->born) return false;
    give(block, block->stream, block->by_proof ? own->proof_tag : own->order_tag, own->point,
         config_.verify ? own->terminals : no_markers);
    return true;
  }
  if (config_.reuse == Reuse::strict) return false;

  std::vector<StreamView*> views{own};
  for (Stream user : block->users) {
    auto found = capture.views.find(user);
    if (found == capture.views.end() || !found->second->known) return false;
    views.push_back(found->second.get());
  }
  for (Stream user : block->users) {
    // A view of this capture is no proof that the stream is in it now.
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
  if (block->stream == nobody) {  // it was lent, and all of that is over
    block->used_outside = false;
    point = 0;
  }
  if (block->used_outside) point = never_covered;
  history_.add(HistoryEntry::free_completed, block->address, block->size, block->stream);
  Pool& pool = *block->segment->pool;
  if (block->borrowed) pool.lent -= block->size;
  block->borrowed = false;
  pool.give(block, stream, tag, point, markers);
}

void Lifetimes::park(Block* block) {
  stats_.parked++;
  parked_.push_back(block);
}

void Lifetimes::settle_or_park(Block* block) {
  Events done = by_events(block);
  if (done == Events::later) {
    park(block);
  } else if (done == Events::unanswered) {
    unanswered_.push_back(block);
    unanswered_bytes_ += block->size;
  }
}

// Unless it is recorded nothing has changed, and another time may be better.
Lifetimes::Events Lifetimes::by_events(Block* block) {
  // What captures share and has served others goes back to nobody, when these are done with it.
  bool returns = block->borrowed && block->segment->home == nobody;
  Stream home = returns ? nobody : block->segment->home_of(*block);
  if (block->stream != home) {  // it moved inside a capture that is over, or was lent, and goes back
    if (std::find(block->users.begin(), block->users.end(), block->stream) == block->users.end()) {
      block->users.push_back(block->stream);
    }
    block->users.erase(std::remove(block->users.begin(), block->users.end(), home), block->users.end());
    block->stream = home;
  }
  if (block->users.empty()) {
    give(block, block->stream, settled, never_covered, no_markers);
    return Events::recorded;
  }
  std::vector<Ready> none;
  auto outside = [&](Stream stream) { return captures.observe(stream, none).status; };
  Observation::Status seen = returns ? Observation::outside : outside(block->stream);
  for (size_t i = 0; i < block->users.size() && seen == Observation::outside; i++) seen = outside(block->users[i]);
  if (seen != Observation::outside) return seen == Observation::unknown ? Events::unanswered : Events::later;
  std::optional<DriverGuard> guard;
  if (captures.any()) guard.emplace(driver_, relaxed);
  std::vector<Event> events;
  for (Stream user : block->users) {
    Event made = nullptr;
    bool failed = (guard && !guard->ok) || !event(made);
    if (!failed) events.push_back(made);
    if (failed || driver_.event_record(made, user) != result::success) {
      // An event that was recorded is as good as new: its next record replaces this one.
      spare_.insert(spare_.end(), events.begin(), events.end());
      return Events::unanswered;
    }
  }
  for (size_t i = 0; i < events.size(); i++) {
    pending_[block->users[i]].push_back({events[i], block});
    block->events++;
  }
  return Events::recorded;
}

// One of them, and more seldom each time; all when that one is answered.
void Lifetimes::ask_again() {
  if (++paused_ < pause_) return;
  paused_ = 0;
  pause_ = std::min(2 * pause_, most_pause);
  Block* first = unanswered_.back();
  Events done = by_events(first);
  if (done == Events::unanswered) return;
  unanswered_.pop_back();
  if (done == Events::later) park(first);
  std::vector<Block*> others;
  others.swap(unanswered_);
  unanswered_bytes_ = 0;
  for (Block* block : others) settle_or_park(block);
  if (unanswered_.empty()) pause_ = 1;
}

bool Lifetimes::all_is_over() {
  std::vector<Block*> over;
  over.swap(unanswered_);
  unanswered_bytes_ = 0;
  for (Block* block : over) {
    bool returns = block->borrowed && block->segment->home == nobody;
    block->stream = returns ? nobody : block->segment->home_of(*block);
    give(block, block->stream, settled, never_covered, no_markers);
  }
  pause_ = 1;
  return !over.empty();
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
  DriverGuard guard(driver_, relaxed);
  if (!guard.ok) return;
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
  DriverGuard guard(driver_, relaxed);
  if (!guard.ok) return false;
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

// Where memory for a request comes from, in the order in which the places are tried.
//
// cached block -> (garbage goes) -> new segment -> blocks that wait for events -> new segment after cached segments were
// given back -> pools that are open to others at out-of-memory -> the user's callback, then all of it again -> failure
// with an account. During captures nothing is waited for and nothing is given back to the driver.

#include <algorithm>

#include "core/device.h"
#include "core/readable.h"
#include "core/driver_guard.h"

namespace mg {

namespace {

constexpr int callback_rounds = 8;

}  // namespace

Block* Device::climb(Request& request, Lock& lock, std::string& reason) {
  for (int round = 0;; round++) {
    if (Block* block = find(request)) return block;
    {
      DriverGuard in(driver_, context_);
      bool outside = request.seen.status == Observation::outside;
      if (outside && lifetimes_.unanswered() >= request.size && recover()) {
        if (Block* block = find(request)) return block;
      }
      collect_garbage();
      Block* grown = grow(request, reason);
      if (grown != nullptr && verified(request, grown)) return grown;
      if (grown != nullptr) continue;  // what it was joined with is withheld now
      stats_.retries++;
      if (quiet() && outside) {
        bool back = lifetimes_.await();
        if (recover() || back) {
          if (Block* block = find(request)) return block;
        }
        if (give_back_all() != 0) {
          if (Block* block = grow(request, reason)) return block;
        }
      }
      if (Block* block = last_resort(request)) return block;
    }
    if (!oom_callback_ || round == callback_rounds) return nullptr;
    auto callback = oom_callback_;
    lock.unlock();
    PoolId pool = request.pool->id;
    bool again = callback(request.asked);
    lock.lock();
    request.pool = &pool_of(pool);  // the callback may have emptied the cache
    if (!again) return nullptr;
    DriverGuard in(driver_, context_);
    request.seen = tend(request.stream);
  }
}

// Blocks that a destroyed stream has used come back when all work of the device is over.
bool Device::recover() {
  bool waited = false;
  return lifetimes_.unanswered() != 0 && wait(waited) && lifetimes_.all_is_over();
}

Block* Device::find(Request& request) {
  // The driver did not tell: it may be a capture that goes on in a graph, for which nothing that was used is over.
  if (request.seen.status == Observation::unknown) return nullptr;
  for (;;) {
    Block* block = nullptr;
    StreamView* view = request.seen.view;
    auto kind = size_class::kind(request.size);
    if (view == nullptr) {
      block = request.pool->lists().best(request.size, kind, request.stream, &settled, 1);
    } else {
      if (shared(request)) block = find_shared(request);
      Tag tags[] = {view->order_tag, view->proof_tag, settled};
      // What this stream has outside of captures too.
      if (block == nullptr) block = request.pool->lists().best(request.size, kind, request.stream, tags, view->apart ? 2 : 3);
      if (block == nullptr && config_.reuse == Reuse::any_stream) block = find_covered(request, kind);
    }
    if (block == nullptr || verified(request, block)) return block;
  }
}

// Other streams of the same capture, and what of theirs was freed before this one last waited for them.
std::vector<Device::Owner> Device::owners(const Request& request) {
  std::vector<Owner> found;
  StreamView& view = *request.seen.view;
  for (StreamView* other : view.capture->in_order) {
    if (other == &view || other->partial_at != 0 || !other->known) continue;
    found.push_back({other->stream, other->order_tag, other->proof_tag, lifetimes_.captures.cover(view, *other)});
  }
  return found;
}

Block* Device::find_covered(const Request& request, size_class::Kind kind) {
  for (const Owner& owner : owners(request)) {
    for (Tag tag : {owner.order_tag, owner.proof_tag}) {
      if (Block* block = request.pool->lists().best_covered(request.size, kind, owner.stream, tag, owner.cover)) return block;
    }
  }
  return nullptr;
}

// What captures share: neighbours of which this stream may have each.
Block* Device::find_shared(Request& request) {
  const Pool& pool = *request.pool;
  Run run;
  if (request.seen.view->partial_at == 0) {
    May may(*this, request, May::any);
    if (config_.stitch && request.size <= size_class::low_limit) run.first = pool.holes().lowest(request.size, may);
    if (run.first == nullptr) run = pool.holes().best(request.size, may);
    if (may_stitch(request) && (run.first == nullptr || cuts_a_page(run, request.size))) {
      if (Block* block = stitch_cached(request, may, run.first != nullptr)) return block;
    }
  } else {
    run = pool.holes().best(request.size, May(*this, request, May::begun));
    if (run.first == nullptr) run = pool.holes().best(request.size, May(*this, request, May::over));
  }
  return run.first != nullptr ? out_of(request, run.first) : nullptr;
}

// One free block of the neighbours from `first` on, of which the stream may have each.
Block* Device::out_of(const Request& request, Block* first) {
  return first->size >= request.size ? first : gather(request, first, request.size);
}

Device::May::May(Device& device, const Request& request, Which which) : request_(request) {
  StreamView* view = request.seen.view;
  settled_too_ = request.seen.status != Observation::unknown;
  if (view == nullptr) return;
  settled_too_ = !view->apart;
  if (which != over) order_tag_ = view->order_tag;
  if (which != begun) proof_tag_ = view->proof_tag;
  if (which != begun) owners_ = device.owners(request);
}

bool Device::May::operator()(const Block& block) const {
  if (block.state != BlockState::free) return false;
  if (block.tag == settled) {
    return settled_too_ && (block.stream == request_.stream || (block.stream == nobody && request_.seen.view != nullptr));
  }
  if (block.stream == request_.stream) return block.tag == order_tag_ || block.tag == proof_tag_;
  return std::any_of(owners_.begin(), owners_.end(), [&](const Owner& owner) {
    return owner.stream == block.stream && (block.tag == owner.order_tag || block.tag == owner.proof_tag) &&
           block.point <= owner.cover;
  });
}

// The neighbours from `first` on as one block of `size` that is this stream's.
Block* Device::gather(const Request& request, Block* first, size_t size) {
  bool moved = false, by_proof = false;
  Tag tag = settled;
  size_t bytes = 0;
  for (const Block* part = first; bytes < size; part = part->next) {
    bytes += part->size;
    moved = moved || (part->stream != request.stream && part->stream != nobody);
    by_proof = by_proof || moved || part->tag % 2 == 1;
    if (part->tag != settled) tag = request.seen.view->order_tag;
  }
  if (moved) stats_.moved++;
  if (by_proof) tag = request.seen.view->proof_tag;
  return request.pool->gather(first, size, request.stream, tag);
}

// When verifying: what is not proven again nobody gets before the captures end.
bool Device::verified(const Request& request, Block* block) {
  if (!config_.verify || block->markers.empty() || proven_again(request, block)) return true;
  stats_.verify_failures++;
  request.pool->withhold(block);
  return false;
}

bool Device::proven_again(const Request& request, const Block* block) {
  stats_.verified++;
  bool full = block->tag % 2 == 1 || block->stream != request.stream;
  return std::all_of(block->markers.begin(), block->markers.end(),
                     [&](Node marker) { return lifetimes_.captures.proves(request.stream, marker, full); });
}

bool Device::room_for(const Pool& pool, size_t bytes, std::string& reason) const {
  size_t reserved = static_cast<size_t>(stats_.reserved_bytes.current);
  if (limit_ != 0 && reserved + bytes > limit_) {
    reason = "this process may use " + readable(limit_);
    return false;
  }
  if (pool.limit != 0 && pool.reserved + bytes > pool.limit) {
    reason = "this pool may use " + readable(pool.limit);
    return false;
  }
  return true;
}

Block* Device::grow(Request& request, std::string& reason) {
  bool apart = request.seen.view != nullptr && request.seen.view->apart;
  if (config_.expandable && !apart) {
    bool no_range = false;  // addresses are not endless, and a plain segment is better than none
    Block* block = extend(*request.pool, request, reason, no_range);
    if (!no_range) return block;
  }
  size_t bytes = size_class::segment(request.size);
  if (!room_for(*request.pool, bytes, reason)) return nullptr;
  Address address = 0;
  {
    DriverGuard guard(driver_, relaxed);
    if (!guard.ok || driver_.memory_alloc(&address, bytes) != result::success) {
      reason = "the driver has no segment of " + readable(bytes);
      return nullptr;
    }
  }
  try {
    Block* block = request.pool->add_segment(address, bytes, request.stream, size_class::kind(request.size));
    stats_.reserved_bytes.add(static_cast<int64_t>(bytes));
    stats_.segments.add(1);
    history_.add(HistoryEntry::segment_alloc, address, bytes, request.stream);
    // Who may have nothing that is settled has all of this, also what is left of it.
    return apart ? request.pool->bind(block, request.seen.view->order_tag) : block;
  } catch (...) {
    driver_.memory_free(address);
    throw;
  }
}

// What is settled in a pool that is open at out-of-memory serves any stream: what may still use it is waited for on the
// host. No capture gets it: a graph is replayed, and what others use in between cannot be its memory.
Block* Device::last_resort(Request& request) {
  if (request.seen.status != Observation::outside) return nullptr;
  for (Pool* pool : pool_list_) {
    if (!pool->use_on_oom || pool == request.pool) continue;
    if (Block* block = borrow(*pool, request)) return block;
  }
  return nullptr;
}

Block* Device::borrow(Pool& pool, const Request& request) {
  bool waited = false;
  auto over = [&](const Segment& segment, Stream stream) {
    if (segment.captured) return wait(waited);
    return stream == request.stream || wait(stream);
  };
  Block* own = pool.lists().best(request.size, size_class::kind(request.size), request.stream, &settled, 1);
  if (own != nullptr && over(*own->segment, own->stream)) return own;
  if (config_.expandable) {  // less may be missing behind what is free there
    std::string unused;
    bool no_range = false;
    Block* block = extend(pool, request, unused, no_range);
    if (block != nullptr && over(*block->segment, request.stream)) return block;
  }
  if (!quiet()) return nullptr;
  Block* block = pool.lists().best_settled(request.size);
  if (block != nullptr && over(*block->segment, block->stream)) return block;
  // What captures have left in the range that they share. No graph of the pool may be launched before it is back.
  auto free = [](const Block& part) { return part.state == BlockState::free && part.tag == settled; };
  Run run = pool.holes().best(request.size, free);
  if (run.first == nullptr || !over(*run.first->segment, nobody)) return nullptr;
  return pool.gather(run.first, request.size, request.stream, settled);
}

bool Device::wait(bool& waited) {
  if (waited) return true;
  if (!quiet() || scopes_.for_captures()) return false;  // a capture would be broken
  waited = driver_.context_synchronize() == result::success;
  return waited;
}

bool Device::wait(const Segment& segment, bool& waited) {
  if (waited || wait(waited)) return true;
  return !segment.captured && segment.home != nobody && wait(segment.home);
}

bool Device::wait(Stream stream) {
  // A capture that began without a scope is not known, and an event would become part of it.
  std::vector<Ready> none;
  if (lifetimes_.captures.observe(stream, none).status != Observation::outside) return false;
  DriverGuard guard(driver_, relaxed);
  Event event = nullptr;
  if (!guard.ok || driver_.event_create(&event, event_without_timing) != result::success) return false;
  bool passed = driver_.event_record(event, stream) == result::success &&
                driver_.event_synchronize(event) == result::success;
  driver_.event_destroy(event);
  return passed;
}

// Above the threshold, cached segments that were not used for longer than the average of them go.
void Device::collect_garbage() {
  if (config_.garbage_threshold <= 0 || limit_ == 0 || !quiet()) return;
  if (static_cast<double>(stats_.reserved_bytes.current) < config_.garbage_threshold * static_cast<double>(limit_)) {
    return;
  }
  uint64_t sum = 0, count = 0;
  for (auto& [address, segment] : default_pool_->segments()) {
    if (!segment->cached()) continue;
    sum += segment->last_use;
    count++;
  }
  if (count != 0) give_back(*default_pool_, sum / count + 1);
}

size_t Device::give_back(Pool& pool, uint64_t not_used_since) {
  size_t bytes = 0;
  DriverGuard guard(driver_, relaxed);
  if (!guard.ok) return 0;
  bytes += shrink(pool, not_used_since);
  for (auto& segment : pool.cut_cached(not_used_since)) {
    if (driver_.memory_free(segment->address) != result::success) {
      pool.put_back(std::move(segment));
      continue;
    }
    bytes += segment->size;
    stats_.reserved_bytes.add(-static_cast<int64_t>(segment->size));
    stats_.segments.add(-1);
    history_.add(HistoryEntry::segment_free, segment->address, segment->size, segment->home);
  }
  return bytes;
}

// A pool that somebody still holds keeps its segments: recordings know their addresses.
size_t Device::give_back_all() {
  size_t bytes = 0;
  for (Pool* pool : pool_list_) {
    if (pool == default_pool_ || pool->users == 0) bytes += give_back(*pool);
  }
  return bytes;
}

}  // namespace mg

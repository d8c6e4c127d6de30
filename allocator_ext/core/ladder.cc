// Where memory for a request comes from, in the order in which the places are tried.
//
// cached block -> (garbage goes) -> new segment -> blocks that wait for events -> new segment after cached segments were
// given back -> pools that are open to others at out-of-memory -> relief, then all of it again -> the user's callback, then
// all of it again -> failure with an account. During captures nothing is waited for and nothing is given back to the driver: waiting would break the
// capture, and memory of the driver may be part of its graph.

#include "core/device.h"

namespace mg {

namespace {

constexpr int callback_rounds = 8;
constexpr int relief_rounds = 2;  // what is given up first may be too little, or in pieces

}  // namespace

Block* Device::climb(Request& request, Lock& lock, std::string& reason) {
  for (int round = 0;; round++) {
    if (Block* block = search_.find(request)) return block;
    {
      DriverGuard in(driver_, context_);
      bool outside = request.seen.status == Observation::outside;
      if (outside && lifetimes_.unanswered() >= request.size && recover()) {
        if (Block* block = search_.find(request)) return block;
      }
      collect_garbage();
      Block* grown = grow(request, reason);
      if (grown != nullptr && search_.verified(request, grown)) return grown;
      if (grown != nullptr) continue;  // what it was joined with is withheld now
      stats_.retries++;
      if (quiet() && outside) {
        bool back = lifetimes_.await();
        if (recover() || back) {
          if (Block* block = search_.find(request)) return block;
        }
        if (give_back_all() != 0) {
          if (Block* block = grow(request, reason)) return block;
        }
      }
      if (Block* block = last_resort(request)) return block;
    }
    bool relieved = relief_ && round < relief_rounds && quiet() && request.seen.status == Observation::outside &&
                    gives(relief_, request, lock, reason);
    if (request.pool->asleep) return nullptr;
    if (!relieved && (!oom_callback_ || round == callback_rounds || !gives(oom_callback_, request, lock, reason))) return nullptr;
    DriverGuard in(driver_, context_);
    request.seen = tend(request.stream);
  }
}

// Asks the program, without the lock; whether it gave something up, and the request may be tried again.
bool Device::gives(std::function<bool(size_t)> asked, Request& request, Lock& lock, std::string& reason) {
  PoolId pool = request.pool->id;
  lock.unlock();
  bool gave = asked(request.asked);
  lock.lock();
  request.pool = &pool_of(pool);  // the program may have emptied the cache, or put the pool to sleep
  if (request.pool->asleep) reason = asleep_text;
  return gave && !request.pool->asleep;
}

// Blocks that a destroyed stream has used come back when all work of the device is over.
bool Device::recover() {
  return lifetimes_.unanswered() != 0 && waits().for_all() && lifetimes_.all_is_over();
}

Block* Device::grow(Request& request, std::string& reason) {
  bool apart = request.seen.view != nullptr && request.seen.view->apart;
  if (supply_.expandable() && !apart) {
    bool no_range = false;  // addresses are not endless, and a plain segment is better than none
    Block* block = extend(*request.pool, request, reason, no_range);
    if (!no_range) return block;
  }
  Block* block = supply_.segment(*request.pool, request.size, request.stream, reason);
  // Who may have nothing that is settled has all of this, also what is left of it.
  return block != nullptr && apart ? request.pool->bind(block, request.seen.view->order_tag) : block;
}

// `pool` is the request's own or, at out-of-memory, another: that is only extended where it saves memory.
Block* Device::extend(Pool& pool, const Request& request, std::string& reason, bool& no_range) {
  auto kind = search_.shared(request) ? size_class::Kind::shared : size_class::kind(request.size);
  Stream home = search_.shared(request) ? nobody : request.stream;
  bool early = request.seen.view != nullptr && request.seen.view->partial_at != 0;
  May may(search_, request, early ? May::over : May::any);
  Pool::Room room = pool.room(request.size, home, kind, may);
  bool own = &pool == request.pool;
  if (!own && (room.unmapped == nullptr || room.bytes >= request.size)) return nullptr;
  if (room.unmapped == nullptr) {
    no_range = supply_.range(pool, request.size, home, kind, reason) == nullptr;
    if (no_range) return nullptr;
    room = pool.room(request.size, home, kind, may);
  }
  if (own && kind == size_class::Kind::shared && search_.may_stitch(request)) {
    if (Block* block = search_.stitch_fresh(request, may, room)) return block;
    if (Run run = pool.holes().best(request.size, may); run.first != nullptr) return search_.out_of(request, run.first);
    room = pool.room(request.size, home, kind, may);
    if (room.unmapped == nullptr) {
      reason = "the range of addresses is full";
      return nullptr;
    }
  }
  Address fresh = room.unmapped->address;
  Block* block = supply_.pages(pool, room, request.stream, reason);
  if (block != nullptr && request.seen.status == Observation::unknown) return pool.from(block, fresh);
  if (block == nullptr || block->size >= request.size) return block;
  size_t has = block->size;
  for (; has < request.size; has += block->size) block = block->previous;
  return search_.gather(request, block, request.size);
}

// What is settled in a pool that is open at out-of-memory serves any stream: what may still use it is waited for on the
// host. No capture gets it: a graph is replayed, and what others use in between cannot be its memory.
Block* Device::last_resort(Request& request) {
  if (request.seen.status != Observation::outside) return nullptr;
  for (Pool* pool : pool_list_) {
    if (!pool->use_on_oom || pool->asleep || pool == request.pool) continue;
    if (Block* block = borrow(*pool, request)) return block;
  }
  return nullptr;
}

Block* Device::borrow(Pool& pool, const Request& request) {
  Waits waits = this->waits();
  auto over = [&](const Segment& segment, Stream stream) {
    if (segment.captured) return waits.for_all();
    return stream == request.stream || waits.for_stream(stream);
  };
  Block* own = pool.lists().best(request.size, size_class::kind(request.size), request.stream, &settled, 1);
  if (own != nullptr && over(*own->segment, own->stream)) return own;
  if (supply_.expandable()) {  // less may be missing behind what is free there
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

// Above the threshold, cached segments that were not used for longer than the average of them go.
void Device::collect_garbage() {
  if (config_.garbage_threshold <= 0 || supply_.limit == 0 || !quiet()) return;
  if (static_cast<double>(stats_.reserved_bytes.current) < config_.garbage_threshold * static_cast<double>(supply_.limit)) {
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
  Waits waits = this->waits();
  return supply_.give_back(pool, not_used_since, waits);
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

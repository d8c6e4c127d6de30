// Expandable segments: ranges of addresses of which pages are mapped as they are needed.
//
// Why: blocks of all sizes share one range, so that what a freed large block leaves is joined by what is mapped behind it,
// instead of waiting for a request of its size. In: requests that no free block serves. Out: free memory at the end of
// what is mapped, or in a hole; at the other end of life, chunks that are free go back. Outside of captures each pool,
// stream and kind of size has a range; captures share one in each pool, for requests of all their streams and of all sizes.
// Each chunk is one physical allocation, and its handle is released once it is mapped: the mapping keeps it. Where pages
// may be mapped again (windows.h), each is a chunk and keeps its handle.
// Invariant: a block is mapped and accessible as a whole, or it is an unmapped block.

#include <algorithm>

#include "core/device.h"
#include "core/driver_guard.h"

namespace mg {

Segment* Device::reserve(Pool& pool, const Request& request, size_class::Kind kind, std::string& reason) {
  size_t free = 0, total = 0;
  Address address = 0;
  DriverGuard guard(driver_, relaxed);
  bool told = guard.ok && can_map() && driver_.memory_info(&free, &total) == result::success;
  // An eighth more than there is, so that holes in the range do not end it. Pools beside the default one may be many,
  // and have another range when one is full.
  size_t bytes = &pool == default_pool_ ? total + total / 8 : std::max(total / 4, 2 * request.size);
  bytes = size_class::up(bytes, size_class::page);
  if (!told || request.size > total || driver_.address_reserve(&address, bytes, 0, 0, 0) != result::success) {
    reason = "the driver has no range of addresses for this";
    return nullptr;
  }
  try {
    return pool.add_range(address, bytes, kind == size_class::Kind::shared ? nobody : request.stream, kind);
  } catch (...) {
    driver_.address_free(address, bytes);
    throw;
  }
}

// All of it or, where the driver refuses, nothing.
bool Device::map(Segment& segment, Address address, size_t bytes) {
  DriverGuard guard(driver_, relaxed);
  int ordinal = 0;
  std::vector<MemoryAccess> access;
  unmap_stuck();
  for (auto& [stuck, size] : stuck_) {
    if (stuck < address + bytes && address < stuck + size) return false;
  }
  std::map<Address, Chunk> chunks;
  bool again = config_.stitch && segment.kind == size_class::Kind::shared;
  size_t most = again ? size_class::page : size_class::most_mapped;
  for (size_t at = 0; at < bytes; at += most) chunks.emplace(address + at, Chunk{std::min(bytes - at, most)});
  stuck_.reserve(stuck_.size() + chunks.size());
  if (!guard.ok || driver_.device_get(&ordinal, index_) != result::success) return false;
  access.push_back({{1, ordinal}, 3});
  for (int peer : peers_) access.push_back({{1, peer}, 3});
  auto done = chunks.begin();
  for (; done != chunks.end(); ++done) {
    Physical handle = 0;
    size_t size = done->second.size;
    if (driver_.physical_create(&handle, size, &memory_, 0) != result::success) break;
    bool mapped = driver_.memory_map(done->first, size, 0, handle, 0) == result::success;
    if (mapped && again) {
      done->second.handle = handle;
    } else {
      driver_.physical_release(handle);
    }
    if (!mapped) break;
  }
  if (done == chunks.end() && driver_.memory_access(address, bytes, access.data(), access.size()) == result::success) {
    segment.chunks.merge(chunks);
    return true;
  }
  for (auto chunk = chunks.begin(); chunk != done; ++chunk) {
    size_t size = chunk->second.size;
    if (driver_.memory_unmap(chunk->first, size) != result::success) stuck_.push_back({chunk->first, size});
    release_handle(chunk->second);
  }
  return false;
}

void Device::release_handle(const Chunk& chunk) {
  if (chunk.handle != 0) driver_.physical_release(chunk.handle);
}

// Where the driver cannot map memory, or not in our pages, all segments are plain from now on. Memory is asked for as
// torch asks: with a handle that can be given to another process, and for network cards to reach, where the device has that.
bool Device::can_map() {
  if (asked_) return true;
  int ordinal = 0, can = 0, shares = 0, remote = 0;
  size_t grain = 0;
  if (driver_.device_get(&ordinal, index_) != result::success ||
      driver_.device_attribute(&can, maps_memory, ordinal) != result::success ||
      driver_.device_attribute(&shares, shares_by_descriptor, ordinal) != result::success ||
      driver_.device_attribute(&remote, remote_access_to_mapped, ordinal) != result::success) {
    return false;  // it may tell the next time
  }
  memory_ = {};
  memory_.type = 1;
  memory_.location = {1, ordinal};
  memory_.handle_types = shares != 0 ? by_descriptor : 0;
  memory_.direct_rdma = remote != 0 ? 1 : 0;
  if (can != 0 && driver_.granularity(&grain, &memory_, least_granularity) != result::success) return false;
  asked_ = can != 0 && grain != 0 && size_class::page % grain == 0;
  config_.expandable = asked_;
  return asked_;
}

Outcome Device::open_to(int other) {
  Lock lock(mutex_);
  DriverGuard guard(driver_, context_, relaxed);
  int own = 0, peer = 0, can = 0;
  if (!guard.ok || driver_.device_get(&own, index_) != result::success ||
      driver_.device_get(&peer, other) != result::success || driver_.can_access_peer(&can, peer, own) != result::success) {
    return {Status::driver_failed, "the driver does not tell whether these devices reach each other"};
  }
  if (can == 0) return {Status::invalid, "these devices do not reach each other"};
  if (std::find(peers_.begin(), peers_.end(), peer) != peers_.end()) return {};
  peers_.push_back(peer);
  MemoryAccess access{{1, peer}, 3};
  auto open = [&](Address start, size_t size) { return driver_.memory_access(start, size, &access, 1) == result::success; };
  bool all = true;
  for (Pool* pool : pool_list_) {
    for (auto& [address, segment] : pool->segments()) {
      for (auto& [start, chunk] : segment->chunks) all = all && open(start, chunk.size);
    }
    for (auto& [address, window] : pool->windows()) all = all && (!window->whole() || open(address, window->size));
  }
  if (all) return {};
  peers_.pop_back();  // some of it may be open already, which harms nobody
  return {Status::driver_failed, "the driver does not open memory to that device"};
}

void Device::unmap_stuck() {
  for (size_t i = stuck_.size(); i-- > 0;) {
    if (driver_.memory_unmap(stuck_[i].first, stuck_[i].second) == result::success) {
      stuck_[i] = stuck_.back();
      stuck_.pop_back();
    }
  }
}

// `pool` is the request's own or, at out-of-memory, another: that is only extended where it saves memory.
Block* Device::extend(Pool& pool, const Request& request, std::string& reason, bool& no_range) {
  auto kind = shared(request) ? size_class::Kind::shared : size_class::kind(request.size);
  Stream home = shared(request) ? nobody : request.stream;
  bool early = request.seen.view != nullptr && request.seen.view->partial_at != 0;
  May may(*this, request, early ? May::over : May::any);
  Pool::Room room = pool.room(request.size, home, kind, may);
  bool own = &pool == request.pool;
  if (!own && (room.unmapped == nullptr || room.bytes >= request.size)) return nullptr;
  if (room.unmapped == nullptr) {
    no_range = reserve(pool, request, kind, reason) == nullptr;
    if (no_range) return nullptr;
    room = pool.room(request.size, home, kind, may);
  }
  if (own && kind == size_class::Kind::shared && may_stitch(request)) {
    if (Block* block = stitch_fresh(request, may, room)) return block;
    if (Run run = pool.holes().best(request.size, may); run.first != nullptr) return out_of(request, run.first);
    room = pool.room(request.size, home, kind, may);
    if (room.unmapped == nullptr) {
      reason = "the range of addresses is full";
      return nullptr;
    }
  }
  Address fresh = room.unmapped->address;
  Block* block = map_more(pool, room, request.stream, reason);
  if (block != nullptr && request.seen.status == Observation::unknown) return pool.from(block, fresh);
  if (block == nullptr || block->size >= request.size) return block;
  size_t has = block->size;
  for (; has < request.size; has += block->size) block = block->previous;
  return gather(request, block, request.size);
}

// The free block that new pages are, or are a part of.
Block* Device::map_more(Pool& pool, const Pool::Room& room, Stream stream, std::string& reason) {
  if (!room_for(pool, room.bytes, reason)) return nullptr;
  Segment& segment = *room.unmapped->segment;
  Address address = room.unmapped->address;
  if (!map(segment, address, room.bytes)) {
    reason = "the driver has no " + std::to_string(room.bytes / size_class::mib) + " MiB to map";
    return nullptr;
  }
  if (segment.mapped == 0) stats_.segments.add(1);
  stats_.reserved_bytes.add(static_cast<int64_t>(room.bytes));
  history_.add(HistoryEntry::segment_map, address, room.bytes, stream);
  return pool.mapped(room.unmapped, room.bytes);
}

// Chunks that are free go back to the driver, and ranges of which nothing is mapped. Unmapping waits for nobody, so what
// may use them is waited for first.
size_t Device::shrink(Pool& pool, uint64_t not_used_since) {
  size_t bytes = 0;
  bool waited = false;
  unmap_stuck();
  unmap_windows(pool, not_used_since, waited);
  std::vector<Segment*> ranges;
  for (auto& [address, segment] : pool.segments()) {
    bool own = segment->expandable && segment->kind != size_class::Kind::window;
    if (own && segment->last_use < not_used_since) ranges.push_back(segment.get());
  }
  for (Segment* segment : ranges) {
    Address from = segment->address;
    bool over = false;
    while (Address start = Pool::free_chunk(*segment, from)) {
      const Chunk mapped = segment->chunks.at(start);
      size_t size = mapped.size;
      from = start + size;
      if (mapped.windows != 0) continue;  // it would not go back
      over = over || wait(*segment, waited);
      if (!over) break;
      Block* chunk = pool.take_at(start, size);
      if (driver_.memory_unmap(start, size) != result::success) {
        pool.give(chunk, segment->home, settled, never_covered, {});  // nothing runs that uses it
        continue;
      }
      release_handle(mapped);
      bytes += size;
      stats_.reserved_bytes.add(-static_cast<int64_t>(size));
      history_.add(HistoryEntry::segment_unmap, start, size, segment->home);
      pool.unmapped(chunk);
      if (segment->mapped == 0) stats_.segments.add(-1);
    }
    bool stuck = std::any_of(stuck_.begin(), stuck_.end(), [&](auto& s) {
      return s.first >= segment->address && s.first < segment->address + segment->size;
    });
    if (segment->mapped == 0 && !stuck && driver_.address_free(segment->address, segment->size) == result::success) {
      pool.drop(*segment);
    }
  }
  return bytes;
}

void Device::unmap_all(const Segment& segment) {
  unmap_stuck();
  for (auto& [address, chunk] : segment.chunks) {
    driver_.memory_unmap(address, chunk.size);
    release_handle(chunk);
  }
  driver_.address_free(segment.address, segment.size);
}

}  // namespace mg

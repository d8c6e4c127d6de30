#include "core/supply.h"

#include <algorithm>
#include <map>

#include "core/physical.h"
#include "core/readable.h"

namespace mg {

namespace {
using size_class::page;
}

Block* Supply::segment(Pool& pool, size_t size, Stream stream, std::string& reason) {
  size_t bytes = size_class::segment(size);
  if (!room_for(pool, bytes, reason)) return nullptr;
  Address address = 0;
  {
    DriverGuard guard(driver_, relaxed);
    if (!guard.ok || driver_.memory_alloc(&address, bytes) != result::success) {
      reason = "the driver has no segment of " + readable(bytes);
      return nullptr;
    }
  }
  try {
    Block* block = pool.add_segment(address, bytes, stream, size_class::kind(size));
    stats_.reserved_bytes.add(static_cast<int64_t>(bytes));
    stats_.segments.add(1);
    history_.add(HistoryEntry::segment_alloc, address, bytes, stream);
    return block;
  } catch (...) {
    driver_.memory_free(address);
    throw;
  }
}

Segment* Supply::range(Pool& pool, size_t size, Stream home, Kind kind, std::string& reason) {
  size_t free = 0, total = 0;
  Address address = 0;
  DriverGuard guard(driver_, relaxed);
  bool told = guard.ok && can_map() && driver_.memory_info(&free, &total) == result::success;
  // An eighth more than there is, so that holes in the range do not end it. Pools beside the default one may be many,
  // and have another range when one is full.
  size_t bytes = pool.id == PoolId{} ? total + total / 8 : std::max(total / 4, 2 * size);
  bytes = size_class::up(bytes, page);
  if (!told || size > total || driver_.address_reserve(&address, bytes, 0, 0, 0) != result::success) {
    reason = "the driver has no range of addresses for this";
    return nullptr;
  }
  try {
    return pool.add_range(address, bytes, home, kind);
  } catch (...) {
    driver_.address_free(address, bytes);
    throw;
  }
}

Block* Supply::pages(Pool& pool, const Pool::Room& room, Stream stream, std::string& reason) {
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

bool Supply::room_for(const Pool& pool, size_t bytes, std::string& reason) const {
  size_t reserved = static_cast<size_t>(stats_.reserved_bytes.current);
  if (limit != 0 && reserved + bytes > limit) {
    reason = "this process may use " + readable(limit);
    return false;
  }
  if (pool.limit != 0 && pool.reserved + bytes > pool.limit) {
    reason = "this pool may use " + readable(pool.limit);
    return false;
  }
  return true;
}

// All of it or, where the driver refuses, nothing.
bool Supply::map(Segment& segment, Address address, size_t bytes) {
  DriverGuard guard(driver_, relaxed);
  int ordinal = 0;
  unmap_stuck();
  for (auto& [stuck, size] : stuck_) {
    if (stuck < address + bytes && address < stuck + size) return false;
  }
  std::map<Address, Chunk> chunks;
  bool again = keeps_handles_ && segment.kind == Kind::shared;  // its pages may be mapped again
  size_t most = again ? page : size_class::most_mapped;
  for (size_t at = 0; at < bytes; at += most) chunks.emplace(address + at, Chunk{std::min(bytes - at, most)});
  stuck_.reserve(stuck_.size() + chunks.size());
  if (!guard.ok || driver_.device_get(&ordinal, index_) != result::success) return false;
  std::vector<MemoryAccess> users = access(ordinal);
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
  if (done == chunks.end() && driver_.memory_access(address, bytes, users.data(), users.size()) == result::success) {
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

// Who may use what is mapped: this device and those that it was opened to.
std::vector<MemoryAccess> Supply::access(int ordinal) const {
  std::vector<MemoryAccess> users{{{1, ordinal}, 3}};
  for (int peer : peers_) users.push_back({{1, peer}, 3});
  return users;
}

void Supply::release_handle(const Chunk& chunk) {
  if (chunk.handle != 0) driver_.physical_release(chunk.handle);
}

// Where the driver cannot map memory, or not in our pages, all segments are plain from now on.
bool Supply::can_map() {
  if (asked_) return true;
  Maps maps = describe(driver_, index_, memory_);
  if (maps == Maps::not_told) return false;  // it may tell the next time
  asked_ = maps == Maps::pages;
  expandable_ = asked_;
  return asked_;
}

// All of it or, where the driver refuses, nothing that is used: what it does not take back then is tried again with what
// has no block any more.
Window* Supply::window(Pool& pool, const std::vector<Address>& pages) {
  DriverGuard guard(driver_, context_, relaxed);
  int ordinal = 0;
  Address address = 0;
  size_t size = pages.size() * page;
  if (!guard.ok || driver_.device_get(&ordinal, index_) != result::success) return nullptr;
  std::vector<MemoryAccess> users = access(ordinal);
  if (driver_.address_reserve(&address, size, 0, 0, 0) != result::success) return nullptr;
  Window* window = nullptr;
  try {
    window = &pool.windows().add(address, size);
  } catch (...) {
    driver_.address_free(address, size);
    throw;
  }
  for (Address at : pages) {
    Address next = address + window->pages.size() * page;
    if (driver_.memory_map(next, page, 0, pool.chunk_at(at)->handle, 0) != result::success) break;
    pool.windows().add_page(*window, at, *pool.chunk_at(at));
  }
  if (window->whole() && driver_.memory_access(address, size, users.data(), users.size()) == result::success) return window;
  unmap(pool, *window);
  return nullptr;
}

// From its end; where the driver refuses, the rest is still there.
bool Supply::unmap(Pool& pool, Window& window) {
  while (!window.pages.empty()) {
    size_t last = window.pages.size() - 1;
    if (window.mapped(last) && driver_.memory_unmap(window.address + last * page, page) != result::success) return false;
    pool.windows().remove_page(window, pool.chunk_at(window.pages.back()));
  }
  if (driver_.address_free(window.address, window.size) != result::success) return false;
  pool.windows().drop(window);
  return true;
}

// Windows without a block, before the memory behind them goes back; where the device cannot be waited for they stay.
void Supply::unmap_windows(Pool& pool, uint64_t not_used_since, Waits& waits) {
  std::vector<Window*> idle;
  for (auto& [address, window] : pool.windows()) {
    bool old = std::all_of(window->pages.begin(), window->pages.end(), [&](Address at) {
      return std::prev(pool.segments().upper_bound(at))->second->last_use < not_used_since;
    });
    if (window->segment == nullptr && old) idle.push_back(window.get());
  }
  if (idle.empty() || !waits.for_all()) return;
  for (Window* window : idle) unmap(pool, *window);
}

size_t Supply::give_back(Pool& pool, uint64_t not_used_since, Waits& waits) {
  size_t bytes = 0;
  DriverGuard guard(driver_, relaxed);
  if (!guard.ok) return 0;
  unmap_stuck();
  unmap_windows(pool, not_used_since, waits);
  std::vector<Segment*> ranges;
  for (auto& [address, segment] : pool.segments()) {
    bool own = segment->expandable && segment->kind != Kind::window;
    if (own && segment->last_use < not_used_since) ranges.push_back(segment.get());
  }
  for (Segment* segment : ranges) {
    bytes += give_back_chunks(*segment, waits);
    bool empty = segment->mapped == 0 && !stuck_in(*segment);
    if (empty && driver_.address_free(segment->address, segment->size) == result::success) pool.drop(*segment);
  }
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

// Unmapping waits for nobody, so what may use the segment is waited for before its first chunk goes.
size_t Supply::give_back_chunks(Segment& segment, Waits& waits) {
  Pool& pool = *segment.pool;
  size_t bytes = 0;
  Address from = segment.address;
  bool over = false;
  while (Address start = Pool::free_chunk(segment, from)) {
    const Chunk mapped = segment.chunks.at(start);
    size_t size = mapped.size;
    from = start + size;
    if (mapped.windows != 0) continue;  // it would not go back
    if (mapped.away) {
      pool.away -= size;
      pool.unmapped(pool.take_at(start, size));
      if (segment.mapped == 0) stats_.segments.add(-1);
      continue;
    }
    over = over || waits.for_segment(segment);
    if (!over) break;
    Block* chunk = pool.take_at(start, size);
    if (driver_.memory_unmap(start, size) != result::success) {
      pool.give(chunk, segment.home, settled, never_covered, {});  // nothing runs that uses it
      continue;
    }
    release_handle(mapped);
    bytes += size;
    stats_.reserved_bytes.add(-static_cast<int64_t>(size));
    history_.add(HistoryEntry::segment_unmap, start, size, segment.home);
    pool.unmapped(chunk);
    if (segment.mapped == 0) stats_.segments.add(-1);
  }
  return bytes;
}

bool Supply::stuck_in(const Segment& segment) const {
  return std::any_of(stuck_.begin(), stuck_.end(), [&](auto& s) {
    return s.first >= segment.address && s.first < segment.address + segment.size;
  });
}

void Supply::take_down(Pool& pool) {
  forget_kept(pool);
  while (!pool.windows().empty() && unmap(pool, *pool.windows().begin()->second)) {
  }
  for (auto& [address, segment] : pool.segments()) {
    if (segment->kind == Kind::window) continue;
    if (!segment->expandable) {
      driver_.memory_free(address);
      continue;
    }
    unmap_stuck();
    for (auto& [start, chunk] : segment->chunks) {
      if (chunk.away) continue;
      driver_.memory_unmap(start, chunk.size);
      release_handle(chunk);
    }
    driver_.address_free(address, segment->size);
  }
}

Outcome Supply::open_to(int other, const std::vector<Pool*>& pools) {
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
  for (Pool* pool : pools) {
    for (auto& [address, segment] : pool->segments()) {
      for (auto& [start, chunk] : segment->chunks) all = all && (chunk.away || open(start, chunk.size));
    }
    for (auto& [address, window] : pool->windows()) {
      for (size_t i = 0; i < window->pages.size() && window->whole(); i++) {
        all = all && (!window->mapped(i) || open(address + i * page, page));
      }
    }
  }
  if (all) return {};
  peers_.pop_back();  // some of it may be open already, which harms nobody
  return {Status::driver_failed, "the driver does not open memory to that device"};
}

void Supply::unmap_stuck() {
  for (size_t i = stuck_.size(); i-- > 0;) {
    if (driver_.memory_unmap(stuck_[i].first, stuck_[i].second) == result::success) {
      stuck_[i] = stuck_.back();
      stuck_.pop_back();
    }
  }
}

}  // namespace mg

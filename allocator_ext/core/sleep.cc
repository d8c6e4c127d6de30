// Pools that sleep: their pages are the device's, their addresses stay reserved, their blocks are what they were.
//
// Why: graphs, parameters and views hold addresses. A server with several models, or a trainer whose turn it is not, gives its
// memory up and later goes on with the same objects.
//
// An example. A pool has 40 MiB in two chunks at A and A + 20 MiB; a window W maps a page of a shared chunk a second time.
// To sleep: the host waits for the device, copies the chunks (if contents are kept), unmaps W's page, then the chunks, whose
// memory goes with that. To wake: new memory is mapped at A, at A + 20 MiB, and what lies at the home of W's page also at W;
// then the contents are copied back.
//
// What may be refused comes before anything is unmapped, so a sleep that fails has changed nothing. A wake that fails puts
// away again what it had brought: the pool sleeps on, the host keeps its copy, and the next wake begins anew. A chunk that the
// driver does not unmap stays, with its windows' pages: a page and what maps it a second time come and go together, for else
// they would be two memories.
// A free while the pool sleeps is as ever: it looks at no memory. Chunks that are free as a whole are not brought back, unless
// graphs may use them.
// Plain segments do not sleep; they keep what they have.

#include <algorithm>
#include <map>

#include "core/device.h"
#include "core/readable.h"

namespace mg {

namespace {

using size_class::page;

Outcome unknown_pool() { return {Status::invalid, "there is no such pool"}; }

}  // namespace

// ---- which pools, and when

Outcome Device::sleep(const std::vector<Pool*>& pools, bool keep, size_t& bytes) {
  tend(nullptr);
  if (!quiet()) return {Status::invalid, "a capture is under way, and may use the pool"};
  for (Pool* pool : pools) {
    if (pool->asleep) return {Status::invalid, "the pool sleeps already"};
    if (scopes_.open(pool->id)) return {Status::invalid, "the pool is open: what is allocated now goes there"};
  }
  if (!waits().for_all()) {
    return {Status::invalid, "work on the device cannot be waited for: a capture may be under way, or work has failed"};
  }
  lifetimes_.await();
  recover();
  for (Pool* pool : pools) {
    bool all = pools.size() == pool_list_.size();
    if (pool->lent != 0 && !all) return {Status::invalid, "memory of the pool is lent to others"};
    if (pool == default_pool_ || !pool->captured) give_back(*pool);
    bool plain = false, mapped = false;
    for (auto& [address, segment] : pool->segments()) (segment->expandable ? mapped : plain) = true;
    if (plain && !mapped && !all) {
      return {Status::invalid, "the pool's segments are plain, and only those that are mapped can sleep"};
    }
  }
  return supply_.sleep(pools, keep, bytes);
}

Outcome Device::wake(Pool& pool, int fill, size_t& bytes) {
  tend(nullptr);
  if (!quiet()) return {Status::invalid, "a capture is under way"};
  if (pool.users == 0 || &pool == default_pool_ || !pool.captured) give_back(pool);  // no need to bring that back
  Outcome done = supply_.wake(pool, fill, bytes);
  if (done.status == Status::out_of_memory && give_back_all() != 0) done = supply_.wake(pool, fill, bytes);
  return done;
}

Outcome Device::sleep_pool(PoolId id, bool keep, size_t& bytes) {
  bytes = 0;
  Lock lock(mutex_);
  Pool* pool = known(id);
  if (pool == nullptr) return unknown_pool();
  DriverGuard in(driver_, context_);
  return sleep({pool}, keep, bytes);
}

Outcome Device::wake_pool(PoolId id, int fill, size_t& bytes) {
  bytes = 0;
  Lock lock(mutex_);
  Pool* pool = known(id);
  if (pool == nullptr) return unknown_pool();
  if (!pool->asleep) return {Status::invalid, "the pool does not sleep"};
  DriverGuard in(driver_, context_);
  return wake(*pool, fill, bytes);
}

Outcome Device::pool_asleep(PoolId id, bool& asleep, size_t& bytes) {
  Lock lock(mutex_);
  Pool* pool = known(id);
  asleep = pool != nullptr && pool->asleep;
  bytes = pool != nullptr ? pool->away : 0;
  return {};
}

Outcome Device::sleep_all(bool keep, size_t& bytes) {
  bytes = 0;
  Lock lock(mutex_);
  if (default_pool_->asleep) return {Status::invalid, "the allocator sleeps already"};
  std::vector<Pool*> pools;
  for (Pool* pool : pool_list_) {
    if (!pool->asleep) pools.push_back(pool);
  }
  DriverGuard in(driver_, context_);
  Outcome done = sleep(pools, keep, bytes);
  if (done.status == Status::ok) {
    for (Pool* pool : pools) pool->asleep_with_all = true;
  }
  return done;
}

// What has been woken when one pool cannot be stays awake; the next call goes on with the rest.
Outcome Device::wake_all(int fill, size_t& bytes) {
  bytes = 0;
  Lock lock(mutex_);
  std::vector<Pool*> pools;
  for (Pool* pool : pool_list_) {
    if (pool->asleep && pool->asleep_with_all) pools.push_back(pool);
  }
  if (pools.empty()) return {Status::invalid, "the allocator does not sleep"};
  DriverGuard in(driver_, context_);
  for (Pool* pool : pools) {
    size_t brought = 0;
    Outcome done = wake(*pool, fill, brought);
    bytes += brought;
    if (done.status != Status::ok) return done;
  }
  return {};
}

size_t Device::give_back_host() {
  Lock lock(mutex_);
  DriverGuard in(driver_, context_);
  return supply_.give_back_host();
}

// ---- pages

Outcome Supply::sleep(const std::vector<Pool*>& pools, bool keep, size_t& bytes) {
  DriverGuard guard(driver_, relaxed);
  if (!guard.ok) return {Status::driver_failed, "the driver refuses the calls that sleep needs"};
  auto refused = [&](Status status, std::string why) {
    for (Pool* pool : pools) host_.give_back(pool->kept);
    return Outcome{status, std::move(why)};
  };
  for (Pool* pool : pools) {
    for (auto& [address, window] : pool->windows()) window->away.assign(window->pages.size(), false);
  }
  if (keep) {
    Copies copies(driver_);
    for (Pool* pool : pools) {
      size_t total = 0;
      pool->each_chunk([&](Segment&, Address, Chunk& chunk) {
        chunk.kept_at = total;
        total += chunk.size;
      });
      if (!host_.take(driver_, total, pool->kept)) {
        return refused(Status::no_host_memory, "the host has no " + readable(total) + " of pinned memory for the contents");
      }
      pool->each_chunk([&](Segment&, Address start, Chunk& chunk) { copies.to_host(start, chunk.size, pool->kept, chunk.kept_at); });
    }
    if (!copies.done()) return refused(Status::driver_failed, "the driver does not copy the contents to the host");
  }
  for (Pool* pool : pools) {
    bytes += put_away(*pool);
    pool->asleep = true;
    pool->asleep_with_all = false;
  }
  return {};
}

// All that the driver unmaps; bytes. Windows first, and pages of which a window is left stay.
size_t Supply::put_away(Pool& pool) {
  size_t bytes = 0;
  std::map<Address, size_t> left;  // pages that a window still maps
  for (auto& [address, window] : pool.windows()) {
    for (size_t i = 0; i < window->pages.size(); i++) left[window->pages[i]] += window->mapped(i);
  }
  for (auto& [address, window] : pool.windows()) {
    for (size_t i = 0; i < window->pages.size(); i++) {
      if (!window->mapped(i) || driver_.memory_unmap(address + i * page, page) != result::success) continue;
      window->away[i] = true;
      left[window->pages[i]]--;
    }
  }
  pool.each_chunk([&](Segment& segment, Address start, Chunk& chunk) {
    auto window = left.find(start);
    if (chunk.away || (window != left.end() && window->second != 0)) return;
    if (driver_.memory_unmap(start, chunk.size) != result::success) return;
    release_handle(chunk);
    chunk.handle = 0;
    chunk.away = true;
    bytes += chunk.size;
    history_.add(HistoryEntry::segment_unmap, start, chunk.size, segment.home);
  });
  pool.away += bytes;
  stats_.reserved_bytes.add(-static_cast<int64_t>(bytes));
  return bytes;
}

Outcome Supply::wake(Pool& pool, int fill, size_t& bytes) {
  DriverGuard guard(driver_, relaxed);
  if (!guard.ok) return {Status::driver_failed, "the driver refuses the calls that a wake needs"};
  if (limit != 0 && static_cast<size_t>(stats_.reserved_bytes.current) + pool.away > limit) {
    return {Status::out_of_memory, "the pool sleeps on: it needs " + readable(pool.away) + ", and this process may use " +
                                       readable(limit)};
  }
  bytes = 0;
  unmap_stuck();
  Outcome done = bring_back(pool, fill, bytes);
  if (done.status != Status::ok) {
    put_away(pool);
    bytes = 0;
    return done;
  }
  for (auto& [address, window] : pool.windows()) window->away.clear();
  host_.give_back(pool.kept);
  pool.asleep = pool.asleep_with_all = false;
  return {};
}

// What was brought when this fails is the caller's to put away.
Outcome Supply::bring_back(Pool& pool, int fill, size_t& bytes) {
  int ordinal = 0;
  size_t needed = pool.away;
  if (driver_.device_get(&ordinal, index_) != result::success) return {Status::driver_failed, "the driver does not tell the device"};
  std::vector<MemoryAccess> users = access(ordinal);
  bool memory = true, mapped = true;
  Copies copies(driver_);
  pool.each_chunk([&](Segment& segment, Address start, Chunk& chunk) {
    if (!memory || !mapped) return;
    bool fresh = chunk.away;
    if (fresh) {
      Physical handle = 0;
      memory = driver_.physical_create(&handle, chunk.size, &memory_, 0) == result::success;
      mapped = memory && driver_.memory_map(start, chunk.size, 0, handle, 0) == result::success;
      if (mapped && keeps_handles_ && segment.kind == Kind::shared) {
        chunk.handle = handle;
      } else if (memory) {
        driver_.physical_release(handle);
      }
      if (!mapped) return;
      chunk.away = false;
      pool.away -= chunk.size;
      bytes += chunk.size;
      stats_.reserved_bytes.add(static_cast<int64_t>(chunk.size));
      history_.add(HistoryEntry::segment_map, start, chunk.size, segment.home);
    }
    mapped = driver_.memory_access(start, chunk.size, users.data(), users.size()) == result::success;
    if (!mapped) return;
    if (!pool.kept.empty()) copies.from_host(start, chunk.size, pool.kept, chunk.kept_at);
    else if (fresh && fill >= 0) copies.fill(start, chunk.size, static_cast<unsigned char>(fill));
  });
  for (auto& [address, window] : pool.windows()) {
    for (size_t i = 0; i < window->pages.size() && memory && mapped; i++) {
      Address at = address + i * page;
      if (!window->mapped(i)) {
        mapped = driver_.memory_map(at, page, 0, pool.chunk_at(window->pages[i])->handle, 0) == result::success;
        if (!mapped) break;
        window->away[i] = false;
      }
      mapped = driver_.memory_access(at, page, users.data(), users.size()) == result::success;
    }
  }
  if (!memory) {
    return {Status::out_of_memory, "the pool sleeps on: the device has no " + readable(needed) + " for it"};
  }
  if (!mapped) return {Status::driver_failed, "the pool sleeps on: the driver does not map its memory"};
  if (!copies.done()) return {Status::driver_failed, "the pool sleeps on: the driver does not copy its contents back"};
  return {};
}

}  // namespace mg

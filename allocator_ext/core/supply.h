// What supplies a device's memory: segments of the driver, ranges of addresses with pages mapped into them, windows.
//
// Why: the rules of reuse know nothing of the driver's memory calls, and these know nothing of requests. What serves
// requests (device.h, search.h) asks here for more and says when something may go back; nobody else maps, unmaps,
// allocates or frees memory of the driver, or counts what is reserved.
// In: a pool and how much is missing. Out: a free block of the pool, or null and a reason.
//
// An expandable segment is a range of addresses into which pages of 2 MiB are mapped as they are needed, so that blocks of
// all sizes share it and what a freed block leaves is joined by what is mapped behind it. What one call maps is a *chunk*,
// one physical allocation of the driver; its handle is released at once, for the mapping keeps it alive. Pages of shared
// segments are chunks of one page each and keep their handles, so that windows can map them again (windows.h).
//
// Guarantee: a block is mapped and accessible as a whole, or it is an unmapped block. A mapping that the driver refuses
// half way is undone; what it then does not take back is never used, and tried again before the next mapping. A page that
// a window maps does not go back, but while its pool sleeps. Nothing is given back before what may use it has been waited for.
// Lock: the device's is held during all calls. Context: `window` and `open_to` bring the device's themselves, all other
// calls are made while it is current.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/driver_guard.h"
#include "core/history.h"
#include "core/host_memory.h"
#include "core/outcome.h"
#include "core/pool.h"
#include "core/stats.h"
#include "core/waits.h"

namespace mg {

class Supply {
 public:
  using Kind = size_class::Kind;

  Supply(const Driver& driver, int index, Context context, const Config& config, Stats& stats, History& history)
      : driver_(driver), index_(index), context_(context), keeps_handles_(config.stitch), expandable_(config.expandable),
        stats_(stats), history_(history) {}

  size_t limit = 0;  // bytes, of all pools; 0: none

  // Whether segments are expandable: that was asked for, and the driver is not known to map no memory.
  bool expandable() const { return expandable_; }

  // A new plain segment for a request of `size` bytes, as one free block of `stream`.
  Block* segment(Pool& pool, size_t size, Stream stream, std::string& reason);

  // A new range of addresses for requests of `kind`, of which one has `size` bytes; nothing of it is mapped.
  Segment* range(Pool& pool, size_t size, Stream home, Kind kind, std::string& reason);

  // The pages of `room` are mapped. The free block that they are, or are a part of.
  Block* pages(Pool& pool, const Pool::Room& room, Stream stream, std::string& reason);

  // A window over these pages of shared segments, in this order; null: the driver refused.
  Window* window(Pool& pool, const std::vector<Address>& pages);

  // A window without a block is no longer mapped; false: the driver refused, and a part of it still is.
  bool unmap(Pool& pool, Window& window);

  // What is free and settled in segments that were not used since then goes back to the driver: plain segments and chunks
  // that are free as a whole, ranges of which nothing is mapped, and first the windows that map their pages. Bytes.
  size_t give_back(Pool& pool, uint64_t not_used_since, Waits& waits);

  // sleep.cc: pages go back to the device, and new ones come to the same addresses. Nothing uses the pools. With `keep` their
  // contents are copied to the host before, and then back. What a sleep or a wake that fails has changed is undone.
  Outcome sleep(const std::vector<Pool*>& pools, bool keep, size_t& bytes);
  // New pages are filled with the byte `fill` where nothing was kept; -1: they are as they come.
  Outcome wake(Pool& pool, int fill, size_t& bytes);
  // Of a pool that is about to end.
  void forget_kept(Pool& pool) { host_.give_back(pool.kept); }
  // Host memory that is kept for the next sleep goes; bytes.
  size_t give_back_host() { return host_.give_back_all(driver_); }

  // All of the pool's memory goes back, whatever uses it: the device's allocator ends. In the relaxed mode.
  void take_down(Pool& pool);

  // Device number `other` may use what is mapped for these pools, and what will be.
  Outcome open_to(int other, const std::vector<Pool*>& pools);

 private:
  size_t put_away(Pool& pool);
  Outcome bring_back(Pool& pool, int fill, size_t& bytes);
  bool room_for(const Pool& pool, size_t bytes, std::string& reason) const;
  bool can_map();
  std::vector<MemoryAccess> access(int ordinal) const;
  bool map(Segment& segment, Address address, size_t bytes);
  void release_handle(const Chunk& chunk);
  void unmap_stuck();
  void unmap_windows(Pool& pool, uint64_t not_used_since, Waits& waits);
  size_t give_back_chunks(Segment& segment, Waits& waits);
  bool stuck_in(const Segment& segment) const;

  const Driver& driver_;
  const int index_;
  const Context context_;
  const bool keeps_handles_;
  bool expandable_;
  Stats& stats_;
  History& history_;
  bool asked_ = false;                             // whether the driver maps memory
  PhysicalMemory memory_{};                        // what is asked for then
  HostMemory host_;
  std::vector<int> peers_;                         // devices that may use what is mapped, as the driver numbers them
  std::vector<std::pair<Address, size_t>> stuck_;  // mapped, in unmapped blocks: the driver did not take them back
};

}  // namespace mg

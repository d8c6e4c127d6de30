// The allocator of one device: what torch calls ends here, under one lock.
//
// In: requests of streams, frees, scopes, limits. Out: addresses, or a status and a readable reason.
// It ties the parts together. For a request, the scopes say which pool it goes to; `Search` finds free memory that its
// stream may have; where there is none the ladder is climbed (ladder.cc), for which `Supply` gets more from the driver.
// For a free, `Lifetimes` brings the block back as soon as that is sure. What is here itself: which addresses are handed
// out, states of pools and whose frees are ignored (checkpoint.cc), pools that sleep (sleep.cc), and text about all of it
// (account.cc).
//
// Locks. Each device has one, `mutex_`. Every public function takes it, and every private one is called under it; the
// parts (`Search`, `Supply`, `Lifetimes`, `Scopes`, pools) have none of their own and are used under it alone. It is given
// up while code of others runs or a disk is waited for: filters of scopes (`route`), the callback at out-of-memory
// (`climb`), writing a snapshot (`allocate`). What was learnt before is then looked at again: `route` begins anew when the
// list of scopes has changed, `climb` asks for the pool and the stream's place once more. `Scopes::any` alone is read
// without the lock. A thread that holds the lock of torch/stacks.h may take this one, never the other way round.
//
// Guarantee: each address handed out lies in exactly one live block, found in `live_`.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/driver_guard.h"
#include "core/lifetimes.h"
#include "core/outcome.h"
#include "core/pool.h"
#include "core/scopes.h"
#include "core/search.h"
#include "core/stats.h"
#include "core/supply.h"
#include "core/waits.h"

namespace mg {

// A live block, as a state knows it.
struct SavedBlock {
  Address address;
  size_t size;
  size_t requested;
  Stream stream;
  uint64_t life;
  std::vector<Stream> users;
  uint64_t capture;
  uint64_t window = 0;  // in which it lies: the pool's number; 0: in none
};

struct PoolState {
  PoolId pool;
  std::vector<SavedBlock> blocks;  // by address
};

class Device {
 public:
  // `context`: the one in which the driver is called, null where the caller's own is right.
  Device(const Driver& driver, int index, Config config, Context context = nullptr);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  Outcome allocate(size_t asked, Stream stream, Address& out);
  Outcome release(Address address);
  Outcome record_stream(Address address, Stream stream);
  Outcome base(Address address, Address& start, size_t& size);

  void begin_pool(PoolId pool, Filter filter, Takes takes = Takes::any);
  Outcome end_pool(PoolId pool);
  Outcome release_pool(PoolId pool);
  Outcome pool_users(PoolId pool, int& users);

  // checkpoint.cc: states of pools; blocks whose owners have lost them.
  Outcome save_pool(PoolId pool, uint64_t& state);
  Outcome restore_pool(uint64_t state);
  Outcome forget_state(uint64_t state);
  Outcome adopt(const Address* addresses, size_t count);  // one free of each is ignored
  Outcome drop(Address address);                          // a free that is never ignored
  std::vector<SavedBlock> live_blocks(PoolId pool);
  std::vector<SavedBlock> segments(PoolId pool);          // runs of mapped memory

  // sleep.cc: a pool's pages go back to the device and its addresses stay. While it sleeps nothing of it is handed out; what
  // is freed is freed. Both refuse, and change nothing, while a capture is under way.
  Outcome sleep_pool(PoolId pool, bool keep, size_t& bytes);
  Outcome wake_pool(PoolId pool, int fill, size_t& bytes);
  Outcome pool_asleep(PoolId pool, bool& asleep, size_t& bytes);  // bytes that the device has meanwhile
  Outcome sleep_all(bool keep, size_t& bytes);  // pools that are awake
  Outcome wake_all(int fill, size_t& bytes);    // those that `sleep_all` has put to sleep
  size_t give_back_host();                      // pinned memory that is kept for the next sleep

  // From now on another device may read and write what is mapped here, and what was mapped before. Only expandable
  // segments ask for it: to plain ones a device has access as soon as its context has.
  Outcome open_to(int other);

  // What is free of it then serves others at out-of-memory, also what captures have left. Graphs that were captured into
  // it may be launched while it has lent nothing.
  Outcome set_use_on_oom(PoolId pool, bool on);
  Outcome pool_lent(PoolId pool, size_t& bytes);
  Outcome set_pool_limit(PoolId pool, size_t bytes);  // 0: none
  Outcome set_limit(size_t bytes);                    // of all pools; 0: none
  Outcome set_fraction(double fraction);              // the same, of the device's memory
  Outcome set_reuse(Reuse reuse);
  // Asked when all else failed; true: try again.
  void set_oom_callback(std::function<bool(size_t)> callback);
  // Asked before that, once for an allocation and never in a capture. It is called without the lock, too.
  void set_relief(std::function<bool(size_t)> relief);

  // Gives cached segments back to the driver; bytes. Does nothing while a capture is under way.
  size_t empty_cache();
  // Those of one pool, also if it is held, but not if a capture has used it: a replay may still.
  Outcome empty_pool(PoolId pool, size_t& bytes);

  Stats stats();
  void reset_peaks();
  void record_history(size_t entries);     // how many of the latest; 0: none
  void snapshot_at_oom(std::string path);  // where a snapshot is written then; empty: nowhere
  std::string snapshot();                  // JSON, see account.cc
  std::string verify();                    // what is wrong with the books, or nothing

 private:
  using Lock = std::unique_lock<std::mutex>;

  Lock route(Stream stream, std::shared_ptr<const Scopes::Scope>& scope);
  Pool& pool_of(PoolId id);
  Pool* known(PoolId id);
  void forget_empty_pools();
  // No capture is under way that is known. One that has begun unseen has nothing of what is given back or lent, and bears
  // what is called for that, but for the wait for the whole device (`Waits::for_all`).
  bool quiet() const { return lifetimes_.quiet(); }
  bool watched() const { return scopes_.any() || lifetimes_.captures.any(); }
  void tell_of_scopes() { lifetimes_.captures.scopes(scopes_.newest(), scopes_.oldest_open(), scopes_.single()); }
  Observation tend(Stream stream) {
    tell_of_scopes();
    return lifetimes_.tend(stream, watched(), pool_list_);
  }
  Waits waits() { return Waits(driver_, scopes_, lifetimes_); }
  void hand_out(Block* block, const Request& request, Address& out);
  Outcome end(ByAddress::iterator place);
  void end_of_window(Block* block);
  void count_live(const Block& block, int sign);

  // ladder.cc
  Block* climb(Request& request, Lock& lock, std::string& reason);
  bool gives(std::function<bool(size_t)> asked, Request& request, Lock& lock, std::string& reason);
  bool recover();
  Block* grow(Request& request, std::string& reason);
  Block* extend(Pool& pool, const Request& request, std::string& reason, bool& no_range);
  Block* last_resort(Request& request);
  Block* borrow(Pool& pool, const Request& request);
  void collect_garbage();
  size_t give_back(Pool& pool, uint64_t not_used_since = UINT64_MAX);
  size_t give_back_all();

  // sleep.cc
  Outcome sleep(const std::vector<Pool*>& pools, bool keep, size_t& bytes);
  Outcome wake(Pool& pool, int fill, size_t& bytes);

  // checkpoint.cc
  std::string in_the_way(Pool& pool);
  std::string obstacle(Pool& pool) const;
  Block* take_window(Pool& pool, const SavedBlock& saved);

  const Driver& driver_;
  const int index_;
  Config config_;
  const Context context_;
  std::mutex mutex_;
  Scopes scopes_;
  Stats stats_;
  std::map<PoolId, std::unique_ptr<Pool>> pools_;
  std::vector<Pool*> pool_list_;
  Pool* default_pool_ = nullptr;
  ByAddress live_;
  std::unordered_map<Address, unsigned> ghosts_;  // frees that will come of what is another's by then
  std::map<uint64_t, PoolState> states_;
  uint64_t last_state_ = 0;
  uint64_t lives_ = 0;
  History history_;
  Lifetimes lifetimes_;
  Supply supply_;
  Search search_;
  std::string snapshot_path_;
  uint64_t requests_ = 0;
  std::function<bool(size_t)> oom_callback_, relief_;
};

}  // namespace mg

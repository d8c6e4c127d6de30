// The allocator of one device: what torch calls ends here, under one lock.
//
// In: requests of streams, frees, scopes, limits. Out: addresses, or a status and a readable reason. It ties the parts:
// scopes say which pool, the pool finds a block, lifetimes bring freed blocks back, and the ladder (ladder.cc) is climbed
// when nothing fits.
// The lock is never held while code of others runs: filters of scopes, the callback at out-of-memory.
// Invariant: each address handed out lies in exactly one live block, found in `live_`.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/driver_guard.h"
#include "core/lifetimes.h"
#include "core/pool.h"
#include "core/scopes.h"
#include "core/stats.h"

namespace mg {

enum class Status : int { ok = 0, out_of_memory = 1, invalid = 2, driver_failed = 3, no_host_memory = 4 };

struct Outcome {
  Status status = Status::ok;
  std::string message;
};

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
  struct Request {
    size_t asked;
    size_t size;
    Stream stream;
    Pool* pool;
    Observation seen;
  };
  using Lock = std::unique_lock<std::mutex>;

  Lock route(Stream stream, std::shared_ptr<const Scopes::Scope>& scope);
  Pool& pool_of(PoolId id);
  Pool* known(PoolId id);
  void forget_empty_pools();
  // No capture is under way that is known. One that has begun unseen has nothing of what is given back or lent, and bears
  // what is called for that, but for the wait for the whole device (`wait`).
  bool quiet() const { return lifetimes_.quiet(); }
  bool watched() const { return scopes_.any() || lifetimes_.captures.any(); }
  void tell_of_scopes() { lifetimes_.captures.scopes(scopes_.newest(), scopes_.oldest_open(), scopes_.single()); }
  Observation tend(Stream stream) {
    tell_of_scopes();
    return lifetimes_.tend(stream, watched(), pool_list_);
  }
  void unmap_all(const Segment& segment);
  std::string in_the_way(Pool& pool);
  std::string obstacle(Pool& pool) const;
  void count_live(const Block& block, int sign);
  Outcome end(ByAddress::iterator place);
  void hand_out(Block* block, const Request& request, Address& out);

  // account.cc
  std::string account(size_t asked, const std::string& reason);
  std::string snapshot_text() const;

  // ladder.cc, expandable.cc
  Block* climb(Request& request, Lock& lock, std::string& reason);
  bool recover();
  Block* find(Request& request);
  Block* find_covered(const Request& request, size_class::Kind kind);
  Block* find_shared(Request& request);
  Block* gather(const Request& request, Block* first, size_t size);
  Block* out_of(const Request& request, Block* first);
  // Where streams do not take turns, each is better served from ranges of its own.
  bool shared(const Request& request) const {
    return config_.expandable && config_.reuse == Reuse::any_stream && request.seen.view != nullptr;
  }
  // The streams of a capture whose blocks another one may have, and up to which of their points.
  struct Owner {
    Stream stream;
    Tag order_tag, proof_tag;
    uint64_t cover;
  };
  std::vector<Owner> owners(const Request& request);
  // Whether a free block may go to this request now. What was used on its stream alone need only have begun when it is
  // used again, the rest has to be over; where kernels begin early, neighbours must all be of the one or of the other.
  class May {
   public:
    enum Which { any, begun, over };
    May(Device& device, const Request& request, Which which);
    bool operator()(const Block& block) const;

   private:
    const Request& request_;
    std::vector<Owner> owners_;
    Tag order_tag_ = settled, proof_tag_ = settled;
    bool settled_too_ = true;
  };
  // stitch.cc
  bool may_stitch(const Request& request) const {
    return config_.stitch && request.size >= size_class::stitch_limit && request.size < size_class::medium_limit &&
           request.seen.view->partial_at == 0;
  }
  static bool cuts_a_page(const Run& run, size_t size);
  Block* stitch_cached(const Request& request, const May& may, bool fits);
  Block* stitch_fresh(const Request& request, const May& may, Pool::Room room);
  Block* stitch(const Request& request, const Plan& plan);
  Window* map_window(Pool& pool, const std::vector<Address>& pages);
  bool unmap(Pool& pool, Window& window);
  void unmap_windows(Pool& pool, uint64_t not_used_since, bool& waited);
  void end_of_window(Block* block);
  bool verified(const Request& request, Block* block);
  bool proven_again(const Request& request, const Block* block);
  Block* extend(Pool& pool, const Request& request, std::string& reason, bool& no_range);
  Block* map_more(Pool& pool, const Pool::Room& room, Stream stream, std::string& reason);
  void release_handle(const Chunk& chunk);
  Segment* reserve(Pool& pool, const Request& request, size_class::Kind kind, std::string& reason);
  bool map(Segment& segment, Address address, size_t bytes);
  void unmap_stuck();
  size_t shrink(Pool& pool, uint64_t not_used_since);
  Block* grow(Request& request, std::string& reason);
  Block* last_resort(Request& request);
  Block* borrow(Pool& pool, const Request& request);
  // For all work of the device, once in `waited`; false: it cannot be waited for, as a capture may be under way.
  bool wait(bool& waited);
  // For what may still use memory of this segment that is free: all work, or that of its stream where that is enough.
  bool wait(const Segment& segment, bool& waited);
  bool wait(Stream stream);
  Block* take_window(Pool& pool, const SavedBlock& saved);
  bool room_for(const Pool& pool, size_t bytes, std::string& reason) const;
  void collect_garbage();
  size_t give_back(Pool& pool, uint64_t not_used_since = UINT64_MAX);
  size_t give_back_all();

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
  std::string snapshot_path_;
  size_t limit_ = 0;
  uint64_t requests_ = 0;
  std::function<bool(size_t)> oom_callback_;
  bool can_map();
  std::vector<int> peers_;                         // devices that may use what is mapped, as the driver numbers them
  bool asked_ = false;                             // whether the driver maps memory
  PhysicalMemory memory_{};                        // what is asked for then
  std::vector<std::pair<Address, size_t>> stuck_;  // mapped, in unmapped blocks: the driver did not take them back
};

}  // namespace mg

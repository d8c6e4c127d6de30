// Which stack of the program's language allocated what is live, and made which call; off unless asked for.
//
// In: a function that numbers the calling thread's stack, and each call of torch with the time before and after it. Out:
// the number for each live block, and the latest calls, by whose times and addresses entries of the history find theirs.
// The core knows nothing of it.
// The function takes a lock of its own, Python's. So it runs before the allocator does anything, under no lock of the
// allocator's or of this file; it is not asked again by what it does itself; and once `stop` has returned, it does not
// run and will not.
// Guarantee: off, it costs a look at one flag. A block whose allocation was not seen has no number, and neither has one
// that was brought back to a life that is not known.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/device.h"
#include "torch/devices.h"

namespace mg::torch_side {

class Stacks {
 public:
  using Number = uint64_t (*)();
  enum Kind : uint64_t { allocated = 0, freed = 1, out_of_memory = 2 };

  // As mg_torch_stacks_log writes it. `stack` 0: not asked for. Times are microseconds of the system's clock.
  struct Call {
    uint64_t kind, address, bytes, stack;
    int64_t began, ended;
    int64_t device;
  };

  // What is known before a call: the stack, and when it was.
  struct Asked {
    bool on = false;
    uint64_t stack = 0;
    int64_t began = 0;
  };

  void start(Number number, bool of_frees, size_t calls) {
    stop();
    std::lock_guard lock(mutex_);
    capacity_ = std::min(calls, History::most);
    log_.reserve(capacity_);
    of_frees_.store(of_frees);
    number_.store(number);
    on_.store(number != nullptr);
  }

  // Waits for threads in which the function runs: the caller holds no lock that it takes.
  void stop() {
    on_.store(false);
    number_.store(nullptr);
    if (forked()) return;  // other threads are no more, and what they held is never given back
    while (asking_.load() != 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    std::lock_guard lock(mutex_);
    live_.clear();
    adopted_.clear();
    for (auto& [of, state] : saved_) state.stacks.clear();  // whose pool they are of will be asked again
    std::vector<Call>().swap(log_);
    capacity_ = oldest_ = 0;
  }

  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }

  Asked ask(bool of_free) noexcept {
    Asked asked;
    if (!on()) return asked;
    asked.on = true;
    if (!of_free || of_frees_.load()) asked.stack = number();
    asked.began = now();
    return asked;
  }

  void was_allocated(const Asked& asked, int device, Address address, size_t bytes) noexcept {
    if (!asked.on || address == 0) return;
    quietly([&] {
      if (!on()) return;
      if (asked.stack != 0) {
        live_[address] = asked.stack;
      } else {
        live_.erase(address);
      }
      note({allocated, address, bytes, asked.stack, asked.began, now(), device});
    });
  }

  void was_refused(const Asked& asked, int device, size_t bytes) noexcept {
    if (asked.on) quietly([&] { note({out_of_memory, 0, bytes, asked.stack, asked.began, now(), device}); });
  }

  // Before the free: the address may be another block's right after it. The frees of owners that have lost their block
  // end nothing.
  void is_freed(const Asked& asked, Address address) noexcept {
    if (!asked.on) return;
    quietly([&] {
      auto ghost = adopted_.find(address);
      if (ghost == adopted_.end()) {
        live_.erase(address);
      } else if (--ghost->second == 0) {
        adopted_.erase(ghost);
      }
    });
  }

  void was_freed(const Asked& asked, int device, Address address) noexcept {
    if (asked.on) quietly([&] { note({freed, address, 0, asked.stack, asked.began, now(), device}); });
  }

  void is_adopted(Address address) noexcept {
    if (on()) quietly([&] { adopted_[address]++; });
  }

  void is_dropped(Address address) noexcept {
    if (on()) quietly([&] { live_.erase(address); });
  }

  // States of pools: which life a block has, the core knows.
  void was_saved(Device& device, uint64_t state, PoolId pool) noexcept {
    quietly([&] {
      State& made = saved_[{&device, state}];
      made.pool = pool;
      if (!on()) return;
      for (const SavedBlock& block : device.live_blocks(pool)) {
        auto found = live_.find(block.address);
        if (found != live_.end()) made.stacks.emplace(block.life, found->second);
      }
    });
  }

  void was_restored(Device& device, uint64_t state, const std::vector<SavedBlock>& before) noexcept {
    if (!on()) return;
    quietly([&] {
      auto found = saved_.find({&device, state});
      std::map<uint64_t, uint64_t> lives;  // of what was live, the stacks
      for (const SavedBlock& block : before) {
        auto known = live_.find(block.address);
        if (known == live_.end()) continue;
        lives.emplace(block.life, known->second);
        live_.erase(known);
      }
      if (found == saved_.end()) return;
      for (const SavedBlock& block : device.live_blocks(found->second.pool)) {
        auto known = lives.find(block.life);
        auto saved = found->second.stacks.find(block.life);
        if (known != lives.end()) {
          live_[block.address] = known->second;
        } else if (saved != found->second.stacks.end()) {
          live_[block.address] = saved->second;
        }
      }
    });
  }

  void was_forgotten(Device& device, uint64_t state) noexcept {
    quietly([&] { saved_.erase({&device, state}); });
  }

  std::vector<SavedBlock> blocks_of(Device& device, uint64_t state) {
    if (!on()) return {};
    PoolId pool;
    {
      std::lock_guard lock(mutex_);
      auto found = saved_.find({&device, state});
      if (found == saved_.end()) return {};
      pool = found->second.pool;
    }
    return device.live_blocks(pool);
  }

  std::vector<std::pair<uint64_t, uint64_t>> live() {
    std::lock_guard lock(mutex_);
    return {live_.begin(), live_.end()};
  }

  // From the oldest to the newest.
  std::vector<Call> calls() {
    std::lock_guard lock(mutex_);
    std::vector<Call> in_order(log_.begin() + static_cast<std::ptrdiff_t>(oldest_), log_.end());
    in_order.insert(in_order.end(), log_.begin(), log_.begin() + static_cast<std::ptrdiff_t>(oldest_));
    return in_order;
  }

 private:
  struct State {
    PoolId pool;
    std::map<uint64_t, uint64_t> stacks;  // by life
  };

  static int64_t now() {
    auto since = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::microseconds>(since).count();
  }

  uint64_t number() noexcept {
    static thread_local bool inside = false;
    if (inside) return 0;  // what the function itself lets go of
    inside = true;
    asking_.fetch_add(1);
    Number function = number_.load();
    uint64_t found = function != nullptr ? function() : 0;
    asking_.fetch_sub(1);
    inside = false;
    return found;
  }

  // Without memory of the host for it, stacks are missing and nothing else.
  template <class Body>
  void quietly(Body body) noexcept {
    try {
      std::lock_guard lock(mutex_);
      body();
    } catch (...) {
    }
  }

  void note(const Call& call) {
    if (!on() || capacity_ == 0) return;
    if (log_.size() < capacity_) {
      log_.push_back(call);
      return;
    }
    log_[oldest_] = call;
    oldest_ = (oldest_ + 1) % capacity_;
  }

  std::atomic<bool> on_{false}, of_frees_{false};
  std::atomic<Number> number_{nullptr};
  std::atomic<int> asking_{0};
  std::mutex mutex_;  // the device's own is taken under it, never the other way round
  std::unordered_map<Address, uint64_t> live_;
  std::unordered_map<Address, unsigned> adopted_;  // frees that will come of what is not freed
  std::map<std::pair<Device*, uint64_t>, State> saved_;
  std::vector<Call> log_;
  size_t capacity_ = 0, oldest_ = 0;
};

inline Stacks& stacks() {
  static Stacks* made = new Stacks;  // torch frees tensors until the very end of the process
  return *made;
}

}  // namespace mg::torch_side

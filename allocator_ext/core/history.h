// The latest things that happened to memory, in a ring; off unless asked for.
//
// In: an action and a range. Out: entries from the oldest to the newest. Actions and their order are torch's: a free is
// asked for, and completed when the block may be used again.
// Guarantee: never more than `most` entries, and no memory for them while it is off.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "core/types.h"

namespace mg {

struct HistoryEntry {
  enum Action : int {
    allocate, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom
  } action;
  Address address;  // at out-of-memory: bytes that the driver had free
  size_t size;
  Stream stream;
  int64_t microseconds;  // of the system's clock
};

class History {
 public:
  static constexpr size_t most = 1500000;

  explicit History(size_t entries) { keep(entries); }

  // From now on this many of the latest; what is there is forgotten.
  void keep(size_t entries) {
    capacity_ = std::min(entries, most);
    std::vector<HistoryEntry>().swap(ring_);
    ring_.reserve(capacity_);  // so that nothing fails later, in the middle of something
    oldest_ = 0;
  }

  void add(HistoryEntry::Action action, Address address, size_t size, Stream stream) noexcept {
    if (capacity_ == 0) return;
    auto now = std::chrono::system_clock::now().time_since_epoch();
    HistoryEntry entry{action, address, size, stream, std::chrono::duration_cast<std::chrono::microseconds>(now).count()};
    if (ring_.size() < capacity_) {
      ring_.push_back(entry);
      return;
    }
    ring_[oldest_] = entry;
    oldest_ = (oldest_ + 1) % capacity_;
  }

  template <class Each>
  void read(Each each) const {
    for (size_t i = 0; i < ring_.size(); i++) each(ring_[(oldest_ + i) % ring_.size()]);
  }

 private:
  size_t capacity_ = 0;
  size_t oldest_ = 0;
  std::vector<HistoryEntry> ring_;
};

}  // namespace mg

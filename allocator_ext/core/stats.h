// What a device's allocator counts. Plain numbers, changed under the device's lock.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mg {

struct Level {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t up = 0;    // all that was ever added
  int64_t down = 0;  // and taken away

  void add(int64_t amount) {
    current += amount;
    (amount > 0 ? up : down) += amount > 0 ? amount : -amount;
    if (current > peak) peak = current;
  }
};

struct Stats {
  Level allocated_bytes, requested_bytes, reserved_bytes;
  Level active_bytes;  // live, or freed and waiting
  Level allocations, segments;
  uint64_t ooms = 0;
  uint64_t retries = 0;          // allocations that took more than the cache and one call of the driver
  uint64_t freed_in_captures = 0;
  uint64_t proven = 0;           // given back inside the capture in which they were freed, by markers
  uint64_t parked = 0;           // had to wait for the end of captures
  uint64_t moved = 0;            // went to another stream inside a capture
  uint64_t stitched = 0;         // made of pieces of several pages
  uint64_t verified = 0;
  uint64_t verify_failures = 0;
};

}  // namespace mg

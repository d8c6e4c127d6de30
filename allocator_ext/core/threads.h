// Which thread this is, by a number that no other thread ever has.
//
// A capture is driven by one thread at a time: what it appends to, its terminals and its graph, is the driver's memory
// and may be looked at by that thread alone. Frees come from any.
#pragma once

#include <atomic>
#include <cstdint>

namespace mg {

inline uint64_t& this_thread() {
  static std::atomic<uint64_t> last{0};
  thread_local uint64_t number = ++last;
  return number;  // a test changes it, to be another thread for one call
}

}  // namespace mg

#include "core/waits.h"

#include "core/driver_guard.h"

namespace mg {

bool Waits::for_all() {
  if (all_) return true;
  if (!lifetimes_.quiet() || scopes_.for_captures()) return false;  // a capture would be broken
  all_ = driver_.context_synchronize() == result::success;
  return all_;
}

bool Waits::for_segment(const Segment& segment) {
  if (for_all()) return true;
  return !segment.captured && segment.home != nobody && for_stream(segment.home);
}

bool Waits::for_stream(Stream stream) {
  // A capture that began without a scope is not known, and an event would become part of it.
  std::vector<Ready> none;
  if (lifetimes_.captures.observe(stream, none).status != Observation::outside) return false;
  DriverGuard guard(driver_, relaxed);
  Event event = nullptr;
  if (!guard.ok || driver_.event_create(&event, event_without_timing) != result::success) return false;
  bool passed = driver_.event_record(event, stream) == result::success &&
                driver_.event_synchronize(event) == result::success;
  driver_.event_destroy(event);
  return passed;
}

}  // namespace mg

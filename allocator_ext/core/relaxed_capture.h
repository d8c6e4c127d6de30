// Calls of the driver that are not part of a capture, made while one may be under way on any thread.
//
// A capture in torch's mode is broken when a thread allocates, frees or asks for an event meanwhile, unless that thread
// has said that it knows. Invariant: the thread's mode is what it was when this ends.
#pragma once

#include "driver.h"

namespace mg {

class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
    ok = driver_.exchange_capture_mode(&mode_) == result::success;
  }
  ~RelaxedCapture() {
    if (ok) driver_.exchange_capture_mode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  bool ok;  // false: the driver refused, and nothing should be called

 private:
  const Driver& driver_;
  CaptureMode mode_ = capture_mode_relaxed;
};

}  // namespace mg

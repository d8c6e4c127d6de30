// What the driver's calls depend on in the thread that makes them: the current context, and the mode of stream capture.
//
// Why: a call of the driver acts on the thread's current context, and torch's thread may have another device's or none.
// And a capture in torch's mode is broken when any thread allocates, frees or asks for an event meanwhile, unless that
// thread has said that it knows, by the relaxed mode.
// In: the table of the driver, and which of the two is needed. Calls that are harmless beside captures, such as asking
// whether a stream captures, need the context alone; changing the mode costs two calls. Where a function already has the
// context, it asks for the mode alone.
// Guarantee: when the guard ends, the thread's context and mode are what they were. Guards nest.
#pragma once

#include "driver.h"

namespace mg {

class DriverGuard {
 public:
  struct Relaxed {};

  // The device's context; null: the caller's own is right.
  DriverGuard(const Driver& driver, Context context) : driver_(driver) { enter(context); }
  // The relaxed mode.
  DriverGuard(const Driver& driver, Relaxed) : driver_(driver) { relax(); }
  // Both.
  DriverGuard(const Driver& driver, Context context, Relaxed) : driver_(driver) {
    enter(context);
    relax();
  }
  ~DriverGuard() {
    if (relaxed_) driver_.exchange_capture_mode(&mode_);
    if (changed_) driver_.context_set(previous_);
  }
  DriverGuard(const DriverGuard&) = delete;
  DriverGuard& operator=(const DriverGuard&) = delete;

  bool ok = true;  // false: the driver refused the relaxed mode, and nothing should be called that needs it

 private:
  void enter(Context context) {
    if (context == nullptr) return;
    if (driver_.context_current(&previous_) != result::success || previous_ == context) return;
    changed_ = driver_.context_set(context) == result::success;
  }
  void relax() {
    relaxed_ = driver_.exchange_capture_mode(&mode_) == result::success;
    ok = relaxed_;
  }

  const Driver& driver_;
  Context previous_ = nullptr;
  CaptureMode mode_ = capture_mode_relaxed;
  bool changed_ = false, relaxed_ = false;
};

constexpr DriverGuard::Relaxed relaxed{};

}  // namespace mg

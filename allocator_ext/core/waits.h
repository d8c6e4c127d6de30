// Waiting on the host until work is over that may still use free memory.
//
// Why: outside of captures a settled block is free for its own stream, whose order covers it. Before it serves another
// stream, or its memory goes back to the driver by a call that waits for nobody, the host waits.
// In: a segment or a stream. Out: whether its work is over. False: it cannot be waited for, since a capture may be under
// way, which such a wait would break, or since the driver refused.
// One object is for one operation: the device is waited for as a whole at most once, and then all of it is over.
#pragma once

#include "core/lifetimes.h"
#include "core/scopes.h"

namespace mg {

class Waits {
 public:
  Waits(const Driver& driver, const Scopes& scopes, Lifetimes& lifetimes)
      : driver_(driver), scopes_(scopes), lifetimes_(lifetimes) {}

  // All work of the device.
  bool for_all();

  // What may use free memory of this segment: all work, or that of its home stream where that is enough.
  bool for_segment(const Segment& segment);

  bool for_stream(Stream stream);

 private:
  const Driver& driver_;
  const Scopes& scopes_;
  Lifetimes& lifetimes_;
  bool all_ = false;  // the device has been waited for
};

}  // namespace mg

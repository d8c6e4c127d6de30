// What memory of the driver is asked for, apart from addresses.
//
// Why: segments that grow (supply.h) and segments of torch's pools that may sleep (torch/segments.cc) are mapped alike. Memory
// is asked for as torch asks: with a handle that can be given to another process, and for network cards to reach, where the
// device has that.
#pragma once

#include "core/size_class.h"
#include "driver.h"

namespace mg {

enum class Maps : unsigned char { not_told, no, pages };

// Whether the driver maps memory of device `index` in our pages, and how that memory is asked for.
inline Maps describe(const Driver& driver, int index, PhysicalMemory& out) {
  int ordinal = 0, can = 0, shares = 0, remote = 0;
  size_t grain = 0;
  if (driver.device_get(&ordinal, index) != result::success ||
      driver.device_attribute(&can, maps_memory, ordinal) != result::success ||
      driver.device_attribute(&shares, shares_by_descriptor, ordinal) != result::success ||
      driver.device_attribute(&remote, remote_access_to_mapped, ordinal) != result::success) {
    return Maps::not_told;
  }
  out = {};
  out.type = 1;
  out.location = {1, ordinal};
  out.handle_types = shares != 0 ? by_descriptor : 0;
  out.direct_rdma = remote != 0 ? 1 : 0;
  if (can != 0 && driver.granularity(&grain, &out, least_granularity) != result::success) return Maps::not_told;
  return can != 0 && grain != 0 && size_class::page % grain == 0 ? Maps::pages : Maps::no;
}

}  // namespace mg

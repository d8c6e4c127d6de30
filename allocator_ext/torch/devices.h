// The allocators of this process, one for each device that torch names, and the driver that they stand on.
//
// Guarantee: an allocator is never taken down, for torch frees tensors until the very end of the process. In a child that
// was forked after the driver was used there is none: the driver does not survive that.
#pragma once

#include <string>

#include "core/device.h"

namespace mg::torch_side {

constexpr int most_devices = 64;

// The driver's table and the context of a device; null table: `reason` says why.
const Driver* driver_for(int index, Context& context, std::string& reason);

// The allocator of a device, made when first asked for; null: `reason` says why.
Device* device_of(int index, std::string& reason);
Device* made_device(int index) noexcept;

// Where allocators that are made from now on write a snapshot at out-of-memory: device 0 to `path`, device N to `path`.N;
// empty: nowhere. What else they are like is mg_set_options' matter.
void snapshot_at_oom(std::string path);

// This process is the child of a fork that happened after the driver was used. Nothing of its parent's may be touched, no
// lock either: another thread may have held it.
bool forked() noexcept;
constexpr const char* forked_text =
    "CUDA memory cannot be used in a forked process whose parent had started CUDA (multigraph's allocator): "
    "use multiprocessing's start method 'spawn', or fork before CUDA starts";

// Calls `attempt` with each allocator until it answers true: some of torch's calls do not say which device they mean.
template <class Try>
void on_any_device(Try attempt) noexcept {
  for (int index = 0; index < most_devices; index++) {
    Device* device = made_device(index);
    if (device != nullptr && attempt(device)) return;
  }
}

}  // namespace mg::torch_side

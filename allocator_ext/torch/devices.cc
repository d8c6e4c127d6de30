#include "torch/devices.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "abi.h"
#include "cuda/libcuda.h"
#include "torch/relief.h"

namespace mg::torch_side {

namespace {

std::mutex making;
std::string snapshot_path;  // under `making`
std::atomic<Device*> devices[most_devices];
std::atomic<bool> driver_used{false};
std::atomic<bool> is_child{false};       // of any fork
std::atomic<bool> is_late_child{false};  // of one after the driver was used

// Only flags: the child may have been forked while another thread held any of the locks.
[[maybe_unused]] const int watching_forks = pthread_atfork(nullptr, nullptr, [] {
  is_child.store(true, std::memory_order_relaxed);
  if (driver_used.load(std::memory_order_relaxed)) is_late_child.store(true, std::memory_order_relaxed);
});

}  // namespace

bool forked() noexcept { return is_late_child.load(std::memory_order_relaxed); }

const Driver* driver_for(int index, Context& context, std::string& reason) {
  if (forked()) {
    reason = forked_text;
    return nullptr;
  }
  if (index < 0 || index >= most_devices) {
    reason = "there is no device " + std::to_string(index);
    return nullptr;
  }
  const Driver* driver = cuda::driver(reason);
  if (driver == nullptr) return nullptr;
  driver_used.store(true, std::memory_order_relaxed);
  int ordinal = 0;
  if (driver->device_get(&ordinal, index) != result::success ||
      driver->primary_context(&context, ordinal) != result::success) {
    // torch may have started the driver before the fork, without a word to this library
    reason = is_child.load() ? forked_text : "the driver has no context for device " + std::to_string(index);
    return nullptr;
  }
  return driver;
}

Device* made_device(int index) noexcept {
  if (forked() || index < 0 || index >= most_devices) return nullptr;
  return devices[index].load(std::memory_order_acquire);
}

Device* device_of(int index, std::string& reason) {
  if (Device* made = made_device(index)) return made;
  Context context = nullptr;
  const Driver* driver = driver_for(index, context, reason);
  if (driver == nullptr) return nullptr;
  std::lock_guard lock(making);
  if (Device* made = made_device(index)) return made;
  auto* made = new Device(*driver, index, configured(), context);
  if (!snapshot_path.empty()) {
    made->snapshot_at_oom(index == 0 ? snapshot_path : snapshot_path + "." + std::to_string(index));
  }
  made->set_relief([index](size_t bytes) { return relief(index, bytes); });
  devices[index].store(made, std::memory_order_release);
  // torch copies between devices by kernels that read the other's memory, and asks the runtime for that, which does not
  // open what is mapped. So devices that this process allocates on are open to each other, where they can be.
  for (int other = 0; other < most_devices; other++) {
    Device* there = other == index ? nullptr : made_device(other);
    if (there == nullptr) continue;
    made->open_to(other);
    there->open_to(index);
  }
  return made;
}

void snapshot_at_oom(std::string path) {
  std::lock_guard lock(making);
  snapshot_path = std::move(path);
}

}  // namespace mg::torch_side

// What torch calls for the segments of a `torch.cuda.MemPool` that was given this library: torch's own allocator cuts
// them into blocks and knows who uses them.
//
// In: requests for whole segments, from under torch's lock. Out: memory of the driver, null where there is none or the
// pool's limit is reached: torch then climbs its own ladder and raises its own error. Nothing is kept back for later: a
// segment that torch gives up may still be in use by a replay, and only the driver's free waits for the device.
// torch tells no pool's name, so each pool has functions of its own: one of `slots` pairs of the same template.
// Guarantee: a slot's `bytes` are those of its segments that are with torch.

#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "core/driver_guard.h"
#include "cuda/libcuda.h"
#include "multigraph_allocator.h"
#include "torch/devices.h"

namespace {

constexpr int slots = 64;

struct Slot {
  std::mutex mutex;
  bool taken = false;
  size_t limit = 0;  // 0: none
  size_t bytes = 0;
  size_t peak = 0;
  uint64_t refused = 0;
  std::map<mg::Address, size_t> segments;
};

Slot table[slots];

// The context is retained once for each device and kept.
const mg::Driver* driver_of(int index, mg::Context& context) {
  static std::mutex mutex;
  static std::map<int, mg::Context> contexts;
  std::lock_guard lock(mutex);
  std::string reason;
  if (mg::torch_side::forked()) return nullptr;
  auto known = contexts.find(index);
  if (known != contexts.end()) {
    context = known->second;
    return mg::cuda::driver(reason);
  }
  const mg::Driver* driver = mg::torch_side::driver_for(index, context, reason);
  if (driver != nullptr) contexts.emplace(index, context);
  return driver;
}

void* allocate(Slot& slot, size_t bytes, int index) noexcept {
  try {
    mg::Context context = nullptr;
    const mg::Driver* driver = driver_of(index, context);
    if (driver == nullptr || bytes == 0) return nullptr;
    std::lock_guard lock(slot.mutex);
    if (slot.limit != 0 && slot.bytes + bytes > slot.limit) {
      slot.refused++;
      return nullptr;
    }
    mg::DriverGuard guard(*driver, context, mg::relaxed);
    mg::Address address = 0;
    if (!guard.ok || driver->memory_alloc(&address, bytes) != mg::result::success) {
      slot.refused++;
      return nullptr;
    }
    try {
      slot.segments.emplace(address, bytes);
    } catch (...) {
      driver->memory_free(address);
      return nullptr;
    }
    slot.bytes += bytes;
    if (slot.bytes > slot.peak) slot.peak = slot.bytes;
    return reinterpret_cast<void*>(address);
  } catch (...) {
    return nullptr;
  }
}

void release(Slot& slot, void* address, int index) noexcept {
  try {
    mg::Context context = nullptr;
    const mg::Driver* driver = driver_of(index, context);
    if (driver == nullptr) return;
    std::lock_guard lock(slot.mutex);
    auto found = slot.segments.find(reinterpret_cast<mg::Address>(address));
    if (found == slot.segments.end()) return;
    mg::DriverGuard guard(*driver, context, mg::relaxed);
    // what the driver does not take stays counted
    if (!guard.ok || driver->memory_free(found->first) != mg::result::success) return;
    slot.bytes -= found->second;
    slot.segments.erase(found);
  } catch (...) {
  }
}

template <int number>
void* allocate_in(size_t bytes, int index, mg::Stream) {
  return allocate(table[number], bytes, index);
}

template <int number>
void release_in(void* address, size_t, int index, mg::Stream) {
  release(table[number], address, index);
}

using Allocate = void* (*)(size_t, int, mg::Stream);
using Release = void (*)(void*, size_t, int, mg::Stream);

template <int... numbers>
constexpr std::array<Allocate, slots> allocators(std::integer_sequence<int, numbers...>) {
  return {&allocate_in<numbers>...};
}

template <int... numbers>
constexpr std::array<Release, slots> releasers(std::integer_sequence<int, numbers...>) {
  return {&release_in<numbers>...};
}

constexpr auto all_allocators = allocators(std::make_integer_sequence<int, slots>{});
constexpr auto all_releasers = releasers(std::make_integer_sequence<int, slots>{});

}  // namespace

// It takes a slot whose pool has ended and whose segments are gone.
int mg_segments_open(size_t limit, void** allocate, void** release) noexcept {
  for (int number = 0; number < slots; number++) {
    Slot& slot = table[number];
    std::lock_guard lock(slot.mutex);
    if (slot.taken || slot.bytes != 0) continue;
    slot.taken = true;
    slot.limit = limit;
    slot.peak = 0;
    slot.refused = 0;
    *allocate = reinterpret_cast<void*>(all_allocators[static_cast<size_t>(number)]);
    *release = reinterpret_cast<void*>(all_releasers[static_cast<size_t>(number)]);
    return number;
  }
  return -1;
}

void mg_segments_close(int number) noexcept {
  if (number < 0 || number >= slots) return;
  std::lock_guard lock(table[number].mutex);
  table[number].taken = false;
}

int mg_segments_read(int number, size_t* bytes, size_t* peak, size_t* count, uint64_t* refused) noexcept {
  if (number < 0 || number >= slots) return static_cast<int>(mg::Status::invalid);
  Slot& slot = table[number];
  std::lock_guard lock(slot.mutex);
  *bytes = slot.bytes;
  *peak = slot.peak;
  *count = slot.segments.size();
  *refused = slot.refused;
  return 0;
}

// What torch calls for the segments of a `torch.cuda.MemPool` that was given this library: torch's own allocator cuts
// them into blocks and knows who uses them.
//
// In: requests for whole segments, from under torch's lock. Out: memory of the driver, null where there is none or the
// pool's limit is reached: torch then climbs its own ladder and raises its own error. Nothing is kept back for later: a
// segment that torch gives up may still be in use by a replay, and only the driver's free waits for the device.
// torch tells no pool's name, so each pool has functions of its own: one of `slots` pairs of the same template.
// A pool that may sleep has segments that are mapped: each is one physical allocation in a range of addresses of its own, open
// to the program's other devices, which see plain segments as a matter of course. Unmapping waits for nobody, so the device
// is waited for first (torch gives nothing up while it knows of a capture, which that would end); where that fails, the segment
// is kept until another call comes.
// Guarantee: a slot's `bytes` are those of its segments that are with torch, or that the driver has not taken back yet.

#include <array>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "abi.h"
#include "core/driver_guard.h"
#include "core/host_memory.h"
#include "core/physical.h"
#include "core/readable.h"
#include "core/size_class.h"
#include "cuda/libcuda.h"
#include "multigraph_allocator.h"
#include "torch/devices.h"

namespace {

constexpr int slots = 64;

struct Segment {
  size_t size = 0;
  bool away = false;   // its pool sleeps, and its memory is the device's
  bool dead = false;   // torch has given it up, and the driver has not taken it back yet
  size_t kept_at = 0;  // where its contents begin in what the host keeps
};

struct Slot {
  std::mutex mutex;
  bool taken = false;
  bool maps = false;   // its segments are mapped, and it may sleep
  bool asleep = false;
  int index = 0;       // of the device, where it maps
  size_t away = 0;     // bytes
  mg::HostCopy kept;
  mg::PhysicalMemory memory{};
  std::vector<mg::MemoryAccess> users;
  size_t limit = 0;  // 0: none
  size_t bytes = 0;
  size_t peak = 0;
  uint64_t refused = 0;
  std::map<mg::Address, Segment> segments;
};

Slot table[slots];

std::mutex host_mutex;  // taken last
mg::HostMemory host;    // of all slots

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

bool map(Slot& slot, const mg::Driver& driver, mg::Address address, size_t bytes) {
  mg::Physical handle = 0;
  if (driver.physical_create(&handle, bytes, &slot.memory, 0) != mg::result::success) return false;
  bool mapped = driver.memory_map(address, bytes, 0, handle, 0) == mg::result::success;
  driver.physical_release(handle);  // the mapping keeps it
  if (!mapped) return false;
  if (driver.memory_access(address, bytes, slot.users.data(), slot.users.size()) == mg::result::success) return true;
  driver.memory_unmap(address, bytes);
  return false;
}

// Where it fails the driver has it all again, as far as it takes it.
bool supplied(Slot& slot, const mg::Driver& driver, int index, size_t& bytes, mg::Address& address) {
  if (!slot.maps) {
    if (driver.memory_alloc(&address, bytes) != mg::result::success) return false;
    try {
      slot.segments[address].size = bytes;
    } catch (...) {
      driver.memory_free(address);
      return false;
    }
    return true;
  }
  bytes = mg::size_class::up(bytes, mg::size_class::page);
  if (index != slot.index || driver.address_reserve(&address, bytes, 0, 0, 0) != mg::result::success) return false;
  bool has = false;
  try {
    slot.segments[address].size = bytes;
    has = map(slot, driver, address, bytes);
    if (!has) slot.segments.erase(address);
  } catch (...) {
  }
  if (!has) driver.address_free(address, bytes);
  return has;
}

// Gives back what torch has given up. What the driver does not take stays counted, and is tried again.
void bury(Slot& slot, const mg::Driver& driver) {
  bool waited = false;
  for (auto place = slot.segments.begin(); place != slot.segments.end();) {
    auto& [address, segment] = *place;
    bool gone = false;
    if (segment.dead && !slot.maps) {
      gone = driver.memory_free(address) == mg::result::success;
    } else if (segment.dead && segment.away) {
      gone = driver.address_free(address, segment.size) == mg::result::success;
    } else if (segment.dead) {
      waited = waited || driver.context_synchronize() == mg::result::success;
      gone = waited && driver.memory_unmap(address, segment.size) == mg::result::success;
      if (gone) driver.address_free(address, segment.size);
    }
    if (!gone) {
      ++place;
      continue;
    }
    slot.bytes -= segment.size;
    if (segment.away) slot.away -= segment.size;
    place = slot.segments.erase(place);
  }
}

// Calls `body(slot, driver)` for a slot that may sleep, in its device's context and the relaxed mode.
template <class Body>
int on_mapped(int number, Body body) noexcept {
  auto refused = [](const char* why) { return mg::Outcome{mg::Status::invalid, why}; };
  try {
    if (number < 0 || number >= slots) return mg::told(refused("there is no such pool"));
    Slot& slot = table[number];
    std::lock_guard lock(slot.mutex);
    if (!slot.maps) return mg::told(refused("the pool's segments are plain, and only those that are mapped can sleep"));
    mg::Context context = nullptr;
    const mg::Driver* driver = driver_of(slot.index, context);
    if (driver == nullptr) return mg::told(refused("the driver is gone"));
    mg::DriverGuard guard(*driver, context, mg::relaxed);
    if (!guard.ok) return mg::told({mg::Status::driver_failed, "the driver refuses the calls that sleep needs"});
    return mg::told(body(slot, *driver));
  } catch (...) {
    return static_cast<int>(mg::Status::no_host_memory);
  }
}

mg::Outcome put_to_sleep(Slot& slot, const mg::Driver& driver, bool keep, size_t& bytes) {
  bury(slot, driver);
  if (driver.context_synchronize() != mg::result::success) {
    return {mg::Status::invalid, "work on the device cannot be waited for: a capture may be under way, or work has failed"};
  }
  if (keep) {
    std::lock_guard lock(host_mutex);
    size_t total = 0;
    for (auto& [address, segment] : slot.segments) {
      segment.kept_at = total;
      total += segment.size;
    }
    if (!host.take(driver, total, slot.kept)) {
      return {mg::Status::no_host_memory, "the host has no " + mg::readable(total) + " of pinned memory for the contents"};
    }
    mg::Copies copies(driver);
    for (auto& [address, segment] : slot.segments) copies.to_host(address, segment.size, slot.kept, segment.kept_at);
    if (!copies.done()) {
      host.give_back(slot.kept);
      return {mg::Status::driver_failed, "the driver does not copy the contents to the host"};
    }
  }
  slot.asleep = true;
  for (auto& [address, segment] : slot.segments) {
    if (driver.memory_unmap(address, segment.size) != mg::result::success) continue;  // it stays, awake
    segment.away = true;
    slot.away += segment.size;
    bytes += segment.size;
  }
  return {};
}

// All or nothing, but what the driver does not unmap again.
mg::Outcome wake(Slot& slot, const mg::Driver& driver, int fill, size_t& bytes) {
  bury(slot, driver);
  size_t needed = slot.away;
  std::vector<std::pair<const mg::Address, Segment>*> brought;
  brought.reserve(slot.segments.size());
  bool memory = true, copied = true;
  {
    mg::Copies copies(driver);
    for (auto& entry : slot.segments) {
      auto& [address, segment] = entry;
      bool fresh = segment.away;
      memory = !fresh || map(slot, driver, address, segment.size);
      if (!memory) break;
      if (fresh) brought.push_back(&entry);
      segment.away = false;
      if (!slot.kept.empty()) copies.from_host(address, segment.size, slot.kept, segment.kept_at);
      else if (fresh && fill >= 0) copies.fill(address, segment.size, static_cast<unsigned char>(fill));
    }
    copied = copies.done();
  }
  for (auto* entry : brought) {
    size_t size = entry->second.size;
    if (!(memory && copied) && driver.memory_unmap(entry->first, size) == mg::result::success) {
      entry->second.away = true;
    } else {
      slot.away -= size;
      bytes += size;
    }
  }
  if (!(memory && copied)) bytes = 0;
  if (!memory) return {mg::Status::out_of_memory, "the pool sleeps on: the device has no " + mg::readable(needed) + " for it"};
  if (!copied) return {mg::Status::driver_failed, "the pool sleeps on: the driver does not copy its contents back"};
  std::lock_guard lock(host_mutex);
  host.give_back(slot.kept);
  slot.asleep = false;
  return {};
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
    if (guard.ok) bury(slot, *driver);
    if (!guard.ok || slot.asleep || !supplied(slot, *driver, index, bytes, address)) {
      slot.refused++;
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
    found->second.dead = true;
    if (guard.ok) bury(slot, *driver);
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
    slot.maps = slot.asleep = false;
    std::lock_guard with_host(host_mutex);
    host.give_back(slot.kept);
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

int mg_segments_map(int number, int index) noexcept {
  if (number < 0 || number >= slots) return mg::told({mg::Status::invalid, "there is no such pool"});
  try {
    Slot& slot = table[number];
    std::lock_guard lock(slot.mutex);
    mg::Context context = nullptr;
    const mg::Driver* driver = driver_of(index, context);
    int devices = 0, own = 0;
    if (driver == nullptr || mg::describe(*driver, index, slot.memory) != mg::Maps::pages ||
        driver->device_get(&own, index) != mg::result::success || driver->device_count(&devices) != mg::result::success) {
      return mg::told({mg::Status::driver_failed, "the driver does not map memory, which a pool that sleeps needs"});
    }
    slot.users.assign(1, {{1, own}, 3});
    for (int other = 0; other < devices; other++) {
      int peer = 0, can = 0;
      if (other == index || driver->device_get(&peer, other) != mg::result::success) continue;
      if (driver->can_access_peer(&can, peer, own) == mg::result::success && can != 0) slot.users.push_back({{1, peer}, 3});
    }
    slot.index = index;
    slot.maps = true;
    return 0;
  } catch (...) {
    return static_cast<int>(mg::Status::no_host_memory);
  }
}

int mg_segments_sleep(int number, int keep, size_t* bytes) noexcept {
  *bytes = 0;
  return on_mapped(number, [&](Slot& slot, const mg::Driver& driver) {
    if (slot.asleep) return mg::Outcome{mg::Status::invalid, "the pool sleeps already"};
    return put_to_sleep(slot, driver, keep != 0, *bytes);
  });
}

int mg_segments_wake(int number, int fill, size_t* bytes) noexcept {
  *bytes = 0;
  return on_mapped(number, [&](Slot& slot, const mg::Driver& driver) {
    if (!slot.asleep) return mg::Outcome{mg::Status::invalid, "the pool does not sleep"};
    return wake(slot, driver, fill, *bytes);
  });
}

int mg_segments_asleep(int number, int* asleep, size_t* bytes) noexcept {
  if (number < 0 || number >= slots) return static_cast<int>(mg::Status::invalid);
  Slot& slot = table[number];
  std::lock_guard lock(slot.mutex);
  *asleep = slot.asleep ? 1 : 0;
  *bytes = slot.away;
  return 0;
}

int mg_segments_list(int number, mg_block* out, size_t capacity, size_t* count) noexcept {
  if (number < 0 || number >= slots) return static_cast<int>(mg::Status::invalid);
  Slot& slot = table[number];
  std::lock_guard lock(slot.mutex);
  *count = 0;
  for (auto& [address, segment] : slot.segments) {
    if (segment.dead) continue;
    if (*count < capacity) out[*count] = {address, segment.size, segment.size, nullptr};
    ++*count;
  }
  return 0;
}

int mg_segments_empty_host(size_t* bytes) noexcept {
  *bytes = 0;
  for (int number = 0; number < slots; number++) {  // any that has a driver
    Slot& slot = table[number];
    std::lock_guard lock(slot.mutex);
    mg::Context context = nullptr;
    const mg::Driver* driver = slot.maps ? driver_of(slot.index, context) : nullptr;
    if (driver == nullptr) continue;
    mg::DriverGuard guard(*driver, context, mg::relaxed);
    std::lock_guard with_host(host_mutex);
    *bytes += host.give_back_all(*driver);
    return 0;
  }
  return 0;
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

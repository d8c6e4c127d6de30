// What torch calls when this is the process's allocator, one function for each setter of its pluggable allocator.
//
// In: torch's types without its headers (multigraph_allocator.h). Out: calls on the allocator of the device.
// torch does not look at a null address, so the one that allocates has to throw; it is the only function that does, and
// it is C++ to C++ (torch_error.h). What is not out-of-memory is a std::runtime_error, torch's RuntimeError.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "abi.h"
#include "cuda/libcuda.h"
#include "torch/devices.h"
#include "torch/stacks.h"
#include "torch/torch_error.h"

using mg::torch_side::device_of;
using mg::torch_side::forked;
using mg::torch_side::forked_text;
using mg::torch_side::made_device;
using mg::torch_side::on_any_device;
using mg::torch_side::Stacks;
using mg::torch_side::stacks;

namespace {

mg::Address number(void* address) { return reinterpret_cast<mg::Address>(address); }

// As torch begins such a text, which programs look for: "CUDA out of memory. Tried to allocate".
std::string out_of_memory_text(const std::string& account) {
  const std::string begins = "out of memory: t";
  if (account.compare(0, begins.size(), begins) != 0) return "CUDA out of memory. " + account;
  return "CUDA out of memory. T" + account.substr(begins.size());
}

template <class Body>
int with_status(Body body) noexcept {
  try {
    return mg::told(body());
  } catch (...) {
    return static_cast<int>(mg::Status::no_host_memory);
  }
}

// A block that is live already, to be the answer to one allocation of this thread.
struct Claim {
  mg::Address address = 0;
  size_t bytes = 0;
  int index = 0;
};
thread_local Claim claim;

}  // namespace

int mg_torch_ready() noexcept {
  return with_status([] {
    std::string reason;
    if (mg::cuda::driver(reason) != nullptr) return mg::Outcome{};
    return mg::Outcome{mg::Status::driver_failed, reason};
  });
}

int mg_torch_errors() noexcept {
  return with_status([] {
    std::string lacking = mg::torch_errors();
    return lacking.empty() ? mg::Outcome{} : mg::Outcome{mg::Status::invalid, lacking};
  });
}

int mg_torch_snapshot_at_oom(const char* path) noexcept {
  return with_status([&] {
    mg::torch_side::snapshot_at_oom(path != nullptr ? path : "");
    return mg::Outcome{};
  });
}

mg_device* mg_torch_device(int index) noexcept { return made_device(index); }

int mg_torch_claim(int index, uint64_t address, size_t bytes) noexcept {
  claim = {address, bytes, index};
  return 0;
}

void* mg_torch_alloc(size_t bytes, int index, mg::Stream stream) {
  if (claim.address != 0 && claim.bytes == bytes && claim.index == index) {
    return reinterpret_cast<void*>(std::exchange(claim.address, 0));
  }
  std::string reason;
  mg::Device* device = device_of(index, reason);
  if (device == nullptr) {
    throw std::runtime_error(reason == forked_text ? reason : "multigraph's allocator cannot serve this: " + reason);
  }
  mg::Address address = 0;
  Stacks::Asked asked = stacks().ask(false);
  mg::Outcome outcome = device->allocate(bytes, stream, address);
  if (outcome.status == mg::Status::out_of_memory) {
    stacks().was_refused(asked, index, bytes);
    mg::throw_out_of_memory(out_of_memory_text(outcome.message));
  }
  if (outcome.status != mg::Status::ok) throw std::runtime_error("multigraph's allocator: " + outcome.message);
  stacks().was_allocated(asked, index, address, bytes);
  return reinterpret_cast<void*>(address);
}

void mg_torch_free(void* address, size_t, int index, mg::Stream) noexcept {
  mg::Device* device = made_device(index);
  if (device == nullptr) return;
  Stacks::Asked asked = stacks().ask(true);
  stacks().is_freed(asked, number(address));
  mg_free(device, number(address));
  stacks().was_freed(asked, index, number(address));
}

int mg_torch_record_stacks(uint64_t (*number)(), int of_frees, size_t calls) noexcept {
  return with_status([&] {
    if (number == nullptr) {
      stacks().stop();
    } else {
      stacks().start(number, of_frees != 0, calls);
    }
    return mg::Outcome{};
  });
}

int mg_torch_stacks_live(uint64_t* out, size_t capacity, size_t* count) noexcept {
  return with_status([&] {
    auto live = stacks().live();
    *count = live.size();
    for (size_t i = 0; i < live.size() && i < capacity; i++) {
      out[2 * i] = live[i].first;
      out[2 * i + 1] = live[i].second;
    }
    return mg::Outcome{};
  });
}

int mg_torch_stacks_log(int64_t* out, size_t capacity, size_t* count) noexcept {
  return with_status([&] {
    auto calls = stacks().calls();
    *count = calls.size();
    static_assert(sizeof(Stacks::Call) == 7 * sizeof(int64_t));
    if (out != nullptr && !calls.empty()) memcpy(out, calls.data(), std::min(calls.size(), capacity) * sizeof(Stacks::Call));
    return mg::Outcome{};
  });
}

int mg_torch_pool_save(mg_device* device, uint64_t first, uint64_t second, uint64_t* state) noexcept {
  if (forked()) return with_status([] { return mg::Outcome{mg::Status::invalid, forked_text}; });
  int status = mg_pool_save(device, first, second, state);
  if (status == 0) stacks().was_saved(*device, *state, {first, second});
  return status;
}

int mg_torch_pool_restore(mg_device* device, uint64_t state) noexcept {
  if (forked()) return with_status([] { return mg::Outcome{mg::Status::invalid, forked_text}; });
  int status = 0;
  int looked = with_status([&] {
    auto before = stacks().blocks_of(*device, state);
    status = mg_pool_restore(device, state);
    if (status == 0) stacks().was_restored(*device, state, before);
    return mg::Outcome{};
  });
  return status != 0 ? status : looked;
}

int mg_torch_pool_forget(mg_device* device, uint64_t state) noexcept {
  if (forked()) return 0;
  stacks().was_forgotten(*device, state);
  return mg_pool_forget(device, state);
}

int mg_torch_adopt(mg_device* device, uint64_t address) noexcept {
  if (forked()) return 0;
  int status = mg_adopt(device, &address, 1);
  if (status == 0) stacks().is_adopted(address);
  return status;
}

int mg_torch_drop(mg_device* device, uint64_t address) noexcept {
  if (forked()) return 0;
  stacks().is_dropped(address);
  return mg_drop(device, address);
}

void mg_torch_init(int) noexcept {}

void mg_torch_reset() noexcept {
  on_any_device([](mg::Device* device) {
    size_t bytes = 0;
    mg_empty_cache(device, &bytes);
    return false;
  });
}

void mg_torch_memory_fraction(double fraction, int index) noexcept {
  with_status([&] {
    std::string reason;
    mg::Device* device = device_of(index, reason);
    return device == nullptr ? mg::Outcome{mg::Status::driver_failed, reason} : device->set_fraction(fraction);
  });
}

void* mg_torch_base_alloc(void* address, size_t* bytes) noexcept {
  uint64_t start = 0;
  size_t unasked = 0;  // torch may ask without a place for the size
  if (bytes == nullptr) bytes = &unasked;
  on_any_device([&](mg::Device* device) { return mg_base(device, number(address), &start, bytes) == 0; });
  return reinterpret_cast<void*>(start);
}

void mg_torch_record_stream(void* address, mg::Stream stream) noexcept {
  on_any_device([&](mg::Device* device) { return mg_record_stream(device, number(address), stream) == 0; });
}

void mg_torch_begin_pool(int index, mg_torch_pool pool, mg_torch_filter filter) noexcept {
  with_status([&] {
    std::string reason;
    mg::Device* device = device_of(index, reason);
    if (device == nullptr) return mg::Outcome{mg::Status::driver_failed, reason};
    device->begin_pool({pool.first, pool.second}, std::move(filter), mg::Takes::one_capture);
    return mg::Outcome{};
  });
}

void mg_torch_end_pool(int index, mg_torch_pool pool) noexcept {
  if (mg::Device* device = made_device(index)) mg_end_pool(device, pool.first, pool.second);
}

void mg_torch_release_pool(int index, mg_torch_pool pool) noexcept {
  if (mg::Device* device = made_device(index)) mg_release_pool(device, pool.first, pool.second);
}

int mg_torch_begin_pool_on_thread(int index, uint64_t first, uint64_t second) noexcept {
  return with_status([&] {
    std::string reason;
    mg::Device* device = device_of(index, reason);
    if (device == nullptr) return mg::Outcome{mg::Status::driver_failed, reason};
    auto thread = std::this_thread::get_id();
    device->begin_pool({first, second}, [thread](mg::Stream) { return std::this_thread::get_id() == thread; },
                       mg::Takes::plain);
    return mg::Outcome{};
  });
}

mg_device* mg_torch_make_device(int index) noexcept {
  mg::Device* device = nullptr;
  with_status([&] {
    std::string reason;
    device = device_of(index, reason);
    return device == nullptr ? mg::Outcome{mg::Status::driver_failed, reason} : mg::Outcome{};
  });
  return device;
}

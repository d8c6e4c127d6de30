// What torch calls when this is the process's allocator, one function for each setter of its pluggable allocator.
//
// In: torch's types without its headers: a pair of two integers comes in two registers and a filter by reference, as
// libstdc++ passes them. Out: calls on the allocator of the device, which is made when it is first named.
// torch does not look at a null address, so the one that allocates has to throw; it is the only function that does, and
// it is C++ to C++: `std::bad_alloc` with the account as its text, which torch turns into a RuntimeError.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "abi.h"
#include "core/device.h"
#include "cuda/libcuda.h"

namespace {

constexpr int most_devices = 64;

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

std::mutex making;
// Never taken down: torch frees tensors until the very end of the process.
std::atomic<mg::Device*> devices[most_devices];

mg::Device* device_of(int index, std::string& reason) {
  if (index < 0 || index >= most_devices) {
    reason = "there is no device " + std::to_string(index);
    return nullptr;
  }
  if (mg::Device* made = devices[index].load(std::memory_order_acquire)) return made;
  std::lock_guard lock(making);
  if (mg::Device* made = devices[index].load(std::memory_order_acquire)) return made;
  const mg::Driver* driver = mg::cuda::driver(reason);
  if (driver == nullptr) return nullptr;
  int ordinal = 0;
  mg::Context context = nullptr;
  if (driver->device_get(&ordinal, index) != mg::result::success ||
      driver->primary_context(&context, ordinal) != mg::result::success) {
    reason = "the driver has no context for device " + std::to_string(index);
    return nullptr;
  }
  auto* made = new mg::Device(*driver, index, mg::Config{}, context);
  devices[index].store(made, std::memory_order_release);
  return made;
}

mg::Device* made_device(int index) noexcept {
  return index >= 0 && index < most_devices ? devices[index].load(std::memory_order_acquire) : nullptr;
}

// The device whose memory `address` is in: some of torch's calls do not say.
template <class Try>
void on_any_device(Try attempt) noexcept {
  for (auto& slot : devices) {
    mg::Device* device = slot.load(std::memory_order_acquire);
    if (device != nullptr && attempt(device)) return;
  }
}

mg::Address number(void* address) { return reinterpret_cast<mg::Address>(address); }

}  // namespace

using torch_pool = std::pair<unsigned long long, unsigned long long>;
using torch_filter = std::function<bool(mg::Stream)>;

#define MG_TORCH_EXPORT __attribute__((visibility("default")))

// Whether the driver is there with all that is needed; if not, the reason is in mg_message().
MG_EXPORT int mg_torch_ready() noexcept {
  try {
    std::string reason;
    if (mg::cuda::driver(reason) != nullptr) return 0;
    return mg::told({mg::Status::driver_failed, reason});
  } catch (...) {
    return static_cast<int>(mg::Status::no_host_memory);
  }
}

// The allocator of a device, for the functions of abi.h; null before torch has allocated there.
MG_EXPORT mg_device* mg_torch_device(int index) noexcept { return made_device(index); }

extern "C" MG_TORCH_EXPORT void* mg_torch_alloc(size_t bytes, int index, mg::Stream stream) {
  std::string reason;
  mg::Device* device = device_of(index, reason);
  if (device == nullptr) throw OutOfMemory("multigraph's allocator cannot serve this: " + reason);
  mg::Address address = 0;
  mg::Outcome outcome = device->allocate(bytes, stream, address);
  if (outcome.status != mg::Status::ok) throw OutOfMemory("CUDA out of memory (multigraph): " + outcome.message);
  return reinterpret_cast<void*>(address);
}

MG_EXPORT void mg_torch_free(void* address, size_t, int index, mg::Stream) noexcept {
  if (mg::Device* device = made_device(index)) mg_free(device, number(address));
}

MG_EXPORT void mg_torch_init(int) noexcept {}

MG_EXPORT void mg_torch_reset() noexcept {
  on_any_device([](mg::Device* device) {
    size_t bytes = 0;
    mg_empty_cache(device, &bytes);
    return false;
  });
}

MG_EXPORT void mg_torch_memory_fraction(double fraction, int index) noexcept {
  try {
    std::string reason;
    if (mg::Device* device = device_of(index, reason)) mg_fraction(device, fraction);
  } catch (...) {
  }
}

MG_EXPORT void* mg_torch_base_alloc(void* address, size_t* bytes) noexcept {
  uint64_t start = 0;
  on_any_device([&](mg::Device* device) { return mg_base(device, number(address), &start, bytes) == 0; });
  return reinterpret_cast<void*>(start);
}

MG_EXPORT void mg_torch_record_stream(void* address, mg::Stream stream) noexcept {
  on_any_device([&](mg::Device* device) { return mg_record_stream(device, number(address), stream) == 0; });
}

MG_EXPORT void mg_torch_begin_pool(int index, torch_pool pool, torch_filter filter) noexcept {
  try {
    std::string reason;
    if (mg::Device* device = device_of(index, reason)) device->begin_pool({pool.first, pool.second}, std::move(filter));
  } catch (...) {
  }
}

MG_EXPORT void mg_torch_end_pool(int index, torch_pool pool) noexcept {
  if (mg::Device* device = made_device(index)) mg_end_pool(device, pool.first, pool.second);
}

MG_EXPORT void mg_torch_release_pool(int index, torch_pool pool) noexcept {
  if (mg::Device* device = made_device(index)) mg_release_pool(device, pool.first, pool.second);
}

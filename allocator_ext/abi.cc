#include "abi.h"

#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <string>

#include "core/device.h"

namespace {

thread_local std::string message;

std::mutex configuring;
mg::Config config;

mg::Stream as_stream(void* stream) { return static_cast<mg::Stream>(stream); }

mg::Outcome unknown_rule() { return {mg::Status::invalid, "a rule of reuse is 0, 1, 2 or 3"}; }
mg::Outcome too_long() { return {mg::Status::invalid, "a history has at most 1500000 entries"}; }

mg::Outcome written(const std::vector<mg::SavedBlock>& blocks, mg_block* out, size_t capacity, size_t* count) {
  *count = blocks.size();
  for (size_t i = 0; i < blocks.size() && i < capacity; i++) {
    out[i] = {blocks[i].address, blocks[i].size, blocks[i].requested, blocks[i].stream};
  }
  return {};
}

// Whatever happens inside, only a status comes out.
template <class Body>
int guarded(Body body) noexcept {
  try {
    return mg::told(body());
  } catch (const std::bad_alloc&) {
    return static_cast<int>(mg::Status::no_host_memory);
  } catch (...) {
    return static_cast<int>(mg::Status::invalid);
  }
}

}  // namespace

int mg::told(const Outcome& outcome) noexcept {
  try {
    if (outcome.status != Status::ok) message = outcome.message;
  } catch (...) {
    message.clear();
  }
  return static_cast<int>(outcome.status);
}

mg::Config mg::configured() noexcept {
  std::lock_guard lock(configuring);
  return config;
}

int mg_set_options(const mg_options* options) noexcept {
  return guarded([&] {
    mg::Config made;
    if (options != nullptr) {
      if (options->reuse < 0 || options->reuse > 3) return unknown_rule();
      if (!(options->garbage_threshold >= 0 && options->garbage_threshold < 1)) {
        return mg::Outcome{mg::Status::invalid, "a threshold for garbage lies between 0 and 1"};
      }
      if (options->history > mg::History::most) return too_long();
      made.reuse = static_cast<mg::Reuse>(options->reuse);
      made.empty_nodes = options->empty_nodes != 0;
      made.verify = options->verify != 0;
      made.expandable = options->expandable != 0;
      made.stitch = options->expandable == 2;
      made.garbage_threshold = options->garbage_threshold;
      made.history_entries = options->history;
    }
    std::lock_guard lock(configuring);
    config = made;
    return mg::Outcome{};
  });
}

int mg_abi_version() noexcept { return MG_ABI_VERSION; }
const char* mg_message() noexcept { return message.c_str(); }

int mg_allocate(mg_device* device, size_t bytes, void* stream, uint64_t* address) noexcept {
  return guarded([&] {
    mg::Address made = 0;
    mg::Outcome outcome = device->allocate(bytes, as_stream(stream), made);
    *address = made;
    return outcome;
  });
}

int mg_free(mg_device* device, uint64_t address) noexcept {
  return guarded([&] { return device->release(address); });
}

int mg_record_stream(mg_device* device, uint64_t address, void* stream) noexcept {
  return guarded([&] { return device->record_stream(address, as_stream(stream)); });
}

int mg_base(mg_device* device, uint64_t address, uint64_t* start, size_t* bytes) noexcept {
  return guarded([&] {
    mg::Address found = 0;
    mg::Outcome outcome = device->base(address, found, *bytes);
    *start = found;
    return outcome;
  });
}

int mg_begin_pool(mg_device* device, uint64_t first, uint64_t second, int (*filter)(void*, void*),
                  void* context) noexcept {
  return guarded([&] {
    device->begin_pool({first, second}, [filter, context](mg::Stream s) { return filter(context, s) != 0; });
    return mg::Outcome{};
  });
}

int mg_end_pool(mg_device* device, uint64_t first, uint64_t second) noexcept {
  return guarded([&] { return device->end_pool({first, second}); });
}

int mg_release_pool(mg_device* device, uint64_t first, uint64_t second) noexcept {
  return guarded([&] { return device->release_pool({first, second}); });
}

int mg_pool_save(mg_device* device, uint64_t first, uint64_t second, uint64_t* state) noexcept {
  return guarded([&] { return device->save_pool({first, second}, *state); });
}

int mg_pool_restore(mg_device* device, uint64_t state) noexcept {
  return guarded([&] { return device->restore_pool(state); });
}

int mg_pool_forget(mg_device* device, uint64_t state) noexcept {
  return guarded([&] { return device->forget_state(state); });
}

int mg_adopt(mg_device* device, const uint64_t* addresses, size_t count) noexcept {
  return guarded([&] {
    std::vector<mg::Address> list(addresses, addresses + count);
    return device->adopt(list.data(), count);
  });
}

int mg_drop(mg_device* device, uint64_t address) noexcept {
  return guarded([&] { return device->drop(address); });
}

int mg_pool_blocks(mg_device* device, uint64_t first, uint64_t second, mg_block* out, size_t capacity,
                   size_t* count) noexcept {
  return guarded([&] { return written(device->live_blocks({first, second}), out, capacity, count); });
}

int mg_pool_segments(mg_device* device, uint64_t first, uint64_t second, mg_block* out, size_t capacity,
                     size_t* count) noexcept {
  return guarded([&] { return written(device->segments({first, second}), out, capacity, count); });
}

int mg_pool_users(mg_device* device, uint64_t first, uint64_t second, int* users) noexcept {
  return guarded([&] { return device->pool_users({first, second}, *users); });
}

int mg_use_on_oom(mg_device* device, uint64_t first, uint64_t second, int on) noexcept {
  return guarded([&] { return device->set_use_on_oom({first, second}, on != 0); });
}

int mg_pool_lent(mg_device* device, uint64_t first, uint64_t second, size_t* bytes) noexcept {
  return guarded([&] { return device->pool_lent({first, second}, *bytes); });
}

int mg_pool_limit(mg_device* device, uint64_t first, uint64_t second, size_t bytes) noexcept {
  return guarded([&] { return device->set_pool_limit({first, second}, bytes); });
}

int mg_limit(mg_device* device, size_t bytes) noexcept {
  return guarded([&] { return device->set_limit(bytes); });
}

int mg_fraction(mg_device* device, double fraction) noexcept {
  return guarded([&] { return device->set_fraction(fraction); });
}

int mg_reuse(mg_device* device, int rule) noexcept {
  return guarded([&] {
    if (rule < 0 || rule > 3) return unknown_rule();
    return device->set_reuse(static_cast<mg::Reuse>(rule));
  });
}

int mg_oom_callback(mg_device* device, int (*callback)(void*, size_t), void* context) noexcept {
  return guarded([&] {
    std::function<bool(size_t)> asked;
    if (callback != nullptr) asked = [callback, context](size_t bytes) { return callback(context, bytes) != 0; };
    device->set_oom_callback(std::move(asked));
    return mg::Outcome{};
  });
}

int mg_empty_cache(mg_device* device, size_t* bytes) noexcept {
  return guarded([&] {
    *bytes = device->empty_cache();
    return mg::Outcome{};
  });
}

int mg_empty_pool(mg_device* device, uint64_t first, uint64_t second, size_t* bytes) noexcept {
  return guarded([&] { return device->empty_pool({first, second}, *bytes); });
}

int mg_pool_sleep(mg_device* device, uint64_t first, uint64_t second, int keep, size_t* bytes) noexcept {
  return guarded([&] { return device->sleep_pool({first, second}, keep != 0, *bytes); });
}

int mg_pool_wake(mg_device* device, uint64_t first, uint64_t second, int fill, size_t* bytes) noexcept {
  return guarded([&] { return device->wake_pool({first, second}, fill, *bytes); });
}

int mg_pool_asleep(mg_device* device, uint64_t first, uint64_t second, int* asleep, size_t* bytes) noexcept {
  return guarded([&] {
    bool sleeps = false;
    mg::Outcome outcome = device->pool_asleep({first, second}, sleeps, *bytes);
    *asleep = sleeps ? 1 : 0;
    return outcome;
  });
}

int mg_sleep(mg_device* device, int keep, size_t* bytes) noexcept {
  return guarded([&] { return device->sleep_all(keep != 0, *bytes); });
}

int mg_wake(mg_device* device, int fill, size_t* bytes) noexcept {
  return guarded([&] { return device->wake_all(fill, *bytes); });
}

int mg_empty_host(mg_device* device, size_t* bytes) noexcept {
  return guarded([&] {
    *bytes = device->give_back_host();
    return mg::Outcome{};
  });
}

int mg_peer_access(mg_device* device, int other) noexcept {
  return guarded([&] { return device->open_to(other); });
}

int mg_read_stats(mg_device* device, mg_stats* out) noexcept {
  return guarded([&] {
    mg::Stats s = device->stats();
    *out = {s.allocated_bytes.current, s.allocated_bytes.peak, s.requested_bytes.current, s.requested_bytes.peak,
            s.reserved_bytes.current,  s.reserved_bytes.peak,  s.active_bytes.current,    s.active_bytes.peak,
            s.allocations.current,     s.allocations.peak,     s.segments.current,        s.segments.peak,
            s.ooms, s.retries, s.freed_in_captures, s.proven, s.parked, s.moved, s.verified, s.verify_failures,
            s.allocated_bytes.up, s.allocated_bytes.down, s.requested_bytes.up, s.requested_bytes.down,
            s.reserved_bytes.up, s.reserved_bytes.down, s.active_bytes.up, s.active_bytes.down,
            s.allocations.up, s.allocations.down, s.segments.up, s.segments.down,
            s.stitched};
    return mg::Outcome{};
  });
}

int mg_reset_peaks(mg_device* device) noexcept {
  return guarded([&] {
    device->reset_peaks();
    return mg::Outcome{};
  });
}

int mg_snapshot(mg_device* device, char* out, size_t capacity, size_t* length) noexcept {
  return guarded([&] {
    std::string text = device->snapshot();
    *length = text.size() + 1;
    if (out != nullptr && capacity >= text.size() + 1) memcpy(out, text.c_str(), text.size() + 1);
    return mg::Outcome{};
  });
}

int mg_record_history(mg_device* device, size_t entries) noexcept {
  return guarded([&] {
    if (entries > mg::History::most) return too_long();
    device->record_history(entries);
    return mg::Outcome{};
  });
}

int mg_snapshot_at_oom(mg_device* device, const char* path) noexcept {
  return guarded([&] {
    device->snapshot_at_oom(path != nullptr ? path : "");
    return mg::Outcome{};
  });
}

int mg_verify(mg_device* device) noexcept {
  return guarded([&] {
    std::string wrong = device->verify();
    return wrong.empty() ? mg::Outcome{} : mg::Outcome{mg::Status::invalid, wrong};
  });
}

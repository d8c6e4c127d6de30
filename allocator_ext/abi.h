// What the library offers to C: a handle for the allocator of one device, and functions on it.
//
// No function throws. Each returns a status, and where it is not 0, `mg_message` has a sentence for the calling thread.
// Structures only grow at their end, and `mg_abi_version` is raised when anything else changes.
#pragma once

#include <cstddef>
#include <cstdint>

#define MG_ABI_VERSION 1
#define MG_EXPORT extern "C" __attribute__((visibility("default")))

namespace mg {
class Device;
struct Outcome;
// Keeps the sentence for the calling thread; the status.
int told(const Outcome& outcome) noexcept;
// What mg_set_options has set.
struct Config;
Config configured() noexcept;
}  // namespace mg

using mg_device = mg::Device;

struct mg_stats {
  int64_t allocated, allocated_peak;
  int64_t requested, requested_peak;
  int64_t reserved, reserved_peak;
  int64_t active, active_peak;
  int64_t allocations, allocations_peak;
  int64_t segments, segments_peak;
  uint64_t ooms, retries, freed_in_captures, proven, parked, moved, verified, verify_failures;
  // All that was ever added to the levels above, and taken away.
  int64_t allocated_up, allocated_down;
  int64_t requested_up, requested_down;
  int64_t reserved_up, reserved_down;
  int64_t active_up, active_down;
  int64_t allocations_up, allocations_down;
  int64_t segments_up, segments_down;
  uint64_t stitched;
};

// How allocators that are made from now on behave; the defaults are zeros but for `reuse`, which is 1. `rule` as in
// mg_reuse; `verify` proves each reuse again by brute force.
struct mg_options {
  int reuse;
  int empty_nodes;
  int verify;
  int expandable;            // 2: and nothing is mapped twice
  double garbage_threshold;  // part of the limit above which old cached segments go; 0: never
  size_t history;            // entries; at most 1500000
};

struct mg_block {
  uint64_t address, bytes, requested;
  void* stream;
};

MG_EXPORT int mg_abi_version() noexcept;
MG_EXPORT const char* mg_message() noexcept;

// An address of nothing asks for the defaults.
MG_EXPORT int mg_set_options(const mg_options* options) noexcept;

MG_EXPORT int mg_allocate(mg_device* device, size_t bytes, void* stream, uint64_t* address) noexcept;
MG_EXPORT int mg_free(mg_device* device, uint64_t address) noexcept;
MG_EXPORT int mg_record_stream(mg_device* device, uint64_t address, void* stream) noexcept;
MG_EXPORT int mg_base(mg_device* device, uint64_t address, uint64_t* start, size_t* bytes) noexcept;

// `filter(context, stream)`: whether allocations of this stream are meant; asked without any lock, from any thread.
MG_EXPORT int mg_begin_pool(mg_device* device, uint64_t first, uint64_t second, int (*filter)(void*, void*),
                            void* context) noexcept;
MG_EXPORT int mg_end_pool(mg_device* device, uint64_t first, uint64_t second) noexcept;
MG_EXPORT int mg_release_pool(mg_device* device, uint64_t first, uint64_t second) noexcept;

// States of a pool (checkpoint.cc). Save and restore refuse, and change nothing, while a capture uses the pool or a block
// of it is freed and waits. A restore frees what was allocated since and makes live again what was freed since.
MG_EXPORT int mg_pool_save(mg_device* device, uint64_t first, uint64_t second, uint64_t* state) noexcept;
MG_EXPORT int mg_pool_restore(mg_device* device, uint64_t state) noexcept;
MG_EXPORT int mg_pool_forget(mg_device* device, uint64_t state) noexcept;
// From now on these blocks are the caller's: the next free of each comes from an owner that has lost it, and is ignored.
MG_EXPORT int mg_adopt(mg_device* device, const uint64_t* addresses, size_t count) noexcept;
// The caller's own free of a block, never taken for an owner's.
MG_EXPORT int mg_drop(mg_device* device, uint64_t address) noexcept;
// Live blocks, and runs of mapped memory: at most `capacity` are written, `count` is how many there are.
MG_EXPORT int mg_pool_blocks(mg_device* device, uint64_t first, uint64_t second, mg_block* out, size_t capacity,
                             size_t* count) noexcept;
MG_EXPORT int mg_pool_segments(mg_device* device, uint64_t first, uint64_t second, mg_block* out, size_t capacity,
                               size_t* count) noexcept;
// How often it was begun and not yet released.
MG_EXPORT int mg_pool_users(mg_device* device, uint64_t first, uint64_t second, int* users) noexcept;

MG_EXPORT int mg_use_on_oom(mg_device* device, uint64_t first, uint64_t second, int on) noexcept;
// Bytes of it that serve others now, or did and are not over: what was captured into it is not to be launched meanwhile.
MG_EXPORT int mg_pool_lent(mg_device* device, uint64_t first, uint64_t second, size_t* bytes) noexcept;
MG_EXPORT int mg_pool_limit(mg_device* device, uint64_t first, uint64_t second, size_t bytes) noexcept;
MG_EXPORT int mg_limit(mg_device* device, size_t bytes) noexcept;
MG_EXPORT int mg_fraction(mg_device* device, double fraction) noexcept;
MG_EXPORT int mg_reuse(mg_device* device, int rule) noexcept;
MG_EXPORT int mg_oom_callback(mg_device* device, int (*callback)(void*, size_t), void* context) noexcept;
MG_EXPORT int mg_empty_cache(mg_device* device, size_t* bytes) noexcept;
// The cache of one pool, also of one that is held, unless a capture has used it.
MG_EXPORT int mg_empty_pool(mg_device* device, uint64_t first, uint64_t second, size_t* bytes) noexcept;
// What is and will be mapped may be used by device number `other` too; an error where it cannot reach this one.
MG_EXPORT int mg_peer_access(mg_device* device, int other) noexcept;

MG_EXPORT int mg_read_stats(mg_device* device, mg_stats* out) noexcept;
MG_EXPORT int mg_reset_peaks(mg_device* device) noexcept;
// Text of at most `capacity` bytes with its final 0; `length` is what the whole of it needs, so a first call can ask.
MG_EXPORT int mg_snapshot(mg_device* device, char* out, size_t capacity, size_t* length) noexcept;
// Keeps the latest `entries` of what happens from now on; 0: none.
MG_EXPORT int mg_record_history(mg_device* device, size_t entries) noexcept;
// Where a snapshot is written at out-of-memory; null: nowhere.
MG_EXPORT int mg_snapshot_at_oom(mg_device* device, const char* path) noexcept;
MG_EXPORT int mg_verify(mg_device* device) noexcept;

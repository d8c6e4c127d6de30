/* Everything that the library exports, for C and C++: allocators of devices, what torch calls, segments for torch's pools.
 *
 * Why: one place says what programs may rely on. The library defines what is declared here and nothing else with default
 * visibility, exports.map lists the same names, and `multigraph_backend/allocator/library.py` repeats the types of those
 * that it calls; the tests compare all three with this file. An export is declared in lines that begin with MG_EXPORT.
 *
 * No function throws but `mg_torch_alloc`. Where an `int` is returned and nothing else is said, it is a status: 0, or 1 out
 * of memory, 2 refused, 3 the driver failed, 4 the host has no memory; and then `mg_message` has a sentence for the calling
 * thread. Structures only grow at their end, and MG_ABI_VERSION is raised when anything else changes.
 *
 * A pool is named by two numbers, `first` and `second`, as torch names it; the default pool is (0, 0).
 */
#pragma once

#ifdef __cplusplus
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#define MG_EXPORT extern "C" __attribute__((visibility("default")))
#define MG_NOEXCEPT noexcept
#define MG_NOTHING
namespace mg {
class Device;
}
typedef mg::Device mg_device;
#else
#include <stddef.h>
#include <stdint.h>
#define MG_EXPORT extern
#define MG_NOEXCEPT
#define MG_NOTHING void
typedef struct mg_device mg_device; /* the allocator of one device */
#endif

#define MG_ABI_VERSION 1

struct CUstream_st; /* a stream of CUDA, by its handle; `void*` below means the same */

typedef struct mg_stats {
  int64_t allocated, allocated_peak;
  int64_t requested, requested_peak;
  int64_t reserved, reserved_peak;
  int64_t active, active_peak;
  int64_t allocations, allocations_peak;
  int64_t segments, segments_peak;
  uint64_t ooms, retries, freed_in_captures, proven, parked, moved, verified, verify_failures;
  /* All that was ever added to the levels above, and taken away. */
  int64_t allocated_up, allocated_down;
  int64_t requested_up, requested_down;
  int64_t reserved_up, reserved_down;
  int64_t active_up, active_down;
  int64_t allocations_up, allocations_down;
  int64_t segments_up, segments_down;
  uint64_t stitched;
} mg_stats;

/* How allocators that are made from now on behave; the defaults are zeros but for `reuse`, which is 1. `reuse` is a rule as
 * in mg_reuse; `verify` proves each reuse again by brute force. */
typedef struct mg_options {
  int reuse;
  int empty_nodes;
  int verify;
  int expandable;           /* 2: and pages may be mapped twice, so that free pieces of several are one block */
  double garbage_threshold; /* part of the limit above which old cached segments go; 0: never */
  size_t history;           /* entries; at most 1500000 */
} mg_options;

typedef struct mg_block {
  uint64_t address, bytes, requested;
  void* stream;
} mg_block;

MG_EXPORT int mg_abi_version(MG_NOTHING) MG_NOEXCEPT;
MG_EXPORT const char* mg_message(MG_NOTHING) MG_NOEXCEPT;

/* No options ask for the defaults. */
MG_EXPORT int mg_set_options(const mg_options* options) MG_NOEXCEPT;

/* ---- The allocator of a device ---- */

MG_EXPORT int mg_allocate(mg_device* device, size_t bytes, void* stream, uint64_t* address) MG_NOEXCEPT;
MG_EXPORT int mg_free(mg_device* device, uint64_t address) MG_NOEXCEPT;
MG_EXPORT int mg_record_stream(mg_device* device, uint64_t address, void* stream) MG_NOEXCEPT;
MG_EXPORT int mg_base(mg_device* device, uint64_t address, uint64_t* start, size_t* bytes) MG_NOEXCEPT;

/* `filter(context, stream)`: whether allocations of this stream are meant; asked without any lock, from any thread. */
MG_EXPORT int mg_begin_pool(mg_device* device, uint64_t first, uint64_t second, int (*filter)(void*, void*),
                            void* context) MG_NOEXCEPT;
MG_EXPORT int mg_end_pool(mg_device* device, uint64_t first, uint64_t second) MG_NOEXCEPT;
MG_EXPORT int mg_release_pool(mg_device* device, uint64_t first, uint64_t second) MG_NOEXCEPT;

/* States of a pool. Save and restore refuse, and change nothing, while a capture uses the pool or a block of it is freed
 * and waits. A restore frees what was allocated since and makes live again what was freed since. */
MG_EXPORT int mg_pool_save(mg_device* device, uint64_t first, uint64_t second, uint64_t* state) MG_NOEXCEPT;
MG_EXPORT int mg_pool_restore(mg_device* device, uint64_t state) MG_NOEXCEPT;
MG_EXPORT int mg_pool_forget(mg_device* device, uint64_t state) MG_NOEXCEPT;
/* From now on these blocks are the caller's: the next free of each comes from an owner that has lost it, and is ignored. */
MG_EXPORT int mg_adopt(mg_device* device, const uint64_t* addresses, size_t count) MG_NOEXCEPT;
/* The caller's own free of a block, never taken for an owner's. */
MG_EXPORT int mg_drop(mg_device* device, uint64_t address) MG_NOEXCEPT;
/* Live blocks, and runs of mapped memory: at most `capacity` are written, `count` is how many there are. */
MG_EXPORT int mg_pool_blocks(mg_device* device, uint64_t first, uint64_t second, mg_block* out, size_t capacity,
                             size_t* count) MG_NOEXCEPT;
MG_EXPORT int mg_pool_segments(mg_device* device, uint64_t first, uint64_t second, mg_block* out, size_t capacity,
                               size_t* count) MG_NOEXCEPT;
/* How often it was begun and not yet released. */
MG_EXPORT int mg_pool_users(mg_device* device, uint64_t first, uint64_t second, int* users) MG_NOEXCEPT;

/* What is free of it serves others at out-of-memory. */
MG_EXPORT int mg_use_on_oom(mg_device* device, uint64_t first, uint64_t second, int on) MG_NOEXCEPT;
/* Bytes of it that serve others now, or did and are not over: what was captured into it is not to be launched meanwhile. */
MG_EXPORT int mg_pool_lent(mg_device* device, uint64_t first, uint64_t second, size_t* bytes) MG_NOEXCEPT;
/* Limits, of a pool and of all of them; 0: none. */
MG_EXPORT int mg_pool_limit(mg_device* device, uint64_t first, uint64_t second, size_t bytes) MG_NOEXCEPT;
MG_EXPORT int mg_limit(mg_device* device, size_t bytes) MG_NOEXCEPT;
MG_EXPORT int mg_fraction(mg_device* device, double fraction) MG_NOEXCEPT;
/* How much a capture gives back before it ends: 0 strict, 1 to the own stream, 2 graph-wide, 3 to any stream of it. */
MG_EXPORT int mg_reuse(mg_device* device, int rule) MG_NOEXCEPT;
/* `callback(context, bytes)` is asked when all else failed; not 0: the allocation is tried again. */
MG_EXPORT int mg_oom_callback(mg_device* device, int (*callback)(void*, size_t), void* context) MG_NOEXCEPT;
MG_EXPORT int mg_empty_cache(mg_device* device, size_t* bytes) MG_NOEXCEPT;
/* The cache of one pool, also of one that is held, unless a capture has used it. */
MG_EXPORT int mg_empty_pool(mg_device* device, uint64_t first, uint64_t second, size_t* bytes) MG_NOEXCEPT;
/* Sleep: a pool's pages go back to the device, and its addresses stay. Meanwhile allocations in it are refused, frees are
 * not; nothing may use it. `keep`: contents are kept in pinned memory of the host, else they are undefined after the wake;
 * `fill`: then new pages have this byte, -1: what they come with. A sleep that is refused has changed nothing; after a wake
 * that is, the pool sleeps on. `bytes` went back, or came. */
MG_EXPORT int mg_pool_sleep(mg_device* device, uint64_t first, uint64_t second, int keep, size_t* bytes) MG_NOEXCEPT;
MG_EXPORT int mg_pool_wake(mg_device* device, uint64_t first, uint64_t second, int fill, size_t* bytes) MG_NOEXCEPT;
/* Whether it sleeps, and how many of its bytes the device has meanwhile. */
MG_EXPORT int mg_pool_asleep(mg_device* device, uint64_t first, uint64_t second, int* asleep, size_t* bytes) MG_NOEXCEPT;
/* All pools that are awake; and those that this has put to sleep. */
MG_EXPORT int mg_sleep(mg_device* device, int keep, size_t* bytes) MG_NOEXCEPT;
MG_EXPORT int mg_wake(mg_device* device, int fill, size_t* bytes) MG_NOEXCEPT;
/* Pinned memory of the host that is kept for the next sleep goes. */
MG_EXPORT int mg_empty_host(mg_device* device, size_t* bytes) MG_NOEXCEPT;
/* What is and will be mapped may be used by device number `other` too; an error where it cannot reach this one. */
MG_EXPORT int mg_peer_access(mg_device* device, int other) MG_NOEXCEPT;

MG_EXPORT int mg_read_stats(mg_device* device, mg_stats* out) MG_NOEXCEPT;
MG_EXPORT int mg_reset_peaks(mg_device* device) MG_NOEXCEPT;
/* Text of at most `capacity` bytes with its final 0; `length` is what the whole of it needs, so a first call can ask. */
MG_EXPORT int mg_snapshot(mg_device* device, char* out, size_t capacity, size_t* length) MG_NOEXCEPT;
/* Keeps the latest `entries` of what happens from now on; 0: none. */
MG_EXPORT int mg_record_history(mg_device* device, size_t entries) MG_NOEXCEPT;
/* Where a snapshot is written at out-of-memory; null: nowhere. */
MG_EXPORT int mg_snapshot_at_oom(mg_device* device, const char* path) MG_NOEXCEPT;
/* Whether the books are right; what is wrong is in mg_message. */
MG_EXPORT int mg_verify(mg_device* device) MG_NOEXCEPT;

/* ---- The allocators of this process, one for each device that torch names ---- */

/* Whether the driver is there with all that is needed. */
MG_EXPORT int mg_torch_ready(MG_NOTHING) MG_NOEXCEPT;
/* From now on out-of-memory is torch's own error. To be called with a version of torch that is known (torch_error.h);
 * not 0: it stays a RuntimeError. */
MG_EXPORT int mg_torch_errors(MG_NOTHING) MG_NOEXCEPT;
/* Where the allocators of devices that torch has not named yet write a snapshot at out-of-memory; null: nowhere. */
MG_EXPORT int mg_torch_snapshot_at_oom(const char* path) MG_NOEXCEPT;

/* The allocator of a device; null before torch has allocated there. */
MG_EXPORT mg_device* mg_torch_device(int index) MG_NOEXCEPT;
/* The same, made where it was not there yet; null: mg_message says why. */
MG_EXPORT mg_device* mg_torch_make_device(int index) MG_NOEXCEPT;

/* A pool for what the calling thread allocates on a device from now on, until mg_end_pool; torch's own MemPool asks for an
 * allocator that can make pools by itself, which a pluggable one cannot. */
MG_EXPORT int mg_torch_begin_pool_on_thread(int index, uint64_t first, uint64_t second) MG_NOEXCEPT;

/* The calling thread's next allocation of so many bytes there is answered with this block, which the caller owns: so torch
 * makes a storage over it whose death is a free of it. Address 0: no longer. */
MG_EXPORT int mg_torch_claim(int index, uint64_t address, size_t bytes) MG_NOEXCEPT;

/* States of pools and owners of blocks as above, and with them the stacks of what comes back. In a child of a fork what
 * gives something up does nothing, for it runs when objects of the parent end there. */
MG_EXPORT int mg_torch_pool_save(mg_device* device, uint64_t first, uint64_t second, uint64_t* state) MG_NOEXCEPT;
MG_EXPORT int mg_torch_pool_restore(mg_device* device, uint64_t state) MG_NOEXCEPT;
MG_EXPORT int mg_torch_pool_forget(mg_device* device, uint64_t state) MG_NOEXCEPT;
MG_EXPORT int mg_torch_adopt(mg_device* device, uint64_t address) MG_NOEXCEPT;
MG_EXPORT int mg_torch_drop(mg_device* device, uint64_t address) MG_NOEXCEPT;

/* From now on `number()` is asked for the calling thread's stack at each allocation, with `of_frees` at each free too, and
 * the latest `calls` are kept, at most 1500000. It runs under no lock of this library and may take locks of its own. Null:
 * no longer; then this waits for threads in which it runs. */
MG_EXPORT int mg_torch_record_stacks(uint64_t (*number)(MG_NOTHING), int of_frees, size_t calls) MG_NOEXCEPT;
/* Address and number of stack of what is live. Here and below at most `capacity` are written; `count` is how many there
 * are. */
MG_EXPORT int mg_torch_stacks_live(uint64_t* out, size_t capacity, size_t* count) MG_NOEXCEPT;
/* The latest calls, from the oldest to the newest: seven numbers each, as `Stacks::Call` lists them (torch/stacks.h). */
MG_EXPORT int mg_torch_stacks_log(int64_t* out, size_t capacity, size_t* count) MG_NOEXCEPT;

/* Relief: before an allocation fails, a thread of the program is asked to give memory up (torch/relief.h). `seconds`: how long
 * the allocation waits for it; 0: nobody is asked any more. */
MG_EXPORT int mg_torch_relief(double seconds) MG_NOEXCEPT;
/* For that thread, without Python's lock: waits until it is asked, for bytes on a device; a device of -1: nobody asks any
 * more. From then on its own allocations ask nobody. */
MG_EXPORT int mg_torch_relief_wait(int* index, size_t* bytes) MG_NOEXCEPT;
/* What it was asked for is done; not 0: it gave something up, and the allocation is tried again. */
MG_EXPORT int mg_torch_relief_done(int gave) MG_NOEXCEPT;

/* ---- What torch calls of its current allocator: one function for each setter of its pluggable allocator ---- */

/* The only one that throws: torch does not look at a null address. */
MG_EXPORT void* mg_torch_alloc(size_t bytes, int index, struct CUstream_st* stream);
MG_EXPORT void mg_torch_free(void* address, size_t bytes, int index, struct CUstream_st* stream) MG_NOEXCEPT;
MG_EXPORT void mg_torch_init(int devices) MG_NOEXCEPT;
MG_EXPORT void mg_torch_reset(MG_NOTHING) MG_NOEXCEPT;
MG_EXPORT void mg_torch_memory_fraction(double fraction, int index) MG_NOEXCEPT;
MG_EXPORT void* mg_torch_base_alloc(void* address, size_t* bytes) MG_NOEXCEPT;
MG_EXPORT void mg_torch_record_stream(void* address, struct CUstream_st* stream) MG_NOEXCEPT;

#ifdef __cplusplus
/* torch's own types, without its headers: libstdc++ passes the pair in two registers and the filter by reference. */
typedef std::pair<unsigned long long, unsigned long long> mg_torch_pool;
typedef std::function<bool(CUstream_st*)> mg_torch_filter;
MG_EXPORT void mg_torch_begin_pool(int index, mg_torch_pool pool, mg_torch_filter filter) MG_NOEXCEPT;
MG_EXPORT void mg_torch_end_pool(int index, mg_torch_pool pool) MG_NOEXCEPT;
MG_EXPORT void mg_torch_release_pool(int index, mg_torch_pool pool) MG_NOEXCEPT;
#endif

/* ---- Segments for a `torch.cuda.MemPool` that torch's own allocator cuts into blocks (torch/segments.cc) ---- */

/* A slot for a pool, and its two functions for torch; -1: all slots are taken. `limit` in bytes; 0: none. */
MG_EXPORT int mg_segments_open(size_t limit, void** allocate, void** release) MG_NOEXCEPT;
/* The pool has ended; torch may give its segments back later. */
MG_EXPORT void mg_segments_close(int number) MG_NOEXCEPT;
/* Its segments, of which it has none yet, are mapped, so that it can sleep; they are of device `index`, and those of the
 * program's devices that reach it may use them. */
MG_EXPORT int mg_segments_map(int number, int index) MG_NOEXCEPT;
/* As mg_pool_sleep and its neighbours say; torch must not allocate in the pool meanwhile. */
MG_EXPORT int mg_segments_sleep(int number, int keep, size_t* bytes) MG_NOEXCEPT;
MG_EXPORT int mg_segments_wake(int number, int fill, size_t* bytes) MG_NOEXCEPT;
MG_EXPORT int mg_segments_asleep(int number, int* asleep, size_t* bytes) MG_NOEXCEPT;
MG_EXPORT int mg_segments_list(int number, mg_block* out, size_t capacity, size_t* count) MG_NOEXCEPT;
MG_EXPORT int mg_segments_empty_host(size_t* bytes) MG_NOEXCEPT;
MG_EXPORT int mg_segments_read(int number, size_t* bytes, size_t* peak, size_t* count, uint64_t* refused) MG_NOEXCEPT;

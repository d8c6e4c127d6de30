// Every function of the CUDA driver that the allocator calls, listed once.
//
// Why: the extension is built without CUDA and runs where a driver may be missing, so it links to none of these. What
// comes in is a place that fills the table (cuda/ from libcuda, sim/ from the simulation); what goes out is a table of
// typed function pointers. Types repeat the driver's own layout; no header of CUDA is read.
// Guarantee: a table is complete or it is not handed out.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUctx_st;

namespace mg {

using Stream = CUstream_st*;
using Event = CUevent_st*;
using Graph = CUgraph_st*;
using Node = CUgraphNode_st*;
using Context = CUctx_st*;
using Address = unsigned long long;
using Result = int;

namespace result {
constexpr Result success = 0;
constexpr Result out_of_memory = 2;
constexpr Result not_ready = 600;
constexpr Result capture_unsupported = 900;
constexpr Result capture_implicit = 906;
}  // namespace result

// What is left of an edge when its driver says nothing special: full completion of the node that it comes from.
struct EdgeData {
  unsigned char from_port;
  unsigned char to_port;
  unsigned char type;
  unsigned char reserved[5];

  bool full() const noexcept { return from_port == 0 && to_port == 0 && type == 0; }
};

// Physical memory of a device, and who may access a mapping, as the driver lays them out.
struct MemoryLocation {
  int type;  // 1: a device
  int id;
};
struct PhysicalMemory {
  int type;  // 1: pinned
  int handle_types;
  MemoryLocation location;
  void* windows_metadata;
  unsigned char compression, direct_rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct MemoryAccess {
  MemoryLocation location;
  int flags;  // 3: read and write
};
static_assert(sizeof(PhysicalMemory) == 32 && sizeof(MemoryAccess) == 12, "as in the driver");
using Physical = unsigned long long;

enum CaptureStatus : int { not_capturing = 0, capturing = 1, capture_invalidated = 2 };
enum CaptureMode : int { capture_mode_global = 0, capture_mode_relaxed = 2 };
constexpr unsigned set_capture_dependencies = 1;
constexpr unsigned event_without_timing = 2;
constexpr unsigned stream_beside_all = 1;  // it waits for no stream that did not ask for it, and none for it
constexpr unsigned host_memory_for_all_contexts = 1;
// Attributes of devices: whether addresses and memory can be had apart, whether such memory can be handed to others by a
// file descriptor, and whether network cards may read and write it.
constexpr int maps_memory = 102, shares_by_descriptor = 103, remote_access_to_mapped = 110;
constexpr int by_descriptor = 1;  // a type of handle
constexpr int least_granularity = 0;

// X(name in the table, symbol in libcuda, parameters)
#define MG_DRIVER_FUNCTIONS(X)                                                                                         \
  X(context_current, "cuCtxGetCurrent", (Context*))                                                                    \
  X(context_set, "cuCtxSetCurrent", (Context))                                                                         \
  X(context_synchronize, "cuCtxSynchronize", ())                                                                       \
  X(device_get, "cuDeviceGet", (int*, int))                                                                            \
  X(device_count, "cuDeviceGetCount", (int*))                                                                          \
  X(device_attribute, "cuDeviceGetAttribute", (int*, int, int))                                                        \
  X(can_access_peer, "cuDeviceCanAccessPeer", (int*, int, int))                                                        \
  X(primary_context, "cuDevicePrimaryCtxRetain", (Context*, int))                                                      \
  X(memory_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                                                \
  X(memory_alloc, "cuMemAlloc_v2", (Address*, size_t))                                                                 \
  X(memory_free, "cuMemFree_v2", (Address))                                                                            \
  X(address_reserve, "cuMemAddressReserve", (Address*, size_t, size_t, Address, unsigned long long))                   \
  X(address_free, "cuMemAddressFree", (Address, size_t))                                                               \
  X(granularity, "cuMemGetAllocationGranularity", (size_t*, const PhysicalMemory*, int))                               \
  X(physical_create, "cuMemCreate", (Physical*, size_t, const PhysicalMemory*, unsigned long long))                    \
  X(physical_release, "cuMemRelease", (Physical))                                                                      \
  X(memory_map, "cuMemMap", (Address, size_t, size_t, Physical, unsigned long long))                                   \
  X(memory_unmap, "cuMemUnmap", (Address, size_t))                                                                     \
  X(memory_access, "cuMemSetAccess", (Address, size_t, const MemoryAccess*, size_t))                                   \
  X(host_alloc, "cuMemHostAlloc", (void**, size_t, unsigned))                                                          \
  X(host_free, "cuMemFreeHost", (void*))                                                                               \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, Address, size_t, Stream))                                            \
  X(copy_from_host, "cuMemcpyHtoDAsync_v2", (Address, const void*, size_t, Stream))                                    \
  X(fill, "cuMemsetD8Async", (Address, unsigned char, size_t, Stream))                                                 \
  X(stream_create, "cuStreamCreate", (Stream*, unsigned))                                                              \
  X(stream_synchronize, "cuStreamSynchronize", (Stream))                                                               \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                                                    \
  X(event_create, "cuEventCreate", (Event*, unsigned))                                                                 \
  X(event_destroy, "cuEventDestroy_v2", (Event))                                                                       \
  X(event_record, "cuEventRecord", (Event, Stream))                                                                    \
  X(event_query, "cuEventQuery", (Event))                                                                              \
  X(event_synchronize, "cuEventSynchronize", (Event))                                                                  \
  X(capture_info, "cuStreamGetCaptureInfo_v3",                                                                         \
    (Stream, CaptureStatus*, uint64_t*, Graph*, const Node**, const EdgeData**, size_t*))                              \
  X(capture_dependencies, "cuStreamUpdateCaptureDependencies_v2", (Stream, Node*, const EdgeData*, size_t, unsigned))  \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (CaptureMode*))                                        \
  X(node_dependencies, "cuGraphNodeGetDependencies_v2", (Node, Node*, EdgeData*, size_t*))                             \
  X(graph_nodes, "cuGraphGetNodes", (Graph, Node*, size_t*))                                                           \
  X(add_empty_node, "cuGraphAddEmptyNode", (Node*, Graph, const Node*, size_t))

struct Driver {
#define MG_DECLARE(name, symbol, parameters) Result(*name) parameters = nullptr;
  MG_DRIVER_FUNCTIONS(MG_DECLARE)
#undef MG_DECLARE
};

}  // namespace mg

// Stands in for the driver: notes what is launched, in the order of launching, and fails when it is told to.
#include <cstdint>
#include <cstring>

extern "C" {
struct Launched {
  uint64_t graph, function, stream, table;
  uint32_t programs, threads, shared;
  uint64_t sources[64];
};
Launched last;
int graphs, kernels, sets, fail_graph, fail_kernel, fail_set, contexts, needs_context, capturing;
uint64_t node;

struct NodeParameters {
  void* function;
  unsigned x, y, z, a, b, c, shared;
  void **parameters, **extra;
  void *kernel, *context;
};

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(uint64_t)(device + 100);
  return 0;
}

int cuCtxSetCurrent(void* context) {
  contexts++;
  return 0;
}

int cuStreamGetCaptureInfo_v3(void*, int* status, uint64_t*, void**, void*** nodes, const void**, size_t* count) {
  static void* found[2];
  found[0] = (void*)(uint64_t)4321;
  *status = capturing > 0;
  *nodes = found;
  *count = capturing;
  return 0;
}

int cuGraphLaunch(void* graph, void* stream) {
  if (needs_context && !contexts) return 201;
  last.graph = (uint64_t)graph;
  last.stream = (uint64_t)stream;
  graphs++;
  return fail_graph;
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared,
                   void*, void** parameters, void** extra) {
  if (needs_context && !contexts) return 201;
  if (y * z * b * c != 1 || extra) return 1;
  last.function = (uint64_t)function;
  last.programs = x;
  last.threads = a;
  last.shared = shared;
  std::memcpy(&last.table, parameters[0], 8);
  for (int at = 0; at < (int)(uint64_t)function; at++) std::memcpy(&last.sources[at], parameters[at + 1], 8);
  kernels++;
  return fail_kernel;
}

int cuGraphExecKernelNodeSetParams_v2(void* graph, void* of, const NodeParameters* how) {
  if (needs_context && !contexts) return 201;
  if (how->kernel || how->context) return 1;
  last.graph = (uint64_t)graph;
  node = (uint64_t)of;
  int failed = cuLaunchKernel(how->function, how->x, how->y, how->z, how->a, how->b, how->c, how->shared, nullptr,
                              how->parameters, how->extra);
  kernels--;
  sets++;
  return fail_set ? fail_set : failed;
}
}

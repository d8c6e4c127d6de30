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

// A graph of its own: nodes 1000, 1001 and so on, of these kinds.  Kernels have the function 500 and so on, or none and
// a kernel of that number, and this many parameters of these sizes with these bytes.
enum { NODES = 8, PARAMETERS = 4, BYTES = 40 };
int count_nodes, kinds[NODES], by_kernel[NODES], counts[NODES], sizes[NODES][PARAMETERS], fail_info, in_one_piece;
unsigned char bytes[NODES][PARAMETERS][BYTES];
// what it was told last
unsigned char told[NODES][PARAMETERS][BYTES];
int times_told[NODES], fail_told;  // the number of the node that is refused, from 1 on

int cuGraphGetNodes(void* graph, void** nodes, size_t* count) {
  if ((uint64_t)graph != 4242) return 1;
  if (nodes)
    for (int at = 0; at < count_nodes; at++) nodes[at] = (void*)(uint64_t)(1000 + at);
  *count = count_nodes;
  return 0;
}

int cuGraphNodeGetType(void* node, int* kind) {
  *kind = kinds[(uint64_t)node - 1000];
  return 0;
}

int cuGraphKernelNodeGetParams_v2(void* node, NodeParameters* how) {
  static void* parameters[NODES][PARAMETERS];
  int at = (uint64_t)node - 1000;
  for (int one = 0; one < PARAMETERS; one++) parameters[at][one] = bytes[at][one];
  *how = {by_kernel[at] ? nullptr : (void*)(uint64_t)(500 + at), 2, 3, 4, 5, 6, 7, 8, parameters[at], nullptr,
          by_kernel[at] ? (void*)(uint64_t)(500 + at) : nullptr, by_kernel[at] ? (void*)99 : nullptr};
  if (in_one_piece) how->parameters = nullptr, how->extra = (void**)parameters[at];
  return 0;
}

int info(int at, size_t index, size_t* offset, size_t* size) {
  if (fail_info) return fail_info;
  if ((int)index >= counts[at]) return 1;
  *offset = 64 * index;
  *size = sizes[at][index];
  return 0;
}

int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  return info((uint64_t)function - 500, index, offset, size);
}

int cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* size) {
  return by_kernel[(uint64_t)kernel - 500] ? info((uint64_t)kernel - 500, index, offset, size) : 400;
}

// as cuda.h has them
struct Copy {
  size_t source_at[4];
  int source_kind;
  const void* source_host;
  uint64_t source;
  void* source_others[2];
  size_t source_sizes[2];
  size_t target_at[4];
  int target_kind;
  void* target_host;
  uint64_t target;
  void* target_others[2];
  size_t target_sizes[2];
  size_t extent[3];
};
static_assert(sizeof(Copy) == 200);

int cuGraphMemcpyNodeGetParams(void* node, Copy* how) {
  std::memset(how, 0, sizeof(Copy));
  how->source_kind = how->target_kind = 2;
  how->source = 0x111;
  how->target = 0x222;
  how->extent[0] = 16, how->extent[1] = how->extent[2] = 1;
  return 0;
}

struct Fill {
  uint64_t target;
  size_t pitch;
  unsigned value, size;
  size_t width, height;
};

int cuGraphMemsetNodeGetParams(void* node, Fill* how) {
  *how = {0x333, 0, 7, 4, 10, 1};
  return 0;
}

int cuGraphExecKernelNodeSetParams_v2(void* graph, void* of, const NodeParameters* how) {
  if (needs_context && !contexts) return 201;
  if ((uint64_t)of >= 1000) {
    int at = (uint64_t)of - 1000;
    if (fail_told == at + 1) return 700;
    if ((uint64_t)(by_kernel[at] ? how->kernel : how->function) != (uint64_t)(500 + at) || how->x != 2 || how->shared != 8 ||
        how->extra)
      return 1;
    for (int one = 0; one < counts[at]; one++) std::memcpy(told[at][one], how->parameters[one], sizes[at][one]);
    times_told[at]++;
    return 0;
  }
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

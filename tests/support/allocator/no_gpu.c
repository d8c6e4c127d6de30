// A CUDA runtime in front of the real one, for a torch that is built for CUDA on a machine without a GPU: one device,
// memory of the host, streams and events that are done at once, no captures, no kernels.
#include <stdlib.h>
#include <string.h>

int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return device; }
int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = *greatest = 0; return 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) { *value = 0 * attribute * device; return 0; }
int cudaGetDeviceProperties(void* properties, int device) { memset(properties, device, 1000); return 0; }
int cudaMemGetInfo(size_t* available, size_t* total) { *available = *total = (size_t)1 << 34; return 0; }
int cudaMalloc(void** address, size_t bytes) { *address = malloc(bytes); return *address == NULL; }
int cudaFree(void* address) { free(address); return 0; }
int cudaStreamIsCapturing(void* stream, int* status) { (void)stream; *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void* stream, int* status) { (void)stream; *status = 0; return 0; }
int cudaStreamGetCaptureInfo_v2(void* stream, int* status) { (void)stream; *status = 0; return 0; }
int cudaThreadExchangeStreamCaptureMode(int* mode) { (void)mode; return 0; }
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  (void)flags, (void)priority;
  *stream = malloc(1);
  return *stream == NULL;
}
int cudaStreamQuery(void* stream) { (void)stream; return 0; }
int cudaStreamSynchronize(void* stream) { (void)stream; return 0; }
int cudaEventCreateWithFlags(void** event, unsigned flags) { (void)flags; *event = malloc(1); return *event == NULL; }
int cudaEventRecord(void* event, void* stream) { (void)event, (void)stream; return 0; }
int cudaEventRecordWithFlags(void* event, void* stream, unsigned flags) { (void)event, (void)stream, (void)flags; return 0; }
int cudaEventQuery(void* event) { (void)event; return 0; }
int cudaEventDestroy(void* event) { free(event); return 0; }

// of the driver: what torch, and this package, look for by name
int cuThreadExchangeStreamCaptureMode(int* mode) { (void)mode; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = device == 0;
  return 0;
}

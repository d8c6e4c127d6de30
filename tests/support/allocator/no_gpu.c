// A CUDA runtime in front of the real one, for a torch that is built for CUDA on a machine without a GPU: one device,
// memory of the host, no streams but the default one, no captures, no kernels.
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

// torch looks for the driver too, and for this alone by name
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = device == 0;
  return 0;
}

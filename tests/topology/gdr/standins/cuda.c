/* libcuda: the calls of the registration probe, for one GPU, as strict as the driver and stricter about giving back.

   BUS_ID  where the GPU sits
   OLD     a driver before CUDA 11.7: no cuMemGetHandleForAddressRange
   Source: cuda.h of CUDA 12.9; the driver API's pages on memory management. */
#define _GNU_SOURCE
#include "standin.h"
#include <sys/mman.h>
#ifdef HEADERS
#include <cuda.h>
#else
#define CUDAAPI
typedef int CUresult, CUdevice, CUdevice_attribute, CUmemRangeHandleType;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NOT_INITIALIZED = 3 };
enum { CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_INVALID_DEVICE = 101, CUDA_ERROR_INVALID_CONTEXT = 201 };
enum { CUDA_ERROR_NOT_SUPPORTED = 801, CUDA_ERROR_SYSTEM_NOT_READY = 802 };
enum { CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124 };
enum { CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1 };
#endif
#ifndef BUS_ID
#define BUS_ID "0000:03:00.0"
#endif

static const CUdeviceptr MEMORY = 0x7f0000000000ull;
static int initialised, context, current, allocated, exported_fd = -1;
static unsigned long long allocated_nbytes;
#define LIBRARY "libcuda"
#define CALLED(name)                                     \
  do {                                                   \
    int status = planned(name, 0);                       \
    if (status) return (CUresult)status;                 \
    if (!initialised) return CUDA_ERROR_NOT_INITIALIZED; \
  } while (0)

/* Whether the descriptor that was handed out last is still open; its number may belong to another file by now. */
static int exported(void) {
  char path[40], name[80] = "";
  snprintf(path, sizeof path, "/proc/self/fd/%d", exported_fd);
  return exported_fd >= 0 && readlink(path, name, sizeof name - 1) > 0 && strstr(name, "standin-dmabuf");
}

__attribute__((destructor)) static void at_exit(void) { report(LIBRARY, "kept", context + allocated + exported()); }

CUresult CUDAAPI cuInit(unsigned int flags) {
  if (wrong(LIBRARY, "cuInit wants no flags", flags != 0)) return CUDA_ERROR_INVALID_VALUE;
  int status = planned("cuInit", 0);
  initialised = !status;
  return (CUresult)status;
}
CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name) {
  static const struct { int code; const char *name; } NAMES[] = {
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
      {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"}, {CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY"}};
  for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
    if (NAMES[i].code == (int)error) return *name = NAMES[i].name, CUDA_SUCCESS;
  return *name = NULL, CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuDriverGetVersion(int *version) { *version = planned("cuDriverGetVersion", 12080); return CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGetCount(int *count) { CALLED("cuDeviceGetCount"); *count = planned("gpus", 1); return CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
  CALLED("cuDeviceGet");
  *device = ordinal;
  return wrong(LIBRARY, "no such ordinal", ordinal != 0) ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
  CALLED("cuDeviceGetPCIBusId");
  if (wrong(LIBRARY, "a bus id needs 13 characters", length < 13)) return CUDA_ERROR_INVALID_VALUE;
  snprintf(text, (size_t)length, "%s", BUS_ID);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  CALLED("cuDeviceGetAttribute");
  if (attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) *value = planned("attribute_116", 1);
  else if (attribute == CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) *value = planned("attribute_124", 1);
  else return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
  CALLED("cuDevicePrimaryCtxRetain");
  context++;
  *found = (CUcontext)&context;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  if (wrong(LIBRARY, "context released with memory in it", allocated)) return CUDA_ERROR_INVALID_CONTEXT;
  if (wrong(LIBRARY, "context released more often than retained", !context)) return CUDA_ERROR_INVALID_CONTEXT;
  context--;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxSetCurrent(CUcontext wanted) {
  CALLED("cuCtxSetCurrent");
  current = wanted == (CUcontext)&context;
  return current || !wanted ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
  CALLED("cuMemAlloc_v2");
  if (wrong(LIBRARY, "allocation without a current context", !current || !context)) return CUDA_ERROR_INVALID_CONTEXT;
  allocated++;
  allocated_nbytes = nbytes;
  *address = MEMORY;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemFree_v2(CUdeviceptr address) {
  if (wrong(LIBRARY, "memory freed that was not allocated", address != MEMORY || !allocated)) return CUDA_ERROR_INVALID_VALUE;
  allocated--;
  return CUDA_SUCCESS;
}
#ifndef OLD
CUresult CUDAAPI cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t nbytes, CUmemRangeHandleType kind,
                                               unsigned long long flags) {
  CALLED("cuMemGetHandleForAddressRange");
  int outside = address < MEMORY || address + nbytes > MEMORY + allocated_nbytes || !allocated;
  int unaligned = address % page_nbytes() || nbytes % page_nbytes() || !nbytes;
  if (wrong(LIBRARY, "range is not in allocated memory", outside) || wrong(LIBRARY, "range is not of whole pages", unaligned) ||
      wrong(LIBRARY, "handle type or flags", kind != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags))
    return CUDA_ERROR_INVALID_VALUE;
  if (!planned("attribute_124", 1)) return CUDA_ERROR_NOT_SUPPORTED;
  wrong(LIBRARY, "the last dma-buf is still open", exported());
  exported_fd = memfd_create("standin-dmabuf", 0);
  if (exported_fd < 0 || ftruncate(exported_fd, (off_t)nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *(int *)handle = exported_fd;
  return CUDA_SUCCESS;
}
#endif

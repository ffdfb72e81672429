// Memory, streams and events: the runtime's.
#include "driver.h"

using namespace driver;

namespace {

void* address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }

}  // namespace

extern "C" {

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t nbytes) {
  return code(cudaMalloc(reinterpret_cast<void**>(pointer), nbytes));
}
CUresult cuMemFree_v2(CUdeviceptr pointer) { return code(cudaFree(address(pointer))); }
CUresult cuMemHostAlloc(void** pointer, size_t nbytes, unsigned flags) {
  return code(cudaHostAlloc(pointer, nbytes, flags));
}
CUresult cuMemFreeHost(void* pointer) { return code(cudaFreeHost(pointer)); }
CUresult cuMemGetInfo_v2(size_t* free, size_t* total) { return code(cudaMemGetInfo(free, total)); }
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* nbytes, CUdeviceptr pointer) {
  void* start = nullptr;
  size_t length = 0;
  int device = 0;
  if (!gpu_standin_find(address(pointer), &start, &length, &device)) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = reinterpret_cast<CUdeviceptr>(start);
  if (nbytes) *nbytes = length;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  void* start = nullptr;
  size_t length = 0;
  int device = 0;
  if (!gpu_standin_find(address(pointer), &start, &length, &device)) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = device < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = device < 0 ? 0 : device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *static_cast<CUdeviceptr*>(value) = pointer; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<void**>(value) = start; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *static_cast<size_t*>(value) = length; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned*>(value) = 0; return CUDA_SUCCESS;
    default: return refused(CUDA_ERROR_NOT_SUPPORTED, "cuPointerGetAttribute " + std::to_string(attribute));
  }
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  return code(cudaMemcpyAsync(address(to), address(from), nbytes, cudaMemcpyDefault, stream));
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t nbytes, CUstream stream) {
  return code(cudaMemcpyAsync(address(to), from, nbytes, cudaMemcpyHostToDevice, stream));
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  return code(cudaMemcpyAsync(to, address(from), nbytes, cudaMemcpyDeviceToHost, stream));
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  return code(cudaMemcpyAsync(address(to), address(from), nbytes, cudaMemcpyDeviceToDevice, stream));
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t nbytes) {
  return code(cudaMemcpy(address(to), from, nbytes, cudaMemcpyHostToDevice));
}
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t nbytes) {
  return code(cudaMemcpy(to, address(from), nbytes, cudaMemcpyDeviceToHost));
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return code(cudaMemsetAsync(address(to), value, count, stream));
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return code(cudaStreamCreateWithPriority(stream, flags, priority));
}
CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return code(cudaStreamCreateWithFlags(stream, flags)); }
CUresult cuStreamDestroy_v2(CUstream stream) { return code(cudaStreamDestroy(stream)); }
CUresult cuStreamSynchronize(CUstream stream) { return code(cudaStreamSynchronize(stream)); }
CUresult cuStreamQuery(CUstream stream) { return code(cudaStreamQuery(stream)); }
CUresult cuStreamGetPriority(CUstream stream, int* priority) { return code(cudaStreamGetPriority(stream, priority)); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return code(cudaStreamWaitEvent(stream, event, flags));
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return code(cudaStreamIsCapturing(stream, reinterpret_cast<cudaStreamCaptureStatus*>(status)));
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
  return code(cudaLaunchHostFunc(stream, function, argument));
}
CUresult cuEventCreate(CUevent* event, unsigned flags) { return code(cudaEventCreateWithFlags(event, flags)); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return code(cudaEventRecord(event, stream)); }
CUresult cuEventQuery(CUevent event) { return code(cudaEventQuery(event)); }
CUresult cuEventSynchronize(CUevent event) { return code(cudaEventSynchronize(event)); }
CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return code(cudaEventElapsedTime(milliseconds, start, end));
}
CUresult cuEventDestroy_v2(CUevent event) { return code(cudaEventDestroy(event)); }

}  // extern "C"

// The driver's devices and contexts: one primary context a device, which is there from the start.
#include <cuda.h>
#include <dlfcn.h>

#include <string>

#include "standin.h"

using namespace standin;

namespace {

CUcontext context_of(int device) {
  static char contexts[64];
  return reinterpret_cast<CUcontext>(&contexts[device]);
}

bool known(int device) { return device >= 0 && device < device_count(); }

}  // namespace

extern "C" {

CUresult cuInit(unsigned) {
  CALLED();
  return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int* version) {
  CALLED();
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  CALLED();
  *count = device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  CALLED();
  *device = ordinal;
  return known(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

// The driver's attributes have the runtime's numbers.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  CALLED();
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  CALLED();
  *flags = 0;
  *active = known(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  CALLED();
  if (!known(device)) return CUDA_ERROR_INVALID_DEVICE;
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  CALLED();
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  CALLED();
  for (int device = 0; device < device_count(); ++device) {
    if (context == context_of(device)) return static_cast<CUresult>(cudaSetDevice(device));
  }
  return context ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  CALLED();
  *name = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  CALLED();
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

}  // extern "C"

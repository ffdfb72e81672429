// Devices, contexts and errors. A context is a device's primary one; there are no others.
#include <cstdio>
#include <cstring>

#include "driver.h"

struct CUctx_st {
  int device;
  unsigned flags;
};

namespace driver {
namespace {

constexpr int kMostDevices = 64;
thread_local std::vector<int> pushed;  // devices that were current before cuCtxPushCurrent
thread_local CUresult explained = CUDA_SUCCESS;
thread_local std::string explanation;

CUctx_st* contexts() {
  static CUctx_st* all = [] {
    auto* made = new CUctx_st[kMostDevices];
    for (int i = 0; i < kMostDevices; ++i) made[i] = {i, 0};
    return made;
  }();
  return all;
}

}  // namespace

CUresult refused(CUresult error, const std::string& why) {
  explained = error, explanation = why;
  std::fprintf(stderr, "gpu stand-in: %s\n", why.c_str());
  return error;
}

int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

}  // namespace driver

using namespace driver;

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return code(cudaDriverGetVersion(version)); }

CUresult cuGetErrorString(CUresult error, const char** text) {
  if (error != CUDA_SUCCESS && error == explained) {
    *text = explanation.c_str();
    return CUDA_SUCCESS;
  }
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) { return code(cudaGetDeviceCount(count)); }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (ordinal < 0 || ordinal >= count) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return code(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, device)) return code(error);
  std::snprintf(name, static_cast<size_t>(length), "%s", properties.name);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, device)) return code(error);
  std::memcpy(uuid, &properties.uuid, sizeof *uuid);
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t* nbytes, CUdevice device) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, device)) return code(error);
  *nbytes = properties.totalGlobalMem;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = contexts() + device;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  contexts()[device].flags = flags;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = contexts()[device].flags;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = contexts() + current_device();
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return context ? code(cudaSetDevice(context->device)) : CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  pushed.push_back(current_device());
  return code(cudaSetDevice(context->device));
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (pushed.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = contexts() + current_device();
  const int before = pushed.back();
  pushed.pop_back();
  return code(cudaSetDevice(before));
}
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetFlags(unsigned* flags) {
  *flags = contexts()[current_device()].flags;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetApiVersion(CUcontext, unsigned* version) {
  *version = 3020;
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() { return code(cudaDeviceSynchronize()); }

}  // extern "C"

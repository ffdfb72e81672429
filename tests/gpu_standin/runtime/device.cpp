// Devices: how many, which is current, what they say of themselves; errors; the driver's entry points.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "standin.h"

namespace standin {
namespace {

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

// An H100 in its numbers: torch and gradwire choose kernels and plans by them.
constexpr int major_capability = 9, minor_capability = 0;
constexpr int warp_size = 32, threads_per_block = 1024, threads_per_sm = 2048, blocks_per_sm = 32;
constexpr int registers_per_sm = 65536, l2_nbytes = 50 << 20;
constexpr int shared_per_block = 48 << 10, shared_per_block_optin = 227 << 10, shared_per_sm = 228 << 10;
constexpr int cuda_version = CUDART_VERSION;

int sms() { return static_cast<int>(setting("SMS", 132LL)); }
bool known(int device) { return device >= 0 && device < device_count(); }

}  // namespace

int device_count() {
  return static_cast<int>(setting("DEVICES", 8LL));
}

int current_device() { return current; }

cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  CALLED();
  *count = device_count();
  return returned(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  CALLED();
  *device = current;
  return returned(cudaSuccess);
}

cudaError_t cudaSetDevice(int device) {
  CALLED();
  if (!known(device)) return returned(cudaErrorInvalidDevice);
  current = device;
  return returned(cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int* version) {
  CALLED();
  *version = cuda_version;
  return returned(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  CALLED();
  *version = cuda_version;
  return returned(cudaSuccess);
}

cudaError_t cudaGetLastError() {
  CALLED();
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  CALLED();
  return last_error;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorPeerAccessAlreadyEnabled: return "cudaErrorPeerAccessAlreadyEnabled";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    default: return "an error that the stand-in has no name for";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    default: return cudaGetErrorName(error);
  }
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  CALLED();
  if (!known(device)) return returned(cudaErrorInvalidDevice);
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", setting("NAME", "GPU of host memory").c_str());
  memcpy(properties->uuid.bytes, "standin", 7);
  properties->uuid.bytes[7] = static_cast<char>(device);
  properties->totalGlobalMem = setting("MEMORY_BYTES", 80LL << 30);
  properties->major = major_capability;
  properties->minor = minor_capability;
  properties->multiProcessorCount = sms();
  properties->warpSize = warp_size;
  properties->maxThreadsPerBlock = threads_per_block;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->sharedMemPerBlock = shared_per_block;
  properties->sharedMemPerBlockOptin = shared_per_block_optin;
  properties->sharedMemPerMultiprocessor = shared_per_sm;
  properties->regsPerBlock = properties->regsPerMultiprocessor = registers_per_sm;
  properties->maxThreadsPerMultiProcessor = threads_per_sm;
  properties->maxBlocksPerMultiProcessor = blocks_per_sm;
  properties->l2CacheSize = l2_nbytes;
  properties->concurrentKernels = 1;
  properties->asyncEngineCount = 3;
  properties->unifiedAddressing = 1;
  properties->managedMemory = 1;
  properties->memoryBusWidth = 5120;
  properties->pciBusID = device + 1;
  return returned(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  CALLED();
  if (!known(device)) return returned(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = major_capability; break;
    case cudaDevAttrComputeCapabilityMinor: *value = minor_capability; break;
    case cudaDevAttrMultiProcessorCount: *value = sms(); break;
    case cudaDevAttrWarpSize: *value = warp_size; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = threads_per_block; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = threads_per_sm; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = blocks_per_sm; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = registers_per_sm; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = shared_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_per_block_optin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = shared_per_sm; break;
    case cudaDevAttrL2CacheSize: *value = l2_nbytes; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrPciBusId: *value = device + 1; break;
    default: *value = 0;  // a property that the stand-in does not have
  }
  return returned(cudaSuccess);
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int capacity, int device) {
  CALLED();
  if (!known(device)) return returned(cudaErrorInvalidDevice);
  snprintf(text, capacity, "0000:%02x:00.0", device + 1);
  return returned(cudaSuccess);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  CALLED();
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return returned(cudaSuccess);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  CALLED();
  *can = known(device) && known(peer) && device != peer;
  return returned(cudaSuccess);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  CALLED();
  return returned(known(peer) ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaProfilerStart() {
  CALLED();
  return returned(cudaSuccess);
}

cudaError_t cudaProfilerStop() {
  CALLED();
  return returned(cudaSuccess);
}

// The driver's functions are those of the libcuda.so.1 beside this library, where it has them.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  CALLED();
  *function = nullptr;
  if (void* driver = dlopen("libcuda.so.1", RTLD_NOW)) {
    for (const char* suffix : {"_v2", ""}) {
      if (!*function) *function = dlsym(driver, (symbol + std::string(suffix)).c_str());
    }
  }
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return returned(cudaSuccess);
}

}  // extern "C"

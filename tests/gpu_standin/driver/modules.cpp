// Modules and functions: what a cubin says of its kernels. Their machine code is never looked at.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>

#include "driver.h"

struct CUmod_st {
  driver::Cubin cubin;
  std::map<std::string, std::unique_ptr<driver::Function>> functions;
};

namespace driver {
namespace {

CUresult load(CUmodule* module, const char* bytes, size_t nbytes, const std::string& where) {
  std::string reason;
  auto made = std::make_unique<CUmod_st>();
  made->cubin = read_cubin(bytes, nbytes, &reason);
  if (made->cubin.kernels.empty()) return refused(CUDA_ERROR_INVALID_IMAGE, "a module " + where + " is " + reason);
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, current_device());
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, current_device());
  const unsigned built_for = made->cubin.architecture;
  if (built_for / 10 != static_cast<unsigned>(major) || built_for % 10 > static_cast<unsigned>(minor))
    return refused(CUDA_ERROR_NO_BINARY_FOR_GPU, "a module " + where + " is for sm_" + std::to_string(built_for) +
                                                     ", the device has compute capability " + std::to_string(major) +
                                                     "." + std::to_string(minor));
  *module = made.release();
  return CUDA_SUCCESS;
}

const Function* function_of(CUfunction handle) { return reinterpret_cast<const Function*>(handle); }

}  // namespace
}  // namespace driver

using namespace driver;

extern "C" {

CUresult cuModuleLoad(CUmodule* module, const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return refused(CUDA_ERROR_FILE_NOT_FOUND, std::string("a module is wanted of ") + path + ", which is not there");
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return load(module, bytes.data(), bytes.size(), std::string("of ") + path);
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const char* bytes = static_cast<const char*>(image);
  return load(module, bytes, elf_nbytes(bytes), "in memory");
}
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleUnload(CUmodule module) {
  delete module;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  const auto found = module->cubin.kernels.find(name);
  if (found == module->cubin.kernels.end()) {
    std::string has;
    for (const auto& each : module->cubin.kernels) has += " " + each.first;
    return refused(CUDA_ERROR_NOT_FOUND, std::string("the module has no kernel ") + name + "; it has" + has);
  }
  auto& made = module->functions[name];
  if (!made) made = std::make_unique<Function>(Function{name, found->second});
  *function = reinterpret_cast<CUfunction>(made.get());
  return CUDA_SUCCESS;
}
CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char* name) {
  return refused(CUDA_ERROR_NOT_FOUND, std::string("a module's variable ") + name + ": the stand-in has none");
}

CUresult cuFuncGetName(const char** name, CUfunction function) {
  *name = function_of(function)->name.c_str();
  return CUDA_SUCCESS;
}
CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* nbytes) {
  const auto& sizes = function_of(function)->info.parameter_nbytes;
  if (index >= sizes.size()) return CUDA_ERROR_INVALID_VALUE;
  size_t at = 0;
  for (size_t i = 0; i <= index; ++i) {
    at = (at + sizes[i] - 1) / sizes[i] * sizes[i];
    if (i < index) at += sizes[i];
  }
  *offset = at;
  if (nbytes) *nbytes = sizes[index];
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  const Function* function = function_of(handle);
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = static_cast<int>(function->info.most_threads); break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = static_cast<int>(function->info.shared_nbytes); break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = static_cast<int>(function->info.registers); break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function->dynamic_shared_nbytes; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  auto* function = reinterpret_cast<Function*>(handle);
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) function->dynamic_shared_nbytes = value;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction handle, int threads,
                                                              size_t dynamic_nbytes, unsigned) {
  const KernelInfo& info = function_of(handle)->info;
  if (threads < 1 || threads > static_cast<int>(info.most_threads)) {
    *blocks = 0;
    return CUDA_SUCCESS;
  }
  // Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", for 9.0.
  int most = 2048 / threads < 32 ? 2048 / threads : 32;
  const int warps = (threads + 31) / 32, registers = static_cast<int>((info.registers + 7) / 8 * 8);
  if (registers && 65536 / (registers * 32 * warps) < most) most = 65536 / (registers * 32 * warps);
  const size_t shared = info.shared_nbytes + dynamic_nbytes + 1024;  // the system's own
  if (static_cast<int>(233472 / shared) < most) most = static_cast<int>(233472 / shared);
  *blocks = most;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int threads, size_t dynamic_nbytes) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, handle, threads, dynamic_nbytes, 0);
}

}  // extern "C"

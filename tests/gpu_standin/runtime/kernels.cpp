// Kernels: their names, and the launches. There is no device code here: a kernel runs where a layer above has
// registered a function of the host for its name, and ends the process where none has.
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "standin.h"

namespace standin {
namespace {

struct HostKernel {
  gpu_standin_kernel run;
  std::vector<std::size_t> argument_nbytes;
};

struct Variable {
  const char* name;
  std::size_t nbytes;
  void* memory = nullptr;
};

// Filled while libraries are loaded.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;  // by the host's stub function
  std::unordered_map<std::string, HostKernel> runnable;
  std::unordered_map<const void*, Variable> variables;
};
Registry& registry() {
  static auto* one = new Registry;
  return *one;
}

struct Configuration {
  dim3 grid, block;
  std::size_t shared_nbytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> pushed;

std::string demangled(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string readable = status == 0 ? text : name;
  free(text);
  return readable;
}

std::string name_of(const void* function) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().names.find(function);
  return found == registry().names.end() ? "" : found->second;
}

cudaError_t unknown(const std::string& kernel) {
  gpu_standin_unknown(("kernel " + (kernel.empty() ? "a function that was never registered" : kernel)).c_str());
  return cudaErrorInvalidDeviceFunction;
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t shared_nbytes,
                   cudaStream_t handle) {
  auto stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  std::string name = demangled(name_of(function).c_str());
  HostKernel kernel{};
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = registry().runnable.find(name);
    if (found != registry().runnable.end()) kernel = found->second;
  }
  if (!kernel.run) return unknown(name);
  if (tracing()) trace("kernel", name);
  auto copies = std::make_shared<std::vector<std::vector<char>>>();
  for (std::size_t i = 0; i < kernel.argument_nbytes.size(); ++i) {
    const char* bytes = static_cast<const char*>(arguments[i]);
    copies->emplace_back(bytes, bytes + kernel.argument_nbytes[i]);
  }
  stream->submit("kernel", [=] {
    std::vector<void*> pointers;
    for (auto& copy : *copies) pointers.push_back(copy.data());
    unsigned of_grid[3] = {grid.x, grid.y, grid.z}, of_block[3] = {block.x, block.y, block.z};
    kernel.run(pointers.data(), of_grid, of_block, shared_nbytes);
  });
  return cudaSuccess;
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

void gpu_standin_register_kernel(const char* name, gpu_standin_kernel run, const size_t* argument_nbytes,
                                 size_t arguments) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().runnable[name] = {run, {argument_nbytes, argument_nbytes + arguments}};
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().names[function] = name;
}

void __cudaRegisterVar(void**, char* variable, char*, const char* name, int, size_t nbytes, int, int) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().variables[variable] = {name, nbytes};
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  CALLED();
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().variables.find(symbol);
  if (found == registry().variables.end()) return returned(cudaErrorInvalidSymbol);
  Variable& variable = found->second;
  if (!variable.memory) {
    if (cudaError_t error = allocate(&variable.memory, variable.nbytes, Place::device, current_device())) {
      return returned(error);
    }
    memset(variable.memory, 0, variable.nbytes);
  }
  *address = variable.memory;
  return returned(cudaSuccess);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_nbytes, cudaStream_t stream) {
  pushed.push_back({grid, block, shared_nbytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_nbytes, void* stream) {
  if (pushed.empty()) return cudaErrorMissingConfiguration;
  Configuration last = pushed.back();
  pushed.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_nbytes = last.shared_nbytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_nbytes,
                             cudaStream_t stream) {
  CALLED();
  return returned(launch(function, grid, block, arguments, shared_nbytes, stream));
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* launch_config, const void* function, void** arguments) {
  CALLED();
  return returned(launch(function, launch_config->gridDim, launch_config->blockDim, arguments,
                         launch_config->dynamicSmemBytes, launch_config->stream));
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                        size_t shared_nbytes, cudaStream_t stream) {
  CALLED();
  return returned(launch(function, grid, block, arguments, shared_nbytes, stream));
}

// A kernel's handle is the host's stub function.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_nbytes,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_nbytes, stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  CALLED();
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return returned(cudaSuccess);
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  CALLED();
  return returned(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t,
                                                                   unsigned) {
  CALLED();
  *blocks = threads > 0 ? 2048 / threads : 1;
  return returned(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                          size_t shared_nbytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared_nbytes, 0);
}

}  // extern "C"

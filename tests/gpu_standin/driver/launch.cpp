// cuLaunchKernel: what a launch asks for is checked, and the kernel's own source, compiled for the host, runs as a host
// function on the stream. tests/kernels_on_cpu makes those libraries; gpu_standin_kernels says where they lie.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "driver.h"
#include "engine.h"
#include "race.h"

namespace driver {
namespace {

constexpr size_t kSharedNbytes = 48 << 10, kMostSharedNbytes = 227 << 10;

using Run = int (*)(const emulation::Kernel*, unsigned, unsigned, void**, uint64_t, int, int);
using Faults = size_t (*)(emulation::race::Fault*, size_t);

struct HostKernel {
  const emulation::Kernel* kernel;
  std::vector<std::string> names;  // of the parameters
  std::string library;
};

struct Host {
  std::mutex mutex;
  Run run = nullptr;
  Faults faults = nullptr;
  bool watched = false;
  std::map<std::string, HostKernel> kernels;
};
Host& host() {
  static auto* one = new Host;
  return *one;
}

// A launch that waits for its turn on a stream.
struct Launch {
  const HostKernel* kernel;
  unsigned blocks, threads;
  int device;
  std::vector<std::vector<char>> values;
};

std::string spelled(const HostKernel& kernel, size_t index) {
  std::string text = std::string(kernel.kernel->name) + ": argument " + std::to_string(index);
  return index < kernel.names.size() ? text + " (`" + kernel.names[index] + "`)" : text;
}

// What is wrong with a pointer among the arguments, in words; empty where nothing is.
std::string wrong_pointer(const HostKernel& kernel, size_t index, const char* bytes, int device) {
  void* pointer;
  std::memcpy(&pointer, bytes, sizeof pointer);
  if (!pointer) return "";  // those that may be null are looked at by the kernel
  void* base = nullptr;
  size_t nbytes = 0;
  int owner = 0;
  char text[256];
  if (!gpu_standin_find(pointer, &base, &nbytes, &owner)) {
    std::snprintf(text, sizeof text, " is %p, which lies in no allocation of a device; wanted an address in one that is "
                  "not freed", pointer);
    return spelled(kernel, index) + text;
  }
  if (owner >= 0 && owner != device) {
    std::snprintf(text, sizeof text, " is %p, on device %d; the kernel runs on device %d", pointer, owner, device);
    return spelled(kernel, index) + text;
  }
  return "";
}

uint64_t next_order() {
  static const uint64_t first = [] {
    const char* text = std::getenv("GRADWIRE_KERNEL_ORDER");
    return text ? std::strtoull(text, nullptr, 10) : 1ull;
  }();
  static std::atomic<uint64_t> launches{0};
  return first ? first + ++launches : 0;
}

// On the stream's thread.
void run_launch(void* argument) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(argument));
  const emulation::Kernel* kernel = launch->kernel->kernel;
  std::vector<void*> pointers;
  for (size_t i = 0; i < launch->values.size(); ++i) {
    pointers.push_back(launch->values[i].data());
    if (!kernel->parameters[i].pointer) continue;
    const std::string wrong = wrong_pointer(*launch->kernel, i, launch->values[i].data(), launch->device);
    if (wrong.empty()) continue;
    std::fprintf(stderr, "gpu stand-in: when the stream came to it, %s\n", wrong.c_str());
    std::abort();
  }
  const uint64_t order = next_order();
  host().run(kernel, launch->blocks, launch->threads, pointers.data(), order, host().watched, 0);
  if (!host().watched) return;
  emulation::race::Fault faults[4];
  const size_t count = host().faults(faults, 4);
  if (!count) return;
  std::fprintf(stderr, "gpu stand-in: %s, order %llu: %zu races between its threads\n", kernel->name,
               static_cast<unsigned long long>(order), count);
  for (size_t i = 0; i < count && i < 4; ++i) {
    Dl_info where[2] = {};
    for (int j = 0; j < 2; ++j) dladdr(reinterpret_cast<void*>(faults[i].pc[j]), &where[j]);
    std::fprintf(stderr, "  thread %u of CTA %u and thread %u of CTA %u at %#llx: addr2line -i -e %s %#llx %#llx\n",
                 faults[i].thread[0], faults[i].cta[0], faults[i].thread[1], faults[i].cta[1],
                 static_cast<unsigned long long>(faults[i].address), where[1].dli_fname,
                 static_cast<unsigned long long>(faults[i].pc[0] - reinterpret_cast<uintptr_t>(where[0].dli_fbase) - 1),
                 static_cast<unsigned long long>(faults[i].pc[1] - reinterpret_cast<uintptr_t>(where[1].dli_fbase) - 1));
  }
  std::abort();
}

std::string wrong_shape(const Function& function, unsigned const (&grid)[3], unsigned const (&block)[3],
                        size_t dynamic_nbytes) {
  const std::string name = function.name + ": ";
  const size_t threads = size_t{block[0]} * block[1] * block[2];
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535)
    return name + "a grid of " + std::to_string(grid[0]) + " x " + std::to_string(grid[1]) + " x " +
           std::to_string(grid[2]) + " CTAs; wanted 1 to 2147483647 x 65535 x 65535";
  if (!threads || block[2] > 64 || threads > function.info.most_threads)
    return name + "CTAs of " + std::to_string(threads) + " threads; wanted 1 to " +
           std::to_string(function.info.most_threads) + ", its __launch_bounds__";
  const size_t allowed = function.dynamic_shared_nbytes ? static_cast<size_t>(function.dynamic_shared_nbytes)
                                                        : kSharedNbytes - function.info.shared_nbytes;
  if (dynamic_nbytes > allowed || function.info.shared_nbytes + dynamic_nbytes > kMostSharedNbytes)
    return name + std::to_string(dynamic_nbytes) + " bytes of dynamic shared memory; wanted at most " +
           std::to_string(allowed) + " (more needs CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)";
  return "";
}

CUresult launch(const Function& function, unsigned const (&grid)[3], unsigned const (&block)[3], size_t dynamic_nbytes,
                CUstream stream, void** parameters, void** extra) {
  const std::string shape = wrong_shape(function, grid, block, dynamic_nbytes);
  if (!shape.empty()) return refused(CUDA_ERROR_INVALID_VALUE, shape);
  const HostKernel* kernel = nullptr;
  {
    std::lock_guard<std::mutex> lock(host().mutex);
    const auto found = host().kernels.find(function.name);
    if (found != host().kernels.end()) kernel = &found->second;
  }
  if (!kernel) {
    gpu_standin_unknown(("kernel " + function.name + ", which is not compiled for the host").c_str());
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (grid[1] != 1 || grid[2] != 1 || block[1] != 1 || block[2] != 1 || block[0] % emulation::kLanes || extra) {
    gpu_standin_unknown((function.name + " with a grid or CTAs of more than one dimension, with CTAs of a part of a warp, "
                         "or with its arguments in a buffer").c_str());
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  std::vector<unsigned> sizes;
  for (unsigned i = 0; i < kernel->kernel->count; ++i) sizes.push_back(kernel->kernel->parameters[i].nbytes);
  if (sizes != function.info.parameter_nbytes)
    return refused(CUDA_ERROR_INVALID_IMAGE, function.name + " has other parameters in the module (" +
                                                 std::to_string(function.info.parameter_nbytes.size()) +
                                                 ") than in the library for the host (" + std::to_string(sizes.size()) +
                                                 "): they were compiled from different sources");
  auto made = std::make_unique<Launch>(Launch{kernel, grid[0], block[0], current_device(), {}});
  for (unsigned i = 0; i < sizes.size(); ++i) {
    if (!parameters || !parameters[i])
      return refused(CUDA_ERROR_INVALID_VALUE, spelled(*kernel, i) + " is missing; the kernel has " +
                                                   std::to_string(sizes.size()) + " parameters");
    const char* bytes = static_cast<const char*>(parameters[i]);
    made->values.emplace_back(bytes, bytes + sizes[i]);
    if (!kernel->kernel->parameters[i].pointer) continue;
    const std::string wrong = wrong_pointer(*kernel, i, bytes, made->device);
    if (!wrong.empty()) return refused(CUDA_ERROR_ILLEGAL_ADDRESS, wrong);
  }
  if (cudaError_t error = cudaLaunchHostFunc(stream, run_launch, made.get())) return code(error);
  made.release();
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace driver

using namespace driver;

extern "C" {

// Tells the driver of a library of kernels for the host.
//
// path: the library; engine: that of tests/kernels_on_cpu, which it needs. kernels: "name parameter parameter ..." of
// each, NULL at the end. watched: look for races between their threads. Returns what is wrong, or NULL.
const char* gpu_standin_kernels(const char* engine, const char* path, const char* const* kernels, int watched) {
  std::lock_guard<std::mutex> lock(host().mutex);
  void* of_engine = dlopen(engine, RTLD_NOW | RTLD_GLOBAL);
  void* library = of_engine ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) return dlerror();
  host().run = reinterpret_cast<Run>(dlsym(of_engine, "emulation_launch"));
  host().faults = reinterpret_cast<Faults>(dlsym(of_engine, "emulation_faults"));
  host().watched = watched != 0;
  for (; *kernels; ++kernels) {
    HostKernel found{};
    std::string words = *kernels, name = words.substr(0, words.find(' '));
    for (size_t at = words.find(' '); at != std::string::npos;) {
      const size_t next = words.find(' ', at + 1);
      found.names.push_back(words.substr(at + 1, next == std::string::npos ? next : next - at - 1));
      at = next;
    }
    auto* function = reinterpret_cast<const emulation::Kernel* (*)()>(dlsym(library, ("kernel_" + name).c_str()));
    if (!function) return dlerror();
    found.kernel = function(), found.library = path;
    host().kernels[name] = found;
  }
  return nullptr;
}

CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_nbytes, CUstream stream, void** parameters,
                        void** extra) {
  gpu_standin_called("cuLaunchKernel");
  return launch(*reinterpret_cast<Function*>(handle), {grid_x, grid_y, grid_z}, {block_x, block_y, block_z},
                shared_nbytes, stream, parameters, extra);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* wanted, CUfunction handle, void** parameters, void** extra) {
  gpu_standin_called("cuLaunchKernelEx");
  return launch(*reinterpret_cast<Function*>(handle), {wanted->gridDimX, wanted->gridDimY, wanted->gridDimZ},
                {wanted->blockDimX, wanted->blockDimY, wanted->blockDimZ}, wanted->sharedMemBytes, wanted->hStream,
                parameters, extra);
}

}  // extern "C"

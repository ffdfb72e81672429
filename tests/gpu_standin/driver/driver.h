// What the files of the driver share. The driver's API lies on top of the stand-in's CUDA runtime (the other way round
// than NVIDIA's): a stream, an event and a pointer are the runtime's own, and a kernel runs as a host function on a stream.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <string>
#include <vector>

#include "gpu_standin.h"

namespace driver {

// ---------------------------------------------------------------------------------------------- contexts.cpp

// The driver's code of a runtime's error: they have the same numbers.
inline CUresult code(cudaError_t error) { return static_cast<CUresult>(error); }
// Says on stderr what was wrong with a call; cuGetErrorString says it, too, on this thread, for the code that is returned.
CUresult refused(CUresult error, const std::string& why);
int current_device();

// ---------------------------------------------------------------------------------------------- cubin.cpp

// What a compiled file says of a kernel.
struct KernelInfo {
  std::vector<unsigned> parameter_nbytes;
  unsigned most_threads = 1024;  // __launch_bounds__, or what the hardware takes
  unsigned shared_nbytes = 0;    // static
  unsigned registers = 0;
};
struct Cubin {
  std::map<std::string, KernelInfo> kernels;
  unsigned architecture = 0;  // such as 90
};
// Reads an ELF file for a GPU; an empty `kernels` and a reason where it is none.
Cubin read_cubin(const char* bytes, size_t nbytes, std::string* reason);
// The size of an ELF file that lies in memory.
size_t elf_nbytes(const char* bytes);

// ---------------------------------------------------------------------------------------------- modules.cpp

struct Function {
  std::string name;
  KernelInfo info;
  int dynamic_shared_nbytes = 0;  // what cuFuncSetAttribute has allowed beyond 48 KiB
};

// ---------------------------------------------------------------------------------------------- symbols.cpp

// A function that ends the process with `name`.
void* function_that_gives_up(const char* name);

}  // namespace driver

/* What the stand-in offers beyond CUDA's and NCCL's own functions: to tests (through ctypes) and to the layers above. */
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Overrides the variable GPU_STANDIN_<name> in this process from now on. */
void gpu_standin_set(const char* name, const char* value);

/* Begins the delays of all streams anew, also of those to come, as GPU_STANDIN_SEED=seed does for a new process. */
void gpu_standin_seed(unsigned long long seed);

/* Calls of each function of the API since the last reset, as JSON {"cudaMalloc": 3, ...}; valid until the thread's next call. */
const char* gpu_standin_counts(void);
void gpu_standin_reset_counts(void);

/* What each stream that is not idle is doing, in words, one a line; valid until the thread's next call. */
const char* gpu_standin_describe(void);

/* A kernel that cudaLaunchKernel can run: called on the stream's thread with the launch's arguments, each a copy made
 * at the launch. `name` is what c++filt makes of it, as a mangled name may hold a hash of the file; `argument_nbytes` has the
 * size of each argument. */
typedef void (*gpu_standin_kernel)(void** arguments, const unsigned grid[3], const unsigned block[3], size_t shared_nbytes);
void gpu_standin_register_kernel(const char* name, gpu_standin_kernel run, const size_t* argument_nbytes, size_t arguments);

/* For the driver's API: cudaLaunchHostFunc with a name that traces show. 0, or a cudaError_t. */
int gpu_standin_submit(void* stream, const char* name, void (*run)(void*), void* argument);

/* Counts a call of a function of another layer, and traces it. */
void gpu_standin_called(const char* function);

/* Says that the process has called what the stand-in does not have, and ends it; returns 1, after the message, where
 * GPU_STANDIN_UNKNOWN=error: for suites that go on after a failed test. */
int gpu_standin_unknown(const char* what);

/* Base, size and device (-1: pinned host memory) of the allocation that `pointer` lies in; 0 where there is none. */
int gpu_standin_find(const void* pointer, void** base, size_t* nbytes, int* device);

#ifdef __cplusplus
}
#endif

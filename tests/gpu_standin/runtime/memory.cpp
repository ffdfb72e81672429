// Memory: allocations, their guard pages and poison, copies.
//
// An allocation is a mapping of its own. With GPU_STANDIN_GUARD=1 a page that nobody may touch lies before and behind
// it, its end as near to the page behind as CUDA's alignment of 256 bytes permits, the bytes between filled with a
// pattern that is looked at when it is freed; freed memory stays unmapped, so that a late access ends the process
// with the allocation named. With GPU_STANDIN_POISON=1 fresh memory is full of 0xff: NaN in every floating type, and
// -1. What is freed is then filled as well.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "standin.h"

namespace standin {
namespace {

constexpr std::size_t page_nbytes = 4096, alignment = 256;
constexpr unsigned char poison = 0xff, canary = 0xa5;

struct Allocation {
  std::size_t nbytes;
  Place place;
  int device;
  char* mapping;
  std::size_t mapped_nbytes;
  std::size_t slack_nbytes;  // between the end and the page behind
  bool guarded;
};

struct Memory {
  std::mutex mutex;
  std::map<std::uintptr_t, Allocation> live;
  std::map<std::uintptr_t, std::size_t> freed;  // under guard: base -> nbytes, never mapped again
  std::map<int, std::size_t> used;              // device -> bytes
};
Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

std::size_t rounded(std::size_t nbytes, std::size_t to) { return (nbytes + to - 1) / to * to; }
std::size_t capacity() { return static_cast<std::size_t>(setting("MEMORY_BYTES", 80LL << 30)); }

// The allocation that holds `address` or ends next below it.
std::map<std::uintptr_t, Allocation>::iterator below(std::uintptr_t address) {
  auto after = memory().live.upper_bound(address);
  return after == memory().live.begin() ? memory().live.end() : std::prev(after);
}

// Says which allocation a bad access lies at, then lets the signal end the process.
void explain_fault(int number, siginfo_t* info, void*) {
  auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  signal(number, SIG_DFL);
  if (memory().mutex.try_lock()) {
    auto freed = memory().freed.upper_bound(address);
    auto live = below(address);
    if (freed != memory().freed.begin() && address < std::prev(freed)->first + rounded(std::prev(freed)->second, page_nbytes)) {
      --freed;
      say(format("access at %#lx, byte %zu of an allocation of %zu bytes that was freed", address,
                 address - freed->first, freed->second));
    } else if (live != memory().live.end() && address < live->first + live->second.nbytes + 2 * page_nbytes) {
      say(format("access at %#lx, %zu bytes behind the end of an allocation of %zu bytes of device %d", address,
                 address - live->first - live->second.nbytes, live->second.nbytes, live->second.device));
    } else {
      auto above = memory().live.upper_bound(address);
      if (above != memory().live.end() && above->first - address <= 2 * page_nbytes) {
        say(format("access at %#lx, %zu bytes before an allocation of %zu bytes of device %d", address,
                   above->first - address, above->second.nbytes, above->second.device));
      }
    }
  }
  raise(number);
}

void watch_faults() {
  static const bool done = [] {
    struct sigaction action {};
    action.sa_sigaction = explain_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGSEGV, &action, nullptr) == 0;
  }();
  (void)done;
}

}  // namespace

Found find_memory(const void* pointer) {
  auto address = reinterpret_cast<std::uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = below(address);
  if (found == memory().live.end() || address >= found->first + std::max<std::size_t>(found->second.nbytes, 1)) return {};
  return {found->second.place, found->second.device, found->first, found->second.nbytes};
}

std::optional<std::string> overrun(const void* pointer, std::size_t nbytes) {
  Found found = find_memory(pointer);
  auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (found.place == Place::unknown || address + nbytes <= found.base + found.nbytes) return std::nullopt;
  return format("%zu bytes at byte %zu of an allocation of %zu bytes of device %d: %zu too many", nbytes,
                address - found.base, found.nbytes, found.device, address + nbytes - found.base - found.nbytes);
}

cudaError_t allocate(void** pointer, std::size_t nbytes, Place place, int device) {
  *pointer = nullptr;
  if (nbytes == 0) return cudaSuccess;
  bool guarded = setting("GUARD", 0LL) != 0;
  std::size_t inner = rounded(nbytes, page_nbytes), guard = guarded ? page_nbytes : 0;
  {
    std::lock_guard<std::mutex> lock(memory().mutex);
    if (place == Place::device && memory().used[device] + nbytes > capacity()) return cudaErrorMemoryAllocation;
    if (place == Place::device) memory().used[device] += nbytes;
  }
  void* mapped = mmap(nullptr, inner + 2 * guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    if (place == Place::device) memory().used[device] -= nbytes;
    return cudaErrorMemoryAllocation;
  }
  char* mapping = static_cast<char*>(mapped);
  char* base = mapping + guard;
  std::size_t slack = 0;
  if (guarded) {
    watch_faults();
    mprotect(mapping, guard, PROT_NONE);
    mprotect(mapping + guard + inner, guard, PROT_NONE);
    base += inner - rounded(nbytes, alignment);
    slack = rounded(nbytes, alignment) - nbytes;
    memset(base + nbytes, canary, slack);
  }
  if (setting("POISON", 0LL)) memset(base, poison, nbytes);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().live[reinterpret_cast<std::uintptr_t>(base)] = {nbytes, place, device, mapping, inner + 2 * guard, slack, guarded};
  *pointer = base;
  return cudaSuccess;
}

cudaError_t release(void* pointer, Place place) {
  if (!pointer) return cudaSuccess;
  Allocation freed;
  {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto found = memory().live.find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == memory().live.end() || found->second.place != place) return cudaErrorInvalidValue;
    freed = found->second;
    memory().live.erase(found);
    if (place == Place::device) memory().used[freed.device] -= freed.nbytes;
    if (freed.guarded) memory().freed[reinterpret_cast<std::uintptr_t>(pointer)] = freed.nbytes;
  }
  if (!freed.mapping) return cudaSuccess;  // registered, not allocated
  auto* end = static_cast<unsigned char*>(pointer) + freed.nbytes;
  for (std::size_t i = 0; i < freed.slack_nbytes; ++i) {
    if (end[i] != canary) give_up(format("byte %zu behind an allocation of %zu bytes of device %d was written", i, freed.nbytes, freed.device));
  }
  if (setting("POISON", 0LL)) memset(pointer, poison, freed.nbytes);
  if (freed.guarded) {
    // Keeps the addresses, gives the memory back.
    mmap(freed.mapping, freed.mapped_nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  } else {
    munmap(freed.mapping, freed.mapped_nbytes);
  }
  return cudaSuccess;
}

namespace {

// Copies in stream order. Pageable memory of the host is read at once, and written before the call returns, as in CUDA.
cudaError_t copy(void* to, const void* from, std::size_t nbytes, cudaStream_t handle) {
  auto stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (nbytes == 0) return cudaSuccess;
  for (const void* end : {static_cast<const void*>(to), from}) {
    if (auto problem = overrun(end, nbytes)) {
      say("cudaMemcpy of " + *problem);
      return cudaErrorInvalidValue;
    }
  }
  if (find_memory(from).place == Place::unknown) {
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + nbytes);
    stream->submit("copy", [=] { memcpy(to, staged->data(), nbytes); });
  } else {
    stream->submit("copy", [=] { memmove(to, from, nbytes); });
  }
  if (find_memory(to).place == Place::unknown) stream->drain();
  return cudaSuccess;
}

cudaError_t fill(void* to, int value, std::size_t nbytes, cudaStream_t handle) {
  auto stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (nbytes == 0) return cudaSuccess;
  if (auto problem = overrun(to, nbytes)) {
    say("cudaMemset of " + *problem);
    return cudaErrorInvalidValue;
  }
  stream->submit("fill", [=] { memset(to, value, nbytes); });
  return cudaSuccess;
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
  CALLED();
  // CUDA may wait here for the device; whether it does depends on the driver.
  if (setting("MALLOC_WAITS", 0LL)) drain_device(current_device());
  return returned(allocate(pointer, nbytes, Place::device, current_device()));
}

cudaError_t cudaFree(void* pointer) {
  CALLED();
  if (Found found = find_memory(pointer); found.place == Place::device) drain_device(found.device);
  return returned(release(pointer, Place::device));
}

// In stream order: the memory is there at once, and goes when the stream has come to the call.
cudaError_t cudaMallocAsync(void** pointer, size_t nbytes, cudaStream_t handle) {
  CALLED();
  auto stream = find_stream(handle);
  if (!stream) return returned(cudaErrorInvalidResourceHandle);
  return returned(allocate(pointer, nbytes, Place::device, stream->device));
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t handle) {
  CALLED();
  auto stream = find_stream(handle);
  if (!stream || find_memory(pointer).place != Place::device) return returned(cudaErrorInvalidValue);
  stream->submit("free", [=] {
    if (release(pointer, Place::device)) give_up("cudaFreeAsync of memory that was freed before its stream came to it");
  });
  return returned(cudaSuccess);
}

// One pool for each device, whose memory is never kept.
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  CALLED();
  static char pools[64];
  if (device < 0 || device >= device_count()) return returned(cudaErrorInvalidDevice);
  *pool = reinterpret_cast<cudaMemPool_t>(&pools[device]);
  return returned(cudaSuccess);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  CALLED();
  return returned(cudaSuccess);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  CALLED();
  std::lock_guard<std::mutex> lock(memory().mutex);
  *static_cast<std::uint64_t*>(value) = memory().used[current_device()];
  return returned(cudaSuccess);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  CALLED();
  return returned(cudaSuccess);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  CALLED();
  return returned(cudaSuccess);
}

cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned) {
  CALLED();
  if (setting("MALLOC_WAITS", 0LL)) drain_device(current_device());
  return returned(allocate(pointer, nbytes, Place::host, 0));
}

cudaError_t cudaMallocHost(void** pointer, size_t nbytes) { return cudaHostAlloc(pointer, nbytes, 0); }

cudaError_t cudaFreeHost(void* pointer) {
  CALLED();
  drain_device(current_device());
  return returned(release(pointer, Place::host));
}

cudaError_t cudaHostRegister(void* pointer, size_t nbytes, unsigned) {
  CALLED();
  std::lock_guard<std::mutex> lock(memory().mutex);
  bool fresh = memory().live.emplace(reinterpret_cast<std::uintptr_t>(pointer),
                                     Allocation{nbytes, Place::host, 0, nullptr, 0, 0, false}).second;
  return returned(fresh ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* pointer) {
  CALLED();
  return returned(release(pointer, Place::host) ? cudaErrorHostMemoryNotRegistered : cudaSuccess);
}

cudaError_t cudaHostGetDevicePointer(void** device_pointer, void* pointer, unsigned) {
  CALLED();
  *device_pointer = pointer;
  return returned(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t* free_nbytes, size_t* total_nbytes) {
  CALLED();
  std::lock_guard<std::mutex> lock(memory().mutex);
  *total_nbytes = capacity();
  *free_nbytes = *total_nbytes - memory().used[current_device()];
  return returned(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  CALLED();
  Found found = find_memory(pointer);
  memset(attributes, 0, sizeof *attributes);
  attributes->device = found.place == Place::unknown ? -2 : found.device;
  attributes->type = found.place == Place::device ? cudaMemoryTypeDevice
                     : found.place == Place::host ? cudaMemoryTypeHost
                                                  : cudaMemoryTypeUnregistered;
  if (found.place != Place::unknown) attributes->devicePointer = const_cast<void*>(pointer);
  if (found.place != Place::device) attributes->hostPointer = const_cast<void*>(pointer);
  return returned(cudaSuccess);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  CALLED();
  return returned(copy(to, from, nbytes, stream));
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
  CALLED();
  return returned(copy(to, from, nbytes, stream));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  CALLED();
  cudaError_t error = copy(to, from, nbytes, nullptr);
  if (error == cudaSuccess) find_stream(nullptr)->drain();
  return returned(error);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  CALLED();
  for (size_t row = 0; row < height; ++row) {
    cudaError_t error = copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, stream);
    if (error != cudaSuccess) return returned(error);
  }
  return returned(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream) {
  CALLED();
  return returned(fill(to, value, nbytes, stream));
}

cudaError_t cudaMemset(void* to, int value, size_t nbytes) {
  CALLED();
  return returned(fill(to, value, nbytes, nullptr));
}

int gpu_standin_find(const void* pointer, void** base, size_t* nbytes, int* device) {
  Found found = find_memory(pointer);
  if (found.place == Place::unknown) return 0;
  *base = reinterpret_cast<void*>(found.base);
  *nbytes = found.nbytes;
  *device = found.place == Place::device ? found.device : -1;
  return 1;
}

}  // extern "C"

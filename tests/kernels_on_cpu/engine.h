// The engine's side of a kernel: how it is described, and what it calls.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulation {

constexpr unsigned kLanes = 32;

struct Triple {
  unsigned x, y, z;
};

// The thread that runs now.
struct Now {
  Triple thread, block, block_shape, grid_shape;
};
extern Now now;

struct Parameter {
  unsigned nbytes;
  bool pointer, writes;  // what its type says
};

// A kernel as the engine starts it; its library makes one of static data.
struct Kernel {
  const char* name;
  unsigned count;
  const Parameter* parameters;
  void (*call)(void** arguments);
  char *shared_begin, *shared_end;  // all variables of all CTAs of the library's kernels
};

// A collective of the CTA, and of the warp.
void wait_block();
void wait_warp();
uint64_t exchange(uint64_t mine, unsigned from);
unsigned ballot(bool flag);
void fence();
// Memory that is read past the caches of a multiprocessor: it may be written by an atomic operation at the same time.
void note_coherent_read(const void* at, size_t nbytes);

}  // namespace emulation

// Finds accesses of a kernel's threads that nothing orders: to the same bytes, by two threads, one of them at least a
// write, and not both of them atomic. In the manner of compute-sanitizer's racecheck, for global memory, too.
//
// What orders: a CTA's barrier its threads; __syncwarp a warp's; and across CTAs an atomic operation with a fence on both
// sides. __shfl_sync and __ballot_sync order no memory (CUDA C++ Programming Guide, "Warp Shuffle Functions"), so they
// order none here. Each access leaves its thread, its barrier's number and how many fences its thread had made; an atomic
// operation on global memory publishes how far each thread of its CTA had fenced, and who reads it and fences as well is
// behind that.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulation::race {

enum class Kind : uint8_t { kRead, kCoherentRead, kWrite, kAtomic };

struct Fault {
  uint64_t address, pc[2];  // of the earlier access and of the later; pc[0] is 0 where nothing was written before
  uint32_t cta[2], thread[2], nbytes;
  uint8_t kind[2], shared;
};

struct Range {
  uint64_t start, stop;
  uint32_t read, written;
};

void begin_launch(bool check, bool keep_ranges, unsigned threads, const char* shared_begin, const char* shared_end,
                  const char* stacks_begin, const char* stacks_end);
void begin_block(unsigned index);
void block_barrier();
void warp_barrier(unsigned warp);
void fence();
void note(const void* at, size_t nbytes, Kind kind, const void* pc);
void end_launch();

}  // namespace emulation::race

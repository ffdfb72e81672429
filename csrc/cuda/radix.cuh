// Radix select: the k-th largest of many 31-bit keys, digit by digit from the top, without ever sorting them.
#pragma once
#include "device.cuh"

namespace gradwire {

constexpr int kBins = 2048;     // 11 bits, then twice 10: the 31 bits of a magnitude
constexpr int kMostWarps = 32;  // of a CTA

// The state of one selection between its passes; zeroed by the first kernel, read by the later ones.
struct Selection {
  uint32_t threshold;   // keys below it were not marked
  uint32_t candidates;  // how many were
  uint32_t prefix;      // the digits found so far; after the last pass the k-th largest key
  uint32_t wanted;      // how many with this prefix are still to be chosen; at the end those equal to the k-th largest
  uint32_t tickets;     // CTAs that have finished the current pass over this parameter
  uint32_t padding[3];
  uint32_t counts[kBins];
};

__device__ inline uint32_t bins_of(int shift) { return shift == 20 ? 2048u : 1024u; }
__device__ inline uint32_t digits_above(int shift) {
  return shift == 20 ? 0u : 0x7fffffffu & ~((bins_of(shift) << shift) - 1u);
}
__device__ inline uint32_t magnitude_key(float x) { return bits_of_float(x) & 0x7fffffffu; }

// Sum of `x` over the threads before this one; every thread of the CTA calls it. `shared` has kMostWarps entries.
__device__ inline uint32_t exclusive_sum(uint32_t x, uint32_t* shared) {
  const unsigned lane = lane_index(), warp = threadIdx.x / kWarp;
  uint32_t inclusive = x;
#pragma unroll
  for (unsigned width = 1; width < kWarp; width *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, inclusive, width);
    if (lane >= width) inclusive += below;
  }
  if (lane == kWarp - 1) shared[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  for (unsigned w = 0; w < warp; ++w) before += shared[w];
  __syncthreads();
  return before + inclusive - x;
}

// Goes through the bins from the largest key down and stores the bin in which `wanted` is reached, and the remainder of
// `wanted` there. Every thread of the CTA calls it; the number of threads divides the number of bins.
__device__ inline void pick_bin(const volatile uint32_t* counts, int shift, uint32_t prefix, uint32_t wanted,
                                uint32_t* shared, uint32_t* new_prefix, uint32_t* new_wanted) {
  const uint32_t bins = bins_of(shift), per_thread = bins / blockDim.x, top = bins - 1 - threadIdx.x * per_thread;
  uint32_t own = 0;
  for (uint32_t i = 0; i < per_thread; ++i) own += counts[top - i];
  uint32_t before = exclusive_sum(own, shared);
  if (before >= wanted || before + own < wanted) return;
  for (uint32_t i = 0; i < per_thread; ++i) {
    const uint32_t count = counts[top - i];
    if (before + count >= wanted) {
      *new_prefix = prefix | (top - i) << shift;
      *new_wanted = wanted - before;
      return;
    }
    before += count;
  }
}

// True in every thread of the CTA that finishes last of `blocks`; what the others wrote before is then visible to it.
__device__ inline bool last_block(uint32_t* tickets, int64_t blocks, uint32_t* shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *shared = atomicAdd(tickets, 1u);
  __syncthreads();
  const bool last = *shared == blocks - 1;
  if (last) __threadfence();
  return last;
}

}  // namespace gradwire

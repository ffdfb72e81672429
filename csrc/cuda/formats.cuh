// float32, float16 and bfloat16 in memory, eight elements at a time; computed with in float32.
#pragma once
#include "device.cuh"

namespace gradwire {

struct Float32 {
  using Stored = float;
};

struct Float16 {
  using Stored = uint16_t;
  // The instruction rounds as the shared formula does, and costs a tenth; a NaN keeps the formula's bits.
  __device__ static uint16_t narrow(float x) {
#if defined(__CUDA_ARCH__)
    if ((bits_of_float(x) & 0x7fffffffu) > 0x7f800000u) return half_from_float(x);
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
#else
    return half_from_float(x);
#endif
  }
  __device__ static float widen(uint16_t half) {
#if defined(__CUDA_ARCH__)
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
#else
    return float_from_half(half);
#endif
  }
};

struct BFloat16 {
  using Stored = uint16_t;
  __device__ static uint16_t narrow(float x) { return bfloat_from_float(x); }
  __device__ static float widen(uint16_t bfloat) { return float_from_bfloat(bfloat); }
};

// A thread handles eight elements at once, a warp 256: lane l holds 4 l + (0..3) of the first 128 and of the second. So
// a warp's access is 512 bytes in a row of float32, 256 of 16 bits; eight in a row would touch every sector twice.
constexpr int kRun = 8;
constexpr int64_t kQuad = 4;
constexpr int64_t kHalf = kQuad * kWarp;  // from a thread's first four elements to its other four
constexpr int64_t kWarpRun = 2 * kHalf;

struct Run {
  float at[kRun];
};

// The first element of this thread's first run, where all threads of the grid walk through a tensor together.
__device__ inline int64_t first_of_run() { return kWarpRun * warp_index() + kQuad * lane_index(); }

// Loads a run, of which `count` elements exist from `at` on; the others read as zero.
template <class Format>
struct Memory {
  __device__ static Run load(const uint16_t* at, int64_t count) {
    Run run;
    load_quad(at, count, run.at);
    load_quad(at + kHalf, count - kHalf, run.at + kQuad);
    return run;
  }

  // Stores a run and returns it as it reads back.
  __device__ static Run store(uint16_t* at, const Run& run, int64_t count) {
    Run stored;
    store_quad(at, run.at, count, stored.at);
    store_quad(at + kHalf, run.at + kQuad, count - kHalf, stored.at + kQuad);
    return stored;
  }

 private:
  __device__ static void load_quad(const uint16_t* at, int64_t count, float* to) {
    if (count >= kQuad && aligned<uint2>(at)) {
      const uint2 words = *reinterpret_cast<const uint2*>(at);
      const uint32_t pairs[2] = {words.x, words.y};
#pragma unroll
      for (int i = 0; i < kQuad; ++i) to[i] = Format::widen(static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2)));
      return;
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) to[i] = i < count ? Format::widen(at[i]) : 0.0f;
  }

  __device__ static void store_quad(uint16_t* at, const float* from, int64_t count, float* stored) {
    uint32_t pairs[2] = {};
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const uint16_t narrow = Format::narrow(from[i]);
      stored[i] = Format::widen(narrow);
      pairs[i / 2] |= static_cast<uint32_t>(narrow) << 16 * (i % 2);
    }
    if (count >= kQuad && aligned<uint2>(at)) {
      *reinterpret_cast<uint2*>(at) = make_uint2(pairs[0], pairs[1]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i)
      if (i < count) at[i] = static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2));
  }
};

template <>
struct Memory<Float32> {
  __device__ static Run load(const float* at, int64_t count) {
    const float4 a = load4(at, count), b = load4(at + kHalf, count - kHalf);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
  __device__ static Run store(float* at, const Run& run, int64_t count) {
    store4(at, make_float4(run.at[0], run.at[1], run.at[2], run.at[3]), count);
    store4(at + kHalf, make_float4(run.at[4], run.at[5], run.at[6], run.at[7]), count - kHalf);
    return run;
  }
};

}  // namespace gradwire

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

constexpr int kRun = 8;  // elements a thread handles at once: 16 bytes of float16, twice 16 bytes of float32

struct Run {
  float at[kRun];
};

// Loads a run of which `count` elements exist; the others read as zero.
template <class Format>
struct Memory {
  __device__ static Run load(const uint16_t* at, int64_t count) {
    Run run;
    if (count >= kRun && aligned<uint4>(at)) {
      const uint4 words = *reinterpret_cast<const uint4*>(at);
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < kRun; ++i) run.at[i] = Format::widen(static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2)));
      return run;
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) run.at[i] = i < count ? Format::widen(at[i]) : 0.0f;
    return run;
  }

  // Stores a run and returns it as it reads back.
  __device__ static Run store(uint16_t* at, const Run& run, int64_t count) {
    Run stored;
    uint32_t pairs[4] = {};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const uint16_t narrow = Format::narrow(run.at[i]);
      stored.at[i] = Format::widen(narrow);
      pairs[i / 2] |= static_cast<uint32_t>(narrow) << 16 * (i % 2);
    }
    if (count >= kRun && aligned<uint4>(at)) {
      *reinterpret_cast<uint4*>(at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      return stored;
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      if (i < count) at[i] = static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2));
    return stored;
  }
};

template <>
struct Memory<Float32> {
  __device__ static Run load(const float* at, int64_t count) {
    const float4 a = load4(at, count), b = load4(at + 4, count - 4);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
  __device__ static Run store(float* at, const Run& run, int64_t count) {
    store4(at, make_float4(run.at[0], run.at[1], run.at[2], run.at[3]), count);
    store4(at + 4, make_float4(run.at[4], run.at[5], run.at[6], run.at[7]), count - 4);
    return run;
  }
};

}  // namespace gradwire

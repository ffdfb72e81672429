// Scale, add the residual, cast to float16 or bfloat16 and keep what the cast left out, in one pass; and back.
//
// Bytes an element, read + written: encode 4 + 2 (8 + 6 with residual), decode_reduce 2 W + 4. The twin of
// csrc/cpu/cast.cpp, bit for bit. One launch each; no synchronisation.
#include "formats.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;

// Arguments.
struct Encode {
  const float *gradient, *residual;  // residual may be null
  float* left;                       // may be null, or the residual's own memory
  uint16_t* target;
  int64_t numel;
  float scale;
};

// Kernels.
template <class Format>
__device__ inline void cast_encode(const Encode& a) {
  for (int64_t i = kRun * thread_index(); i < a.numel; i += kRun * thread_count()) {
    const int64_t count = a.numel - i;
    Run p = Memory<Float32>::load(a.gradient + i, count);
#pragma unroll
    for (int j = 0; j < kRun; ++j) p.at[j] = p.at[j] * a.scale;
    if (a.residual) {
      const Run residual = Memory<Float32>::load(a.residual + i, count);
#pragma unroll
      for (int j = 0; j < kRun; ++j) p.at[j] += residual.at[j];
    }
    Run left = Memory<Format>::store(a.target + i, p, count);
    if (!a.left) continue;
#pragma unroll
    for (int j = 0; j < kRun; ++j) left.at[j] = p.at[j] - left.at[j];
    Memory<Float32>::store(a.left + i, left, count);
  }
}

template <class Format>
__device__ inline void cast_decode_reduce(const Reduction<uint16_t>& a) {
  for (int64_t i = kRun * thread_index(); i < a.numel; i += kRun * thread_count()) {
    const int64_t count = a.numel - i;
    Run sum = Memory<Float32>::load(a.addend ? a.addend + i : a.target + i, a.addend ? count : 0);
    if (!a.addend && a.workers == 1) {  // 0 + x would lose the sign of a zero
      Memory<Float32>::store(a.target + i, Memory<Format>::load(a.rows + i, count), count);
      continue;
    }
    for (int64_t w = 0; w < a.workers; ++w) {
      const Run source = Memory<Format>::load(a.rows + w * a.stride + i, count);
#pragma unroll
      for (int j = 0; j < kRun; ++j) sum.at[j] += source.at[j];
    }
    Memory<Float32>::store(a.target + i, sum, count);
  }
}

#define GRADWIRE_CAST(name, Format)                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
      cast_encode_##name(const float* gradient, float scale, const float* residual, float* left,                  \
                         uint16_t* target, int64_t numel) {                                                       \
    cast_encode<Format>({gradient, residual, left, target, numel, scale});                                        \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
      cast_decode_reduce_##name(const uint16_t* sources, int64_t stride, int64_t workers, const float* addend,    \
                                float* target, int64_t numel) {                                                   \
    cast_decode_reduce<Format>({sources, stride, workers, addend, target, numel});                                \
  }

GRADWIRE_CAST(f16, Float16)
GRADWIRE_CAST(bf16, BFloat16)

}  // namespace gradwire

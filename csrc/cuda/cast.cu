// Scale, add the residual, cast to float16 or bfloat16 and keep what the cast left out, in one pass; and back.
//
// Bytes an element, read + written: encode 4 + 2 (8 + 6 with residual), decode_reduce 2 W + 4, serve 2 W + 2 (2 W + 4 +
// 6 with residual). The twin of csrc/cpu/kernels/cast.cpp, bit for bit. One launch each; no synchronisation. Payloads of several
// pieces lie one behind the other as the payload of all would, so no kernel knows of pieces.
#include "formats.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
constexpr int kAhead = 2;  // workers whose payloads are on their way before the first is added

// Arguments.
struct Encode {
  const float* residual;  // may be null
  float* left;            // may be null, or the residual's own memory
  uint16_t* target;
  int64_t numel;
};

// Kernels.
// target = p + residual, and what the cast leaves out.
template <class Format>
__device__ inline void encode_run(Run p, const Encode& a, int64_t i) {
  const int64_t count = a.numel - i;
  if (a.residual) {
    const Run residual = Memory<Float32>::load(a.residual + i, count);
#pragma unroll
    for (int j = 0; j < kRun; ++j) p.at[j] += residual.at[j];
  }
  Run left = Memory<Format>::store(a.target + i, p, count);
  if (!a.left) return;
#pragma unroll
  for (int j = 0; j < kRun; ++j) left.at[j] = p.at[j] - left.at[j];
  Memory<Float32>::store(a.left + i, left, count);
}

template <class Format>
__device__ inline Run sum_run(const Reduction<uint16_t>& a, int64_t i) {
  const int64_t count = a.numel - i;
  if (!a.addend && a.workers == 1) return Memory<Format>::load(a.rows + i, count);  // 0 + x loses the sign of a zero
  Run sum = {};
  if (a.addend) sum = Memory<Float32>::load(a.addend + i, count);
  for (int64_t first = 0; first < a.workers; first += kAhead) {
    Run sources[kAhead];
#pragma unroll
    for (int w = 0; w < kAhead; ++w)
      if (first + w < a.workers) sources[w] = Memory<Format>::load(a.rows + (first + w) * a.stride + i, count);
#pragma unroll
    for (int w = 0; w < kAhead; ++w)
#pragma unroll
      for (int j = 0; j < kRun; ++j)
        if (first + w < a.workers) sum.at[j] += sources[w].at[j];
  }
  return sum;
}

template <class Format>
__device__ inline void cast_encode(const float* gradient, float scale, const Encode& a) {
  for (int64_t i = first_of_run(); i < a.numel; i += kRun * thread_count()) {
    Run p = Memory<Float32>::load(gradient + i, a.numel - i);
#pragma unroll
    for (int j = 0; j < kRun; ++j) p.at[j] = p.at[j] * scale;
    encode_run<Format>(p, a, i);
  }
}

template <class Format>
__device__ inline void cast_decode_reduce(const Reduction<uint16_t>& a) {
  for (int64_t i = first_of_run(); i < a.numel; i += kRun * thread_count())
    Memory<Float32>::store(a.target + i, sum_run<Format>(a, i), a.numel - i);
}

template <class Format>
__device__ inline void cast_serve(const Reduction<uint16_t>& a, const Encode& answer) {
  for (int64_t i = first_of_run(); i < a.numel; i += kRun * thread_count())
    encode_run<Format>(sum_run<Format>(a, i), answer, i);
}

#define GRADWIRE_CAST(name, Format)                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
      cast_encode_##name(const float* gradient, float scale, const float* residual, float* left,                  \
                         uint16_t* target, int64_t numel) {                                                       \
    cast_encode<Format>(gradient, scale, {residual, left, target, numel});                                        \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
      cast_decode_reduce_##name(const uint16_t* sources, int64_t stride, int64_t workers, const float* addend,    \
                                float* target, int64_t numel) {                                                   \
    cast_decode_reduce<Format>({sources, stride, workers, addend, target, numel});                                \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
      cast_serve_##name(const uint16_t* sources, int64_t stride, int64_t workers, const float* residual,          \
                        float* left, uint16_t* answer, int64_t numel) {                                           \
    cast_serve<Format>({sources, stride, workers, nullptr, nullptr, numel}, {residual, left, answer, numel});     \
  }

GRADWIRE_CAST(f16, Float16)
GRADWIRE_CAST(bf16, BFloat16)

}  // namespace gradwire

// Scale, add the residual, cast to float16 or bfloat16 and keep the compression error, in one pass; and back.
//
// Bytes an element, read + written, with W workers: encode 4 + 2 (8 + 6 with residual), decode_reduce 2 W + 4,
// reduce_encode 2 W + 2 (2 W + 4 + 6 with residual). The twin of csrc/cpu/kernels/codecs/cast.cpp, bit for bit. One launch
// each; no synchronisation. Payloads of several pieces lie one behind the other as the payload of the whole tensor
// would, so no kernel distinguishes pieces.
#include "formats.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
constexpr int kAhead = 2;  // workers whose payloads are being loaded before the first is added

// Arguments.
struct Encode {
  const float* residual;  // may be null
  float* new_residual;    // may be null, or the residual's own memory
  uint16_t* target;
  int64_t numel;
};

// Kernels.
// target = p + residual, narrowed; new_residual = the compression error of the cast.
template <class Format>
__device__ inline void encode_run(Run p, const Encode& a, int64_t i) {
  const int64_t count = a.numel - i;
  if (a.residual) {
    const Run residual = Memory<Float32>::load(a.residual + i, count);
#pragma unroll
    for (int j = 0; j < kRun; ++j) p.at[j] += residual.at[j];
  }
  Run new_residual = Memory<Format>::store(a.target + i, p, count);
  if (!a.new_residual) return;
#pragma unroll
  for (int j = 0; j < kRun; ++j) new_residual.at[j] = p.at[j] - new_residual.at[j];
  Memory<Float32>::store(a.new_residual + i, new_residual, count);
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
__device__ inline void cast_reduce_encode(const Reduction<uint16_t>& a, const Encode& reduced) {
  for (int64_t i = first_of_run(); i < a.numel; i += kRun * thread_count())
    encode_run<Format>(sum_run<Format>(a, i), reduced, i);
}

#define GRADWIRE_CAST(name, Format)                                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
      cast_encode_##name(float scale, const float* gradient, const float* residual, float* new_residual,             \
                         uint16_t* target, int64_t numel) {                                                          \
    cast_encode<Format>(gradient, scale, {residual, new_residual, target, numel});                                   \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads) cast_decode_reduce_##name(                                  \
      const uint16_t* sources, int64_t stride, int64_t workers, const float* addend, float* target, int64_t numel) { \
    cast_decode_reduce<Format>({sources, stride, workers, addend, target, numel});                                   \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
      cast_reduce_encode_##name(const uint16_t* sources, int64_t stride, int64_t workers, const float* residual,     \
                                float* new_residual, uint16_t* reduced, int64_t numel) {                             \
    cast_reduce_encode<Format>({sources, stride, workers, nullptr, nullptr, numel},                                  \
                               {residual, new_residual, reduced, numel});                                            \
  }

GRADWIRE_CAST(f16, Float16)
GRADWIRE_CAST(bf16, BFloat16)

}  // namespace gradwire

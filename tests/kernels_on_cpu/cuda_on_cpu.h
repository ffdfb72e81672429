// Runs a CUDA kernel's own source on the CPU: every thread of a CTA is a fiber, and a warp's or CTA's collective waits
// until all of them have come to it. It shows the arithmetic, the order of bits, the indices, and, with race.h, accesses
// that nothing orders. It shows nothing of speed. What a kernel calls is here; the engine behind it is in engine.cpp.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "engine.h"

#ifndef __global__  // the build reads the parameters' names with a mark in its place
#define __global__
#endif
#define __device__
#define __host__
#define __shared__ static  // the only variables without a value in a kernels' library: they are its .bss
#define __launch_bounds__(...)

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulation {

template <class T>
T exchange_value(T value, unsigned from) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a slot holds 64 bits");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  word = exchange(word, from);
  std::memcpy(&value, &word, sizeof value);
  return value;
}

template <class T>
struct IsWritable : std::bool_constant<std::is_pointer_v<T> && !std::is_const_v<std::remove_pointer_t<T>>> {};

template <auto kernel>
struct Entry;
template <class... P, void (*kernel)(P...)>
struct Entry<kernel> {
  static constexpr Parameter kParameters[] = {
      {static_cast<unsigned>(sizeof(P)), std::is_pointer_v<P>, IsWritable<P>::value}...};
  static constexpr unsigned kCount = sizeof...(P);
  // Not instrumented: where the arguments lie is no memory of the device.
  template <size_t... I>
  __attribute__((no_sanitize("thread"))) static void unpack(void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::decay_t<P>*>(arguments[I])...);
  }
  static void call(void** arguments) { unpack(arguments, std::index_sequence_for<P...>{}); }
};

}  // namespace emulation

#define threadIdx (::emulation::now.thread)
#define blockIdx (::emulation::now.block)
#define blockDim (::emulation::now.block_shape)
#define gridDim (::emulation::now.grid_shape)

inline void __syncthreads() { ::emulation::wait_block(); }
inline void __syncwarp(unsigned = 0xffffffffu) { ::emulation::wait_warp(); }
inline void __threadfence() { ::emulation::fence(); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::exchange_value(value, static_cast<unsigned>(lane));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange_value(value, threadIdx.x ^ static_cast<unsigned>(mask));
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = threadIdx.x % emulation::kLanes;
  return emulation::exchange_value(value, lane >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = threadIdx.x % emulation::kLanes;
  return emulation::exchange_value(value, lane + delta < emulation::kLanes ? lane + delta : lane);
}
inline unsigned __ballot_sync(unsigned, bool flag) { return emulation::ballot(flag); }
inline int __any_sync(unsigned, bool flag) { return emulation::ballot(flag) != 0; }
inline int __all_sync(unsigned, bool flag) { return emulation::ballot(flag) == 0xffffffffu; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
__attribute__((noinline, no_sanitize("thread"))) T __ldcg(const T* at) {
  ::emulation::note_coherent_read(at, sizeof(T));
  return *at;
}
unsigned atomicAdd(unsigned* at, unsigned x);
int atomicAdd(int* at, int x);
unsigned long long atomicAdd(unsigned long long* at, unsigned long long x);
unsigned atomicOr(unsigned* at, unsigned x);
unsigned atomicAnd(unsigned* at, unsigned x);
unsigned atomicMax(unsigned* at, unsigned x);
unsigned atomicMin(unsigned* at, unsigned x);
unsigned atomicExch(unsigned* at, unsigned x);
unsigned atomicCAS(unsigned* at, unsigned assumed, unsigned x);
unsigned long long atomicCAS(unsigned long long* at, unsigned long long assumed, unsigned long long x);

extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];

#define EMULATE(kernel)                                                                                  \
  extern "C" const emulation::Kernel* kernel_##kernel() {                                                \
    using Of = emulation::Entry<&gradwire::kernel>;                                                      \
    static const emulation::Kernel made = {#kernel, Of::kCount, Of::kParameters, Of::call, __bss_start, _end}; \
    return &made;                                                                                        \
  }

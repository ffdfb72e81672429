// Compiles one loop for several instruction sets and picks at run time: the wheel runs on any x86-64 or Arm machine.
#pragma once

// The loop is written once as an always-inline template and instantiated inside a function of each instruction set.
#define GRADWIRE_ALWAYS_INLINE inline __attribute__((always_inline))

// The output may be one of the inputs, element for element: vectorising is right, and a run-time overlap test would
// choose the scalar loop exactly there.
#if defined(__clang__)
#define GRADWIRE_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define GRADWIRE_ELEMENTWISE _Pragma("GCC ivdep")
#else
#define GRADWIRE_ELEMENTWISE
#endif

#if defined(__x86_64__)
#define GRADWIRE_AVX2 __attribute__((target("avx2")))
#define GRADWIRE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif

namespace gradwire::shm {

enum class Isa { plain, avx2, avx512 };

inline Isa best_isa() {
#if defined(__x86_64__)
  static const Isa found = [] {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Isa::avx512 : __builtin_cpu_supports("avx2") ? Isa::avx2 : Isa::plain;
  }();
  return found;
#else
  return Isa::plain;
#endif
}

}  // namespace gradwire::shm

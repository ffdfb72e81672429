// Compiles GRADWIRE_LOOPS once for each instruction set, in the namespaces plain and, by processor, avx2 and avx512 or neon.
//
// The target is set function by function, never for a whole unit: the wheel must start on any processor. There is
// no include guard, because every kernel's unit includes this file once. Include standard headers and intrinsics.h before it.
#ifndef GRADWIRE_LOOPS
#error "define GRADWIRE_LOOPS as the header with the loops"
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own _mm512_undefined_ps() (bug 105593)
#endif

#define GRADWIRE_ISA 0
namespace plain {
#include "vec.h"
#include GRADWIRE_LOOPS
}  // namespace plain
#undef GRADWIRE_ISA

#if defined(__x86_64__)
#define GRADWIRE_ISA 2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#include "vec.h"
#include GRADWIRE_LOOPS
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef GRADWIRE_ISA

#define GRADWIRE_ISA 512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")
#endif
namespace avx512 {
#include "vec.h"
#include GRADWIRE_LOOPS
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef GRADWIRE_ISA
#elif defined(__aarch64__)
#define GRADWIRE_ISA 128
namespace neon {  // every 64-bit Arm processor has it: no target to set
#include "vec.h"
#include GRADWIRE_LOOPS
}  // namespace neon
#undef GRADWIRE_ISA
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#undef GRADWIRE_LOOPS

// The compiler's vector intrinsics of the processor that is compiled for, if it has any that the kernels use.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// What lets one header serve g++, nvcc and NVRTC: where fixed-width integers come from, and who may call a function.
//
// NVRTC has no standard headers, so the integers are declared here; inside the namespace, where they cannot clash with
// others of the same name.
#pragma once

#if defined(__CUDACC_RTC__)
namespace gradwire {
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
}  // namespace gradwire
#else
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#endif

#if defined(__CUDACC__)
#define GRADWIRE_ANYWHERE __host__ __device__
#else
#define GRADWIRE_ANYWHERE
#endif

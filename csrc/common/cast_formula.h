// float32 to float16 and bfloat16, rounding to the nearest with ties to even: one element at a time, for processors
// without an instruction for it. Overflow becomes inf; NaN stays NaN.
// Source: IEEE 754-2019, sections 3.6 and 4.3.1; bfloat16 is the upper half of a float32.
#pragma once
#include "common/portable.h"

namespace gradwire {

GRADWIRE_ANYWHERE inline uint32_t bits_of_float(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  static_assert(sizeof bits == sizeof x, "float must be 32 bits wide");
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

GRADWIRE_ANYWHERE inline float float_of_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

GRADWIRE_ANYWHERE inline uint16_t half_from_float(float x) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x1ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to inf
  if (magnitude < 0x38800000u) {  // below 2^-14 a half has a fixed step of 2^-24: adding 0.5 aligns to that step
    const float aligned = float_of_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of_float(aligned) - 0x3f000000u));
  }
  const uint32_t odd = magnitude >> 13 & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

GRADWIRE_ANYWHERE inline float float_from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return float_of_bits(sign | 0x7f800000u | quiet | (magnitude & 0x3ffu) << 13);
  }
  if (magnitude < 0x400u) {
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return float_of_bits(sign | bits_of_float(value));
  }
  return float_of_bits(sign | ((magnitude << 13) + 0x38000000u));
}

GRADWIRE_ANYWHERE inline uint16_t bfloat_from_float(float x) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

GRADWIRE_ANYWHERE inline float float_from_bfloat(uint16_t bfloat) {
  return float_of_bits(static_cast<uint32_t>(bfloat) << 16);
}

}  // namespace gradwire

// IEEE binary16 and bfloat16 <-> float32: one element at a time anywhere, runs of them with the CPU's own instructions.
//
// Both narrowings round to nearest, ties to even; overflow becomes infinity and a NaN stays a (quiet) NaN.
// Source: IEEE 754-2008 section 3.4 (binary16); the Intel "BFLOAT16 - Hardware Numerics Definition" (bfloat16).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/intrinsics.h"

namespace gradwire {

/// The bits of a binary16; a type of its own so that it cannot be mistaken for an integer.
struct Float16 {
  std::uint16_t bits;
};

/// The bits of a bfloat16.
struct BFloat16 {
  std::uint16_t bits;
};

static_assert(sizeof(Float16) == 2 && sizeof(BFloat16) == 2, "both are two bytes in a tensor");
static_assert(sizeof(float) == 4, "float is binary32");

inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t bits_from_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(BFloat16 value) { return float_from_bits(std::uint32_t{value.bits} << 16); }

inline BFloat16 to_bfloat16(float value) {
  const std::uint32_t bits = bits_from_float(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x0040u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded)};
}

inline float to_float(Float16 value) {
  const std::uint32_t sign = std::uint32_t{value.bits & 0x8000u} << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude > 0x7c00u) return float_from_bits(sign | 0x7fc00000u | (magnitude << 13));  // NaN, made quiet
  if (magnitude == 0x7c00u) return float_from_bits(sign | 0x7f800000u);
  if (magnitude < 0x0400u) {  // subnormal: an integer multiple of 2^-24, exact in float32
    const float absolute = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return float_from_bits(sign | bits_from_float(absolute));
  }
  return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));  // exponent bias 127 - 15 = 112
}

inline Float16 to_float16(float value) {
  const std::uint32_t bits = bits_from_float(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 lets the float adder round to a multiple of 2^-24
    result = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    result = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | result)};
}

#if defined(__x86_64__)
inline bool has_f16c() {
  static const bool found = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return found;
}

/// Widens the first multiple of 8 elements; returns how many. Reads 2 bytes and writes 4 per element.
__attribute__((target("avx,f16c"))) inline std::size_t widen_f16c(float* wide, const Float16* narrow,
                                                                  std::size_t numel) {
  std::size_t index = 0;
  for (; index + 8 <= numel; index += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(narrow + index));
    _mm256_storeu_ps(wide + index, _mm256_cvtph_ps(eight));
  }
  return index;
}

/// Narrows the first multiple of 8 elements; returns how many. Reads 4 bytes and writes 2 per element.
__attribute__((target("avx,f16c"))) inline std::size_t narrow_f16c(Float16* narrow, const float* wide,
                                                                   std::size_t numel) {
  std::size_t index = 0;
  for (; index + 8 <= numel; index += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(wide + index), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(narrow + index), eight);
  }
  return index;
}
#elif defined(__aarch64__)
/// Widens the first multiple of 8 elements; returns how many. Reads 2 bytes and writes 4 per element.
inline std::size_t widen_neon(float* wide, const Float16* narrow, std::size_t numel) {
  std::size_t index = 0;
  for (; index + 8 <= numel; index += 8) {
    const float16x8_t eight = vreinterpretq_f16_u16(vld1q_u16(&narrow[index].bits));
    vst1q_f32(wide + index, vcvt_f32_f16(vget_low_f16(eight)));
    vst1q_f32(wide + index + 4, vcvt_high_f32_f16(eight));
  }
  return index;
}

/// Narrows the first multiple of 8 elements; returns how many. Reads 4 bytes and writes 2 per element.
inline std::size_t narrow_neon(Float16* narrow, const float* wide, std::size_t numel) {
  std::size_t index = 0;
  for (; index + 8 <= numel; index += 8) {
    const float16x8_t eight = vcvt_high_f16_f32(vcvt_f16_f32(vld1q_f32(wide + index)), vld1q_f32(wide + index + 4));
    vst1q_u16(&narrow[index].bits, vreinterpretq_u16_f16(eight));
  }
  return index;
}
#endif

/// wide[i] = narrow[i]. Reads 2 bytes and writes 4 per element.
inline void widen(float* wide, const Float16* narrow, std::size_t numel) {
  std::size_t index = 0;
#if defined(__x86_64__)
  if (has_f16c()) index = widen_f16c(wide, narrow, numel);
#elif defined(__aarch64__)
  index = widen_neon(wide, narrow, numel);
#endif
  for (; index < numel; ++index) wide[index] = to_float(narrow[index]);
}

/// narrow[i] = wide[i], rounded once. Reads 4 bytes and writes 2 per element.
inline void narrow(Float16* narrow, const float* wide, std::size_t numel) {
  std::size_t index = 0;
#if defined(__x86_64__)
  if (has_f16c()) index = narrow_f16c(narrow, wide, numel);
#elif defined(__aarch64__)
  index = narrow_neon(narrow, wide, numel);
#endif
  for (; index < numel; ++index) narrow[index] = to_float16(wide[index]);
}

/// wide[i] = narrow[i]. Reads 2 bytes and writes 4 per element; the compiler vectorises the loop.
inline void widen(float* wide, const BFloat16* narrow, std::size_t numel) {
  for (std::size_t index = 0; index < numel; ++index) wide[index] = to_float(narrow[index]);
}

/// narrow[i] = wide[i], rounded once. Reads 4 bytes and writes 2 per element; the compiler vectorises the loop.
inline void narrow(BFloat16* narrow, const float* wide, std::size_t numel) {
  for (std::size_t index = 0; index < numel; ++index) narrow[index] = to_bfloat16(wide[index]);
}

}  // namespace gradwire

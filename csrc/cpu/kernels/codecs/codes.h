// Floats to packed codes and back, for one instruction set; included inside a namespace by quantize_loops.h, no include
// guard.
//
// codes64 packs 64 floats (0 <= x < 2^kBits, truncated): a byte each, or with 4 bits the even one in the low half.
// values64 unpacks them again.
#if GRADWIRE_ISA == 512

inline Vec truncate(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
inline float least(Vec x) { return _mm512_reduce_min_ps(x); }
inline float greatest(Vec x) { return _mm512_reduce_max_ps(x); }
template <int kBits>
inline void codes64(const Vec* x, uint8_t* out) {
  const __m512i low = _mm512_packus_epi32(_mm512_cvttps_epi32(x[0]), _mm512_cvttps_epi32(x[1]));
  const __m512i high = _mm512_packus_epi32(_mm512_cvttps_epi32(x[2]), _mm512_cvttps_epi32(x[3]));
  // The packs work within quarters of the register: put the fours of elements in order again.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
  if (kBits == 8) {
    _mm512_storeu_si512(out, bytes);
  } else {  // even + 16 * odd
    const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(pairs));
  }
}
inline Vec value16(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }

#elif GRADWIRE_ISA == 2

inline Vec truncate(Vec x) {
  constexpr int kToZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kToZero), _mm256_round_ps(x.b, kToZero)};
}
inline float least(Vec x) {
  const __m256 eight = _mm256_min_ps(x.a, x.b);
  __m128 four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_min_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_min_ss(four, _mm_movehdup_ps(four)));
}
inline float greatest(Vec x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline __m256i bytes32(Vec x, Vec y) {
  const __m256i low = _mm256_packus_epi32(_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b));
  const __m256i high = _mm256_packus_epi32(_mm256_cvttps_epi32(y.a), _mm256_cvttps_epi32(y.b));
  // The packs work within halves of the register: put the fours of elements in order again.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
}
template <int kBits>
inline void codes64(const Vec* x, uint8_t* out) {
  const __m256i low = bytes32(x[0], x[1]), high = bytes32(x[2], x[3]);
  __m256i* at = reinterpret_cast<__m256i*>(out);
  if (kBits == 8) {
    _mm256_storeu_si256(at, low), _mm256_storeu_si256(at + 1, high);
  } else {  // even + 16 * odd
    const __m256i weights = _mm256_set1_epi16(0x1001);
    const __m256i pairs = _mm256_packus_epi16(_mm256_maddubs_epi16(low, weights), _mm256_maddubs_epi16(high, weights));
    _mm256_storeu_si256(at, _mm256_permute4x64_epi64(pairs, 0xd8));
  }
}
inline Vec value16(__m128i bytes) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
}

#elif GRADWIRE_ISA == 128

inline Vec truncate(Vec x) { return {vrndq_f32(x.q[0]), vrndq_f32(x.q[1]), vrndq_f32(x.q[2]), vrndq_f32(x.q[3])}; }
inline float least(Vec x) { return vminvq_f32(vminq_f32(vminq_f32(x.q[0], x.q[1]), vminq_f32(x.q[2], x.q[3]))); }
inline float greatest(Vec x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.q[0], x.q[1]), vmaxq_f32(x.q[2], x.q[3]))); }
inline uint8x16_t codes16(Vec x) {
  uint32x4_t words[4];
  for (int i = 0; i < 4; ++i) words[i] = vcvtq_u32_f32(x.q[i]);
  return bytes16(words);
}
template <int kBits>
inline void codes64(const Vec* x, uint8_t* out) {
  for (int j = 0; j < 4; j += 2) {
    const uint8x16_t low = codes16(x[j]), high = codes16(x[j + 1]);
    if (kBits == 8) vst1q_u8(out + 16 * j, low), vst1q_u8(out + 16 * j + 16, high);
    else vst1q_u8(out + 8 * j, vsliq_n_u8(vuzp1q_u8(low, high), vuzp2q_u8(low, high), 4));  // even + 16 * odd
  }
}
inline Vec value16(uint8x16_t bytes) {
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
          vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))};
}
template <int kBits>
inline void values64(const uint8_t* codes, Vec* x) {
  if (kBits == 8) {
    for (int i = 0; i < 4; ++i) x[i] = value16(vld1q_u8(codes + 16 * i));
  } else {
    for (int i = 0; i < 2; ++i) {
      const uint8x16_t pairs = vld1q_u8(codes + 16 * i);
      const uint8x16_t even = vandq_u8(pairs, vdupq_n_u8(0x0f)), odd = vshrq_n_u8(pairs, 4);
      x[2 * i] = value16(vzip1q_u8(even, odd)), x[2 * i + 1] = value16(vzip2q_u8(even, odd));
    }
  }
}

#else

inline Vec truncate(const Vec& x) {
  Vec result;
  for (int i = 0; i < 16; ++i) result.lane[i] = static_cast<float>(static_cast<int32_t>(x.lane[i]));
  return result;
}
inline float least(const Vec& x) {
  float result = x.lane[0];
  for (float lane : x.lane) result = lane < result ? lane : result;
  return result;
}
inline float greatest(const Vec& x) {
  float result = x.lane[0];
  for (float lane : x.lane) result = lane > result ? lane : result;
  return result;
}
template <int kBits>
inline void codes64(const Vec* x, uint8_t* out) {
  uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(static_cast<int32_t>(x[i / 16].lane[i % 16]));
  if (kBits == 8) std::memcpy(out, bytes, sizeof bytes);
  else
    for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(bytes[2 * i] | bytes[2 * i + 1] << 4);
}

template <int kBits>
inline void values64(const uint8_t* codes, Vec* x) {
  for (int i = 0; i < 64; ++i)
    x[i / 16].lane[i % 16] = static_cast<float>(kBits == 8 ? codes[i] : codes[i / 2] >> 4 * (i % 2) & 0xf);
}

#endif

#if GRADWIRE_ISA == 2 || GRADWIRE_ISA == 512
template <int kBits>
inline void values64(const uint8_t* codes, Vec* x) {
  if (kBits == 8) {
    for (int i = 0; i < 4; ++i) x[i] = value16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + i));
  } else {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), ones = _mm256_set1_epi8(0x0f);
    const __m256i even = _mm256_and_si256(pairs, ones), odd = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), ones);
    // The unpacks work within halves of the register: elements 0 to 15 and 32 to 47, 16 to 31 and 48 to 63.
    const __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
    x[0] = value16(_mm256_castsi256_si128(low)), x[1] = value16(_mm256_castsi256_si128(high));
    x[2] = value16(_mm256_extracti128_si256(low, 1)), x[3] = value16(_mm256_extracti128_si256(high, 1));
  }
}
#endif

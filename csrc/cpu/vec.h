// Sixteen floats and the dozen operations the kernels need, for one instruction set.
//
// Included inside a namespace by foreach_isa.h, once for each value of GRADWIRE_ISA (0 plain, 2 AVX2, 128 NEON, 512
// AVX-512); no include guard.
// No fused multiply-add anywhere: a product and a sum round the same on every processor, and ranks must agree.
#if GRADWIRE_ISA == 512

using Vec = __m512;
inline Vec load(const float* at) { return _mm512_loadu_ps(at); }
inline void store(float* at, Vec x) { _mm512_storeu_ps(at, x); }
inline void stream(float* at, Vec x) { _mm512_stream_ps(at, x); }
inline Vec fill(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec minimum(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec absolute(Vec x) { return _mm512_abs_ps(x); }
inline uint16_t nonnegative(Vec x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ); }
inline uint16_t at_least(Vec x, uint32_t key) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  return _mm512_cmp_epu32_mask(bits, _mm512_set1_epi32(static_cast<int>(key)), _MM_CMPINT_NLT);
}
inline uint16_t unordered(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline Vec signed_by(Vec x, uint32_t bits, int first) {  // no mask registers: moves into them are the scarce resource
  const __m512i lanes = _mm512_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16);
  const __m512i shifts = _mm512_sub_epi32(lanes, _mm512_set1_epi32(first));
  const __m512i set = _mm512_sllv_epi32(_mm512_set1_epi32(static_cast<int>(bits)), shifts);
  const __m512i top = _mm512_set1_epi32(INT32_MIN);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(x), set, top, 0xd2));  // x ^ (~set & top)
}
inline void to_half(uint16_t* at, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec from_half(const uint16_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline void to_bfloat(uint16_t* at, Vec x) {
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(bits, 16), one));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(words));
}
inline Vec from_bfloat(const uint16_t* at) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
inline void fence() { _mm_sfence(); }

#elif GRADWIRE_ISA == 2

struct Vec {
  __m256 a, b;
};
inline Vec load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
inline void store(float* at, Vec x) { _mm256_storeu_ps(at, x.a), _mm256_storeu_ps(at + 8, x.b); }
inline void stream(float* at, Vec x) { _mm256_stream_ps(at, x.a), _mm256_stream_ps(at + 8, x.b); }
inline Vec fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec minimum(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Vec maximum(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline __m256 magnitude8(__m256 x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
inline Vec absolute(Vec x) { return {magnitude8(x.a), magnitude8(x.b)}; }
inline uint16_t pair_bits(__m256 a, __m256 b) {
  return static_cast<uint16_t>(_mm256_movemask_ps(a) | _mm256_movemask_ps(b) << 8);
}
inline uint16_t nonnegative(Vec x) {
  const __m256 zero = _mm256_setzero_ps();
  return pair_bits(_mm256_cmp_ps(x.a, zero, _CMP_GE_OQ), _mm256_cmp_ps(x.b, zero, _CMP_GE_OQ));
}
inline uint16_t at_least(Vec x, uint32_t key) {  // magnitudes have no sign bit: the signed comparison is right
  const __m256i below = _mm256_set1_epi32(static_cast<int>(key) - 1);
  return pair_bits(_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_castps_si256(magnitude8(x.a)), below)),
                   _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_castps_si256(magnitude8(x.b)), below)));
}
inline uint16_t unordered(Vec x, Vec y) {
  return pair_bits(_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q));
}
inline __m256 signed8(__m256 x, uint32_t bits, int first) {
  const __m256i lanes = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256i shifts = _mm256_sub_epi32(lanes, _mm256_set1_epi32(first));
  const __m256i set = _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(bits)), shifts);
  const __m256i flip = _mm256_andnot_si256(set, _mm256_set1_epi32(INT32_MIN));
  return _mm256_xor_ps(x, _mm256_castsi256_ps(flip));
}
inline Vec signed_by(Vec x, uint32_t bits, int first) {
  return {signed8(x.a, bits, first), signed8(x.b, bits, first + 8)};
}
inline void to_half(uint16_t* at, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec from_half(const uint16_t* at) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 8)))};
}
inline __m256i bfloat8(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(_mm256_srli_epi32(bits, 16), one));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
inline void to_bfloat(uint16_t* at, Vec x) {  // the pack works within halves of the register: put them in order again
  const __m256i packed = _mm256_packus_epi32(bfloat8(x.a), bfloat8(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline __m256 bfloat8_back(const uint16_t* at) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
inline Vec from_bfloat(const uint16_t* at) { return {bfloat8_back(at), bfloat8_back(at + 8)}; }
inline void fence() { _mm_sfence(); }

#elif GRADWIRE_ISA == 128

struct Vec {
  float32x4_t q[4];
};
#define GRADWIRE_QUARTERS(expression)                      \
  do {                                                     \
    for (int i = 0; i < 4; ++i) result.q[i] = expression;  \
  } while (0)
inline Vec load(const float* at) { Vec result; GRADWIRE_QUARTERS(vld1q_f32(at + 4 * i)); return result; }
inline void store(float* at, Vec x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(at + 4 * i, x.q[i]);
}
inline void stream(float* at, Vec x) { store(at, x); }  // Arm's non-temporal stores have no intrinsic, and are a hint only
inline Vec fill(float x) { Vec result; GRADWIRE_QUARTERS(vdupq_n_f32(x)); return result; }
inline Vec add(Vec a, Vec b) { Vec result; GRADWIRE_QUARTERS(vaddq_f32(a.q[i], b.q[i])); return result; }
inline Vec sub(Vec a, Vec b) { Vec result; GRADWIRE_QUARTERS(vsubq_f32(a.q[i], b.q[i])); return result; }
inline Vec mul(Vec a, Vec b) { Vec result; GRADWIRE_QUARTERS(vmulq_f32(a.q[i], b.q[i])); return result; }
// Compared and selected: FMIN and FMAX treat NaN and the two zeros in another way than the other instruction sets.
inline Vec minimum(Vec a, Vec b) {
  Vec result; GRADWIRE_QUARTERS(vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); return result;
}
inline Vec maximum(Vec a, Vec b) {
  Vec result; GRADWIRE_QUARTERS(vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); return result;
}
inline Vec absolute(Vec x) { Vec result; GRADWIRE_QUARTERS(vabsq_f32(x.q[i])); return result; }
// The low bytes of sixteen words of 32 bits, in order.
inline uint8x16_t bytes16(const uint32x4_t* words) {
  const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(words[0]), vreinterpretq_u16_u32(words[1]));
  const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_u32(words[2]), vreinterpretq_u16_u32(words[3]));
  return vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
}
// A bit for each of sixteen lanes that are all ones or all zeros.
inline uint16_t lane_bits(const uint32x4_t* lanes) {
  const uint8x8_t weights = vcreate_u8(0x8040201008040201u);
  const uint8x16_t marks = vandq_u8(bytes16(lanes), vcombine_u8(weights, weights));
  return static_cast<uint16_t>(vaddv_u8(vget_low_u8(marks)) | vaddv_u8(vget_high_u8(marks)) << 8);
}
inline uint16_t nonnegative(Vec x) {
  uint32x4_t lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = vcgezq_f32(x.q[i]);
  return lane_bits(lanes);
}
inline uint16_t at_least(Vec x, uint32_t key) {
  uint32x4_t lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = vcgeq_u32(vreinterpretq_u32_f32(vabsq_f32(x.q[i])), vdupq_n_u32(key));
  return lane_bits(lanes);
}
inline uint16_t unordered(Vec a, Vec b) {
  uint32x4_t lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = vmvnq_u32(vandq_u32(vceqq_f32(a.q[i], a.q[i]), vceqq_f32(b.q[i], b.q[i])));
  return lane_bits(lanes);
}
inline Vec signed_by(Vec x, uint32_t bits, int first) {  // shifts the bit of each lane to the place of the sign
  const int32x4_t places = vcombine_s32(vcreate_s32(uint64_t{30} << 32 | 31), vcreate_s32(uint64_t{28} << 32 | 29));
  const uint32x4_t all = vdupq_n_u32(bits), top = vdupq_n_u32(0x80000000u);
  Vec result;
  GRADWIRE_QUARTERS(vreinterpretq_f32_u32(veorq_u32(
      vreinterpretq_u32_f32(x.q[i]), vbicq_u32(top, vshlq_u32(all, vsubq_s32(places, vdupq_n_s32(first + 4 * i)))))));
  return result;
}
inline void to_half(uint16_t* at, Vec x) {
  for (int i = 0; i < 4; ++i) vst1_u16(at + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.q[i])));
}
inline Vec from_half(const uint16_t* at) {
  Vec result; GRADWIRE_QUARTERS(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at + 4 * i)))); return result;
}
inline uint16x4_t bfloat4(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint16x4_t rounded = vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  return vbsl_u16(vmovn_u32(vceqq_f32(x, x)), rounded, vdup_n_u16(0x7fc0));
}
inline void to_bfloat(uint16_t* at, Vec x) {
  for (int i = 0; i < 4; ++i) vst1_u16(at + 4 * i, bfloat4(x.q[i]));
}
inline Vec from_bfloat(const uint16_t* at) {
  Vec result; GRADWIRE_QUARTERS(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at + 4 * i), 16))); return result;
}
inline void fence() {}
#undef GRADWIRE_QUARTERS

#else

struct Vec {
  float lane[16];
};
#define GRADWIRE_LANES(expression)                            \
  do {                                                        \
    for (int i = 0; i < 16; ++i) result.lane[i] = expression; \
  } while (0)
inline Vec load(const float* at) {
  Vec result;
  std::memcpy(result.lane, at, sizeof result.lane);
  return result;
}
inline void store(float* at, const Vec& x) { std::memcpy(at, x.lane, sizeof x.lane); }
inline void stream(float* at, const Vec& x) { store(at, x); }
inline Vec fill(float x) { Vec result; GRADWIRE_LANES(x); return result; }
inline Vec add(const Vec& a, const Vec& b) { Vec result; GRADWIRE_LANES(a.lane[i] + b.lane[i]); return result; }
inline Vec sub(const Vec& a, const Vec& b) { Vec result; GRADWIRE_LANES(a.lane[i] - b.lane[i]); return result; }
inline Vec mul(const Vec& a, const Vec& b) { Vec result; GRADWIRE_LANES(a.lane[i] * b.lane[i]); return result; }
inline Vec minimum(const Vec& a, const Vec& b) {
  Vec result; GRADWIRE_LANES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); return result;
}
inline Vec maximum(const Vec& a, const Vec& b) {
  Vec result; GRADWIRE_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); return result;
}
inline Vec absolute(const Vec& x) { Vec result; GRADWIRE_LANES(std::fabs(x.lane[i])); return result; }
inline uint16_t nonnegative(const Vec& x) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(x.lane[i] >= 0.0f) << i;
  return static_cast<uint16_t>(bits);
}
inline uint16_t at_least(const Vec& x, uint32_t key) {
  uint32_t bits = 0, lane[16];
  std::memcpy(lane, x.lane, sizeof lane);
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>((lane[i] & 0x7fffffffu) >= key) << i;
  return static_cast<uint16_t>(bits);
}
inline uint16_t unordered(const Vec& a, const Vec& b) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(a.lane[i] != a.lane[i] || b.lane[i] != b.lane[i]) << i;
  return static_cast<uint16_t>(bits);
}
inline Vec signed_by(const Vec& x, uint32_t bits, int first) {
  Vec result; GRADWIRE_LANES(bits >> (first + i) & 1 ? x.lane[i] : -x.lane[i]); return result;
}
inline void to_half(uint16_t* at, const Vec& x) {
  for (int i = 0; i < 16; ++i) at[i] = half_from_float(x.lane[i]);
}
inline Vec from_half(const uint16_t* at) { Vec result; GRADWIRE_LANES(float_from_half(at[i])); return result; }
inline void to_bfloat(uint16_t* at, const Vec& x) {
  for (int i = 0; i < 16; ++i) at[i] = bfloat_from_float(x.lane[i]);
}
inline Vec from_bfloat(const uint16_t* at) { Vec result; GRADWIRE_LANES(float_from_bfloat(at[i])); return result; }
inline void fence() {}
#undef GRADWIRE_LANES

#endif

inline float sum_lanes(Vec x) {  // a fixed tree, the same on every instruction set
  alignas(64) float lane[16];
  store(lane, x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

inline void put(float* at, Vec x, bool past_cache) {
  if (past_cache) stream(at, x);
  else store(at, x);
}

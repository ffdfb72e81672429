// Sixteen floats and the dozen operations the kernels need, for one instruction set.
//
// Included inside a namespace by foreach_isa.h, once for each value of GRADWIRE_ISA (0, 2, 512); no include guard.
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

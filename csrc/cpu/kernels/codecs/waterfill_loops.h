// The loops of waterfill.cpp for one instruction set; included by foreach_isa.h, no include guard.

#include "codes.h"

// 64 codes of two blocks to words, a bit of each of a block's codes in a word; and back to numbers. A block's eight words
// are written and read, of which the first `width` are its own: the second block's overwrite the others.
//
// 64 bits are eight rows of eight: turned, the bytes of eight codes are their first bits, their second bits, ... Then the
// byte of each eight of a block's codes that holds the same bit goes into the same word. Source: Warren, Hacker's Delight,
// section 7-3.
#if GRADWIRE_ISA == 512

template <int kShift>
inline __m512i swap_bits(__m512i x, int64_t mask) {
  const __m512i m = _mm512_set1_epi64(mask);
  const __m512i t = _mm512_ternarylogic_epi64(x, _mm512_srli_epi64(x, kShift), m, 0x28);  // (x ^ shifted) & m
  return _mm512_ternarylogic_epi64(x, t, _mm512_slli_epi64(t, kShift), 0x96);             // x ^ t ^ shifted
}
inline __m512i turned(__m512i x) {
  x = swap_bits<7>(x, 0x00aa00aa00aa00aa);
  x = swap_bits<14>(x, 0x0000cccc0000cccc);
  return swap_bits<28>(x, 0x00000000f0f0f0f0);
}
inline __m512i fours() {  // within each 16 bytes, four rows of four turn into columns
  return _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}
inline void planes64(const uint8_t* codes, uint32_t* first, uint32_t* second) {
  const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  const __m512i x = _mm512_permutexvar_epi32(order, turned(_mm512_loadu_si512(codes)));
  const __m512i words = _mm512_shuffle_epi8(x, fours());
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm512_castsi512_si256(words));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), _mm512_extracti64x4_epi64(words, 1));
}
inline void codes64_of(const uint8_t* first, int width, const uint8_t* second, int second_width, Vec* values) {
  const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  x = _mm512_inserti64x4(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1);
  x = turned(_mm512_permutexvar_epi32(order, _mm512_shuffle_epi8(x, fours())));
  __m512i mask = _mm512_castsi256_si512(_mm256_set1_epi64x(static_cast<int64_t>(kMasks[width])));
  mask = _mm512_inserti64x4(mask, _mm256_set1_epi64x(static_cast<int64_t>(kMasks[second_width])), 1);
  x = _mm512_and_si512(x, mask);
  values[0] = value16(_mm512_castsi512_si128(x)), values[1] = value16(_mm512_extracti32x4_epi32(x, 1));
  values[2] = value16(_mm512_extracti32x4_epi32(x, 2)), values[3] = value16(_mm512_extracti32x4_epi32(x, 3));
}

#elif GRADWIRE_ISA == 2

template <int kShift>
inline __m256i swap_bits(__m256i x, int64_t mask) {
  const __m256i t = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, kShift)), _mm256_set1_epi64x(mask));
  return _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, kShift)));
}
inline __m256i turned(__m256i x) {
  x = swap_bits<7>(x, 0x00aa00aa00aa00aa);
  x = swap_bits<14>(x, 0x0000cccc0000cccc);
  return swap_bits<28>(x, 0x00000000f0f0f0f0);
}
inline __m256i fours() {
  return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}
inline void planes32(const uint8_t* codes, uint32_t* words) {
  const __m256i x = turned(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m256i y = _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm256_shuffle_epi8(y, fours()));
}
inline void planes64(const uint8_t* codes, uint32_t* first, uint32_t* second) {
  planes32(codes, first), planes32(codes + kBlock, second);
}
inline void codes32_of(const uint8_t* words, int width, Vec* values) {
  const __m256i x = _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)), fours());
  const __m256i y = turned(_mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  const __m256i codes = _mm256_and_si256(y, _mm256_set1_epi64x(static_cast<int64_t>(kMasks[width])));
  values[0] = value16(_mm256_castsi256_si128(codes)), values[1] = value16(_mm256_extracti128_si256(codes, 1));
}
inline void codes64_of(const uint8_t* first, int width, const uint8_t* second, int second_width, Vec* values) {
  codes32_of(first, width, values), codes32_of(second, second_width, values + 2);
}

#elif GRADWIRE_ISA == 128

template <int kShift>
inline uint64x2_t swap_bits(uint64x2_t x, uint64_t mask) {
  const uint64x2_t t = vandq_u64(veorq_u64(x, vshrq_n_u64(x, kShift)), vdupq_n_u64(mask));
  return veorq_u64(x, veorq_u64(t, vshlq_n_u64(t, kShift)));
}
inline uint8x16_t turned(uint8x16_t bytes) {
  uint64x2_t x = vreinterpretq_u64_u8(bytes);
  x = swap_bits<7>(x, 0x00aa00aa00aa00aau);
  x = swap_bits<14>(x, 0x0000cccc0000ccccu);
  return vreinterpretq_u8_u64(swap_bits<28>(x, 0x00000000f0f0f0f0u));
}
// The places for a table lookup: the bytes of `low`, then those of `high`, `first` added to each.
inline uint8x16_t places(uint64_t low, uint64_t high, uint8_t first) {
  return vaddq_u8(vcombine_u8(vcreate_u8(low), vcreate_u8(high)), vdupq_n_u8(first));
}
inline void planes32(const uint8_t* codes, uint32_t* words) {  // byte j of row g becomes byte g of word j
  const uint8x16x2_t rows = {{turned(vld1q_u8(codes)), turned(vld1q_u8(codes + 16))}};
  uint8_t* at = reinterpret_cast<uint8_t*>(words);
  vst1q_u8(at, vqtbl2q_u8(rows, places(0x1911090118100800u, 0x1b130b031a120a02u, 0)));
  vst1q_u8(at + 16, vqtbl2q_u8(rows, places(0x1911090118100800u, 0x1b130b031a120a02u, 4)));
}
inline void planes64(const uint8_t* codes, uint32_t* first, uint32_t* second) {
  planes32(codes, first), planes32(codes + kBlock, second);
}
inline void codes32_of(const uint8_t* words, int width, Vec* values) {
  const uint8x16x2_t planes = {{vld1q_u8(words), vld1q_u8(words + 16)}};
  const uint8x16_t mask = vreinterpretq_u8_u64(vdupq_n_u64(kMasks[width]));
  const uint8x16_t low = vqtbl2q_u8(planes, places(0x1c1814100c080400u, 0x1d1915110d090501u, 0));
  const uint8x16_t high = vqtbl2q_u8(planes, places(0x1c1814100c080400u, 0x1d1915110d090501u, 2));
  values[0] = value16(vandq_u8(turned(low), mask)), values[1] = value16(vandq_u8(turned(high), mask));
}
inline void codes64_of(const uint8_t* first, int width, const uint8_t* second, int second_width, Vec* values) {
  codes32_of(first, width, values), codes32_of(second, second_width, values + 2);
}

#else

template <int kShift>
inline uint64_t swap_bits(uint64_t x, uint64_t mask) {
  const uint64_t t = (x ^ x >> kShift) & mask;
  return x ^ t ^ t << kShift;
}
inline uint64_t turned(uint64_t x) {
  x = swap_bits<7>(x, 0x00aa00aa00aa00aau);
  x = swap_bits<14>(x, 0x0000cccc0000ccccu);
  return swap_bits<28>(x, 0x00000000f0f0f0f0u);
}
inline void planes32(const uint8_t* codes, uint32_t* words) {
  uint32_t out[8] = {};
  for (int g = 0; g < 4; ++g) {
    uint64_t x;
    std::memcpy(&x, codes + 8 * g, sizeof x);
    x = turned(x);
    for (int j = 0; j < 8; ++j) out[j] |= static_cast<uint32_t>(x >> 8 * j & 0xff) << 8 * g;
  }
  std::memcpy(words, out, sizeof out);
}
inline void planes64(const uint8_t* codes, uint32_t* first, uint32_t* second) {
  planes32(codes, first), planes32(codes + kBlock, second);
}
inline void codes32_of(const uint8_t* words, int width, Vec* values) {
  for (int g = 0; g < 4; ++g) {
    uint64_t x = 0;
    for (int j = 0; j < 8; ++j) x |= static_cast<uint64_t>(words[4 * j + g]) << 8 * j;
    x = turned(x) & kMasks[width];
    for (int i = 0; i < 8; ++i) values[g / 2].lane[g % 2 * 8 + i] = static_cast<float>(x >> 8 * i & 0xff);
  }
}
inline void codes64_of(const uint8_t* first, int width, const uint8_t* second, int second_width, Vec* values) {
  codes32_of(first, width, values), codes32_of(second, second_width, values + 2);
}

#endif

// Bits of as many blocks as a register has bytes, at a level: fill_width of common/waterfill_formula.h; and their sum.
#if GRADWIRE_ISA == 512

using Bytes = __m512i;
inline Bytes load_bytes(const uint8_t* at) { return _mm512_loadu_si512(at); }
inline void store_bytes(uint8_t* at, Bytes x) { _mm512_storeu_si512(at, x); }
inline Bytes subtract(Bytes x, Bytes y) { return _mm512_sub_epi8(x, y); }
inline Bytes widths_at(int level, Bytes octaves, Bytes eighths, Bytes least) {
  const Bytes one = _mm512_set1_epi8(1), most = _mm512_set1_epi8(static_cast<char>((level >> 3) + 1));
  const __mmask64 past = _mm512_cmpgt_epi8_mask(eighths, _mm512_set1_epi8(static_cast<char>(level & 7)));
  const Bytes missing = _mm512_mask_add_epi8(octaves, past, octaves, one);
  return _mm512_max_epu8(_mm512_min_epu8(_mm512_subs_epu8(most, missing), _mm512_set1_epi8(kFillMostWidth)), least);
}
inline int sum_bytes(Bytes x) {
  alignas(64) uint64_t eight[8];  // _mm512_reduce_add_epi64 makes GCC 12 warn of itself
  _mm512_store_si512(eight, _mm512_sad_epu8(x, _mm512_setzero_si512()));
  return static_cast<int>((eight[0] + eight[1]) + (eight[2] + eight[3]) + ((eight[4] + eight[5]) + (eight[6] + eight[7])));
}
inline Bytes add_bytes(Bytes x, Bytes y) { return _mm512_add_epi8(x, y); }

#elif GRADWIRE_ISA == 2

using Bytes = __m256i;
inline Bytes load_bytes(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline void store_bytes(uint8_t* at, Bytes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), x); }
inline Bytes subtract(Bytes x, Bytes y) { return _mm256_sub_epi8(x, y); }
inline Bytes widths_at(int level, Bytes octaves, Bytes eighths, Bytes least) {
  const Bytes most = _mm256_set1_epi8(static_cast<char>((level >> 3) + 1));
  const Bytes past = _mm256_cmpgt_epi8(eighths, _mm256_set1_epi8(static_cast<char>(level & 7)));
  const Bytes missing = _mm256_sub_epi8(octaves, past);
  return _mm256_max_epu8(_mm256_min_epu8(_mm256_subs_epu8(most, missing), _mm256_set1_epi8(kFillMostWidth)), least);
}
inline int sum_bytes(Bytes x) {
  const __m256i four = _mm256_sad_epu8(x, _mm256_setzero_si256());
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return static_cast<int>(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1));
}
inline Bytes add_bytes(Bytes x, Bytes y) { return _mm256_add_epi8(x, y); }

#elif GRADWIRE_ISA == 128

struct Bytes {
  uint8x16_t low, high;
};
inline Bytes load_bytes(const uint8_t* at) { return {vld1q_u8(at), vld1q_u8(at + 16)}; }
inline void store_bytes(uint8_t* at, Bytes x) { vst1q_u8(at, x.low), vst1q_u8(at + 16, x.high); }
inline Bytes subtract(Bytes x, Bytes y) { return {vsubq_u8(x.low, y.low), vsubq_u8(x.high, y.high)}; }
inline uint8x16_t widths16_at(int level, uint8x16_t octaves, uint8x16_t eighths, uint8x16_t least) {
  const uint8x16_t most = vdupq_n_u8(static_cast<uint8_t>((level >> 3) + 1));
  const uint8x16_t past = vcgtq_u8(eighths, vdupq_n_u8(static_cast<uint8_t>(level & 7)));
  const uint8x16_t missing = vsubq_u8(octaves, past);
  return vmaxq_u8(vminq_u8(vqsubq_u8(most, missing), vdupq_n_u8(kFillMostWidth)), least);
}
inline Bytes widths_at(int level, Bytes octaves, Bytes eighths, Bytes least) {
  return {widths16_at(level, octaves.low, eighths.low, least.low),
          widths16_at(level, octaves.high, eighths.high, least.high)};
}
inline int sum_bytes(Bytes x) { return vaddlvq_u8(x.low) + vaddlvq_u8(x.high); }
inline Bytes add_bytes(Bytes x, Bytes y) { return {vaddq_u8(x.low, y.low), vaddq_u8(x.high, y.high)}; }

#else

struct Bytes {
  uint8_t at[32];
};
inline Bytes load_bytes(const uint8_t* at) {
  Bytes x;
  std::memcpy(x.at, at, sizeof x.at);
  return x;
}
inline void store_bytes(uint8_t* at, const Bytes& x) { std::memcpy(at, x.at, sizeof x.at); }
inline Bytes subtract(Bytes x, const Bytes& y) {
  for (int i = 0; i < 32; ++i) x.at[i] = static_cast<uint8_t>(x.at[i] - y.at[i]);
  return x;
}
inline Bytes widths_at(int level, const Bytes& octaves, const Bytes& eighths, const Bytes& least) {
  Bytes x;
  for (int i = 0; i < 32; ++i) {
    const int width = (level >> 3) + 1 - octaves.at[i] - (eighths.at[i] > (level & 7) ? 1 : 0);
    x.at[i] = static_cast<uint8_t>(width < least.at[i] ? least.at[i] : width > kFillMostWidth ? kFillMostWidth : width);
  }
  return x;
}
inline int sum_bytes(const Bytes& x) {
  int sum = 0;
  for (int i = 0; i < 32; ++i) sum += x.at[i];
  return sum;
}
inline Bytes add_bytes(Bytes x, const Bytes& y) {
  for (int i = 0; i < 32; ++i) x.at[i] = static_cast<uint8_t>(x.at[i] + y.at[i]);
  return x;
}

#endif

inline int words_at(int level, const Shares& shares) {
  static_assert(kBlocks / sizeof(Bytes) * kFillMostWidth < 256, "sums fit a byte");
  Bytes sums = widths_at(level, load_bytes(shares.octaves), load_bytes(shares.eighths), load_bytes(shares.least));
  for (size_t b = sizeof(Bytes); b < kBlocks; b += sizeof(Bytes))
    sums = add_bytes(sums, widths_at(level, load_bytes(shares.octaves + b), load_bytes(shares.eighths + b), load_bytes(shares.least + b)));
  return sum_bytes(sums);
}

// Works out widths, and from them units and lows, from the record's bytes; see common/waterfill_formula.h.
inline void share_out(int bits, const uint8_t* below, int words, Shares& shares) {
  const uint8_t some = static_cast<uint8_t>(fill_least(bits));
  for (size_t b = 0; b < kBlocks; ++b) {
    const uint8_t octaves = below[b] >> 3;
    shares.least[b] = below[b] == kFillEmpty ? 0 : some;
    shares.octaves[b] = below[b] == kFillEmpty ? kNoOctaves : octaves;
    shares.eighths[b] = below[b] & 7;
  }
  int level = -1;
  for (int step = 256; step > 0; step /= 2)
    if (level + step < kFillLevels && words_at(level + step, shares) < words) level += step;
  int left = words - words_at(level, shares);
  alignas(64) uint8_t more[kBlocks];
  for (size_t b = 0; b < kBlocks; b += sizeof(Bytes)) {
    const Bytes octaves = load_bytes(shares.octaves + b), eighths = load_bytes(shares.eighths + b);
    const Bytes least = load_bytes(shares.least + b);
    const Bytes widths = widths_at(level, octaves, eighths, least);
    store_bytes(shares.widths + b, widths);
    store_bytes(more + b, subtract(widths_at(level + 1, octaves, eighths, least), widths));
  }
  for (size_t first = 0; first < kBlocks && left > 0; first += sizeof(Bytes)) {
    const Bytes some = load_bytes(more + first);
    const int wanted = sum_bytes(some);
    if (wanted <= left) {
      store_bytes(shares.widths + first, add_bytes(load_bytes(shares.widths + first), some));
      left -= wanted;
      continue;
    }
    for (size_t b = first; left > 0; ++b)
      if (more[b]) ++shares.widths[b], --left;
  }
  for (size_t b = 0; b < kBlocks; ++b) {
    const float step = fill_step(shares.base, below[b], shares.widths[b]);
    shares.unit[b] = 2.0f * step;
    shares.low[b] = static_cast<float>(1 - (1 << shares.widths[b])) * step;
  }
}

// p = gradient + residual (which may lie in the same place), zeros up to a multiple of 64; the largest magnitude's bits
// of each of `blocks` blocks. Returns the largest of all, or that of NaN where there is one. Without a residual and a
// place for p, the gradient has whole blocks and is only looked at.
inline uint32_t gather(const float* gradient, const float* residual, size_t count, float* p, uint32_t* peaks) {
  uint32_t all = 0, nan = 0;
  size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    Vec x = load(gradient + i), y = load(gradient + i + 16);
    if (residual) x = add(x, load(residual + i)), y = add(y, load(residual + i + 16));
    if (p) store(p + i, x), store(p + i + 16, y);
    nan |= unordered(x, y);
    peaks[i / kBlock] = bits_of_float(greatest(maximum(absolute(x), absolute(y))));
  }
  if (i < count) {
    uint32_t peak = 0;
    for (; i < count; ++i) {
      p[i] = residual ? gradient[i] + residual[i] : gradient[i];
      peak = std::max(peak, bits_of_float(p[i]) & 0x7fffffffu);
    }
    peaks[(count - 1) / kBlock] = peak;
  }
  if (p)
    for (; i % 64 != 0; ++i) p[i] = 0.0f;
  for (size_t b = 0; b < (count + kBlock - 1) / kBlock; ++b) all = std::max(all, peaks[b]);
  return nan ? 0x7fc00000u : all;
}

// A group with inf or NaN: NaN for the scale and for the new residual.
inline void encode_special(float* new_residual, uint8_t* record, size_t count, int bits) {
  std::memset(record, 0, record_nbytes(count, bits));
  std::memcpy(record, &kFillNan, sizeof kFillNan);
  for (size_t i = 0; new_residual && i < count; ++i) new_residual[i] = float_of_bits(0x7fc00000u);
}

// Encodes a group whose largest magnitudes are known: p, of which `count` elements exist and zeros follow up to a
// multiple of 64. What the two later pointers point to is prefetched meanwhile.
inline void encode_group(int bits, const float* p, const uint32_t* peaks, uint32_t peak, const float* later,
                         const float* later_residual, float* new_residual, bool past_cache, uint8_t* record,
                         size_t count) {
  const int blocks = fill_blocks(static_cast<int>(count)), words = fill_words(blocks, bits);
  Shares shares;
  shares.base = fill_scale(peak);
  alignas(64) uint8_t below[kBlocks];
  for (size_t b = 0; b < kBlocks; ++b)
    below[b] = static_cast<uint8_t>(
        fill_below(shares.base, b < static_cast<size_t>(blocks) ? fill_scale(peaks[b]) : 0));
  std::memset(record, 0, static_cast<size_t>(fill_head_nbytes(blocks)));
  std::memcpy(record, &shares.base, sizeof shares.base);
  std::memcpy(record + 4, below, static_cast<size_t>(blocks));
  share_out(bits, below, words, shares);
  alignas(64) float inverse[kBlocks], half[kBlocks];
  for (size_t b = 0; b < kBlocks; ++b) {
    inverse[b] = shares.unit[b] > 0.0f ? 1.0f / shares.unit[b] : 0.0f;
    half[b] = 0.5f * static_cast<float>(1 << shares.widths[b]);
  }
  uint32_t stream[kBlocks * static_cast<size_t>(kMostBits) + kFillMostWidth];
  uint32_t* cursor = stream;
  const Vec zero = fill(0.0f), one = fill(1.0f);
  for (size_t b = 0; b < static_cast<size_t>(blocks); b += 2) {
    Vec t[4];
    uint8_t codes[64];
    for (size_t j = 0; j < 4; ++j) {
      const size_t at = b * kBlock + 16 * j;
      __builtin_prefetch(later + at);
      if (later_residual) __builtin_prefetch(later_residual + at);
      const Vec x = load(p + at), middle = fill(half[b + j / 2]);
      t[j] = maximum(minimum(add(mul(x, fill(inverse[b + j / 2])), middle), sub(add(middle, middle), one)), zero);
      if (new_residual) {
        const Vec decoded = add(fill(shares.low[b + j / 2]), mul(truncate(t[j]), fill(shares.unit[b + j / 2])));
        put(new_residual + at, sub(x, decoded), past_cache);
      }
    }
    codes64<8>(t, codes);
    uint32_t* second = cursor + shares.widths[b];
    planes64(codes, cursor, second);
    cursor = second + shares.widths[b + 1];
  }
  std::memset(cursor, 0, static_cast<size_t>(stream + words - cursor) * sizeof(uint32_t));
  std::memcpy(record + fill_head_nbytes(blocks), stream, static_cast<size_t>(words) * sizeof(uint32_t));
}

// Encodes gradient + residual of one group; every pointer but the record's is to its first element, and `room` to that
// of a group's worth of floats, which may be the gradient itself.
inline void encode_some(int bits, const float* gradient, const float* residual, float* new_residual, bool past_cache,
                        uint8_t* record, size_t count, float* room) {
  uint32_t peaks[kBlocks];
  const bool direct = count == kGroup && !residual;
  const uint32_t peak = gather(gradient, residual, count, direct ? nullptr : room, peaks);
  if (peak >= 0x7f800000u) return encode_special(new_residual, record, count, bits);
  const float *p = direct ? gradient : room, *later = gradient + kGroup;
  const float* later_residual = residual ? residual + kGroup : nullptr;
  if (count % 64 == 0 || !new_residual)
    return encode_group(bits, p, peaks, peak, later, later_residual, new_residual, past_cache, record, count);
  alignas(64) float rest[kGroup];
  encode_group(bits, p, peaks, peak, later, later_residual, rest, false, record, count);
  std::memcpy(new_residual, rest, count * sizeof(float));
}

inline void encode(int bits, const float* gradient, const float* residual, float* new_residual, uint8_t* payload,
                   size_t numel) {
  alignas(64) float room[kGroup];
  const bool past_cache = streams(new_residual, gradient, residual, numel);
  const size_t nbytes = record_nbytes(kGroup, bits);
  for (size_t start = 0; start < numel; start += kGroup, payload += nbytes)
    encode_some(bits, gradient + start, residual ? residual + start : nullptr,
                new_residual ? new_residual + start : nullptr, past_cache, payload, std::min(kGroup, numel - start),
                room);
  if (past_cache) fence();
}

// Reads the scales of a worker's record of `count` elements. Blocks are read 32 bytes at a time, more than the record of
// a short last group has: what no full record follows is `near_the_end`, and copied to where there is room behind it.
inline void read_record(int bits, const uint8_t* record, size_t count, bool near_the_end, Decoding& decoding) {
  if (near_the_end) {
    std::memcpy(decoding.record, record, record_nbytes(count, bits));
    record = decoding.record;
  }
  const int blocks = fill_blocks(static_cast<int>(count));
  Shares& shares = decoding.shares;
  std::memcpy(&shares.base, record, sizeof shares.base);
  alignas(64) uint8_t below[kBlocks];
  std::memset(below, kFillEmpty, sizeof below);
  std::memcpy(below, record + 4, static_cast<size_t>(blocks));
  share_out(bits, below, fill_words(blocks, bits), shares);
  if (shares.base > kFillLargestScale)
    for (size_t b = 0; b < kBlocks; ++b) shares.unit[b] = shares.low[b] = float_of_bits(0x7fc00000u);
  decoding.words = record + fill_head_nbytes(blocks);
}

// target = addend + worker 0 + worker 1 + ... over 64 elements, two blocks from block b on.
inline void reduce64(std::vector<Decoding>& decodings, size_t b, const float* addend, float* target, bool past_cache) {
  Vec sum[4];
  for (int j = 0; j < 4; ++j) sum[j] = addend ? load(addend + 16 * j) : fill(0.0f);
  for (Decoding& from : decodings) {
    const Shares& shares = from.shares;
    const uint8_t* second = from.words + 4 * shares.widths[b];
    Vec x[4];
    codes64_of(from.words, shares.widths[b], second, shares.widths[b + 1], x);
    from.words = second + 4 * shares.widths[b + 1];
    for (size_t j = 0; j < 4; ++j)
      sum[j] = add(sum[j], add(fill(shares.low[b + j / 2]), mul(x[j], fill(shares.unit[b + j / 2]))));
  }
  for (int j = 0; j < 4; ++j) put(target + 16 * j, sum[j], past_cache);
}

// The group at `start`, of which `count` elements exist; `addend` and `target` point to it.
inline void reduce_group(int bits, const Payloads& payloads, size_t start, const float* addend, float* target,
                         size_t count, bool past_cache, std::vector<Decoding>& decodings) {
  const uint8_t* record = payloads.first + start / kGroup * record_nbytes(kGroup, bits);
  for (size_t w = 0; w < payloads.workers; ++w)
    read_record(bits, record + w * payloads.stride, count, start + 2 * kGroup > payloads.numel, decodings[w]);
  size_t at = 0;
  for (; at + 64 <= count; at += 64)
    reduce64(decodings, at / kBlock, addend ? addend + at : nullptr, target + at, past_cache);
  if (at == count) return;
  float before[64] = {}, after[64];
  if (addend) std::memcpy(before, addend + at, (count - at) * sizeof(float));
  reduce64(decodings, at / kBlock, before, after, false);
  std::memcpy(target + at, after, (count - at) * sizeof(float));
}

inline void decode_reduce(int bits, const Payloads& payloads, const float* addend, float* target) {
  std::vector<Decoding> decodings(payloads.workers);
  const bool past_cache = streams(target, addend, nullptr, payloads.numel);
  for (size_t start = 0; start < payloads.numel; start += kGroup)
    reduce_group(bits, payloads, start, addend ? addend + start : nullptr, target + start,
                 std::min(kGroup, payloads.numel - start), past_cache, decodings);
  if (past_cache) fence();
}

// The owner's stage: the sum of the payloads plus residual, encoded, group by group.
inline void reduce_encode(int bits, const Payloads& payloads, const float* residual, float* new_residual,
                          uint8_t* reduced) {
  alignas(64) float sum[kGroup];
  std::vector<Decoding> decodings(payloads.workers);
  const bool past_cache = streams(new_residual, residual, nullptr, payloads.numel);
  const size_t nbytes = record_nbytes(kGroup, bits);
  for (size_t start = 0; start < payloads.numel; start += kGroup, reduced += nbytes) {
    const size_t count = std::min(kGroup, payloads.numel - start);
    reduce_group(bits, payloads, start, nullptr, sum, count, false, decodings);
    encode_some(bits, sum, residual ? residual + start : nullptr, new_residual ? new_residual + start : nullptr,
                past_cache, reduced, count, sum);
  }
  if (past_cache) fence();
}

// The loops of waterfill.cpp for one instruction set; included by foreach_isa.h, no include guard.

#include "codes.h"

// A bit of each of 32 codes, a word a bit; and back. What words above a code's width hold is not looked at.
#if GRADWIRE_ISA != 0

inline void planes32(const uint8_t* codes, uint32_t* words) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  words[7] = static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
  words[6] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 1)));
  words[5] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 2)));
  words[4] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 3)));
  words[3] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 4)));
  words[2] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 5)));
  words[1] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 6)));
  words[0] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7)));
}

// Exchanges bits that are `kShift` apart: those of `mask`, and those above them.
template <int kShift>
inline __m256i swap_bits(__m256i x, int64_t mask) {
  const __m256i t = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, kShift)), _mm256_set1_epi64x(mask));
  return _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, kShift)));
}

inline void codes32(const uint8_t* words, int width, uint8_t* codes) {
  // Byte g of each word in a row, so that 64 bits are eight rows of eight bits; then those turn into columns.
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  x = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x, order), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  x = swap_bits<7>(x, 0x00aa00aa00aa00aa);
  x = swap_bits<14>(x, 0x0000cccc0000cccc);
  x = swap_bits<28>(x, 0x00000000f0f0f0f0);
  const __m256i mask = _mm256_set1_epi8(static_cast<char>((1 << width) - 1));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_and_si256(x, mask));
}

#else

template <int kShift>
inline uint64_t swap_bits(uint64_t x, uint64_t mask) {
  const uint64_t t = (x ^ x >> kShift) & mask;
  return x ^ t ^ t << kShift;
}

// Eight rows of eight bits turn into columns. Source: Warren, Hacker's Delight, section 7-3.
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

inline void codes32(const uint8_t* words, int width, uint8_t* codes) {
  const uint64_t mask = 0x0101010101010101u * static_cast<uint64_t>((1 << width) - 1);
  for (int g = 0; g < 4; ++g) {
    uint64_t x = 0;
    for (int j = 0; j < 8; ++j) x |= static_cast<uint64_t>(words[4 * j + g]) << 8 * j;
    x = turned(x) & mask;
    std::memcpy(codes + 8 * g, &x, sizeof x);
  }
}

#endif

inline int words_at(const int16_t* below, int level) {
  int16_t words = 0;  // at most 512 times 8
  for (size_t b = 0; b < kBlocks; ++b) words = static_cast<int16_t>(words + fill_width(level, below[b]));
  return words;
}

// Fills in the widths, and from them units and lows; see common/waterfill_formula.h.
inline void share_out(int words, Shares& shares) {
  int level = -1;
  for (int step = 256; step > 0; step /= 2)
    if (level + step < kFillLevels && words_at(shares.below, level + step) < words) level += step;
  int left = words;
  alignas(64) int16_t more[kBlocks];
  for (size_t b = 0; b < kBlocks; ++b) {
    shares.widths[b] = static_cast<int16_t>(fill_width(level, shares.below[b]));
    more[b] = static_cast<int16_t>(fill_width(level + 1, shares.below[b]) - shares.widths[b]);
  }
  for (size_t b = 0; b < kBlocks; ++b) left -= shares.widths[b];
  constexpr size_t kSome = 32;  // blocks that all get one more where so much is left
  for (size_t first = 0; first < kBlocks && left > 0; first += kSome) {
    int wanted = 0;
    for (size_t b = first; b < first + kSome; ++b) wanted += more[b];
    if (wanted <= left) {
      for (size_t b = first; b < first + kSome; ++b) shares.widths[b] = static_cast<int16_t>(shares.widths[b] + more[b]);
      left -= wanted;
      continue;
    }
    for (size_t b = first; b < first + kSome && left > 0; ++b)
      if (more[b]) ++shares.widths[b], --left;
  }
  for (size_t b = 0; b < kBlocks; ++b) {
    const float step = fill_step(shares.base, shares.below[b], shares.widths[b]);
    shares.unit[b] = 2.0f * step;
    shares.low[b] = static_cast<float>(1 - (1 << shares.widths[b])) * step;
  }
}

// The largest magnitude's bits of each of `blocks` blocks; returns that of all.
inline uint32_t find_peaks(const float* p, size_t blocks, uint32_t* peaks) {
  uint32_t all = 0;
  for (size_t b = 0; b < blocks; ++b) {
    uint32_t peak = 0;
    for (size_t i = 0; i < kBlock; ++i) peak = std::max(peak, bits_of_float(p[b * kBlock + i]) & 0x7fffffffu);
    peaks[b] = peak;
    all = std::max(all, peak);
  }
  return all;
}

// A group with inf or NaN: NaN for the scale and for the new residual.
inline void encode_special(float* new_residual, uint8_t* record, size_t count, int bits) {
  std::memset(record, 0, record_nbytes(count, bits));
  std::memcpy(record, &kFillNan, sizeof kFillNan);
  for (size_t i = 0; new_residual && i < count; ++i) new_residual[i] = float_of_bits(0x7fc00000u);
}

// Encodes the group p, of which `count` elements exist and zeros follow up to a multiple of 64. What `later` points to
// is prefetched meanwhile.
inline void encode_group(int bits, const float* p, const float* later, float* new_residual, bool past_cache,
                         uint8_t* record, size_t count) {
  const int blocks = fill_blocks(static_cast<int>(count)), words = fill_words(blocks, bits);
  Shares shares;
  uint32_t scales[kBlocks];
  const uint32_t peak = find_peaks(p, static_cast<size_t>(blocks), scales);
  if (peak >= 0x7f800000u) return encode_special(new_residual, record, count, bits);
  shares.base = fill_scale(peak);
  std::memcpy(record, &shares.base, sizeof shares.base);
  for (int b = blocks; b < static_cast<int>(kBlocks); ++b) scales[b] = 0;
  uint8_t below[kBlocks];
  for (size_t b = 0; b < kBlocks; ++b) {
    below[b] = static_cast<uint8_t>(fill_below(shares.base, fill_scale(scales[b])));
    shares.below[b] = static_cast<int16_t>(below[b] == kFillEmpty ? kNoScale : below[b]);
  }
  std::memset(record + 4, 0, static_cast<size_t>(fill_head_nbytes(blocks)) - 4);
  std::memcpy(record + 4, below, static_cast<size_t>(blocks));
  share_out(words, shares);
  alignas(64) float inverse[kBlocks], half[kBlocks];
  for (size_t b = 0; b < kBlocks; ++b) {
    inverse[b] = shares.unit[b] > 0.0f ? 1.0f / shares.unit[b] : 0.0f;
    half[b] = 0.5f * static_cast<float>(1 << shares.widths[b]);
  }
  uint32_t stream[kBlocks * static_cast<size_t>(kFillMostBits) + kFillMostWidth];
  uint32_t* cursor = stream;
  const Vec zero = fill(0.0f), one = fill(1.0f);
  for (size_t b = 0; b < static_cast<size_t>(blocks); b += 2) {
    Vec t[4];
    uint8_t codes[64];
    for (size_t j = 0; j < 4; ++j) {
      const size_t at = b * kBlock + 16 * j;
      __builtin_prefetch(later + at);
      const Vec x = load(p + at), middle = fill(half[b + j / 2]);
      t[j] = maximum(minimum(add(mul(x, fill(inverse[b + j / 2])), middle), sub(add(middle, middle), one)), zero);
      if (new_residual) {
        const Vec decoded = add(fill(shares.low[b + j / 2]), mul(truncate(t[j]), fill(shares.unit[b + j / 2])));
        put(new_residual + at, sub(x, decoded), past_cache);
      }
    }
    codes64<8>(t, codes);
    planes32(codes, cursor);
    cursor += shares.widths[b];
    planes32(codes + kBlock, cursor);
    cursor += shares.widths[b + 1];
  }
  std::memset(cursor, 0, static_cast<size_t>(stream + words - cursor) * sizeof(uint32_t));
  std::memcpy(record + fill_head_nbytes(blocks), stream, static_cast<size_t>(words) * sizeof(uint32_t));
}

// p = gradient + residual, and zeros up to a multiple of 64.
inline void gather(const float* gradient, const float* residual, size_t count, float* p) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16)
    store(p + i, residual ? add(load(gradient + i), load(residual + i)) : load(gradient + i));
  for (; i < count; ++i) p[i] = residual ? gradient[i] + residual[i] : gradient[i];
  for (; i % 64 != 0; ++i) p[i] = 0.0f;
}

// Encodes gradient + residual of one group; every pointer but the record's is to its first element.
inline void encode_some(int bits, const float* gradient, const float* residual, const float* later, float* new_residual,
                        bool past_cache, uint8_t* record, size_t count) {
  alignas(64) float p[kGroup];
  if (count == kGroup && !residual)
    return encode_group(bits, gradient, later, new_residual, past_cache, record, count);
  gather(gradient, residual, count, p);
  if (count % 64 == 0 || !new_residual)
    return encode_group(bits, p, later, new_residual, past_cache, record, count);
  alignas(64) float rest[kGroup];
  encode_group(bits, p, later, rest, false, record, count);
  std::memcpy(new_residual, rest, count * sizeof(float));
}

inline void encode(int bits, const float* gradient, const float* residual, float* new_residual, uint8_t* payload,
                   size_t numel) {
  const bool past_cache = streams(new_residual, gradient, residual, numel);
  const size_t nbytes = record_nbytes(kGroup, bits);
  for (size_t start = 0; start < numel; start += kGroup, payload += nbytes)
    encode_some(bits, gradient + start, residual ? residual + start : nullptr, gradient + start + kGroup,
                new_residual ? new_residual + start : nullptr, past_cache, payload, std::min(kGroup, numel - start));
  if (past_cache) fence();
}

// Reads the scales of a worker's record of `count` elements, which is the last of its payload or not.
inline void read_record(int bits, const uint8_t* record, size_t count, bool last, Decoding& decoding) {
  if (last) {
    std::memcpy(decoding.record, record, record_nbytes(count, bits));
    record = decoding.record;
  }
  const int blocks = fill_blocks(static_cast<int>(count));
  Shares& shares = decoding.shares;
  std::memcpy(&shares.base, record, sizeof shares.base);
  for (int b = 0; b < static_cast<int>(kBlocks); ++b) {
    const int below = b < blocks ? record[4 + b] : static_cast<int>(kFillEmpty);
    shares.below[b] = static_cast<int16_t>(below == static_cast<int>(kFillEmpty) ? kNoScale : below);
  }
  share_out(fill_words(blocks, bits), shares);
  if (shares.base > kFillLargestScale)
    for (size_t b = 0; b < kBlocks; ++b) shares.unit[b] = shares.low[b] = float_of_bits(0x7fc00000u);
  decoding.words = record + fill_head_nbytes(blocks);
}

// target = addend + worker 0 + worker 1 + ... over 64 elements, two blocks from block b on.
inline void reduce64(std::vector<Decoding>& decodings, size_t b, const float* addend, float* target, bool past_cache) {
  Vec sum[4];
  for (int j = 0; j < 4; ++j) sum[j] = addend ? load(addend + 16 * j) : fill(0.0f);
  for (Decoding& from : decodings) {
    uint8_t codes[64];
    codes32(from.words, from.shares.widths[b], codes);
    from.words += 4 * from.shares.widths[b];
    codes32(from.words, from.shares.widths[b + 1], codes + kBlock);
    from.words += 4 * from.shares.widths[b + 1];
    Vec x[4];
    values64<8>(codes, x);
    for (size_t j = 0; j < 4; ++j)
      sum[j] = add(sum[j], add(fill(from.shares.low[b + j / 2]), mul(x[j], fill(from.shares.unit[b + j / 2]))));
  }
  for (int j = 0; j < 4; ++j) put(target + 16 * j, sum[j], past_cache);
}

// The group at `start`, of which `count` elements exist; `addend` and `target` point to it.
inline void reduce_group(int bits, const Payloads& payloads, size_t start, const float* addend, float* target,
                         size_t count, bool past_cache, std::vector<Decoding>& decodings) {
  const uint8_t* record = payloads.first + start / kGroup * record_nbytes(kGroup, bits);
  for (size_t w = 0; w < payloads.workers; ++w)
    read_record(bits, record + w * payloads.stride, count, start + count == payloads.numel, decodings[w]);
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
    encode_some(bits, sum, residual ? residual + start : nullptr, sum, new_residual ? new_residual + start : nullptr,
                past_cache, reduced, count);
  }
  if (past_cache) fence();
}

// The loops of exponents.cpp for one instruction set; included by foreach_isa.h, no include guard.

// 64 bytes, and masks with a bit for each.
#if GRADWIRE_ISA == 512

using Bytes = __m512i;
inline Bytes load64(const uint8_t* at) { return _mm512_loadu_si512(at); }
inline void store64(uint8_t* at, Bytes x) { _mm512_storeu_si512(at, x); }
inline Bytes fill8(unsigned x) { return _mm512_set1_epi8(static_cast<char>(x)); }
inline Bytes minus(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }
inline Bytes least8(Bytes a, Bytes b) { return _mm512_min_epu8(a, b); }
inline uint64_t equal(Bytes a, Bytes b) { return _mm512_cmpeq_epi8_mask(a, b); }
inline uint64_t odd(Bytes x) { return _mm512_test_epi8_mask(x, fill8(1)); }
inline uint64_t not_below(Bytes a, Bytes b) { return _mm512_cmp_epu8_mask(a, b, _MM_CMPINT_NLT); }
inline Bytes choose(uint64_t mask, Bytes yes, Bytes no) { return _mm512_mask_blend_epi8(mask, no, yes); }
inline Bytes both(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
inline Bytes where(uint64_t mask, unsigned x) { return _mm512_maskz_mov_epi8(mask, fill8(x)); }
inline Bytes looked_up(const uint8_t* table, Bytes index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}
inline unsigned greatest8(Bytes x) {
  const __m256i half = _mm256_max_epu8(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  const __m128i most = _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i pairs = _mm_max_epu8(most, _mm_srli_epi16(most, 8));  // the low byte of each word counts
  const __m128i least = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(255), _mm_and_si128(pairs, _mm_set1_epi16(255))));
  return 255u - (static_cast<unsigned>(_mm_cvtsi128_si32(least)) & 0xffffu);
}
inline void split(const uint16_t* words, Bytes& exponents, Bytes& rest) {
  __m256i e[2], r[2];
  for (int i = 0; i < 2; ++i) {
    const __m512i w = _mm512_loadu_si512(words + 32 * i);
    e[i] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(w, 7));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(w, 8), _mm512_set1_epi16(0x80));
    r[i] = _mm512_cvtepi16_epi8(_mm512_or_si512(sign, _mm512_and_si512(w, _mm512_set1_epi16(0x7f))));
  }
  exponents = _mm512_inserti64x4(_mm512_castsi256_si512(e[0]), e[1], 1);
  rest = _mm512_inserti64x4(_mm512_castsi256_si512(r[0]), r[1], 1);
}
inline void joined(Bytes exponents, Bytes rest, uint16_t* words) {
  const __m256i e[2] = {_mm512_castsi512_si256(exponents), _mm512_extracti64x4_epi64(exponents, 1)};
  const __m256i r[2] = {_mm512_castsi512_si256(rest), _mm512_extracti64x4_epi64(rest, 1)};
  for (int i = 0; i < 2; ++i) {
    const __m512i high = _mm512_slli_epi16(_mm512_cvtepu8_epi16(e[i]), 7), low = _mm512_cvtepu8_epi16(r[i]);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(low, _mm512_set1_epi16(0x80)), 8);
    const __m512i mantissa = _mm512_and_si512(low, _mm512_set1_epi16(0x7f));
    _mm512_storeu_si512(words + 32 * i, _mm512_or_si512(_mm512_or_si512(high, sign), mantissa));
  }
}

#elif GRADWIRE_ISA == 2

struct Bytes {
  __m256i a, b;
};
inline __m256i load32(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline void store32(uint8_t* at, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), x); }
inline Bytes load64(const uint8_t* at) { return {load32(at), load32(at + 32)}; }
inline void store64(uint8_t* at, Bytes x) { store32(at, x.a), store32(at + 32, x.b); }
inline Bytes fill8(unsigned x) {
  const __m256i all = _mm256_set1_epi8(static_cast<char>(x));
  return {all, all};
}
inline uint64_t mask_of(__m256i a, __m256i b) {
  return static_cast<uint32_t>(_mm256_movemask_epi8(a)) |
         static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(b))) << 32;
}
inline Bytes minus(Bytes x, Bytes y) { return {_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)}; }
inline Bytes least8(Bytes x, Bytes y) { return {_mm256_min_epu8(x.a, y.a), _mm256_min_epu8(x.b, y.b)}; }
inline uint64_t equal(Bytes x, Bytes y) { return mask_of(_mm256_cmpeq_epi8(x.a, y.a), _mm256_cmpeq_epi8(x.b, y.b)); }
inline uint64_t odd(Bytes x) { return mask_of(_mm256_slli_epi16(x.a, 7), _mm256_slli_epi16(x.b, 7)); }
inline uint64_t not_below(Bytes x, Bytes y) {
  return mask_of(_mm256_cmpeq_epi8(_mm256_max_epu8(x.a, y.a), x.a), _mm256_cmpeq_epi8(_mm256_max_epu8(x.b, y.b), x.b));
}
inline __m256i spread(uint32_t mask) {  // 0xff where a bit is set
  const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bits = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(mask)), places);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits);
}
inline Bytes spread64(uint64_t mask) {
  return {spread(static_cast<uint32_t>(mask)), spread(static_cast<uint32_t>(mask >> 32))};
}
inline Bytes choose(uint64_t mask, Bytes yes, Bytes no) {
  const Bytes set = spread64(mask);
  return {_mm256_blendv_epi8(no.a, yes.a, set.a), _mm256_blendv_epi8(no.b, yes.b, set.b)};
}
inline Bytes both(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Bytes where(uint64_t mask, unsigned x) {
  const Bytes set = spread64(mask), all = fill8(x);
  return {_mm256_and_si256(set.a, all.a), _mm256_and_si256(set.b, all.b)};
}
inline Bytes looked_up(const uint8_t* table, Bytes index) {
  const __m256i both_halves =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(both_halves, index.a), _mm256_shuffle_epi8(both_halves, index.b)};
}
inline unsigned greatest8(Bytes x) {
  const __m256i half = _mm256_max_epu8(x.a, x.b);
  const __m128i most = _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i pairs = _mm_max_epu8(most, _mm_srli_epi16(most, 8));  // the low byte of each word counts
  const __m128i least = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(255), _mm_and_si128(pairs, _mm_set1_epi16(255))));
  return 255u - (static_cast<unsigned>(_mm_cvtsi128_si32(least)) & 0xffffu);
}
inline void split32(const uint16_t* words, __m256i& exponents, __m256i& rest) {
  __m256i e[2], r[2];
  for (int i = 0; i < 2; ++i) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + 16 * i));
    e[i] = _mm256_and_si256(_mm256_srli_epi16(w, 7), _mm256_set1_epi16(0xff));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(w, 8), _mm256_set1_epi16(0x80));
    r[i] = _mm256_or_si256(sign, _mm256_and_si256(w, _mm256_set1_epi16(0x7f)));
  }  // the pack works within halves of the register: put them in order again
  exponents = _mm256_permute4x64_epi64(_mm256_packus_epi16(e[0], e[1]), 0xd8);
  rest = _mm256_permute4x64_epi64(_mm256_packus_epi16(r[0], r[1]), 0xd8);
}
inline void split(const uint16_t* words, Bytes& exponents, Bytes& rest) {
  split32(words, exponents.a, rest.a), split32(words + 32, exponents.b, rest.b);
}
inline void joined16(__m128i exponents, __m128i rest, uint16_t* words) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(exponents), 7), low = _mm256_cvtepu8_epi16(rest);
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(low, _mm256_set1_epi16(0x80)), 8);
  const __m256i mantissa = _mm256_and_si256(low, _mm256_set1_epi16(0x7f));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm256_or_si256(_mm256_or_si256(high, sign), mantissa));
}
inline void joined(Bytes exponents, Bytes rest, uint16_t* words) {
  joined16(_mm256_castsi256_si128(exponents.a), _mm256_castsi256_si128(rest.a), words);
  joined16(_mm256_extracti128_si256(exponents.a, 1), _mm256_extracti128_si256(rest.a, 1), words + 16);
  joined16(_mm256_castsi256_si128(exponents.b), _mm256_castsi256_si128(rest.b), words + 32);
  joined16(_mm256_extracti128_si256(exponents.b, 1), _mm256_extracti128_si256(rest.b, 1), words + 48);
}

#else

struct Bytes {
  uint8_t lane[64];
};
#define GRADWIRE_BYTES(expression)                                                        \
  do {                                                                                    \
    for (int i = 0; i < 64; ++i) result.lane[i] = static_cast<uint8_t>(expression);       \
  } while (0)
#define GRADWIRE_MASK(condition)                                                          \
  do {                                                                                    \
    for (int i = 0; i < 64; ++i) result |= static_cast<uint64_t>(condition) << i;         \
  } while (0)
inline Bytes load64(const uint8_t* at) {
  Bytes result;
  std::memcpy(result.lane, at, sizeof result.lane);
  return result;
}
inline void store64(uint8_t* at, const Bytes& x) { std::memcpy(at, x.lane, sizeof x.lane); }
inline Bytes fill8(unsigned x) { Bytes result; GRADWIRE_BYTES(x); return result; }
inline Bytes minus(const Bytes& a, const Bytes& b) { Bytes result; GRADWIRE_BYTES(a.lane[i] - b.lane[i]); return result; }
inline Bytes least8(const Bytes& a, const Bytes& b) {
  Bytes result; GRADWIRE_BYTES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); return result;
}
inline uint64_t equal(const Bytes& a, const Bytes& b) {
  uint64_t result = 0; GRADWIRE_MASK(a.lane[i] == b.lane[i]); return result;
}
inline uint64_t odd(const Bytes& x) {
  uint64_t result = 0; GRADWIRE_MASK(x.lane[i] & 1); return result;
}
inline uint64_t not_below(const Bytes& a, const Bytes& b) {
  uint64_t result = 0; GRADWIRE_MASK(a.lane[i] >= b.lane[i]); return result;
}
inline Bytes choose(uint64_t mask, const Bytes& yes, const Bytes& no) {
  Bytes result; GRADWIRE_BYTES(mask >> i & 1 ? yes.lane[i] : no.lane[i]); return result;
}
inline Bytes both(const Bytes& a, const Bytes& b) { Bytes result; GRADWIRE_BYTES(a.lane[i] | b.lane[i]); return result; }
inline Bytes where(uint64_t mask, unsigned x) { Bytes result; GRADWIRE_BYTES(mask >> i & 1 ? x : 0); return result; }
inline Bytes looked_up(const uint8_t* table, const Bytes& index) {
  Bytes result; GRADWIRE_BYTES(table[index.lane[i] & 15]); return result;
}
inline unsigned greatest8(const Bytes& x) { return *std::max_element(x.lane, x.lane + 64); }
inline void split(const uint16_t* words, Bytes& exponents, Bytes& rest) {
  for (int i = 0; i < 64; ++i) {
    exponents.lane[i] = static_cast<uint8_t>(words[i] >> 7);
    rest.lane[i] = static_cast<uint8_t>((words[i] >> 8 & 0x80) | (words[i] & 0x7f));
  }
}
inline void joined(const Bytes& exponents, const Bytes& rest, uint16_t* words) {
  for (int i = 0; i < 64; ++i)
    words[i] = static_cast<uint16_t>((rest.lane[i] & 0x80) << 8 | exponents.lane[i] << 7 | (rest.lane[i] & 0x7f));
}
#undef GRADWIRE_BYTES
#undef GRADWIRE_MASK

#endif

// The bytes of a payload, or 0 where the values themselves are no longer.
template <bool fast>
inline size_t pack_with(const uint16_t* words, size_t stride, size_t blocks, uint8_t* payload) {
  const size_t most = most_nbytes(blocks);
  const size_t room = 8 * blocks + 8;  // of a plane, and what its last word may write behind it
  const std::unique_ptr<uint8_t[]> scratch(new uint8_t[(kPlanes - 1) * room]);
  BitWriter planes[kPlanes];
  for (size_t plane = 1; plane < kPlanes; ++plane) planes[plane].start(scratch.get() + (plane - 1) * room);
  std::vector<uint8_t> escapes;
  uint8_t* largest = payload + kHeader;
  uint8_t* out = largest + blocks;
  uint32_t kept = 0;
  for (size_t block = 0; block < blocks; ++block) {
    Bytes exponents, rest;
    split(words + block * stride, exponents, rest);
    const Bytes zero = fill8(0);
    const uint64_t zeros = equal(exponents, zero);
    if (zeros == ~uint64_t{0} && equal(rest, zero) == ~uint64_t{0}) {
      largest[block] = 0;
      continue;
    }
    const unsigned top = std::max(greatest8(exponents), 1u);
    largest[block] = static_cast<uint8_t>(top);
    ++kept;
    const Bytes below = least8(minus(fill8(top), exponents), fill8(kKnown));
    const Bytes symbols = choose(zeros, fill8(kZero), looked_up(kSymbolOf, below));
    uint64_t at_least[kPlanes + 1];  // which values have so many unary digits 1
    for (unsigned digit = 1; digit <= kPlanes; ++digit) at_least[digit] = not_below(symbols, fill8(2 * digit));
    const uint64_t low = odd(symbols);
    store64(out, rest);
    put64(out + 64, low), put64(out + 72, at_least[1]);
    out += kBlockBytes;
    for (size_t plane = 1; plane < kPlanes && at_least[plane]; ++plane)
      planes[plane].put(extract<fast>(at_least[plane + 1], at_least[plane]),
                        static_cast<unsigned>(__builtin_popcountll(at_least[plane])));
    uint64_t far = equal(symbols, fill8(kEscape));
    if (far) {
      uint8_t all[64];
      store64(all, exponents);
      for (; far; far &= far - 1) escapes.push_back(all[__builtin_ctzll(far)]);
      if (escapes.size() >= most) return 0;
    }
  }
  uint32_t header[8] = {kept};
  size_t nbytes = static_cast<size_t>(out - payload) + escapes.size();
  for (size_t plane = 1; plane < kPlanes; ++plane) {
    header[plane] = static_cast<uint32_t>(planes[plane].finish());
    nbytes += (planes[plane].bits + 7) / 8;
  }
  if (nbytes >= most) return 0;
  header[7] = static_cast<uint32_t>(escapes.size());
  std::memcpy(payload, header, sizeof header);
  for (size_t plane = 1; plane < kPlanes; ++plane) {
    const size_t length = (planes[plane].bits + 7) / 8;
    std::memcpy(out, scratch.get() + (plane - 1) * room, length);
    out += length;
  }
  if (!escapes.empty()) std::memcpy(out, escapes.data(), escapes.size());
  return nbytes;
}

// Whether the payload, whose parts have been checked to be inside it, does not contradict itself.
template <bool fast>
inline bool unpack_with(const Parts& from, size_t blocks, uint16_t* words, size_t stride) {
  const uint8_t* fixed = from.fixed;
  const uint8_t* escape = from.escapes;
  size_t at[kPlanes] = {}, kept = 0;
  for (size_t block = 0; block < blocks; ++block, words += stride) {
    const unsigned top = from.largest[block];
    if (!top) {
      std::memset(words, 0, 64 * sizeof *words);
      continue;
    }
    if (++kept > from.kept) return false;
    const uint64_t low = get64(fixed + 64);
    uint64_t at_least[kPlanes + 2] = {};
    at_least[1] = get64(fixed + 72);
    for (size_t plane = 1; plane < kPlanes && at_least[plane]; ++plane) {
      const size_t start = at[plane];
      at[plane] += static_cast<size_t>(__builtin_popcountll(at_least[plane]));
      if (at[plane] > from.bits[plane]) return false;
      at_least[plane + 1] = deposit<fast>(bits_from(from.planes[plane], start), at_least[plane]);
    }
    const uint64_t* u = at_least;
    const uint64_t first = (u[1] & ~u[2]) | (u[3] & ~u[4]) | (u[5] & ~u[6]) | u[7], second = (u[2] & ~u[4]) | u[6];
    const Bytes symbols = both(both(where(low, 1), where(first, 2)), both(where(second, 4), where(u[4], 8)));
    Bytes exponents = minus(fill8(top), looked_up(kBelow, symbols));
    exponents = choose(equal(symbols, fill8(kZero)), fill8(0), exponents);
    uint64_t far = u[7] & low;
    if (far) {
      uint8_t all[64];
      store64(all, exponents);
      for (; far; far &= far - 1) {
        if (escape == from.end) return false;
        all[__builtin_ctzll(far)] = *escape++;
      }
      exponents = load64(all);
    }
    joined(exponents, load64(fixed), words);
    fixed += kBlockBytes;
  }
  for (size_t plane = 1; plane < kPlanes; ++plane)
    if (at[plane] != from.bits[plane]) return false;
  return kept == from.kept && escape == from.end;
}

inline size_t pack(const uint16_t* words, size_t stride, size_t blocks, uint8_t* payload) {
  return fast_bit_moves() ? pack_with<true>(words, stride, blocks, payload)
                          : pack_with<false>(words, stride, blocks, payload);
}
inline bool unpack(const Parts& from, size_t blocks, uint16_t* words, size_t stride) {
  return fast_bit_moves() ? unpack_with<true>(from, blocks, words, stride)
                          : unpack_with<false>(from, blocks, words, stride);
}

// bfloat16 values with their exponents in Rice's code of 64-bit masks: the same values from fewer bytes, bit for bit.
//
// The format is described in compressors/kernels/reference/exponents.py. A block of 64 values is one byte for the
// largest exponent, 64 for signs and mantissas, two words of 64 bits, and what of five or six more words is left when
// the bits of values that have ended are taken out (pext), appended to one stream for each.
// Bytes a value, read + written: pack 2 + 1.3, unpack 1.3 + 2.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/cast_formula.h"
#include "cpu/isa.h"

namespace {

using namespace gradwire;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "payloads are read as little-endian words");

constexpr size_t kHeader = 32, kBlockBytes = 80, kPlanes = 7;
constexpr unsigned kZero = 6, kEscape = 15, kKnown = 14;  // symbols, and how many exponents have one of their own
constexpr uint32_t kRaw = 0xffffffffu;
// The symbol of an exponent so far below the block's largest, and the inverse.
constexpr uint8_t kSymbolOf[16] = {4, 0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, kEscape, kEscape};
constexpr uint8_t kBelow[16] = {1, 2, 3, 4, 0, 5, 0, 6, 7, 8, 9, 10, 11, 12, 13, 0};

inline size_t most_nbytes(size_t blocks) { return kHeader + 128 * blocks; }
inline void put64(uint8_t* at, uint64_t x) { std::memcpy(at, &x, sizeof x); }
inline uint64_t get64(const uint8_t* at) {
  uint64_t x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

// 64 bits from the bit `start` on, of which those that exist count; nine bytes are read.
inline uint64_t bits_from(const uint8_t* stream, size_t start) {
  const uint8_t* at = stream + start / 8;
  const unsigned shift = start % 8;
  return get64(at) >> shift | static_cast<uint64_t>(at[8]) << 1 << (63 - shift);
}

// The bits of x at the places that are set in mask, moved together at the low end; and back. In assembler, because the
// loops around them are not compiled for BMI2: processors with AVX2 may lack it, or have it in microcode.
template <bool fast>
inline uint64_t extract(uint64_t x, uint64_t mask) {
  uint64_t result = 0;
#if defined(__x86_64__)
  if constexpr (fast) {
    __asm__("pextq %2, %1, %0" : "=r"(result) : "r"(x), "r"(mask));
    return result;
  }
#endif
  for (unsigned at = 0; mask; mask &= mask - 1, ++at) result |= (x >> __builtin_ctzll(mask) & 1) << at;
  return result;
}
template <bool fast>
inline uint64_t deposit(uint64_t x, uint64_t mask) {
  uint64_t result = 0;
#if defined(__x86_64__)
  if constexpr (fast) {
    __asm__("pdepq %2, %1, %0" : "=r"(result) : "r"(x), "r"(mask));
    return result;
  }
#endif
  for (; mask; mask &= mask - 1, x >>= 1) result |= (x & 1) << __builtin_ctzll(mask);
  return result;
}

// Appends to a stream of bits, a word at a time.
struct BitWriter {
  uint8_t* at;
  uint64_t word;
  size_t bits;

  void start(uint8_t* first) { at = first, word = 0, bits = 0; }
  void put(uint64_t x, unsigned count) {  // x has no bits beyond `count`, which is 1 to 64
    const unsigned filled = bits % 64;
    word |= x << filled;
    bits += count;
    if (filled + count < 64) return;
    put64(at, word);
    at += 8;
    word = filled ? x >> (64 - filled) : 0;
  }
  size_t finish() {
    put64(at, word);
    return bits;
  }
};

// Where the parts of a payload lie.
struct Parts {
  const uint8_t* largest;
  const uint8_t* fixed;
  const uint8_t* planes[kPlanes];  // copies, with room to read on behind them
  const uint8_t* escapes;
  const uint8_t* end;
  size_t bits[kPlanes];
  size_t kept;
};

#define GRADWIRE_LOOPS "cpu/kernels/exponents_loops.h"
#include "cpu/foreach_isa.h"

uint16_t* words_at(uintptr_t at) { return reinterpret_cast<uint16_t*>(at); }
uint8_t* bytes_at(uintptr_t at) { return reinterpret_cast<uint8_t*>(at); }

size_t exponents_pack(uintptr_t words, size_t stride, size_t blocks, uintptr_t payload) {
  if (blocks > UINT32_MAX / 64) throw std::invalid_argument("`blocks` has more values than a header can count");
  uint8_t* out = bytes_at(payload);
  const size_t packed = GRADWIRE_DISPATCH(pack, words_at(words), stride, blocks, out);
  if (packed) return packed;
  std::memset(out, 0, kHeader);
  std::memcpy(out, &kRaw, sizeof kRaw);
  for (size_t block = 0; block < blocks; ++block)
    std::memcpy(out + kHeader + 128 * block, words_at(words) + block * stride, 128);
  return most_nbytes(blocks);
}

void exponents_unpack(uintptr_t payload, size_t nbytes, uintptr_t words, size_t stride, size_t blocks) {
  const uint8_t* in = bytes_at(payload);
  const auto damaged = [] { throw std::invalid_argument("`payload` contradicts its header: it is damaged"); };
  uint32_t header[8] = {};
  if (nbytes < kHeader) damaged();
  std::memcpy(header, in, sizeof header);
  if (header[0] == kRaw) {
    if (nbytes < most_nbytes(blocks)) damaged();
    for (size_t block = 0; block < blocks; ++block)
      std::memcpy(words_at(words) + block * stride, in + kHeader + 128 * block, 128);
    return;
  }
  Parts parts{};
  parts.kept = header[0];
  parts.largest = in + kHeader;
  size_t at = kHeader + blocks, planes_nbytes = 0;
  parts.fixed = in + at;
  at += kBlockBytes * parts.kept;
  for (size_t plane = 1; plane < kPlanes; ++plane) planes_nbytes += (header[plane] + size_t{7}) / 8;
  if (at + planes_nbytes + header[7] > nbytes) damaged();
  std::vector<uint8_t> planes(planes_nbytes + 16);
  std::memcpy(planes.data(), in + at, planes_nbytes);
  for (size_t plane = 1, start = 0; plane < kPlanes; ++plane) {
    parts.planes[plane] = planes.data() + start;
    parts.bits[plane] = header[plane];
    start += (header[plane] + size_t{7}) / 8;
  }
  parts.escapes = in + at + planes_nbytes;
  parts.end = parts.escapes + header[7];
  if (!GRADWIRE_DISPATCH(unpack, parts, blocks, words_at(words), stride)) damaged();
}

}  // namespace

void bind_exponents(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("exponents_pack", &exponents_pack, unlocked);
  m.def("exponents_unpack", &exponents_unpack, unlocked);
}

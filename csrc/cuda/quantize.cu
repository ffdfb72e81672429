// 8 or 4 bits an element between the smallest and the largest of each block of 512; a warp handles a block.
//
// Payload as in csrc/cpu/quantize.cpp, bit for bit: ceil(n / 512) pairs of float32 (unit, low), then the codes; of two
// 4-bit codes in a byte the even element's is the lower. Bytes an element, read + written, at 4 bits, in one pass and
// one launch each, no synchronisation: encode 4 + 1/2 (8 + 4 + 1/2 with residual), decode_reduce W/2 + 4.
// Encoding, a lane holds 4 elements of each 128: 16 bytes of floats, 4 bytes of 8-bit codes or 2 bytes of 4-bit codes.
// Decoding, a thread holds 8 in a row: one word of codes a worker, 32 bytes of floats.
// Source: Alistarh et al., QSGD, NeurIPS 2017, section 4 (buckets, random rounding).
#include "common/hash_formula.h"
#include "formats.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
constexpr int kBlock = 512;
constexpr int kQuads = kBlock / 128;
constexpr float kSmallestNormal = 0x1p-126f;  // below it 1 / unit is inf: such a range is as good as empty

// Arguments.
struct Encode {
  const float *gradient, *residual;  // residual may be null
  float* left;                       // may be null, or the residual's own memory
  uint8_t* payload;
  int64_t numel;
  bool random;
  uint32_t key;
};

struct Range {
  float low, unit;
  bool finite;
};

// What holds the codes of a run.
template <int kBits>
struct EightCodes {
  using Word = uint64_t;
};
template <>
struct EightCodes<4> {
  using Word = uint32_t;
};

__device__ inline int64_t block_count(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// Where the code of an element lies that begins a byte, and how many bytes the payload has from there on.
template <int kBits>
__device__ inline int64_t codes_at(int64_t element, int64_t numel) {
  return 8 * block_count(numel) + element * kBits / 8;
}
template <int kBits>
__device__ inline int64_t codes_nbytes(int64_t element, int64_t numel) {
  return ((numel - element) * kBits + 7) / 8;
}

// Kernels.
__device__ inline Range range_of(const float (&p)[4 * kQuads], float levels) {
  float low = p[0], high = p[0];
  bool special = false;
#pragma unroll
  for (int i = 0; i < 4 * kQuads; ++i) {
    low = fminf(low, p[i]), high = fmaxf(high, p[i]);
    special = special || (bits_of_float(p[i]) & 0x7fffffffu) >= 0x7f800000u;
  }
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    low = fminf(low, __shfl_xor_sync(kAllLanes, low, width));
    high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, width));
  }
  low += 0.0f;  // -0 becomes 0
  const float spread = high - low;
  const float unit = bits_of_float(spread) < 0x7f800000u ? spread / levels : high / levels - low / levels;
  return {low, unit < kSmallestNormal ? 0.0f : unit, __ballot_sync(kAllLanes, special) == 0};
}

// p = gradient + residual; elements past the end repeat the block's first, which changes neither end of its range.
__device__ inline void gather_block(const Encode& a, int64_t start, float (&p)[4 * kQuads]) {
  const float filler = a.gradient[start] + (a.residual ? a.residual[start] : 0.0f);
#pragma unroll
  for (int t = 0; t < kQuads; ++t) {
    const int64_t i = start + 128 * t + 4 * lane_index(), count = a.numel - i;
    float4 x = load4(a.gradient + i, count);
    if (a.residual) {
      const float4 e = load4(a.residual + i, count);
      x = make_float4(x.x + e.x, x.y + e.y, x.z + e.z, x.w + e.w);
    }
    p[4 * t] = count > 0 ? x.x : filler;
    p[4 * t + 1] = count > 1 ? x.y : filler;
    p[4 * t + 2] = count > 2 ? x.z : filler;
    p[4 * t + 3] = count > 3 ? x.w : filler;
  }
}

// code = floor((p - low) / unit + offset): offset 1/2 rounds to nearest, a uniform one rounds without bias.
__device__ inline uint32_t code_of(float p, const Range& range, float inverse, float offset, float levels) {
  if (!range.finite) return 0;
  const float t = (p - range.low) * inverse + offset;
  return static_cast<uint32_t>(t < levels ? t : levels);
}

template <int kBits>
__device__ inline void quantize_encode(const Encode& a) {
  constexpr float kLevels = (1 << kBits) - 1;
  for (int64_t block = warp_index(); block < block_count(a.numel); block += warp_count()) {
    float p[4 * kQuads];
    gather_block(a, block * kBlock, p);
    const Range range = range_of(p, kLevels);
    const float inverse = range.unit > 0.0f ? 1.0f / range.unit : 0.0f, nan = float_of_bits(0x7fc00000u);
    const float unit = range.finite ? range.unit : nan, low = range.finite ? range.low : nan;
    if (lane_index() < 2) store_float(a.payload + 8 * block + 4 * lane_index(), lane_index() ? low : unit);
#pragma unroll
    for (int t = 0; t < kQuads; ++t) {
      const int64_t i = block * kBlock + 128 * t + 4 * lane_index(), count = a.numel - i;
      uint32_t codes = 0;
      float left[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float offset = a.random ? uniform_of_hash(hash32(a.key, static_cast<uint32_t>(i + c))) : 0.5f;
        const uint32_t code = code_of(p[4 * t + c], range, inverse, offset, kLevels);
        left[c] = p[4 * t + c] - (low + static_cast<float>(code) * unit);
        if (c < count) codes |= code << kBits * c;
      }
      uint8_t* at = a.payload + codes_at<kBits>(i, a.numel);
      if (kBits == 8) store_word_within<uint32_t>(at, codes, codes_nbytes<kBits>(i, a.numel));
      else store_word_within<uint16_t>(at, static_cast<uint16_t>(codes), codes_nbytes<kBits>(i, a.numel));
      if (a.left) store4(a.left + i, make_float4(left[0], left[1], left[2], left[3]), count);
    }
  }
}

// Every run of eight elements stands alone here, so the grid runs over them; a block's range is the same for two warps.
template <int kBits>
__device__ inline void quantize_decode_reduce(const Reduction<uint8_t>& a) {
  using Codes = typename EightCodes<kBits>::Word;
  constexpr Codes kMask = (1u << kBits) - 1;
  for (int64_t i = kRun * thread_index(); i < a.numel; i += kRun * thread_count()) {
    const int64_t count = a.numel - i;
    Run sum = Memory<Float32>::load(a.addend ? a.addend + i : a.target + i, a.addend ? count : 0);
    for (int64_t w = 0; w < a.workers; ++w) {
      const uint8_t* row = a.rows + w * a.stride;
      const Codes codes =
          load_word_within<Codes>(row + codes_at<kBits>(i, a.numel), codes_nbytes<kBits>(i, a.numel));
      const float unit = load_float(row + 8 * (i / kBlock)), low = load_float(row + 8 * (i / kBlock) + 4);
#pragma unroll
      for (int j = 0; j < kRun; ++j)
        sum.at[j] += low + static_cast<float>(static_cast<uint32_t>(codes >> kBits * j & kMask)) * unit;
    }
    Memory<Float32>::store(a.target + i, sum, count);
  }
}

#define GRADWIRE_QUANTIZE(bits)                                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
      quantize_encode_##bits(const float* gradient, const float* residual, float* left, uint8_t* payload,         \
                             int64_t numel, int32_t random, uint32_t key) {                                       \
    quantize_encode<bits>({gradient, residual, left, payload, numel, random != 0, key});                          \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
      quantize_decode_reduce_##bits(const uint8_t* rows, int64_t stride, int64_t workers, const float* addend,    \
                                    float* target, int64_t numel) {                                               \
    quantize_decode_reduce<bits>({rows, stride, workers, addend, target, numel});                                 \
  }

GRADWIRE_QUANTIZE(8)
GRADWIRE_QUANTIZE(4)

}  // namespace gradwire

// 8 or 4 bits an element between the smallest and the largest of each block of 512; a warp handles a block.
//
// Payload as in csrc/cpu/kernels/codecs/quantize.cpp, bit for bit: ceil(n / 512) pairs of float32 (unit, low), then the codes;
// of two 4-bit codes in a byte the even element's is the lower. Bytes an element, read + written, at 4 bits with W
// workers, in one pass and one launch each, no synchronisation: encode 4 + 1/2 (8 + 4 + 1/2 with residual),
// decode_pieces 1/2 + 4, decode_reduce W/2 + 4, reduce_encode W/2 + 1/2 (W/2 + 8 + 1/2 with residual). A lane holds 4
// elements of each 128: 16 bytes of floats, 4 bytes of 8-bit codes or 2 bytes of 4-bit codes.
// Source: Alistarh et al., QSGD, NeurIPS 2017, section 4 (buckets, random rounding).
#include "common/hash_formula.h"
#include "formats.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
constexpr int kAhead = 4;     // workers whose payloads are being loaded before the first is added
constexpr int kResident = 4;  // CTAs that a multiprocessor keeps then: 64 registers a thread
constexpr int kBlock = 512;
constexpr int kQuads = kBlock / 128;
constexpr float kSmallestNormal = 0x1p-126f;  // below it 1 / unit is inf: such a range counts as empty

// Arguments.
struct Encoded {
  float* new_residual;  // may be null
  uint8_t* payload;
  int64_t numel;
  bool random;
  uint32_t key;
};

struct Range {
  float low, unit;
  bool finite;
};

// What holds the codes of four elements.
template <int kBits>
struct Codes {
  using Four = uint32_t;
};
template <>
struct Codes<4> {
  using Four = uint16_t;
};

__device__ inline int64_t block_count(int64_t numel) { return blocks_in<kBlock>(numel); }

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

// p = what lies in memory for the block that begins at element `start`.
__device__ inline void load_block(float (&p)[4 * kQuads], const float* from, int64_t start, int64_t numel) {
#pragma unroll
  for (int t = 0; t < kQuads; ++t) {
    const int64_t i = start + 128 * t + 4 * lane_index();
    const float4 x = load4(from + i, numel - i);
    p[4 * t] = x.x, p[4 * t + 1] = x.y, p[4 * t + 2] = x.z, p[4 * t + 3] = x.w;
  }
}

// p += the same; nothing where the pointer is null.
__device__ inline void add_block(float (&p)[4 * kQuads], const float* from, int64_t start, int64_t numel) {
  if (!from) return;
#pragma unroll
  for (int t = 0; t < kQuads; ++t) {
    const int64_t i = start + 128 * t + 4 * lane_index();
    const float4 x = load4(from + i, numel - i);
    p[4 * t] += x.x, p[4 * t + 1] += x.y, p[4 * t + 2] += x.z, p[4 * t + 3] += x.w;
  }
}

// sums[0..3] += four codes, decoded. Codes become bytes, and bytes floats, without the unit that converts: it takes an
// eighth of a warp.
template <int kBits>
__device__ inline void add_codes(float* sums, uint32_t codes, float unit, float low) {
  const uint32_t even = kBits == 8 ? codes : codes & 0x0f0fu, odd = kBits == 8 ? codes : codes >> 4 & 0x0f0fu;
  const float2 units = make_float2(unit, unit), lows = make_float2(low, low);
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    const uint32_t place = static_cast<uint32_t>(kBits == 8 ? c : c / 2), next = kBits == 8 ? place + 1 : place;
    const float2 pair = make_float2(float_of_bits(pick_bytes(even, bits_of_float(kWhole), 0x7650u + place)),
                                    float_of_bits(pick_bytes(odd, bits_of_float(kWhole), 0x7650u + next)));
    const float2 sum = add_pair(make_float2(sums[c], sums[c + 1]), decoded_pair(pair, lows, units));
    sums[c] = sum.x, sums[c + 1] = sum.y;
  }
}

// p += the block of one payload, decoded.
template <int kBits>
__device__ inline void add_decoded(float (&p)[4 * kQuads], const uint8_t* row, int64_t block, int64_t numel) {
  using Four = typename Codes<kBits>::Four;
  const float unit = load_float(row + 8 * block), low = load_float(row + 8 * block + 4);
#pragma unroll
  for (int t = 0; t < kQuads; ++t) {
    const int64_t i = block * kBlock + 128 * t + 4 * lane_index();
    const uint32_t codes = load_word_within<Four>(row + codes_at<kBits>(i, numel), codes_nbytes<kBits>(i, numel));
    add_codes<kBits>(p + 4 * t, codes, unit, low);
  }
}

// Elements past the end repeat the block's first, which changes neither end of its range.
__device__ inline void fill_block(float (&p)[4 * kQuads], int64_t start, int64_t numel) {
  const float filler = __shfl_sync(kAllLanes, p[0], 0);
#pragma unroll
  for (int t = 0; t < kQuads; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (start + 128 * t + 4 * lane_index() + c >= numel) p[4 * t + c] = filler;
}

// code = floor((p - low) / unit + offset): offset 1/2 rounds to nearest, a uniform one rounds without bias.
__device__ inline uint32_t code_of(float p, const Range& range, float inverse, float offset, float levels) {
  if (!range.finite) return 0;
  const float t = (p - range.low) * inverse + offset;
  return static_cast<uint32_t>(t < levels ? t : levels);
}

template <int kBits>
__device__ inline void encode_block(const float (&p)[4 * kQuads], const Encoded& out, int64_t block) {
  using Four = typename Codes<kBits>::Four;
  constexpr float kLevels = (1 << kBits) - 1;
  const Range range = range_of(p, kLevels);
  const float inverse = range.unit > 0.0f ? 1.0f / range.unit : 0.0f, nan = float_of_bits(0x7fc00000u);
  const float unit = range.finite ? range.unit : nan, low = range.finite ? range.low : nan;
  if (lane_index() < 2) store_float(out.payload + 8 * block + 4 * lane_index(), lane_index() ? low : unit);
#pragma unroll
  for (int t = 0; t < kQuads; ++t) {
    const int64_t i = block * kBlock + 128 * t + 4 * lane_index(), count = out.numel - i;
    uint32_t codes = 0;
    float new_residual[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float offset = out.random ? uniform_of_hash(hash32(out.key, static_cast<uint32_t>(i + c))) : 0.5f;
      const uint32_t code = code_of(p[4 * t + c], range, inverse, offset, kLevels);
      new_residual[c] = p[4 * t + c] - (low + static_cast<float>(code) * unit);
      if (c < count) codes |= code << kBits * c;
    }
    store_word_within<Four>(out.payload + codes_at<kBits>(i, out.numel), static_cast<Four>(codes),
                            codes_nbytes<kBits>(i, out.numel));
    if (out.new_residual)
      store4(out.new_residual + i, make_float4(new_residual[0], new_residual[1], new_residual[2], new_residual[3]),
             count);
  }
}

// `out` describes the first piece.
template <int kBits>
__device__ inline void quantize_encode(const float* gradient, const float* residual, const Encoded& out, int64_t stride,
                                       int64_t width, int64_t blocks) {
  for (int64_t index = warp_index(); index < blocks; index += warp_count()) {
    const Place at = place_of<kBlock>({out.numel, width}, index);
    const int64_t start = at.start + at.block * kBlock, stop = at.start + at.numel;
    float p[4 * kQuads];
    load_block(p, gradient, start, stop);
    add_block(p, residual, start, stop);
    fill_block(p, start, stop);
    encode_block<kBits>(p,
                        {out.new_residual ? out.new_residual + at.start : nullptr, out.payload + at.piece * stride,
                         at.numel, out.random, out.key},
                        at.block);
  }
}

template <int kBits>
__device__ inline void quantize_reduce_encode(const Reduction<uint8_t>& a, const float* residual,
                                              const Encoded& reduced) {
  for (int64_t block = warp_index(); block < block_count(a.numel); block += warp_count()) {
    float p[4 * kQuads] = {};
    for (int64_t w = 0; w < a.workers; ++w) add_decoded<kBits>(p, a.rows + w * a.stride, block, a.numel);
    add_block(p, residual, block * kBlock, a.numel);
    fill_block(p, block * kBlock, a.numel);
    encode_block<kBits>(p, reduced, block);
  }
}

// A run as a payload holds it: its codes, and the range of the block that it lies in.
struct Coded {
  uint32_t codes[2];
  float unit, low;
};

template <int kBits>
__device__ inline Coded load_coded(const uint8_t* row, int64_t i, int64_t numel) {
  using Four = typename Codes<kBits>::Four;
  const int64_t j = i + kHalf;
  return {{load_word_within<Four>(row + codes_at<kBits>(i, numel), codes_nbytes<kBits>(i, numel)),
           load_word_within<Four>(row + codes_at<kBits>(j, numel), codes_nbytes<kBits>(j, numel))},
          load_float(row + 8 * (i / kBlock)),
          load_float(row + 8 * (i / kBlock) + 4)};
}

// The same where all of it exists and lies at whole words.
template <int kBits>
__device__ inline Coded load_whole(const uint8_t* codes, const uint8_t* range) {
  using Four = typename Codes<kBits>::Four;
  return {{*reinterpret_cast<const Four*>(codes), *reinterpret_cast<const Four*>(codes + kHalf * kBits / 8)},
          *reinterpret_cast<const float*>(range),
          *reinterpret_cast<const float*>(range + 4)};
}

// sum += a run.
template <int kBits>
__device__ inline void add_run(Run& sum, const Coded& coded) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    add_codes<kBits>(sum.at + kQuad * half, coded.codes[half], coded.unit, coded.low);
}

// target = the sum of `a.workers` payloads of one run, which never leaves its block.
template <int kBits>
__device__ inline void decode_run(const Reduction<uint8_t>& a, int64_t i) {
  static_assert(kBlock % kWarpRun == 0, "a warp's run has one range");
  if (i >= a.numel) return;
  Run sum = {};
  if (a.addend) sum = Memory<Float32>::load(a.addend + i, a.numel - i);
  if (i + kHalf + kQuad <= a.numel && aligned<uint32_t>(a.rows) && a.stride % 4 == 0) {
    const uint8_t *codes = a.rows + codes_at<kBits>(i, a.numel), *range = a.rows + 8 * (i / kBlock);
    for (int64_t first = 0; first < a.workers; first += kAhead) {
      Coded coded[kAhead];
#pragma unroll
      for (int w = 0; w < kAhead; ++w) {
        if (first + w < a.workers) coded[w] = load_whole<kBits>(codes, range);
        codes += a.stride, range += a.stride;
      }
#pragma unroll
      for (int w = 0; w < kAhead; ++w)
        if (first + w < a.workers) add_run<kBits>(sum, coded[w]);
    }
  } else {
#pragma unroll 1
    for (int64_t w = 0; w < a.workers; ++w) add_run<kBits>(sum, load_coded<kBits>(a.rows + w * a.stride, i, a.numel));
  }
  Memory<Float32>::store(a.target + i, sum, a.numel - i);
}

// Runs do not depend on each other here, so the grid runs over them; two warps load the range of each block.
template <int kBits>
__device__ inline void quantize_decode_reduce(const Reduction<uint8_t>& a) {
  for (int64_t i = first_of_run(); i < a.numel; i += kRun * thread_count()) decode_run<kBits>(a, i);
}

template <int kBits>
__device__ inline void quantize_decode_pieces(const uint8_t* payloads, int64_t stride, float* target,
                                              const Pieces& pieces, int64_t runs) {
  for (int64_t index = warp_index(); index < runs; index += warp_count()) {
    const Place at = place_of<kWarpRun>(pieces, index);
    decode_run<kBits>({payloads + at.piece * stride, 0, 1, nullptr, target + at.start, at.numel},
                      kWarpRun * at.block + kQuad * lane_index());
  }
}

#define GRADWIRE_QUANTIZE(bits)                                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads) quantize_encode_##bits(                                 \
      const float* gradient, const float* residual, float* new_residual, uint8_t* payloads, int64_t stride,      \
      int64_t numel, int64_t width, int64_t blocks, int32_t random, uint32_t key) {                              \
    quantize_encode<bits>(gradient, residual, {new_residual, payloads, numel, random != 0, key}, stride, width,  \
                          blocks);                                                                               \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, kResident) quantize_decode_reduce_##bits(               \
      const uint8_t* rows, int64_t stride, int64_t workers, const float* addend, float* target, int64_t numel) { \
    quantize_decode_reduce<bits>({rows, stride, workers, addend, target, numel});                                \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) quantize_decode_pieces_##bits(                          \
      const uint8_t* payloads, int64_t stride, float* target, int64_t numel, int64_t width, int64_t runs) {      \
    quantize_decode_pieces<bits>(payloads, stride, target, {numel, width}, runs);                                \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) quantize_reduce_encode_##bits(                          \
      const uint8_t* rows, int64_t stride, int64_t workers, const float* residual, float* new_residual,          \
      uint8_t* reduced, int64_t numel, int32_t random, uint32_t key) {                                           \
    quantize_reduce_encode<bits>({rows, stride, workers, nullptr, nullptr, numel}, residual,                     \
                                 {new_residual, reduced, numel, random != 0, key});                              \
  }

GRADWIRE_QUANTIZE(8)
GRADWIRE_QUANTIZE(4)

}  // namespace gradwire

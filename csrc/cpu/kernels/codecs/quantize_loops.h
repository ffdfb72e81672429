// The loops of quantize.cpp for one instruction set; included by foreach_isa.h, no include guard.

#include "codes.h"

struct Range {
  float low, unit;
  bool finite;
};

constexpr size_t kAhead = 2048;  // elements to prefetch ahead; half and twice as many took about as long for gradients

// The smallest element and the step of a block in which every lane is set. A block's worth from `later` on is
// prefetched meanwhile, which cut the time for 25 MiB to 4 bits to two thirds (AVX-512, one run beside other programs).
// Two running pairs halve the chain of dependent operations; of special numbers only a NaN may be missed by minimum and
// maximum. The loop is not unrolled: fully unrolled, it was slower by a sixth in the same run.
inline Range range_of(const float* p, const float* later, float levels) {
  Vec low[2] = {load(p), load(p + 16)}, high[2] = {low[0], low[1]};
  uint32_t nan = 0;
#pragma GCC unroll 1
  for (size_t at = 0; at < kBlock; at += 32) {
    __builtin_prefetch(later + at), __builtin_prefetch(later + at + 16);
    const Vec x = load(p + at), y = load(p + at + 16);
    low[0] = minimum(x, low[0]), high[0] = maximum(x, high[0]);
    low[1] = minimum(y, low[1]), high[1] = maximum(y, high[1]);
    nan |= unordered(x, y);
  }
  const float bottom = least(minimum(low[0], low[1])), top = greatest(maximum(high[0], high[1]));
  const float spread = top - bottom;
  const float unit = std::isfinite(spread) ? spread / levels : top / levels - bottom / levels;
  const bool finite = nan == 0 && std::isfinite(bottom) && std::isfinite(top);
  return {bottom + 0.0f, unit < kSmallestNormal ? 0.0f : unit, finite};
}

inline void fill_offsets(float* offsets, bool random, uint32_t key, uint32_t first) {
  if (!random) {
    for (size_t i = 0; i < kBlock; ++i) offsets[i] = 0.5f;
    return;
  }
  for (size_t i = 0; i < kBlock; ++i) offsets[i] = uniform_of_hash(hash32(key, first + static_cast<uint32_t>(i)));
}

// A block with inf or NaN: NaN for both numbers and for the new residual.
template <int kBits>
inline void encode_special(float* new_residual, uint8_t* out, float* meta) {
  meta[0] = meta[1] = float_of_bits(0x7fc00000u);
  std::memset(out, 0, kBlock * kBits / 8);
  for (size_t i = 0; new_residual && i < kBlock; ++i) new_residual[i] = meta[0];
}

// code = floor((p - low) / unit + offset): offset 1/2 rounds to nearest, a uniform one rounds without bias.
template <int kBits>
inline void encode_full(const float* p, Range range, const float* offsets, float* new_residual, bool past_cache,
                        uint8_t* out, float* meta) {
  if (!range.finite) return encode_special<kBits>(new_residual, out, meta);
  meta[0] = range.unit, meta[1] = range.low;
  const Vec low = fill(range.low), unit = fill(range.unit),
            inverse = fill(range.unit > 0.0f ? 1.0f / range.unit : 0.0f);
  const Vec most = fill((1 << kBits) - 1);
#pragma GCC unroll 1
  for (size_t start = 0; start < kBlock; start += 64) {
    Vec t[4];
    for (size_t j = 0; j < 4; ++j) {
      const size_t at = start + 16 * j;
      const Vec x = load(p + at);
      t[j] = minimum(add(mul(sub(x, low), inverse), load(offsets + at)), most);
      if (new_residual) put(new_residual + at, sub(x, add(low, mul(truncate(t[j]), unit))), past_cache);
    }
    codes64<kBits>(t, out + start * kBits / 8);
  }
}

// p = gradient + residual; a short block is filled up with its first element, which changes neither end of its range.
inline void gather_block(const float* gradient, const float* residual, float* p, size_t count) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16)
    store(p + i, residual ? add(load(gradient + i), load(residual + i)) : load(gradient + i));
  for (; i < count; ++i) p[i] = residual ? gradient[i] + residual[i] : gradient[i];
  for (; i < kBlock; ++i) p[i] = p[0];
}

// A last block with fewer elements.
template <int kBits>
inline void encode_tail(const float* p, Range range, const float* offsets, float* new_residual, uint8_t* place,
                        float* meta, size_t count) {
  float rest[kBlock];
  uint8_t out[kBlock];
  encode_full<kBits>(p, range, offsets, new_residual ? rest : nullptr, false, out, meta);
  if (kBits == 4 && count % 2) out[count / 2] &= 0x0f;
  std::memcpy(place, out, (count * kBits + 7) / 8);
  if (new_residual) std::memcpy(new_residual, rest, count * sizeof(float));
}

// Where the codes of an element's block begin: behind the pairs of all blocks.
template <int kBits>
inline size_t codes_at(size_t numel, size_t start) {
  return meta_nbytes(numel) + start * kBits / 8;
}

// Encodes gradient + residual of the block at `start`, of which `count` elements exist; every pointer is to the block
// but the payload's. `later` is prefetched meanwhile.
template <int kBits>
inline void encode_block(const float* gradient, const float* residual, float* new_residual, const float* later,
                         const float* offsets, bool past_cache, uint8_t* payload, size_t numel, size_t start,
                         size_t count) {
  alignas(64) float room[kBlock];
  const bool direct = count == kBlock && !residual;
  if (!direct) gather_block(gradient, residual, room, count);
  const float* p = direct ? gradient : room;
  const Range range = range_of(p, later, (1 << kBits) - 1);
  uint8_t* place = payload + codes_at<kBits>(numel, start);
  float meta[2];
  if (count == kBlock) encode_full<kBits>(p, range, offsets, new_residual, past_cache, place, meta);
  else encode_tail<kBits>(p, range, offsets, new_residual, place, meta, count);
  std::memcpy(payload + 8 * (start / kBlock), meta, sizeof meta);
}

template <int kBits>
inline void encode(const float* gradient, const float* residual, float* new_residual, uint8_t* payload, size_t numel,
                   bool random, uint32_t key) {
  alignas(64) float offsets[kBlock];
  const bool past_cache = streams(new_residual, gradient, residual, numel);
  fill_offsets(offsets, false, 0, 0);
  for (size_t start = 0; start < numel; start += kBlock) {
    if (random) fill_offsets(offsets, true, key, static_cast<uint32_t>(start));
    encode_block<kBits>(gradient + start, residual ? residual + start : nullptr,
                        new_residual ? new_residual + start : nullptr, gradient + start + kAhead, offsets, past_cache,
                        payload, numel, start, std::min(kBlock, numel - start));
  }
  if (past_cache) fence();
}

// target = addend + worker 0 + worker 1 + ... over 64 elements of the block at `start`: a worker's is low + code *
// unit.
template <int kBits>
inline void reduce64(const Payloads& payloads, size_t start, const uint8_t* codes, size_t codes_stride,
                     const float* addend, float* target, bool past_cache) {
  Vec sum[4];
  for (int j = 0; j < 4; ++j) sum[j] = addend ? load(addend + 16 * j) : fill(0.0f);
  for (size_t w = 0; w < payloads.workers; ++w) {
    float meta[2];
    std::memcpy(meta, payloads.first + w * payloads.stride + 8 * (start / kBlock), sizeof meta);
    const Vec unit = fill(meta[0]), low = fill(meta[1]);
    const uint8_t* from = codes + w * codes_stride;
    __builtin_prefetch(from + kAhead * kBits / 8);
    Vec x[4];
    values64<kBits>(from, x);
    for (int j = 0; j < 4; ++j) sum[j] = add(sum[j], add(low, mul(x[j], unit)));
  }
  for (int j = 0; j < 4; ++j) put(target + 16 * j, sum[j], past_cache);
}

// The block at `start`, of which `count` elements exist; `addend` and `target` point to it.
template <int kBits>
inline void reduce_block(const Payloads& payloads, size_t start, const float* addend, float* target, size_t count,
                         bool past_cache) {
  const uint8_t* codes = payloads.first + codes_at<kBits>(payloads.numel, start);
  size_t at = 0;
  for (; at + 64 <= count; at += 64)
    reduce64<kBits>(payloads, start, codes + at * kBits / 8, payloads.stride, addend ? addend + at : nullptr,
                    target + at, past_cache);
  if (at == count) return;
  const size_t rest = count - at;
  float before[64] = {}, after[64];
  if (addend) std::memcpy(before, addend + at, rest * sizeof(float));
  std::vector<uint8_t> copies(64 * payloads.workers);
  for (size_t w = 0; w < payloads.workers; ++w)
    std::memcpy(copies.data() + 64 * w, codes + w * payloads.stride + at * kBits / 8, (rest * kBits + 7) / 8);
  reduce64<kBits>(payloads, start, copies.data(), 64, before, after, false);
  std::memcpy(target + at, after, rest * sizeof(float));
}

template <int kBits>
inline void decode_reduce(const Payloads& payloads, const float* addend, float* target) {
  const bool past_cache = streams(target, addend, nullptr, payloads.numel);
  for (size_t start = 0; start < payloads.numel; start += kBlock)
    reduce_block<kBits>(payloads, start, addend ? addend + start : nullptr, target + start,
                        std::min(kBlock, payloads.numel - start), past_cache);
  if (past_cache) fence();
}

// The owner's stage: the sum of the payloads plus residual, encoded, block by block.
template <int kBits>
inline void reduce_encode(const Payloads& payloads, const float* residual, float* new_residual, uint8_t* reduced,
                          bool random, uint32_t key) {
  alignas(64) float sum[kBlock], offsets[kBlock];
  const bool past_cache = streams(new_residual, residual, nullptr, payloads.numel);
  fill_offsets(offsets, false, 0, 0);
  for (size_t start = 0; start < payloads.numel; start += kBlock) {
    const size_t count = std::min(kBlock, payloads.numel - start);
    if (random) fill_offsets(offsets, true, key, static_cast<uint32_t>(start));
    reduce_block<kBits>(payloads, start, nullptr, sum, count, false);
    encode_block<kBits>(sum, residual ? residual + start : nullptr, new_residual ? new_residual + start : nullptr, sum,
                        offsets, past_cache, reduced, payloads.numel, start, count);
  }
  if (past_cache) fence();
}

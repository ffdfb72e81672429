// The loops of quantize.cpp for one instruction set; included by foreach_isa.h, no include guard.

#include "codes.h"

struct Range {
  float low, unit;
  bool finite;
};

constexpr size_t kAhead = 2048;  // 8 KiB; with 4 and 16 KiB it took about as long

// The smallest element and the step of a block in which every lane is set; a block's worth from `later` on is asked for
// meanwhile, with which 25 MiB to 4 bits took two thirds of the time (AVX-512, one run beside other programs). Two running
// pairs halve the chain; of special numbers only a NaN can hide from the two ends. The loop stays a loop: fully unrolled,
// it was slower by a sixth in the same run.
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

// A block with inf or NaN: NaN for both numbers and for what is left.
template <int kBits>
inline void encode_special(float* left, uint8_t* out, float* meta) {
  meta[0] = meta[1] = float_of_bits(0x7fc00000u);
  std::memset(out, 0, kBlock * kBits / 8);
  for (size_t i = 0; left && i < kBlock; ++i) left[i] = meta[0];
}

// code = floor((p - low) / unit + offset): offset 1/2 rounds to nearest, a uniform one rounds without bias.
template <int kBits>
inline void encode_full(const float* p, Range range, const float* offsets, float* left, bool past_cache, uint8_t* out,
                        float* meta) {
  if (!range.finite) return encode_special<kBits>(left, out, meta);
  meta[0] = range.unit, meta[1] = range.low;
  const Vec low = fill(range.low), unit = fill(range.unit), inverse = fill(range.unit > 0.0f ? 1.0f / range.unit : 0.0f);
  const Vec most = fill((1 << kBits) - 1);
#pragma GCC unroll 1
  for (size_t start = 0; start < kBlock; start += 64) {
    Vec t[4];
    for (size_t j = 0; j < 4; ++j) {
      const size_t at = start + 16 * j;
      const Vec x = load(p + at);
      t[j] = minimum(add(mul(sub(x, low), inverse), load(offsets + at)), most);
      if (left) put(left + at, sub(x, add(low, mul(truncate(t[j]), unit))), past_cache);
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
inline void encode_tail(const float* p, Range range, const float* offsets, float* left, uint8_t* place, float* meta,
                        size_t count) {
  float rest[kBlock];
  uint8_t out[kBlock];
  encode_full<kBits>(p, range, offsets, left ? rest : nullptr, false, out, meta);
  if (kBits == 4 && count % 2) out[count / 2] &= 0x0f;
  std::memcpy(place, out, (count * kBits + 7) / 8);
  if (left) std::memcpy(left, rest, count * sizeof(float));
}

template <int kBits>
inline void encode(const float* gradient, const float* residual, float* left, uint8_t* payload, size_t numel,
                   bool random, uint32_t key) {
  alignas(64) float room[kBlock], offsets[kBlock];
  const bool past_cache = streams(left, gradient, residual, numel);
  fill_offsets(offsets, false, 0, 0);
  for (size_t start = 0, block = 0; start < numel; start += kBlock, ++block) {
    const size_t count = numel - start < kBlock ? numel - start : kBlock;
    if (random) fill_offsets(offsets, true, key, static_cast<uint32_t>(start));
    const bool direct = count == kBlock && !residual;
    if (!direct) gather_block(gradient + start, residual ? residual + start : nullptr, room, count);
    const float* p = direct ? gradient + start : room;
    const Range range = range_of(p, gradient + start + kAhead, (1 << kBits) - 1);
    uint8_t* place = payload + meta_nbytes(numel) + start * kBits / 8;
    float meta[2];
    if (count == kBlock)
      encode_full<kBits>(p, range, offsets, left ? left + start : nullptr, past_cache, place, meta);
    else
      encode_tail<kBits>(p, range, offsets, left ? left + start : nullptr, place, meta, count);
    std::memcpy(payload + 8 * block, meta, sizeof meta);
  }
  if (past_cache) fence();
}

// sum += low + code * unit, over one block.
template <int kBits>
inline void decode_add(const uint8_t* __restrict codes, float unit, float low, float* __restrict sum) {
  uint8_t wide[kBlock];
  if (kBits == 8) {
    std::memcpy(wide, codes, kBlock);
  } else {
    for (size_t i = 0; i < kBlock / 2; ++i) {
      const uint16_t pair = static_cast<uint16_t>((codes[i] | codes[i] << 4) & 0x0f0f);
      std::memcpy(wide + 2 * i, &pair, sizeof pair);
    }
  }
  for (size_t i = 0; i < kBlock; ++i) {
    const int32_t code = wide[i];
    sum[i] += low + static_cast<float>(code) * unit;
  }
}

// target = addend + worker 0 + worker 1 + ..., over one block of which `count` elements exist.
template <int kBits>
inline void reduce_block(const uint8_t* payloads, size_t stride, size_t workers, size_t numel, size_t block,
                         const float* addend, float* target, size_t count, bool past_cache) {
  alignas(64) float sum[kBlock];
  for (size_t at = 0; at < kBlock; at += 16) store(sum + at, fill(0.0f));
  if (addend && count < kBlock) std::memcpy(sum, addend, count * sizeof(float));
  if (addend && count == kBlock)
    for (size_t at = 0; at < kBlock; at += 16) store(sum + at, load(addend + at));
  uint8_t copy[kBlock];
  for (size_t w = 0; w < workers; ++w) {
    float meta[2];
    std::memcpy(meta, payloads + w * stride + 8 * block, sizeof meta);
    const uint8_t* codes = payloads + w * stride + meta_nbytes(numel) + block * kBlock * kBits / 8;
    if (count < kBlock) {
      std::memset(copy, 0, sizeof copy);
      codes = static_cast<const uint8_t*>(std::memcpy(copy, codes, (count * kBits + 7) / 8));
    }
    decode_add<kBits>(codes, meta[0], meta[1], sum);
  }
  if (count < kBlock) std::memcpy(target, sum, count * sizeof(float));
  else
    for (size_t at = 0; at < kBlock; at += 16) put(target + at, load(sum + at), past_cache);
}

template <int kBits>
inline void decode_reduce(const uint8_t* payloads, size_t stride, size_t workers, const float* addend, float* target,
                          size_t numel) {
  const bool past_cache = streams(target, addend, nullptr, numel);
  for (size_t start = 0, block = 0; start < numel; start += kBlock, ++block) {
    const size_t count = numel - start < kBlock ? numel - start : kBlock;
    reduce_block<kBits>(payloads, stride, workers, numel, block, addend ? addend + start : nullptr, target + start,
                        count, past_cache);
  }
  if (past_cache) fence();
}

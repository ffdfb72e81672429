// The loops of quantize.cpp for one instruction set; included by foreach_isa.h, no include guard.

struct Range {
  float low, unit;
  bool finite;
};

// The smallest element and the step of a block in which every lane is set.
inline Range range_of(const float* p, float levels) {
  Vec low = load(p), high = low;
  uint32_t special = 0;
  for (size_t at = 0; at < kBlock; at += 16) {
    const Vec x = load(p + at);
    low = minimum(x, low), high = maximum(x, high);
    special |= at_least(x, 0x7f800000u);
  }
  alignas(64) float lows[16], highs[16];
  store(lows, low), store(highs, high);
  for (int i = 1; i < 16; ++i) {
    if (lows[i] < lows[0]) lows[0] = lows[i];
    if (highs[i] > highs[0]) highs[0] = highs[i];
  }
  const float spread = highs[0] - lows[0];
  const bool fits = bits_of_float(spread) < 0x7f800000u;
  const float unit = fits ? spread / levels : highs[0] / levels - lows[0] / levels;
  return {lows[0] + 0.0f, unit < kSmallestNormal ? 0.0f : unit, special == 0};
}

template <int kBits>
inline void pack_codes(const int32_t* codes, uint8_t* out) {
  if (kBits == 8) {
    for (size_t i = 0; i < kBlock; ++i) out[i] = static_cast<uint8_t>(codes[i]);
    return;
  }
  uint8_t bytes[kBlock];
  for (size_t i = 0; i < kBlock; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
  for (size_t i = 0; i < kBlock / 2; ++i) {  // the even element in the low half of the byte
    uint16_t pair;
    std::memcpy(&pair, bytes + 2 * i, sizeof pair);
    out[i] = static_cast<uint8_t>(pair | pair >> 4);
  }
}

inline void fill_offsets(float* offsets, bool random, uint32_t key, uint32_t first) {
  if (!random) {
    for (size_t i = 0; i < kBlock; ++i) offsets[i] = 0.5f;
    return;
  }
  for (size_t i = 0; i < kBlock; ++i) offsets[i] = uniform_of_hash(hash32(key, first + static_cast<uint32_t>(i)));
}

// code = floor((p - low) / unit + offset): offset 1/2 rounds to nearest, a uniform one rounds without bias.
template <int kBits>
inline void encode_full(const float* p, const float* offsets, float* left, uint8_t* out, float* meta) {
  constexpr float kLevels = (1 << kBits) - 1;
  const Range range = range_of(p, kLevels);
  const float low = range.low, unit = range.unit, inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
  int32_t codes[kBlock];
  if (!range.finite) {
    std::memset(codes, 0, sizeof codes);
    meta[0] = meta[1] = float_of_bits(0x7fc00000u);
    if (left)
      for (size_t i = 0; i < kBlock; ++i) left[i] = meta[0];
  } else {
    meta[0] = unit, meta[1] = low;
    for (size_t i = 0; i < kBlock; ++i) {
      const float t = (p[i] - low) * inverse + offsets[i];
      codes[i] = static_cast<int32_t>(t < kLevels ? t : kLevels);
    }
    if (left)
      for (size_t i = 0; i < kBlock; ++i) left[i] = p[i] - (low + static_cast<float>(codes[i]) * unit);
  }
  pack_codes<kBits>(codes, out);
}

// p = gradient + residual; a short block is filled up with its first element, which changes neither end of its range.
inline void gather_block(const float* gradient, const float* residual, float* p, size_t count) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16)
    store(p + i, residual ? add(load(gradient + i), load(residual + i)) : load(gradient + i));
  for (; i < count; ++i) p[i] = residual ? gradient[i] + residual[i] : gradient[i];
  for (; i < kBlock; ++i) p[i] = p[0];
}

template <int kBits>
inline void encode(const float* gradient, const float* residual, float* left, uint8_t* payload, size_t numel,
                   bool random, uint32_t key) {
  alignas(64) float p[kBlock], rest[kBlock], offsets[kBlock];
  uint8_t out[kBlock];
  float meta[2];
  uint8_t* codes = payload + meta_nbytes(numel);
  const bool past_cache = streams(left, gradient, residual, numel);
  fill_offsets(offsets, false, 0, 0);
  for (size_t start = 0, block = 0; start < numel; start += kBlock, ++block) {
    const size_t count = numel - start < kBlock ? numel - start : kBlock;
    const bool whole = count == kBlock;
    if (random) fill_offsets(offsets, true, key, static_cast<uint32_t>(start));
    const bool direct = whole && !residual;
    if (!direct) gather_block(gradient + start, residual ? residual + start : nullptr, p, count);
    uint8_t* place = codes + start * kBits / 8;
    encode_full<kBits>(direct ? gradient + start : p, offsets, left ? rest : nullptr, whole ? place : out, meta);
    std::memcpy(payload + 8 * block, meta, sizeof meta);
    if (whole) {
      for (size_t at = 0; left && at < kBlock; at += 16) put(left + start + at, load(rest + at), past_cache);
      continue;
    }
    if (kBits == 4 && count % 2) out[count / 2] &= 0x0f;
    std::memcpy(place, out, (count * kBits + 7) / 8);
    if (left) std::memcpy(left + start, rest, count * sizeof(float));
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

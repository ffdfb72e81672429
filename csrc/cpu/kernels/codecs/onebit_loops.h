// The loops of onebit.cpp for one instruction set; included by foreach_isa.h, no include guard.

// One block: p = gradient + residual, its signs, its mean magnitude, and in new_residual the compression error.
// Sixty-four running sums (element i goes to sum i % 64) and a fixed tree make the scale the same on every processor.
inline float encode_full(const float* gradient, const float* residual, float* new_residual, bool past_cache,
                         uint8_t* bits, size_t count) {
  alignas(64) float p[kBlock];
  Vec sum[4] = {fill(0.0f), fill(0.0f), fill(0.0f), fill(0.0f)};
  for (size_t i = 0; i < kBlock; i += 64) {
    for (size_t j = 0; j < 4; ++j) {
      const size_t at = i + 16 * j;
      Vec x = load(gradient + at);
      if (residual) x = add(x, load(residual + at));
      if (new_residual) store(p + at, x);
      sum[j] = add(sum[j], absolute(x));
      const uint16_t signs = nonnegative(x);
      std::memcpy(bits + at / 8, &signs, sizeof signs);
    }
  }
  const float scale = sum_lanes(add(add(sum[0], sum[2]), add(sum[1], sum[3]))) / static_cast<float>(count);
  if (!new_residual) return scale;
  const Vec magnitude = fill(scale);
  for (size_t at = 0; at < kBlock; at += 32) {
    uint32_t signs;
    std::memcpy(&signs, bits + at / 8, sizeof signs);
    put(new_residual + at, sub(load(p + at), signed_by(magnitude, signs, 0)), past_cache);
    put(new_residual + at + 16, sub(load(p + at + 16), signed_by(magnitude, signs, 16)), past_cache);
  }
  return scale;
}

// A last block with fewer elements: padded with zeros, which add nothing to the sum; their sign bits are cleared.
inline float encode_tail(const float* gradient, const float* residual, float* new_residual, uint8_t* bits,
                         size_t count) {
  alignas(64) float g[kBlock] = {}, e[kBlock] = {}, rest[kBlock];
  uint8_t signs[kBlock / 8];
  std::memcpy(g, gradient, count * sizeof(float));
  if (residual) std::memcpy(e, residual, count * sizeof(float));
  const float scale = encode_full(g, residual ? e : nullptr, new_residual ? rest : nullptr, false, signs, count);
  if (new_residual) std::memcpy(new_residual, rest, count * sizeof(float));
  if (count % 8) signs[count / 8] &= static_cast<uint8_t>((1u << count % 8) - 1);
  std::memcpy(bits, signs, (count + 7) / 8);
  return scale;
}

inline float encode_block(const float* gradient, const float* residual, float* new_residual, bool past_cache,
                          uint8_t* bits, size_t count) {
  return count == kBlock ? encode_full(gradient, residual, new_residual, past_cache, bits, count)
                         : encode_tail(gradient, residual, new_residual, bits, count);
}

inline void encode(const float* gradient, const float* residual, float* new_residual, uint8_t* payload, size_t numel) {
  uint8_t* bits = payload + scales_nbytes(numel);
  const bool past_cache = streams(new_residual, gradient, residual, numel);
  for (size_t start = 0, block = 0; start < numel; start += kBlock, ++block) {
    const size_t count = numel - start < kBlock ? numel - start : kBlock;
    const float scale =
        encode_block(gradient + start, residual ? residual + start : nullptr,
                     new_residual ? new_residual + start : nullptr, past_cache, bits + start / 8, count);
    std::memcpy(payload + 4 * block, &scale, sizeof scale);
  }
  if (past_cache) fence();
}

// 64 elements of all workers: target = addend + worker 0 + worker 1 + ...
inline void reduce64(const uint8_t* bits, size_t stride, const float* scales, size_t workers, const float* addend,
                     float* target, bool past_cache) {
  Vec sum[4];
  for (int j = 0; j < 4; ++j) sum[j] = addend ? load(addend + 16 * j) : fill(0.0f);
  for (size_t w = 0; w < workers; ++w) {
    uint32_t signs[2];
    std::memcpy(signs, bits + w * stride, sizeof signs);
    const Vec scale = fill(scales[w]);
    for (int j = 0; j < 4; ++j) sum[j] = add(sum[j], signed_by(scale, signs[j / 2], j % 2 * 16));
  }
  for (int j = 0; j < 4; ++j) put(target + 16 * j, sum[j], past_cache);
}

inline void reduce_rest(const uint8_t* bits, size_t stride, const float* scales, size_t workers, const float* addend,
                        float* target, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float sum = addend ? addend[i] : 0.0f;
    for (size_t w = 0; w < workers; ++w) sum += bits[w * stride + i / 8] >> i % 8 & 1 ? scales[w] : -scales[w];
    target[i] = sum;
  }
}

// Prefetches the payloads four blocks ahead, and one line of the page that the sums will then be written to. The sums
// of four payloads of 25 MiB took 0.89 ms with both, 0.93 with the line alone and 1.54 with the payloads alone
// (AVX-512, one run beside other programs).
inline void prefetch_blocks(const uint8_t* bits, size_t stride, size_t workers, const float* target) {
  constexpr size_t kAhead = 4 * kBlock;
  for (size_t w = 0; w < workers; ++w)
    for (size_t line = 0; line < kBlock / 8; line += 64) __builtin_prefetch(bits + w * stride + kAhead / 8 + line);
  // As a number: `target` may be a block on the stack, past whose end no pointer may be made.
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(target) + kAhead * sizeof(float)));
}

inline void reduce_block(const uint8_t* payloads, size_t stride, size_t workers, size_t numel, size_t block,
                         const float* addend, float* target, float* scales, bool past_cache) {
  const size_t start = block * kBlock, count = numel - start < kBlock ? numel - start : kBlock;
  for (size_t w = 0; w < workers; ++w) std::memcpy(&scales[w], payloads + w * stride + 4 * block, sizeof(float));
  const uint8_t* bits = payloads + scales_nbytes(numel) + start / 8;
  prefetch_blocks(bits, stride, workers, target);
  size_t i = 0;
  for (; i + 64 <= count; i += 64)
    reduce64(bits + i / 8, stride, scales, workers, addend ? addend + i : nullptr, target + i, past_cache);
  reduce_rest(bits + i / 8, stride, scales, workers, addend ? addend + i : nullptr, target + i, count - i);
}

inline void decode_reduce(const uint8_t* payloads, size_t stride, size_t workers, const float* addend, float* target,
                          size_t numel) {
  std::vector<float> scales(workers);
  const bool past_cache = streams(target, addend, nullptr, numel);
  for (size_t start = 0, block = 0; start < numel; start += kBlock, ++block)
    reduce_block(payloads, stride, workers, numel, block, addend ? addend + start : nullptr, target + start,
                 scales.data(), past_cache);
  if (past_cache) fence();
}

inline void reduce_encode(const uint8_t* payloads, size_t stride, size_t workers, const float* residual,
                          float* new_residual, uint8_t* reduced, size_t numel) {
  std::vector<float> scales(workers);
  alignas(64) float sum[kBlock];
  uint8_t* bits = reduced + scales_nbytes(numel);
  for (size_t start = 0, block = 0; start < numel; start += kBlock, ++block) {
    const size_t count = numel - start < kBlock ? numel - start : kBlock;
    reduce_block(payloads, stride, workers, numel, block, nullptr, sum, scales.data(), false);
    const float scale = encode_block(sum, residual ? residual + start : nullptr,
                                     new_residual ? new_residual + start : nullptr, false, bits + start / 8, count);
    std::memcpy(reduced + 4 * block, &scale, sizeof scale);
  }
}

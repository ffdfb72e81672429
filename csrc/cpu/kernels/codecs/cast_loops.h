// The loops of cast.cpp for one instruction set; included by foreach_isa.h, no include guard.

template <bool kHalf>
inline void narrow(uint16_t* at, Vec x) {
  if (kHalf) to_half(at, x);
  else to_bfloat(at, x);
}

template <bool kHalf>
inline Vec widen(const uint16_t* at) {
  return kHalf ? from_half(at) : from_bfloat(at);
}

// p = gradient * scale + residual; target = narrow(p); new_residual = p - target.
template <bool kHalf>
inline void encode16(const float* gradient, Vec scale, const float* residual, float* new_residual, uint16_t* target) {
  Vec x = mul(load(gradient), scale);
  if (residual) x = add(x, load(residual));
  narrow<kHalf>(target, x);
  if (new_residual) store(new_residual, sub(x, widen<kHalf>(target)));
}

template <bool kHalf>
inline void encode(const float* gradient, float factor, const float* residual, float* new_residual, uint16_t* target,
                   size_t numel) {
  const Vec scale = fill(factor);
  size_t i = 0;
  for (; i + 16 <= numel; i += 16)
    encode16<kHalf>(gradient + i, scale, residual ? residual + i : nullptr, new_residual ? new_residual + i : nullptr,
                    target + i);
  if (i == numel) return;
  alignas(64) float g[16] = {}, e[16] = {}, rest[16];
  uint16_t last[16];
  const size_t count = numel - i;
  std::memcpy(g, gradient + i, count * sizeof(float));
  if (residual) std::memcpy(e, residual + i, count * sizeof(float));
  encode16<kHalf>(g, scale, residual ? e : nullptr, new_residual ? rest : nullptr, last);
  std::memcpy(target + i, last, count * sizeof(uint16_t));
  if (new_residual) std::memcpy(new_residual + i, rest, count * sizeof(float));
}

// target = addend + worker 0 + worker 1 + ..., in float32.
template <bool kHalf>
inline void decode_reduce(const uint16_t* sources, size_t stride, size_t workers, const float* addend, float* target,
                          size_t numel) {
  for (size_t i = 0; i < numel; i += 16) {
    const size_t count = numel - i < 16 ? numel - i : 16;
    alignas(64) float rest[16] = {};
    if (addend) std::memcpy(rest, addend + i, count * sizeof(float));
    Vec sum = load(rest);
    for (size_t w = 0; w < workers; ++w) {
      const uint16_t* source = sources + w * stride + i;
      uint16_t last[16] = {};
      if (count < 16) source = static_cast<const uint16_t*>(std::memcpy(last, source, count * sizeof(uint16_t)));
      sum = workers == 1 && !addend ? widen<kHalf>(source) : add(sum, widen<kHalf>(source));
    }
    if (count == 16) {
      store(target + i, sum);
    } else {
      store(rest, sum);
      std::memcpy(target + i, rest, count * sizeof(float));
    }
  }
}

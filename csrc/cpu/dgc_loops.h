// The loops of dgc.cpp for one instruction set; included by foreach_isa.h, no include guard.

struct Advanced {
  Vec velocity, total;
};

// Momentum correction of sixteen elements. Heavy ball: u = m u + g, v = v + u. Nesterov: u = m (u + g), v = v + u + g.
inline Advanced advance16(const float* gradient, const float* velocity, const float* total, Vec scale, Vec momentum,
                          bool nesterov) {
  const Vec g = mul(load(gradient), scale), u = load(velocity), v = load(total);
  if (!nesterov) {
    const Vec next = add(mul(momentum, u), g);
    return {next, add(v, next)};
  }
  const Vec next = mul(momentum, add(u, g));
  return {next, add(add(v, next), g)};
}

inline size_t note(uint16_t mask, size_t at, uint32_t* found, size_t capacity, size_t count) {
  for (uint32_t bits = mask; bits; bits &= bits - 1, ++count)
    if (count < capacity) found[count] = static_cast<uint32_t>(at) + static_cast<uint32_t>(__builtin_ctz(bits));
  return count;
}

// One pass over everything: new velocity and total, and the places where the total's magnitude reaches `key`.
// Returns how many there are, which may be more than `capacity` holds.
inline size_t advance(const State& state, const Rule& rule, uint32_t key, uint32_t* found, size_t capacity) {
  const Vec scale = fill(rule.scale), momentum = fill(rule.momentum);
  const bool past_cache = streams(state.velocity_out, state.velocity, nullptr, state.numel) &&
                          streams(state.total_out, state.total, nullptr, state.numel);
  size_t count = 0, i = 0;
  for (; i + 16 <= state.numel; i += 16) {
    const Advanced next = advance16(state.gradient + i, state.velocity + i, state.total + i, scale, momentum,
                                    rule.nesterov);
    put(state.velocity_out + i, next.velocity, past_cache);
    put(state.total_out + i, next.total, past_cache);
    const uint16_t mask = at_least(next.total, key);
    if (mask) count = note(mask, i, found, capacity, count);
  }
  if (past_cache) fence();
  if (i == state.numel) return count;
  const size_t rest = state.numel - i, nbytes = rest * sizeof(float);
  alignas(64) float g[16] = {}, u[16] = {}, v[16] = {};
  std::memcpy(g, state.gradient + i, nbytes);
  std::memcpy(u, state.velocity + i, nbytes);
  std::memcpy(v, state.total + i, nbytes);
  const Advanced next = advance16(g, u, v, scale, momentum, rule.nesterov);
  store(u, next.velocity), store(v, next.total);
  std::memcpy(state.velocity_out + i, u, nbytes);
  std::memcpy(state.total_out + i, v, nbytes);
  return note(at_least(next.total, key) & ((1u << rest) - 1), i, found, capacity, count);
}

// The magnitudes that `advance` would find in `lines` runs of sixteen elements, spread evenly.
inline void sample(const State& state, const Rule& rule, size_t lines, uint32_t* keys) {
  const Vec scale = fill(rule.scale), momentum = fill(rule.momentum);
  const size_t stride = state.numel / 16 / lines * 16;
  for (size_t line = 0; line < lines; ++line) {
    const size_t i = line * stride;
    const Advanced next = advance16(state.gradient + i, state.velocity + i, state.total + i, scale, momentum,
                                    rule.nesterov);
    alignas(64) float v[16];
    store(v, next.total);
    for (int j = 0; j < 16; ++j) keys[16 * line + j] = magnitude_key(v[j]);
  }
}

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

constexpr size_t kRun = 1024;
constexpr size_t kAhead = 512;  // 2 KiB: of 1, 2 and 4 the fastest for three streams of which two are written

// The new totals of a run of elements, in the cache for the selection.
struct Run {
  alignas(64) float totals[kRun];
  alignas(8) uint16_t reached[kRun / 16];  // a bit for each total whose magnitude reaches the threshold
};

// `count` elements from `start` on, at most kRun: new velocity and total, and which totals reach `key`.
inline void advance_run(const State& state, const Rule& rule, size_t start, size_t count, uint32_t key, bool past_cache,
                        Run& run) {
  const Vec scale = fill(rule.scale), momentum = fill(rule.momentum);
  const float *g = state.gradient + start, *u = state.velocity + start, *v = state.total + start;
  float *u_out = state.velocity_out + start, *v_out = state.total_out + start;
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    __builtin_prefetch(g + i + kAhead), __builtin_prefetch(u + i + kAhead), __builtin_prefetch(v + i + kAhead);
    const Advanced next = advance16(g + i, u + i, v + i, scale, momentum, rule.nesterov);
    put(u_out + i, next.velocity, past_cache), put(v_out + i, next.total, past_cache);
    store(run.totals + i, next.total);
    run.reached[i / 16] = at_least(next.total, key);
  }
  if (i == count) return;
  const size_t rest = count - i, nbytes = rest * sizeof(float);
  alignas(64) float last[3][16] = {};
  std::memcpy(last[0], g + i, nbytes), std::memcpy(last[1], u + i, nbytes), std::memcpy(last[2], v + i, nbytes);
  const Advanced next = advance16(last[0], last[1], last[2], scale, momentum, rule.nesterov);
  store(last[1], next.velocity), store(run.totals + i, next.total);
  std::memcpy(u_out + i, last[1], nbytes), std::memcpy(v_out + i, run.totals + i, nbytes);
  run.reached[i / 16] = at_least(next.total, key) & ((1u << rest) - 1);
}

// One pass over everything: new velocity and total, and the ranks of those whose magnitude reaches `key`.
// Returns how many there are, which may be more than `capacity`. The search follows each run: a mispredicted branch on
// a total that is still being loaded from memory would hold up the loads behind it for as long.
inline size_t advance(const State& state, const Rule& rule, uint32_t key, uint64_t* found, size_t capacity) {
  const bool past_cache = streams(state.velocity_out, state.velocity, nullptr, state.numel) &&
                          streams(state.total_out, state.total, nullptr, state.numel);
  size_t total = 0;
  for (size_t start = 0; start < state.numel; start += kRun) {
    const size_t count = std::min(kRun, state.numel - start);
    Run run;
    if (count < kRun) std::memset(run.reached, 0, sizeof run.reached);
    advance_run(state, rule, start, count, key, past_cache, run);
    for (size_t i = 0; i < count; i += 64) {
      uint64_t reached;
      std::memcpy(&reached, run.reached + i / 16, sizeof reached);
      for (; reached; reached &= reached - 1, ++total) {
        const size_t at = i + static_cast<size_t>(__builtin_ctzll(reached));
        if (total < capacity) found[total] = rank_of(run.totals[at], start + at);
      }
    }
  }
  if (past_cache) fence();
  return total;
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

// The loops of pack.cpp for one instruction set; included by foreach_isa.h, no include guard.

struct Wide {
  using Stored = float;
  static Vec read(const float* at) { return load(at); }
  static void write(float* at, Vec x, bool past_cache) { put(at, x, past_cache); }
};

struct Half {
  using Stored = uint16_t;
  static Vec read(const uint16_t* at) { return from_half(at); }
  static void write(uint16_t* at, Vec x, bool) { to_half(at, x); }
};

struct BFloat {
  using Stored = uint16_t;
  static Vec read(const uint16_t* at) { return from_bfloat(at); }
  static void write(uint16_t* at, Vec x, bool) { to_bfloat(at, x); }
};

// Fewer than sixteen elements, through a padded register.
template <class From, class To>
inline void move_few(const typename From::Stored* from, typename To::Stored* to, Vec scale, size_t count) {
  alignas(64) typename From::Stored source[16] = {};
  alignas(64) typename To::Stored target[16];
  std::memcpy(source, from, count * sizeof *from);
  To::write(target, mul(From::read(source), scale), false);
  std::memcpy(to, target, count * sizeof *to);
}

// to = from * scale. Streaming stores must be aligned: the elements before the first aligned one are moved separately.
template <class From, class To>
inline void move_run(const Move& move, Vec scale, bool past_cache) {
  const auto* from = reinterpret_cast<const typename From::Stored*>(move.from.address);
  auto* to = reinterpret_cast<typename To::Stored*>(move.to.address);
  constexpr size_t kAlignment = 16 * sizeof *to;
  const size_t head = std::min((kAlignment - move.to.address % kAlignment) % kAlignment / sizeof *to, move.numel);
  move_few<From, To>(from, to, scale, head);
  size_t i = head;
  for (; i + 16 <= move.numel; i += 16) To::write(to + i, mul(From::read(from + i), scale), past_cache);
  move_few<From, To>(from + i, to + i, scale, move.numel - i);
}

template <class From>
inline void move_from(const Move& move, Vec scale, bool past_cache) {
  if (move.to.format == Format::float32) move_run<From, Wide>(move, scale, past_cache);
  else if (move.to.format == Format::float16) move_run<From, Half>(move, scale, past_cache);
  else move_run<From, BFloat>(move, scale, past_cache);
}

inline void move_all(const std::vector<Move>& moves, float factor, bool past_cache) {
  const Vec scale = fill(factor);
  for (const Move& move : moves) {
    if (move.from.format == Format::float32) move_from<Wide>(move, scale, past_cache);
    else if (move.from.format == Format::float16) move_from<Half>(move, scale, past_cache);
    else move_from<BFloat>(move, scale, past_cache);
  }
  if (past_cache) fence();
}

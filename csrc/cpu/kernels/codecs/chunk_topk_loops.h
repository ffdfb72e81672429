// The loops of chunk_topk.cpp for one instruction set; included by foreach_isa.h, no include guard.

constexpr size_t kGroups = 128;  // whose largest magnitudes bound the k-th largest of the chunk from below
constexpr size_t kAhead = 2048;  // elements to prefetch ahead, as for the quantisation

// A chunk on its way through: in the first cache.
struct Work {
  alignas(64) float p[kMostChunk];
  alignas(64) float candidates[kMostChunk];
  alignas(64) float maxima[kGroups];
  alignas(8) uint16_t reached[kMostChunk / 16];
  uint16_t candidate_places[kMostChunk];
  alignas(64) float values[kMostKeep + 32];  // the kept ones, zeros behind them
  uint16_t places[kMostKeep];
  uint64_t vector[kMostChunk / 64];
};

inline size_t count_at_least(const float* x, size_t padded, uint32_t key) {
  size_t count = 0;
  for (size_t at = 0; at < padded; at += 16)
    count += static_cast<size_t>(__builtin_popcount(at_least(load(x + at), key)));
  return count;
}

// A key that exactly k magnitudes reach, or else the largest that k or more reach. At least k reach `low`. Zeros behind
// the values, up to a multiple of sixteen, never count: every key that is tried is larger.
inline uint32_t cut_of(const float* x, size_t numel, size_t k, uint32_t low) {
  const size_t padded = (numel + 15) / 16 * 16;
  if (low >= kNan || count_at_least(x, padded, kNan) >= k) return kNan;
  for (uint32_t high = kNan; high - low > 1;) {
    const uint32_t middle = low + (high - low) / 2;
    const size_t count = count_at_least(x, padded, middle);
    if (count == k) return middle;
    if (count > k) low = middle;
    else high = middle;
  }
  return low;
}

// p = gradient + decay * residual, zeros up to a multiple of the groups behind a short chunk; the groups' maxima.
// A group is every 128th element. A NaN is left out of its maximum, which is then a bound all the same.
inline void gather(const float* gradient, const float* residual, float decay, size_t count, Work& work) {
  const Vec factor = fill(decay);
  Vec most[8];
  for (int j = 0; j < 8; ++j) most[j] = fill(0.0f);
  const size_t whole = count / kGroups * kGroups;
  for (size_t i = 0; i < whole; i += kGroups) {
    for (int line = 0; line < 8; line += 1) __builtin_prefetch(gradient + i + kAhead + 16 * line);
    if (residual)
      for (int line = 0; line < 8; line += 1) __builtin_prefetch(residual + i + kAhead + 16 * line);
    for (int j = 0; j < 8; ++j) {
      const size_t at = i + 16 * static_cast<size_t>(j);
      Vec x = load(gradient + at);
      if (residual) x = add(x, mul(factor, load(residual + at)));
      store(work.p + at, x);
      most[j] = maximum(absolute(x), most[j]);
    }
  }
  if (whole < count) {
    for (size_t i = whole; i < whole + kGroups; ++i)
      work.p[i] = i >= count ? 0.0f : residual ? gradient[i] + decay * residual[i] : gradient[i];
    for (int j = 0; j < 8; ++j)
      most[j] = maximum(absolute(load(work.p + whole + 16 * static_cast<size_t>(j))), most[j]);
  }
  for (int j = 0; j < 8; ++j) store(work.maxima + 16 * j, most[j]);
}

// Collects what reaches `key`, in the order of the places; returns how many.
inline size_t collect(uint32_t key, size_t count, Work& work) {
  const size_t padded = (count + 63) / 64 * 64;
  for (size_t at = 0; at < padded; at += 16) work.reached[at / 16] = at_least(load(work.p + at), key);
  if (count % 64 != 0) {  // zeros behind a short chunk reach a key of 0
    uint64_t last;
    std::memcpy(&last, work.reached + count / 64 * 4, sizeof last);
    last &= (uint64_t{1} << count % 64) - 1;
    std::memcpy(work.reached + count / 64 * 4, &last, sizeof last);
  }
  size_t found = 0;
  for (size_t i = 0; i < padded; i += 64) {
    uint64_t reached;
    std::memcpy(&reached, work.reached + i / 16, sizeof reached);
    for (; reached; reached &= reached - 1, ++found) {
      const size_t at = i + static_cast<size_t>(__builtin_ctzll(reached));
      work.candidates[found] = work.p[at];
      work.candidate_places[found] = static_cast<uint16_t>(at);
    }
  }
  return found;
}

// The k largest of p, in the order of their places, into `values` and `places`.
inline void select(size_t count, size_t k, Work& work) {
  const uint32_t bound = k <= kGroups ? cut_of(work.maxima, kGroups, k, 0) : 0;
  const size_t found = collect(bound, count, work);
  std::memset(work.candidates + found, 0, ((found + 15) / 16 * 16 - found) * sizeof(float));
  const uint32_t cut = cut_of(work.candidates, found, k, bound);
  size_t equals = k, kept = 0;  // how many of those equal to the cut are kept
  for (size_t i = 0; i < found; ++i) equals -= key_of(work.candidates[i]) > cut;
  for (size_t i = 0; i < found && kept < k; ++i) {
    const uint32_t key = key_of(work.candidates[i]);
    const bool equal = key == cut && equals > 0;
    work.values[kept] = work.candidates[i], work.places[kept] = work.candidate_places[i];
    equals -= equal;
    kept += equal || key > cut;
  }
  for (size_t i = k; i < (k + 31) / 32 * 32; ++i) work.values[i] = 0.0f;
}

// The sum of the magnitudes that reach `least` (the larger ones) or do not, in a fixed order: value i goes to running
// sum i % 32, then a tree of halves.
struct Sums {
  float small, large;
  size_t larger;
};

inline Sums sum_groups(const float* values, size_t k, float least) {
  alignas(64) float small[32] = {}, large[32] = {};
  size_t larger = 0;
  for (size_t i = 0; i < k; ++i) {
    const float x = std::fabs(values[i]);
    const bool reaches = x >= least;
    small[i % 32] += reaches ? 0.0f : x;
    large[i % 32] += reaches ? x : 0.0f;
    larger += reaches;
  }
  return {sum_lanes(add(load(small), load(small + 16))), sum_lanes(add(load(large), load(large + 16))), larger};
}

inline float mean_of(const float* values, size_t k) {
  Vec low = fill(0.0f), high = fill(0.0f);
  for (size_t i = 0; i < k; i += 32)
    low = add(low, absolute(load(values + i))), high = add(high, absolute(load(values + i + 16)));
  return sum_lanes(add(low, high)) / static_cast<float>(k);
}

// The kept ones' entries, then the vector of their places' high parts.
inline void pack_places(const ChunkRecord& layout, const uint8_t* codes, Work& work, uint8_t* out) {
  uint8_t* vector = out + layout.entries_nbytes;
  const unsigned bits = static_cast<unsigned>(layout.entry_bits());
  std::memset(work.vector, 0, (static_cast<size_t>(layout.vector_nbytes) + 7) / 8 * 8);
  uint64_t word = 0;
  unsigned filled = 0;
  for (uint32_t i = 0; i < static_cast<uint32_t>(layout.kept); ++i) {
    const uint32_t place = work.places[i], bit = chunk_bit(layout.low_bits, place, i);
    work.vector[bit / 64] |= uint64_t{1} << bit % 64;
    word |= uint64_t{chunk_entry(layout.low_bits, place, i, codes[i])} << filled;
    for (filled += bits; filled >= 32; filled -= 32, word >>= 32, out += 4) std::memcpy(out, &word, 4);
  }
  std::memcpy(out, &word, (filled + 7) / 8);
  std::memcpy(vector, work.vector, static_cast<size_t>(layout.vector_nbytes));
}

// Encodes one chunk; every pointer but the payload's is to its first element.
inline void encode_chunk(const Rule& rule, const ChunkRecord& layout, const float* gradient, const float* residual,
                         float* new_residual, bool past_cache, uint8_t* record, size_t count, Work& work) {
  const size_t k = static_cast<size_t>(layout.kept);
  gather(gradient, residual, rule.decay, count, work);
  select(count, k, work);
  const float mean = mean_of(work.values, k);
  const Sums sums = sum_groups(work.values, k, mean);
  const bool finite = std::isfinite(mean);
  const float level[2] = {k == sums.larger ? 0.0f : sums.small / static_cast<float>(k - sums.larger),
                          sums.larger == 0 ? 0.0f : sums.large / static_cast<float>(sums.larger)};
  const uint16_t stored[2] = {finite ? bfloat_from_float(level[0]) : uint16_t{0x7fc0},
                              finite ? bfloat_from_float(level[1]) : uint16_t{0x7fc0}};
  std::memcpy(record, stored, sizeof stored);
  uint8_t codes[kMostKeep];
  for (size_t i = 0; i < k; ++i)
    codes[i] = static_cast<uint8_t>((std::fabs(work.values[i]) >= mean) | (work.values[i] < 0.0f) << 1);
  pack_places(layout, codes, work, record + 4);
  if (!new_residual) return;
  const float decoded[2] = {float_from_bfloat(stored[0]), float_from_bfloat(stored[1])};
  for (size_t i = 0; i < k; ++i) {
    const float value = decoded[codes[i] & 1];
    work.p[work.places[i]] = work.values[i] - (codes[i] & 2 ? -value : value);
  }
  if (count % 16 != 0) std::memcpy(new_residual, work.p, count * sizeof(float));
  else
    for (size_t at = 0; at < count; at += 16) put(new_residual + at, load(work.p + at), past_cache);
}

inline void encode(const Rule& rule, const float* gradient, const float* residual, float* new_residual,
                   uint8_t* payload, size_t numel) {
  Work work;
  const bool past_cache = streams(new_residual, gradient, residual, numel);
  const ChunkRecord full = rule.record_of(rule.chunk);
  for (size_t start = 0; start < numel; start += rule.chunk, payload += full.nbytes()) {
    const size_t count = std::min(rule.chunk, numel - start);
    encode_chunk(rule, count == rule.chunk ? full : rule.record_of(count), gradient + start,
                 residual ? residual + start : nullptr, new_residual ? new_residual + start : nullptr, past_cache,
                 payload, count, work);
  }
  if (past_cache) fence();
}

// Adds a record's values at their places. Where a damaged vector has fewer ones than are kept, the other entries are
// nowhere; ones behind the last entry say nothing. Eight zero bytes follow the vector.
template <int kLowBits>
inline void add_places(const ChunkRecord& layout, int chunk, const uint8_t* entries, const float* levels, float* sums) {
  const uint8_t* vector = entries + layout.entries_nbytes;
  const uint32_t kept = static_cast<uint32_t>(layout.kept);
  uint32_t i = 0;
  for (uint32_t at = 0; at < static_cast<uint32_t>(layout.vector_nbytes); at += 8) {
    uint64_t ones;
    std::memcpy(&ones, vector + at, sizeof ones);
    for (; ones && i < kept; ones &= ones - 1, ++i) {
      uint32_t entry;
      std::memcpy(&entry, entries + i * (2 + kLowBits) / 8, sizeof entry);
      entry >>= i * (2 + kLowBits) % 8;
      const uint32_t bit = 8 * at + static_cast<uint32_t>(__builtin_ctzll(ones));
      sums[chunk_place(kLowBits, chunk, bit, i, entry)] += levels[entry & 3];
    }
  }
}

using AddPlaces = void (*)(const ChunkRecord&, int, const uint8_t*, const float*, float*);
constexpr AddPlaces kAddPlaces[] = {add_places<0>, add_places<1>, add_places<2>,  add_places<3>,  add_places<4>,
                                    add_places<5>, add_places<6>, add_places<7>,  add_places<8>,  add_places<9>,
                                    add_places<10>, add_places<11>, add_places<12>};
static_assert(sizeof kAddPlaces / sizeof kAddPlaces[0] == 1 + 12 && kMostChunk == 1 << 12, "by low bits");

// Adds one worker's record to `sums`, which has room for a full chunk: a place outside a short one harms nothing.
inline void add_record(const Rule& rule, const ChunkRecord& layout, const uint8_t* from, float* sums) {
  uint8_t record[4 + kMostKeep / 4 + kMostChunk / 8 + 8];  // no more than with a bitmap of the chunk
  const size_t nbytes = static_cast<size_t>(layout.nbytes());
  std::memcpy(record, from, nbytes);
  std::memset(record + nbytes, 0, 8);
  uint16_t stored[2];
  std::memcpy(stored, record, sizeof stored);
  const float small = float_from_bfloat(stored[0]), large = float_from_bfloat(stored[1]);
  const float levels[4] = {small, large, -small, -large};
  kAddPlaces[layout.low_bits](layout, static_cast<int>(rule.chunk), record + 4, levels, sums);
}

// sums = addend + worker 0 + worker 1 + ... over `count` elements, whose records begin at `records`. What a
// damaged record of a short chunk adds to behind them is zero before.
inline void reduce_chunk(const Rule& rule, const ChunkRecord& layout, const Payloads& payloads, const uint8_t* records,
                         const float* addend, size_t count, float* sums) {
  if (addend) std::memcpy(sums, addend, count * sizeof(float));
  else std::memset(sums, 0, count * sizeof(float));
  if (count < rule.chunk) std::memset(sums + count, 0, (rule.chunk - count) * sizeof(float));
  for (size_t w = 0; w < payloads.workers; ++w) add_record(rule, layout, records + w * payloads.stride, sums);
}

inline void decode_reduce(const Rule& rule, const Payloads& payloads, const float* addend, float* target) {
  alignas(64) float sums[kMostChunk];
  const bool past_cache = streams(target, addend, nullptr, payloads.numel);
  const ChunkRecord full = rule.record_of(rule.chunk);
  const uint8_t* records = payloads.first;
  for (size_t start = 0; start < payloads.numel; start += rule.chunk, records += full.nbytes()) {
    const size_t count = std::min(rule.chunk, payloads.numel - start);
    reduce_chunk(rule, count == rule.chunk ? full : rule.record_of(count), payloads, records,
                 addend ? addend + start : nullptr, count, sums);
    if (count % 16 != 0) std::memcpy(target + start, sums, count * sizeof(float));
    else
      for (size_t at = 0; at < count; at += 16) put(target + start + at, load(sums + at), past_cache);
  }
  if (past_cache) fence();
}

// The owner's stage: the sum of the payloads + decay * residual, encoded, chunk by chunk.
inline void reduce_encode(const Rule& rule, const Payloads& payloads, const float* residual, float* new_residual,
                          uint8_t* reduced) {
  Work work;
  alignas(64) float sums[kMostChunk];
  const bool past_cache = streams(new_residual, residual, nullptr, payloads.numel);
  const ChunkRecord full = rule.record_of(rule.chunk);
  const uint8_t* records = payloads.first;
  for (size_t start = 0; start < payloads.numel; start += rule.chunk, records += full.nbytes()) {
    const size_t count = std::min(rule.chunk, payloads.numel - start);
    const ChunkRecord layout = count == rule.chunk ? full : rule.record_of(count);
    reduce_chunk(rule, layout, payloads, records, nullptr, count, sums);
    encode_chunk(rule, layout, sums, residual ? residual + start : nullptr,
                 new_residual ? new_residual + start : nullptr, past_cache, reduced + (records - payloads.first), count,
                 work);
  }
  if (past_cache) fence();
}

// The largest few of each chunk at two bits each, and their places in the chunk: 64 of 4096 are 0.164 bits an element.
//
// A chunk is a CTA's work; its record is in common/chunk_topk_formula.h. Thread t holds the elements 256 j + t,
// so that loads are 128 bytes in a row and a ballot is a word of the chunk's marks in the order of their places. The
// k-th largest magnitude is found by halving the interval of its bits; most chunks need a third of the 31 rounds: they
// begin near the largest, and any threshold that exactly k reach will do. Bytes an element at 64 of 4096, read + written:
//   encode         4 + 0.02 (8 + 4 + 0.02 with residual)
//   decode_reduce  0.02 W + 4
//   reduce_encode  0.02 W + 8 + 0.02
// Source: Sarfi et al., SparseLoCo, arXiv 2508.15706; the levels are one step of Lloyd's algorithm from the mean.
#include "common/chunk_topk_formula.h"
#include "radix.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMostChunk = 4096;
constexpr int kEach = kMostChunk / kThreads;  // elements of a thread
constexpr int kWords = kMostChunk / 32;
constexpr int kMostKeep = 512;
constexpr uint32_t kNan = 0x7f800001u;  // what the magnitude of every NaN counts as
constexpr uint32_t kQuarter = 2u << 23;       // from a float's bits: a quarter of it
static_assert(kWords <= kThreads && kWarps <= kMostWarps, "a thread counts the marks of one word");

// Arguments.
struct Rule {
  int32_t chunk, keep;
  float decay;

  __device__ inline ChunkRecord record_of(int count) const;
};

// What the threads of a CTA share while they encode a chunk.
struct Shared {
  uint32_t counts[2][kWarps];
  uint32_t greater[kWords], equal[kWords], before[kWords], sums[kMostWarps];
  uint32_t all;  // marks in all words, the equal ones in the upper half
  uint32_t places[kMostKeep], vector[kWords];  // a vector is never longer than a bitmap of the chunk
  float values[kMostKeep];
  float mean, levels[2];
};

// A chunk of a piece, as `place_of`, for a number of elements that is known at run time only.
struct ChunkPlace {
  int64_t piece, start;  // whose payload; the chunk's first element in the tensor
  int64_t record;        // where its record begins in the payload
  int count;             // its elements
  ChunkRecord layout;    // of its record
};

// chunk_record, of which each lane tries another number of low bits; a whole warp calls it. Of those that make the
// record smallest the largest is taken, as there.
__device__ inline ChunkRecord record_by_lanes(int chunk, int keep, int count) {
  const int low_bits = chunk >> lane_index() ? static_cast<int>(lane_index()) : 0;
  const ChunkRecord own = chunk_record_of(chunk, keep, count, low_bits);
  uint32_t best = static_cast<uint32_t>(own.nbytes()) << 5 | (31u - static_cast<uint32_t>(low_bits));
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, best, width);
    best = other < best ? other : best;
  }
  return chunk_record_of(chunk, keep, count, 31 - static_cast<int>(best & 31u));
}

__device__ inline ChunkRecord Rule::record_of(int count) const { return record_by_lanes(chunk, keep, count); }

// `full` is the layout of a full chunk's record: working one out takes as long as an element of each thread.
__device__ inline ChunkPlace chunk_of(const Rule& rule, const ChunkRecord& full, const Pieces& pieces, int64_t index) {
  const uint32_t chunks = static_cast<uint32_t>((pieces.width + rule.chunk - 1) / rule.chunk);
  const uint32_t at = static_cast<uint32_t>(index), piece = at / chunks, chunk = at - piece * chunks;
  const int64_t first = piece * pieces.width, offset = static_cast<int64_t>(chunk) * rule.chunk;
  const int64_t numel = least(pieces.width, pieces.numel - first);
  const int count = static_cast<int>(least(rule.chunk, numel - offset));
  return {piece, first + offset, static_cast<int64_t>(chunk) * full.nbytes(), count,
          count == rule.chunk ? full : rule.record_of(count)};
}

// Kernels.
__device__ inline uint32_t key_of(float x) {
  const uint32_t key = magnitude_key(x);
  return key < kNan ? key : kNan;
}

// What every thread of the CTA has, put together by `join`, which is the same in any order.
template <class Join>
__device__ inline uint32_t join_all(uint32_t own, Shared& shared, int& turn, Join join) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) own = join(own, __shfl_xor_sync(kAllLanes, own, width));
  uint32_t* slots = shared.counts[turn];
  turn ^= 1;  // the other slots may still be read
  if (lane_index() == 0) slots[threadIdx.x / kWarp] = own;
  __syncthreads();
  uint32_t all = slots[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) all = join(all, slots[warp]);
  return all;
}

// How many of the CTA's elements reach `least_key`, which is larger than 0: those that do not exist are zero. Keys are
// below 2^31, so the sign of a difference compares them, in two instructions an element.
__device__ inline uint32_t count_at_least(const uint32_t (&keys)[kEach], uint32_t least_key, Shared& shared, int& turn) {
  uint32_t count = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) count += (least_key - 1 - keys[j]) >> 31;
  return join_all(count, shared, turn, [](uint32_t a, uint32_t b) { return a + b; });
}

// A key that exactly k magnitudes reach, or else the largest that k or more reach. The search begins at a quarter of the
// largest magnitude, above which the k-th largest is in most chunks.
__device__ inline uint32_t cut_of(const uint32_t (&keys)[kEach], uint32_t k, Shared& shared) {
  int turn = 0;
  uint32_t largest = keys[0];
#pragma unroll
  for (int j = 1; j < kEach; ++j) largest = keys[j] > largest ? keys[j] : largest;
  largest = join_all(largest, shared, turn, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
  uint32_t low = 0, high = largest + 1;
  for (uint32_t middle = largest > kQuarter ? largest - kQuarter : 0; high - low > 1; middle = low + (high - low) / 2) {
    if (middle == low) continue;
    const uint32_t count = count_at_least(keys, middle, shared, turn);
    if (count == k) return middle;
    if (count > k) low = middle;
    else high = middle;
  }
  return low;
}

__device__ inline float sum_lanes(float sum) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) sum += __shfl_xor_sync(kAllLanes, sum, width);
  return sum;
}

// The levels of the kept values, by the first warp: value i goes to lane i % 32's sum, then a tree of halves.
__device__ inline void find_levels(int k, Shared& shared) {
  const int lane = static_cast<int>(lane_index());
  float sum = 0.0f, small = 0.0f, large = 0.0f;
  for (int i = lane; i < k; i += 32) sum += fabsf(shared.values[i]);
  const float mean = sum_lanes(sum) / static_cast<float>(k);
  uint32_t larger = 0;
  for (int i = lane; i < k; i += 32) {
    const float x = fabsf(shared.values[i]);
    const bool reaches = x >= mean;
    small += reaches ? 0.0f : x;
    large += reaches ? x : 0.0f;
    larger += reaches;
  }
  small = sum_lanes(small), large = sum_lanes(large);
#pragma unroll
  for (int width = 16; width > 0; width /= 2) larger += __shfl_xor_sync(kAllLanes, larger, width);
  if (lane != 0) return;
  const uint32_t smaller = static_cast<uint32_t>(k) - larger;
  const bool finite = (bits_of_float(mean) & 0x7f800000u) != 0x7f800000u;
  shared.mean = mean;
  shared.levels[0] = finite ? (smaller ? small / static_cast<float>(smaller) : 0.0f) : float_of_bits(0x7fc00000u);
  shared.levels[1] = finite ? (larger ? large / static_cast<float>(larger) : 0.0f) : float_of_bits(0x7fc00000u);
}

__device__ inline uint32_t code_of(float value, const Shared& shared) {
  return (fabsf(value) >= shared.mean ? 1u : 0u) | (value < 0.0f ? 2u : 0u);
}

__device__ inline float value_of(uint32_t code, float small, float large) {
  const float level = code & 1 ? large : small;
  return code & 2 ? -level : level;
}

__device__ inline float rounded(float level) { return float_from_bfloat(bfloat_from_float(level)); }

// The record, a byte a thread.
__device__ inline void write_record(const ChunkRecord& layout, const Shared& shared, uint8_t* record) {
  const int bits = layout.entry_bits(), vector = 4 + layout.entries_nbytes;
  for (int at = threadIdx.x; at < layout.nbytes(); at += kThreads) {
    uint32_t byte = 0;
    if (at < 4) {
      byte = bfloat_from_float(shared.levels[at / 2]) >> at % 2 * 8;
    } else if (at < vector) {
      int i = 8 * (at - 4) / bits;
      for (int shift = i * bits - 8 * (at - 4); shift < 8 && i < layout.kept; shift += bits, ++i) {
        const uint32_t entry = chunk_entry(layout.low_bits, shared.places[i], static_cast<uint32_t>(i),
                                           code_of(shared.values[i], shared));
        byte |= shift < 0 ? entry >> -shift : entry << shift;
      }
    } else {
      byte = shared.vector[(at - vector) / 4] >> (at - vector) % 4 * 8;
    }
    record[at] = static_cast<uint8_t>(byte);
  }
}

// p[j] is element 256 j + thread of the chunk; elements past the end are zero.
__device__ inline void encode_chunk(const ChunkRecord& layout, const float (&p)[kEach], int count, float* new_residual,
                                    uint8_t* record, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(lane_index()), warp = thread / 32;
  const int k = layout.kept;
  if (thread < kWords) shared.vector[thread] = 0;
  uint32_t keys[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) keys[j] = kept_in_register(key_of(p[j]));
  const uint32_t cut = cut_of(keys, static_cast<uint32_t>(k), shared), lower = (1u << lane) - 1u;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t greater = __ballot_sync(kAllLanes, keys[j] > cut);
    const uint32_t equal = __ballot_sync(kAllLanes, keys[j] == cut && kThreads * j + thread < count);
    if (lane == 0) shared.greater[kWarps * j + warp] = greater, shared.equal[kWarps * j + warp] = equal;
  }
  __syncthreads();
  uint32_t own = 0;
  if (thread < kWords)
    own = static_cast<uint32_t>(__popc(shared.greater[thread])) | static_cast<uint32_t>(__popc(shared.equal[thread])) << 16;
  const uint32_t before = exclusive_sum(own, shared.sums);
  if (thread < kWords) shared.before[thread] = before;
  if (thread == kThreads - 1) shared.all = before + own;
  __syncthreads();
  const uint32_t equals = static_cast<uint32_t>(k) - (shared.all & 0xffffu);  // how many equal to the cut are kept
  uint32_t kept = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int word = kWarps * j + warp;
    const uint32_t greater = shared.greater[word], equal = shared.equal[word], first = shared.before[word];
    const uint32_t above = (first & 0xffffu) + static_cast<uint32_t>(__popc(greater & lower));
    const uint32_t level = (first >> 16) + static_cast<uint32_t>(__popc(equal & lower));
    if ((greater >> lane & 1) || ((equal >> lane & 1) && level < equals)) {
      const uint32_t slot = above + (level < equals ? level : equals);
      const uint32_t place = static_cast<uint32_t>(kThreads * j + thread), bit = chunk_bit(layout.low_bits, place, slot);
      atomicOr(&shared.vector[bit / 32], 1u << bit % 32);
      shared.places[slot] = place;
      shared.values[slot] = p[j];
      kept |= 1u << j;
    }
  }
  __syncthreads();
  if (warp == 0) find_levels(k, shared);
  __syncthreads();
  write_record(layout, shared, record);
  if (!new_residual) return;
  const float small = rounded(shared.levels[0]), large = rounded(shared.levels[1]);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int at = kThreads * j + thread;
    if (at < count)
      new_residual[at] = kept >> j & 1 ? p[j] - value_of(code_of(p[j], shared), small, large) : p[j];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)  // without the 3, ptxas aims for more CTAs and spills
    chunk_topk_encode(int32_t chunk, int32_t keep, float decay, const float* gradient, const float* residual,
                      float* new_residual, uint8_t* payloads, int64_t stride, int64_t numel, int64_t width,
                      int64_t chunks) {
  __shared__ Shared shared;
  const Rule rule = {chunk, keep, decay};
  const ChunkRecord full = rule.record_of(chunk);
  for (int64_t index = blockIdx.x; index < chunks; index += gridDim.x) {
    const ChunkPlace at = chunk_of(rule, full, {numel, width}, index);
    const float *g = gradient + at.start, *e = residual ? residual + at.start : nullptr;
    float p[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = kThreads * j + static_cast<int>(threadIdx.x);
      p[j] = i < at.count ? g[i] : 0.0f;
      if (e && i < at.count) p[j] = p[j] + decay * e[i];
    }
    encode_chunk(at.layout, p, at.count, new_residual ? new_residual + at.start : nullptr,
                 payloads + at.piece * stride + at.record, shared);
    __syncthreads();
  }
}

// sums = addend + worker 0 + worker 1 + ... over one chunk. A place outside a short one harms nothing. A warp takes the
// vector's words w, w + 8, ..., a lane a bit; where a damaged vector has fewer ones than are kept, the other entries are
// nowhere, and ones behind the last entry say nothing.
__device__ inline void reduce_chunk(const Rule& rule, const ChunkRecord& layout, const uint8_t* records, int64_t stride,
                                    int64_t workers, const float* addend, int count, float* sums) {
  const int bits = layout.entry_bits(), words = (layout.vector_nbytes + 3) / 4;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(threadIdx.x) / 32;
  for (int i = threadIdx.x; i < rule.chunk; i += kThreads) sums[i] = addend && i < count ? addend[i] : 0.0f;
  __syncthreads();
  for (int64_t w = 0; w < workers; ++w) {
    const uint8_t *record = records + w * stride, *entries = record + 4, *vector = entries + layout.entries_nbytes;
    const float small = float_from_bfloat(load_word<uint16_t>(record));
    const float large = float_from_bfloat(load_word<uint16_t>(record + 2));
    uint32_t before = 0;  // ones in the words before `at`
    for (int at = warp, counted = 0; at < words; counted = at, at += kWarps) {
      uint32_t ones = 0;
      if (lane < at - counted)
        ones = static_cast<uint32_t>(__popc(load_word_within<uint32_t>(
            vector + 4 * (counted + lane), layout.vector_nbytes - 4 * (counted + lane))));
#pragma unroll
      for (int width = 16; width > 0; width /= 2) ones += __shfl_xor_sync(kAllLanes, ones, width);
      before += ones;
      const uint32_t word = load_word_within<uint32_t>(vector + 4 * at, layout.vector_nbytes - 4 * at);
      const uint32_t i = before + static_cast<uint32_t>(__popc(word & ((1u << lane) - 1u)));
      if ((word >> lane & 1) && i < static_cast<uint32_t>(layout.kept)) {
        const int first = static_cast<int>(i) * bits / 8;  // 2 to 14 bits from an offset of at most 7: three bytes
        const uint32_t entry =
            load_word_within<uint32_t>(entries + first, least(3, layout.entries_nbytes - first)) >> i * bits % 8;
        sums[chunk_place(layout.low_bits, rule.chunk, 32u * at + lane, i, entry)] += value_of(entry, small, large);
      }
    }
    __syncthreads();
  }
}

__device__ inline void decode_chunk(const Rule& rule, const ChunkPlace& at, const uint8_t* records, int64_t stride,
                                    int64_t workers, const float* addend, float* target, float* sums) {
  reduce_chunk(rule, at.layout, records, stride, workers, addend, at.count, sums);
  for (int i = threadIdx.x; i < at.count; i += kThreads) target[i] = sums[i];
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads)
    chunk_topk_decode_pieces(int32_t chunk, int32_t keep, const uint8_t* payloads, int64_t stride, float* target,
                             int64_t numel, int64_t width, int64_t chunks) {
  __shared__ float sums[kMostChunk];
  const Rule rule = {chunk, keep, 0.0f};
  const ChunkRecord full = rule.record_of(chunk);
  for (int64_t index = blockIdx.x; index < chunks; index += gridDim.x) {
    const ChunkPlace at = chunk_of(rule, full, {numel, width}, index);
    decode_chunk(rule, at, payloads + at.piece * stride + at.record, 0, 1, nullptr, target + at.start, sums);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)  // without the 4, ptxas aims for more CTAs and spills
    chunk_topk_decode_reduce(int32_t chunk, int32_t keep, const uint8_t* rows, int64_t stride, int64_t workers,
                             const float* addend, float* target, int64_t numel, int64_t chunks) {
  __shared__ float sums[kMostChunk];
  const Rule rule = {chunk, keep, 0.0f};
  const ChunkRecord full = rule.record_of(chunk);
  for (int64_t index = blockIdx.x; index < chunks; index += gridDim.x) {
    const ChunkPlace at = chunk_of(rule, full, {numel, numel}, index);
    decode_chunk(rule, at, rows + at.record, stride, workers, addend ? addend + at.start : nullptr, target + at.start,
                 sums);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    chunk_topk_reduce_encode(int32_t chunk, int32_t keep, float decay, const uint8_t* rows, int64_t stride,
                             int64_t workers, const float* residual, float* new_residual, uint8_t* reduced,
                             int64_t numel, int64_t chunks) {
  __shared__ Shared shared;
  __shared__ float sums[kMostChunk];
  const Rule rule = {chunk, keep, decay};
  const ChunkRecord full = rule.record_of(chunk);
  for (int64_t index = blockIdx.x; index < chunks; index += gridDim.x) {
    const ChunkPlace at = chunk_of(rule, full, {numel, numel}, index);
    reduce_chunk(rule, at.layout, rows + at.record, stride, workers, nullptr, at.count, sums);
    if (residual) {
      for (int i = static_cast<int>(threadIdx.x); i < at.count; i += kThreads)
        sums[i] = sums[i] + decay * residual[at.start + i];
    }
    float p[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = kThreads * j + static_cast<int>(threadIdx.x);
      p[j] = i < at.count ? sums[i] : 0.0f;
    }
    encode_chunk(at.layout, p, at.count, new_residual ? new_residual + at.start : nullptr, reduced + at.record, shared);
    __syncthreads();
  }
}

}  // namespace gradwire

// 2 to 5 bits an element, scales included, shared out between blocks of 32; a CTA handles a group of 16384.
//
// Records are as in csrc/cpu/kernels/codecs/waterfill.cpp, bit for bit. A warp has 32 neighbouring blocks: lane l holds element
// l of each, so that a load is 128 bytes in a row, and works out the bits of block l. Codes of four blocks are a byte
// each of a word; turned over as a matrix of bits, the lanes hold the words of these blocks' codes. The level is found
// from a histogram: from one level to the next only blocks at a distance of whole octaves take a bit more. Two CTAs to a
// multiprocessor: one loads while the other computes; of several payloads the next one is on its way while one is added.
// Bytes an element, read + written, at 5 bits with W workers, in one pass and one launch each: encode 4 + 5/8 (8 + 4 +
// 5/8 with residual), decode_pieces 5/8 + 4, decode_reduce 5/8 W + 4, reduce_encode 5/8 W + 5/8 (5/8 W + 8 + 5/8 with
// residual).
// Source: reverse water-filling: Cover and Thomas, Elements of Information Theory, section 10.3.3.
#include "common/waterfill_formula.h"
#include "radix.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = kFillBlocks;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = kFillGroup / kThreads;  // elements of a thread, one of each block of its warp
constexpr int kSome = 8;                      // of them, whose blocks' largest magnitudes are found together
constexpr int kSet = 4;                       // blocks whose codes are turned over together
constexpr int kMostBits = 5;
constexpr int kMostWords = fill_words(kFillBlocks, kMostBits);
constexpr int kAhead = (kMostWords + kThreads - 1) / kThreads;  // words of a record that a thread loads ahead
constexpr int kLevelThreads = (kFillLevels + 1 + 31) / 32 * 32;  // that have a level, or the one behind the last
constexpr int kNearest = 8 * (kFillMostWidth - 1);  // a histogram of distances begins with as many that do not occur
constexpr int kDistances = kNearest + kLevelThreads;
constexpr int kResident = 2;                                    // CTAs of a multiprocessor: 64 registers a thread
static_assert(kFillBlock == 32 && kEach == 32 && kWarps <= kMostWarps, "a lane has an element of each block, and a block");
static_assert(kFillMostWidth == 8, "a code is a byte");
static_assert(kThreads * kFillMostWidth < 1 << 16, "sums of widths take 16 bits");
static_assert(kLevelThreads <= kThreads && kDistances <= kThreads, "a thread has a level, and a distance to clear");

// What the threads of a CTA share: a group's blocks. Code c of a block stands for low + c * unit.
struct Shared {
  float4 values[kFillBlocks / 2];    // unit and low of two blocks
  float4 inverses[kFillBlocks / 2];  // one over the unit and half of the number of codes, of two blocks
  uint2 places[kFillBlocks];         // of each block's words: the byte in `words` at which they begin, and end
  uint32_t scales[kFillBlocks];
  uint32_t distances[kDistances];  // blocks at each distance below the group's scale, from kNearest on
  uint32_t empty;                  // blocks without bits
  uint32_t levels[kWarps], firsts[kWarps], peaks[kWarps];  // of each warp
  int level, taken;            // the level, and the words that it takes
  uint32_t words[2][kMostWords];  // of a record, and of the one after it
  BitTranspose::Lane turns[kWarp];
};

// A group of a piece.
struct GroupPlace {
  int64_t piece, start;  // whose payload; the group's first element in the tensor
  int64_t record;        // where its record begins in the payload
  int count;             // its elements
};

__device__ inline GroupPlace group_of(const Pieces& pieces, int64_t index, int bits) {
  const Place at = place_of<kFillGroup>(pieces, index);
  const int64_t offset = at.block * kFillGroup;
  return {at.piece, at.start + offset, at.block * fill_record_nbytes(kFillGroup, bits),
          static_cast<int>(least(kFillGroup, at.numel - offset))};
}

// Element of the group that this thread has of block 0 of its warp; the next block's is 32 further on.
__device__ inline int first_element() {
  return static_cast<int>(threadIdx.x / kWarp) * kEach * kFillBlock + static_cast<int>(lane_index());
}

// Kernels.

// The compiler moves no load across it: it would begin all at once, and has no registers for that.
__device__ inline void hold_back() {
#if defined(__CUDA_ARCH__)
  __syncwarp();
#endif
}

// Sum of `x` over the warps before this thread's, each of which has one in `slots`.
__device__ inline uint32_t sum_of_warps_before(const uint32_t* slots) {
  const unsigned lane = lane_index();
  uint32_t x = lane < threadIdx.x / kWarp ? slots[lane] : 0;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(kAllLanes, x, width);
  return x;
}

// Sum of `x` over this lane and those below it.
__device__ inline uint32_t sum_up_to(uint32_t x) {
#pragma unroll
  for (unsigned width = 1; width < kWarp; width *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, x, width);
    if (lane_index() >= width) x += below;
  }
  return x;
}

__device__ inline void begin(Shared& shared) {
  if (threadIdx.x < kDistances) shared.distances[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.empty = 0;
  if (threadIdx.x < kWarp) shared.turns[threadIdx.x] = BitTranspose::prepare(threadIdx.x);
  __syncthreads();
}

// Finds the highest level that takes fewer words than there are, and how many it takes. Thread t has level t: between
// the levels before and at it, a block whose distance is a multiple of 8 less takes one bit more, unless it has the
// fewest still or the most already. `byte` is of this thread's block.
__device__ inline void find_level(int least, uint32_t byte, int words, Shared& shared) {
  const int level = static_cast<int>(threadIdx.x), lane = static_cast<int>(lane_index()), warp = level / 32;
  atomicAdd(byte == kFillEmpty ? &shared.empty : &shared.distances[kNearest + byte], 1u);
  __syncthreads();
  const int fewest = least * (kFillBlocks - static_cast<int>(shared.empty));
  uint32_t more = 0, up_to = 0;
  if (level < kLevelThreads) {
#pragma unroll
    for (int width = 1; width < kFillMostWidth; ++width)
      if (width >= least) more += shared.distances[level + kNearest - 8 * width];
    up_to = sum_up_to(more);
    if (lane == 31) shared.levels[warp] = up_to;
  }
  __syncthreads();
  if (level < kLevelThreads) {
    const int after = fewest + static_cast<int>(sum_of_warps_before(shared.levels) + up_to);
    const int before = after - static_cast<int>(more);
    const bool below = before < words || level == 0;  // level -1 counts as low enough
    if (below && (after >= words || level == kFillLevels)) shared.level = level - 1, shared.taken = before;
  }
  if (level < kDistances) shared.distances[level] = 0;
  if (level == 0) shared.empty = 0;
  __syncthreads();
}

// Works out from the scales how each block is coded; every thread of the CTA calls it, for its own block.
__device__ inline void share_out(int bits, uint32_t base, uint32_t byte, int words, Shared& shared) {
  const int block = static_cast<int>(threadIdx.x), below = byte == kFillEmpty ? kNoScale : static_cast<int>(byte);
  const int least = byte == kFillEmpty ? 0 : fill_least(bits);
  find_level(fill_least(bits), byte, words, shared);
  const int level = shared.level;
  const uint32_t width = static_cast<uint32_t>(fill_width(level, below, least));
  const uint32_t more = static_cast<uint32_t>(fill_width(level + 1, below, least)) - width;
  const uint32_t own = width | more << 16, up_to = sum_up_to(own);
  if (lane_index() == 31) shared.firsts[block / 32] = up_to;
  const uint32_t left = static_cast<uint32_t>(words - shared.taken);
  __syncthreads();
  const uint32_t before = sum_of_warps_before(shared.firsts) + up_to - own, earlier = before >> 16;
  const int final_width = static_cast<int>(width + (more && earlier < left ? 1u : 0u));
  const uint32_t first = (before & 0xffff) + (earlier < left ? earlier : left);
  shared.places[block] = make_uint2(4 * first, 4 * (first + static_cast<uint32_t>(final_width)));
  const float step = fill_step(base, below, final_width), codes = static_cast<float>(1 << final_width);
  const bool special = base > kFillLargestScale;
  const float unit = special ? float_of_bits(0x7fc00000u) : 2.0f * step;
  const float low = special ? float_of_bits(0x7fc00000u) : (1.0f - codes) * step;
  float* value = &shared.values[block / 2].x + 2 * (block % 2);
  float* inverse = &shared.inverses[block / 2].x + 2 * (block % 2);
  value[0] = unit, value[1] = low;
  inverse[0] = unit > 0.0f ? 1.0f / unit : 0.0f, inverse[1] = 0.5f * codes;
  __syncthreads();
}

// Finds the scale of each block, and of a group with inf or NaN that of NaN. p[j] is this thread's element of block j of
// the warp; those that do not exist are zero.
__device__ inline void find_scales(const float (&p)[kEach], Shared& shared) {
  const unsigned lane = lane_index();
#pragma unroll
  for (int first = 0; first < kEach; first += kSome) {
    uint32_t peaks[kSome];
#pragma unroll
    for (int i = 0; i < kSome; ++i) peaks[i] = magnitude_key(p[first + i]);
    unsigned width = 16;
#pragma unroll
    for (int half = kSome / 2; half > 0; half /= 2, width /= 2)  // each half of the lanes goes on with half of the blocks
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const uint32_t keep = lane & width ? peaks[i + half] : peaks[i], give = lane & width ? peaks[i] : peaks[i + half];
        const uint32_t taken = __shfl_xor_sync(kAllLanes, give, static_cast<int>(width));
        peaks[i] = keep > taken ? keep : taken;
      }
#pragma unroll
    for (unsigned rest = 32 / kSome / 2; rest > 0; rest /= 2) {
      const uint32_t taken = __shfl_xor_sync(kAllLanes, peaks[0], static_cast<int>(rest));
      peaks[0] = peaks[0] > taken ? peaks[0] : taken;
    }
    if (lane % (32 / kSome) == 0)
      shared.scales[threadIdx.x / kWarp * kWarp + first + lane / (32 / kSome)] =
          peaks[0] >= 0x7f800000u ? kFillNan : fill_scale(peaks[0]);
  }
  __syncthreads();
}

// The largest scale of the group; every thread of the CTA calls it with its block's.
__device__ inline uint32_t find_base(uint32_t scale, Shared& shared) {
  uint32_t base = scale;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, base, width);
    base = base > other ? base : other;
  }
  if (lane_index() == 0) shared.peaks[threadIdx.x / kWarp] = base;
  __syncthreads();
  base = shared.peaks[lane_index() % kWarps];
#pragma unroll
  for (int width = kWarps / 2; width > 0; width /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, base, width);
    base = base > other ? base : other;
  }
  return base;
}

// Codes a group; kFull: all of its elements exist. New residuals and the words of the codes are stored.
template <bool kFull>
__device__ inline void encode_elements(const float (&p)[kEach], int count, float* new_residual, Shared& shared) {
  const BitTranspose turn(shared.turns[lane_index()]);
  const unsigned lane = lane_index(), block = threadIdx.x / kWarp * kEach, bit = 4 * (lane % kFillMostWidth);
  const int start = first_element();
#pragma unroll
  for (int j = 0; j < kEach; j += kSet) {
    float codes[kSet];
#pragma unroll
    for (int k = 0; k < kSet; ++k) {
      const float4 value = shared.values[(block + j + k) / 2], scale = shared.inverses[(block + j + k) / 2];
      const float unit = k % 2 ? value.z : value.x, low = k % 2 ? value.w : value.y;
      const float inverse = k % 2 ? scale.z : scale.x, half = k % 2 ? scale.w : scale.y;
      const float t = p[j + k] * inverse + half, most = half + half - 1.0f;
      const float within = t < most ? t : most;
      codes[k] = whole_below(within > 0.0f ? within : 0.0f);
      const int i = start + kFillBlock * (j + k);
      if (new_residual && (kFull || i < count)) new_residual[i] = p[j + k] - (low + (codes[k] - kWhole) * unit);
    }
    const uint32_t pairs[2] = {pick_bytes(bits_of_float(codes[0]), bits_of_float(codes[1]), 0x0040),
                               pick_bytes(bits_of_float(codes[2]), bits_of_float(codes[3]), 0x0040)};
    const uint32_t word = turn(pick_bytes(pairs[0], pairs[1], 0x5410));
    const uint2 place = shared.places[block + j + lane / kFillMostWidth];
    if (place.x + bit < place.y) shared.words[0][(place.x + bit) / 4] = word;
    hold_back();
  }
}

__device__ inline void encode_group(int bits, float (&p)[kEach], int count, float* new_residual, uint8_t* record,
                                    Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const int blocks = fill_blocks(count), words = fill_words(blocks, bits), head = fill_head_nbytes(blocks);
  if (count < kFillGroup) {  // a sum has something where no elements are
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (first_element() + kFillBlock * j >= count) p[j] = 0.0f;
  }
  find_scales(p, shared);
  const uint32_t scale = shared.scales[thread], base = find_base(scale, shared);
  const bool special = base > kFillLargestScale;
  const uint32_t below = special ? 0 : fill_below(base, scale);
  if (thread == 0) store_word_within(record, base, 4);
  if (thread < head - 4) record[4 + thread] = static_cast<uint8_t>(thread < blocks ? below : 0);
  share_out(bits, base, special || thread >= blocks ? kFillEmpty : below, words, shared);
  if (count == kFillGroup) encode_elements<true>(p, count, new_residual, shared);
  else encode_elements<false>(p, count, new_residual, shared);
  __syncthreads();
  const int taken = static_cast<int>(shared.places[kThreads - 1].y / 4);
  uint8_t* to = record + head;
  if (aligned<uint32_t>(to)) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int word = kThreads * i + thread;
      if (word < words) reinterpret_cast<uint32_t*>(to)[word] = word < taken ? shared.words[0][word] : 0u;
    }
  } else {
#pragma unroll 1
    for (int word = thread; word < words; word += kThreads)
      store_word_within(to + 4 * word, word < taken ? shared.words[0][word] : 0u, 4);
  }
  __syncthreads();  // before the next group's words are shared
}

// Has a record brought to `words`; returns the distance of this thread's block, and from bit 8 on the group's scale (a
// damaged one stays special).
__device__ inline uint32_t begin_record(int bits, const uint8_t* record, int count, uint32_t* words) {
  const int thread = static_cast<int>(threadIdx.x), blocks = fill_blocks(count), stop = fill_words(blocks, bits);
  const uint8_t* from = record + fill_head_nbytes(blocks);
  const bool whole = aligned<uint32_t>(from);
#pragma unroll 1  // unrolled, it takes registers that the sums need
  for (int word = thread; word < stop; word += kThreads) {
    if (whole) copy_word(words + word, from + 4 * word);
    else words[word] = load_word<uint32_t>(from + 4 * word);
  }
  const uint32_t base = load_word<uint32_t>(record), byte = thread < blocks ? record[4 + thread] : kFillEmpty;
  return byte | (base < kFillNan ? base : kFillNan) << 8;
}

// sums[j] += this thread's element of block j of the warp, of the record that is shared.
__device__ inline void add_codes(float (&sums)[kEach], const uint32_t* words, const Shared& shared) {
  const BitTranspose turn(shared.turns[lane_index()]);
  const unsigned lane = lane_index(), block = threadIdx.x / kWarp * kEach, bit = 4 * (lane % kFillMostWidth);
#pragma unroll
  for (int j = 0; j < kEach; j += kSet) {
    const uint2 place = shared.places[block + j + lane / kFillMostWidth];
    const uint32_t codes = turn(place.x + bit < place.y ? words[(place.x + bit) / 4] : 0u);
#pragma unroll
    for (int k = 0; k < kSet; k += 2) {
      const float4 value = shared.values[(block + j + k) / 2];
      sums[j + k] += value.y + turn.byte_of(codes, k) * value.x;
      sums[j + k + 1] += value.w + turn.byte_of(codes, k + 1) * value.z;
    }
  }
}

// This thread's elements of blocks first, first + 1, ... of its warp; those that do not exist are zero.
__device__ inline void load_some(float (&x)[kSome], const float* from, int first, int count) {
  const int start = first_element() + kFillBlock * first;
  if (count == kFillGroup) {
#pragma unroll
    for (int i = 0; i < kSome; ++i) x[i] = from[start + kFillBlock * i];
  } else {
#pragma unroll
    for (int i = 0; i < kSome; ++i) x[i] = start + kFillBlock * i < count ? from[start + kFillBlock * i] : 0.0f;
  }
}

// p = what lies in memory, or p += it; those that do not exist become zero.
template <bool kAdd>
__device__ inline void load_group(float (&p)[kEach], const float* from, int count) {
#pragma unroll
  for (int j = 0; j < kEach; j += kSome) {
    float x[kSome];
    load_some(x, from, j, count);
#pragma unroll
    for (int i = 0; i < kSome; ++i) p[j + i] = kAdd ? p[j + i] + x[i] : x[i];
  }
}

// sums = addend + worker 0 + worker 1 + ... over one group.
__device__ inline void reduce_group(int bits, const uint8_t* records, int64_t stride, int64_t workers,
                                    const float* addend, int count, float (&sums)[kEach], Shared& shared) {
  if (addend) {
    load_group<false>(sums, addend, count);
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j) sums[j] = 0.0f;
  }
  const int words = fill_words(fill_blocks(count), bits);
  uint32_t next = begin_record(bits, records, count, shared.words[0]);
  for (int64_t w = 0; w < workers; ++w) {
    const uint32_t scale = next;
    copies_arrived();
    if (w + 1 < workers) next = begin_record(bits, records + (w + 1) * stride, count, shared.words[(w + 1) % 2]);
    share_out(bits, scale >> 8, scale & 0xff, words, shared);  // its barriers show all words to all threads
    add_codes(sums, shared.words[w % 2], shared);
    __syncthreads();  // before the next record's blocks are shared
  }
}

__device__ inline void store_group(const float (&sums)[kEach], float* target, int count) {
  float* at = target + first_element();
  if (count == kFillGroup) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) at[kFillBlock * j] = sums[j];
    return;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (first_element() + kFillBlock * j < count) at[kFillBlock * j] = sums[j];
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    waterfill_encode(int32_t bits, const float* gradient, const float* residual, float* new_residual, uint8_t* payloads,
                     int64_t stride, int64_t numel, int64_t width) {
  __shared__ Shared shared;
  begin(shared);
  const GroupPlace at = group_of({numel, width}, blockIdx.x, bits);
  float p[kEach];
  load_group<false>(p, gradient + at.start, at.count);
  if (residual) load_group<true>(p, residual + at.start, at.count);
  encode_group(bits, p, at.count, new_residual ? new_residual + at.start : nullptr,
               payloads + at.piece * stride + at.record, shared);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    waterfill_decode_pieces(int32_t bits, const uint8_t* payloads, int64_t stride, float* target, int64_t numel,
                            int64_t width) {
  __shared__ Shared shared;
  begin(shared);
  const GroupPlace at = group_of({numel, width}, blockIdx.x, bits);
  float sums[kEach];
  reduce_group(bits, payloads + at.piece * stride + at.record, 0, 1, nullptr, at.count, sums, shared);
  store_group(sums, target + at.start, at.count);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    waterfill_decode_reduce(int32_t bits, const uint8_t* rows, int64_t stride, int64_t workers, const float* addend,
                            float* target, int64_t numel) {
  __shared__ Shared shared;
  begin(shared);
  const GroupPlace at = group_of({numel, numel}, blockIdx.x, bits);
  float sums[kEach];
  reduce_group(bits, rows + at.record, stride, workers, addend ? addend + at.start : nullptr, at.count, sums, shared);
  store_group(sums, target + at.start, at.count);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    waterfill_reduce_encode(int32_t bits, const uint8_t* rows, int64_t stride, int64_t workers, const float* residual,
                            float* new_residual, uint8_t* reduced, int64_t numel) {
  __shared__ Shared shared;
  begin(shared);
  const GroupPlace at = group_of({numel, numel}, blockIdx.x, bits);
  float p[kEach];
  reduce_group(bits, rows + at.record, stride, workers, nullptr, at.count, p, shared);
  if (residual) load_group<true>(p, residual + at.start, at.count);
  encode_group(bits, p, at.count, new_residual ? new_residual + at.start : nullptr, reduced + at.record, shared);
}

}  // namespace gradwire

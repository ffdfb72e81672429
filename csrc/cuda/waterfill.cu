// 2 to 5 bits an element, scales included, shared out between blocks of 32; a CTA handles a group of 16384.
//
// Records are as in csrc/cpu/kernels/waterfill.cpp, bit for bit. Thread t holds the elements 512 j + t, so that a load
// is 128 bytes in a row, a warp's elements of one j are a block, and a ballot is a word of its codes; and it works out
// the bits of block t. The level is searched four candidates at a time: 311 of them take four rounds. Bytes an element,
// read + written, at 5 bits with W workers, in one pass and one launch each: encode 4 + 5/8 (8 + 4 + 5/8 with residual),
// decode_pieces 5/8 + 4, decode_reduce 5/8 W + 4, reduce_encode 5/8 W + 5/8 (5/8 W + 8 + 5/8 with residual).
// Source: reverse water-filling: Cover and Thomas, Elements of Information Theory, section 10.3.3.
#include "common/waterfill_formula.h"
#include "radix.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = kFillBlocks;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = kFillGroup / kThreads;  // elements of a thread
constexpr int kSome = 8;                      // of them, whose blocks' largest magnitudes are found together
constexpr int kTried = 4;                     // levels in a round
constexpr int kResident = 1;                  // CTAs that a multiprocessor keeps at least: up to 128 registers a thread
static_assert(kFillBlock == 32 && kWarps <= kMostWarps, "a block is a warp's, and each thread has one");
static_assert(kThreads * kFillMostWidth < 1 << 16, "sums of widths take 16 bits");

// What the threads of a CTA share: a group's blocks.
struct Shared {
  uint64_t counts[2][kWarps];
  uint32_t sums[kMostWarps];
  uint32_t scales[kFillBlocks];
  uint32_t base, all;  // the group's scale; words taken at the level, and in the upper half blocks that want one more
  int32_t first[kFillBlocks], widths[kFillBlocks];  // where a block's words begin; how many it has
  float unit[kFillBlocks], low[kFillBlocks];        // code c stands for low + c * unit
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

// Kernels.

// Sums of `x` over the CTA, four of 16 bits at once.
__device__ inline uint64_t sum_all(uint64_t x, uint64_t* slots) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(kAllLanes, x, width);
  if (lane_index() == 0) slots[threadIdx.x / kWarp] = x;
  __syncthreads();
  uint64_t all = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) all += slots[warp];
  return all;
}

// The highest level that takes fewer words than there are; `below` is of this thread's block.
__device__ inline int level_of(int below, int least, int words, Shared& shared) {
  int low = -1, turn = 0;
  for (int high = kFillLevels; high - low > 1; turn ^= 1) {  // the other slots may still be read
    const int gap = (high - low + kTried) / (kTried + 1);
    uint64_t tried = 0;
#pragma unroll
    for (int i = 0; i < kTried; ++i) {
      const int level = low + (i + 1) * gap < high ? low + (i + 1) * gap : high - 1;
      tried |= static_cast<uint64_t>(fill_width(level, below, least)) << 16 * i;
    }
    const uint64_t taken = sum_all(tried, shared.counts[turn]);
    int next_low = low;
    bool more = true;
#pragma unroll
    for (int i = 0; i < kTried; ++i) {
      const int level = low + (i + 1) * gap < high ? low + (i + 1) * gap : high - 1;
      if (more && static_cast<int>(taken >> 16 * i & 0xffff) < words) next_low = level;
      else if (more) high = level, more = false;
    }
    low = next_low;
  }
  return low;
}

// Works out from the scales how each block is coded; every thread of the CTA calls it, for its own block.
__device__ inline void share_out(int bits, uint32_t base, uint32_t byte, int words, Shared& shared) {
  const int block = static_cast<int>(threadIdx.x), below = byte == kFillEmpty ? kNoScale : static_cast<int>(byte);
  const int least = byte == kFillEmpty ? 0 : fill_least(bits), level = level_of(below, least, words, shared);
  const uint32_t width = static_cast<uint32_t>(fill_width(level, below, least));
  const uint32_t more = static_cast<uint32_t>(fill_width(level + 1, below, least)) - width;
  const uint32_t own = width | more << 16, before = exclusive_sum(own, shared.sums);
  if (block == kThreads - 1) shared.all = (before + own) & 0xffff;
  __syncthreads();
  const uint32_t left = static_cast<uint32_t>(words) - shared.all, earlier = before >> 16;
  const int final_width = static_cast<int>(width + (more && earlier < left ? 1u : 0u));
  shared.first[block] = static_cast<int>((before & 0xffff) + (earlier < left ? earlier : left));
  shared.widths[block] = final_width;
  const float step = fill_step(base, below, final_width);
  const bool special = base > kFillLargestScale;
  shared.unit[block] = special ? float_of_bits(0x7fc00000u) : 2.0f * step;
  shared.low[block] = special ? float_of_bits(0x7fc00000u) : static_cast<float>(1 - (1 << final_width)) * step;
  __syncthreads();
}

// Finds the scale of each block, and of a group with inf or NaN that of NaN. p[j] is element 512 j + thread; those that
// do not exist are zero.
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
    if (lane % (32 / kSome) == 0) {
      const unsigned j = static_cast<unsigned>(first) + lane / (32 / kSome);
      shared.scales[kWarps * j + threadIdx.x / kWarp] = peaks[0] >= 0x7f800000u ? kFillNan : fill_scale(peaks[0]);
    }
  }
}

// The largest scale of the group; every thread of the CTA calls it.
__device__ inline uint32_t find_base(Shared& shared) {
  uint32_t base = shared.scales[threadIdx.x];
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, base, width);
    base = base > other ? base : other;
  }
  if (lane_index() == 0) shared.sums[threadIdx.x / kWarp] = base;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) base = base > shared.sums[warp] ? base : shared.sums[warp];
  __syncthreads();
  return base;
}

__device__ inline void encode_group(int bits, const float (&p)[kEach], int count, float* new_residual, uint8_t* record,
                                    Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(lane_index()), warp = thread / 32;
  const int blocks = fill_blocks(count), words = fill_words(blocks, bits), head = fill_head_nbytes(blocks);
  find_scales(p, shared);
  __syncthreads();
  const uint32_t base = find_base(shared);
  const bool special = base > kFillLargestScale;
  const uint32_t below = special ? 0 : fill_below(base, shared.scales[thread]);
  if (thread == 0) store_word_within(record, base, 4);
  if (thread < head - 4) record[4 + thread] = static_cast<uint8_t>(thread < blocks ? below : 0);
  share_out(bits, base, special || thread >= blocks ? kFillEmpty : below, words, shared);
  const int taken = shared.first[kThreads - 1] + shared.widths[kThreads - 1];
  for (int word = taken + thread; word < words; word += kThreads) store_word_within(record + head + 4 * word, 0u, 4);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int block = kWarps * j + warp, width = shared.widths[block], i = kThreads * j + thread;
    const float unit = shared.unit[block], low = shared.low[block];
    const float half = 0.5f * static_cast<float>(1 << width), inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
    float t = p[j] * inverse + half;
    t = t < half + half - 1.0f ? t : half + half - 1.0f;
    const uint32_t code = static_cast<uint32_t>(t > 0.0f ? t : 0.0f);
    if (new_residual && i < count) new_residual[i] = p[j] - (low + static_cast<float>(code) * unit);
    uint32_t own = 0;
    for (int bit = 0; bit < width; ++bit) {
      const uint32_t word = __ballot_sync(kAllLanes, code >> bit & 1);
      if (lane == bit) own = word;
    }
    if (lane < width) store_word_within(record + head + 4 * (shared.first[block] + lane), own, 4);
  }
}

// sums[j] += element 512 j + thread of one record.
__device__ inline void add_record(int bits, const uint8_t* record, int count, float (&sums)[kEach], Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(lane_index()), warp = thread / 32;
  const int blocks = fill_blocks(count), head = fill_head_nbytes(blocks);
  share_out(bits, load_word<uint32_t>(record), thread < blocks ? record[4 + thread] : kFillEmpty, fill_words(blocks, bits),
            shared);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int block = kWarps * j + warp, width = shared.widths[block];
    const uint32_t own =
        lane < width ? load_word<uint32_t>(record + head + 4 * (shared.first[block] + lane)) : 0u;
    uint32_t code = 0;
    for (int bit = 0; bit < width; ++bit) code |= (__shfl_sync(kAllLanes, own, bit) >> lane & 1u) << bit;
    sums[j] += shared.low[block] + static_cast<float>(code) * shared.unit[block];
  }
  __syncthreads();  // before the next record's blocks are shared
}

// sums = addend + worker 0 + worker 1 + ... over one group.
__device__ inline void reduce_group(int bits, const uint8_t* records, int64_t stride, int64_t workers,
                                    const float* addend, int count, float (&sums)[kEach], Shared& shared) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = kThreads * j + static_cast<int>(threadIdx.x);
    sums[j] = addend && i < count ? addend[i] : 0.0f;
  }
  for (int64_t w = 0; w < workers; ++w) add_record(bits, records + w * stride, count, sums, shared);
}

__device__ inline void store_group(const float (&sums)[kEach], float* target, int count) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = kThreads * j + static_cast<int>(threadIdx.x);
    if (i < count) target[i] = sums[j];
  }
}

// p += the residual; those that do not exist become zero.
__device__ inline void add_residual(float (&p)[kEach], const float* residual, int count) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = kThreads * j + static_cast<int>(threadIdx.x);
    if (i >= count) p[j] = 0.0f;
    else if (residual) p[j] += residual[i];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    waterfill_encode(int32_t bits, const float* gradient, const float* residual, float* new_residual, uint8_t* payloads,
                     int64_t stride, int64_t numel, int64_t width, int64_t groups) {
  __shared__ Shared shared;
  for (int64_t index = blockIdx.x; index < groups; index += gridDim.x) {
    const GroupPlace at = group_of({numel, width}, index, bits);
    float p[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = kThreads * j + static_cast<int>(threadIdx.x);
      p[j] = i < at.count ? gradient[at.start + i] : 0.0f;
    }
    add_residual(p, residual ? residual + at.start : nullptr, at.count);
    encode_group(bits, p, at.count, new_residual ? new_residual + at.start : nullptr,
                 payloads + at.piece * stride + at.record, shared);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    waterfill_decode_pieces(int32_t bits, const uint8_t* payloads, int64_t stride, float* target, int64_t numel,
                            int64_t width, int64_t groups) {
  __shared__ Shared shared;
  for (int64_t index = blockIdx.x; index < groups; index += gridDim.x) {
    const GroupPlace at = group_of({numel, width}, index, bits);
    float sums[kEach];
    reduce_group(bits, payloads + at.piece * stride + at.record, 0, 1, nullptr, at.count, sums, shared);
    store_group(sums, target + at.start, at.count);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    waterfill_decode_reduce(int32_t bits, const uint8_t* rows, int64_t stride, int64_t workers, const float* addend,
                            float* target, int64_t numel, int64_t groups) {
  __shared__ Shared shared;
  for (int64_t index = blockIdx.x; index < groups; index += gridDim.x) {
    const GroupPlace at = group_of({numel, numel}, index, bits);
    float sums[kEach];
    reduce_group(bits, rows + at.record, stride, workers, addend ? addend + at.start : nullptr, at.count, sums, shared);
    store_group(sums, target + at.start, at.count);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    waterfill_reduce_encode(int32_t bits, const uint8_t* rows, int64_t stride, int64_t workers, const float* residual,
                            float* new_residual, uint8_t* reduced, int64_t numel, int64_t groups) {
  __shared__ Shared shared;
  for (int64_t index = blockIdx.x; index < groups; index += gridDim.x) {
    const GroupPlace at = group_of({numel, numel}, index, bits);
    float p[kEach];
    reduce_group(bits, rows + at.record, stride, workers, nullptr, at.count, p, shared);
    add_residual(p, residual ? residual + at.start : nullptr, at.count);
    encode_group(bits, p, at.count, new_residual ? new_residual + at.start : nullptr, reduced + at.record, shared);
    __syncthreads();
  }
}

}  // namespace gradwire

// One bit an element: sign and mean magnitude per block of 1024; a warp handles a block, all of it in registers.
//
// Payload as in csrc/cpu/kernels/codecs/onebit.cpp, bit for bit: ceil(n / 1024) float32 scales, then the signs, lowest bit
// first. Bytes an element, read + written, in one pass and one launch each, no synchronisation:
//   encode         8 + 4 + 1/8      gradient and residual in, new residual and payload out; a payload for each piece
//   decode_pieces  1/8 + 4          a payload for each piece in, all of them out
//   decode_reduce  W/8 + 4          W payloads in, their sum out
//   reduce_encode  W/8 + 8 + 1/8    W payloads and the residual in, new residual and the payload of the sum out
//
// Encoding, lane l holds the elements 32 j + l: a ballot over them is the j-th word of the signs in the payload's own
// order, and the 64 running sums that define the scale are two registers of each lane. A warp's load is 128 bytes in a
// row, 32 of them under way at once. Decoding, lane l sums the 32 elements of word l, each by a selection and an
// addition; shared memory turns the sums over, so that a warp's store is 512 bytes in a row.
// Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, section 4; Tang et al., 1-bit Adam, ICML 2021,
// section 4 (two stages).
#include "device.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
// CTAs that a multiprocessor keeps: 3 leave 80 registers a thread. In them ptxas 13.0 spills encoding for sm_120 and
// later, and the sums of pairs of floats for sm_100 and later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kEncoding = __CUDA_ARCH__ >= 1200 ? 2 : 3, kDecoding = 2;
#else
constexpr int kEncoding = 3, kDecoding = 3;
#endif
constexpr int kBlock = 1024;
constexpr int kWords = kBlock / 32;
static_assert(kWords == kWarp, "lane j stores word j of a block's signs");

// Arguments.
struct Encoded {
  float* new_residual;  // may be null, or the residual's own memory
  uint8_t* payload;
  int64_t numel;
};

__device__ inline int64_t block_count(int64_t numel) { return blocks_in<kBlock>(numel); }

// Kernels.
// p[j] is element 32 j + lane of the block; elements past the end are zero.
__device__ inline void encode_block(const float (&p)[kWords], const Encoded& out, int64_t block) {
  const int lane = static_cast<int>(lane_index()), count = static_cast<int>(least(kBlock, out.numel - block * kBlock));
  uint32_t mine = 0;
  float low = 0.0f, high = 0.0f;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const uint32_t word = __ballot_sync(kAllLanes, 32 * j + lane < count && p[j] >= 0.0f);
    if (lane == j) mine = word;
    if (j % 2) high += fabsf(p[j]);
    else low += fabsf(p[j]);
  }
  float sum = low + high;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) sum += __shfl_xor_sync(kAllLanes, sum, width);
  const float scale = sum / static_cast<float>(count);
  if (lane == 0) store_float(out.payload + 4 * block, scale);
  uint8_t* bits = out.payload + 4 * block_count(out.numel) + block * (kBlock / 8);
  store_word_within(bits + 4 * lane, mine, (count + 7) / 8 - 4 * lane);
  if (!out.new_residual) return;
  float* new_residual = out.new_residual + block * kBlock + lane;
#pragma unroll
  for (int j = 0; j < kWords; ++j)
    if (32 * j + lane < count) new_residual[32 * j] = p[j] - (p[j] >= 0.0f ? scale : -scale);
}

// A block of a payload: its scale, and this lane's word of its signs.
struct Signs {
  uint32_t word;
  float scale;
};

// Where they lie in the first payload of several, whose rows are `stride` bytes apart.
template <bool kWhole>
struct SignReader {
  const uint8_t *scale, *word;
  int64_t stride;
  int nbytes;  // that this lane's word has

  __device__ SignReader(const uint8_t* rows, int64_t stride, int64_t numel, int64_t block)
      : scale(rows + 4 * block),
        word(rows + 4 * block_count(numel) + block * (kBlock / 8) + 4 * lane_index()),
        stride(stride),
        nbytes(static_cast<int>((least(kBlock, numel - block * kBlock) + 7) / 8 - 4 * lane_index())) {}

  // Loads from a payload and goes on to the next. With kWhole all is aligned, and the block is a full one.
  __device__ Signs next() {
    const Signs signs =
        kWhole ? Signs{*reinterpret_cast<const uint32_t*>(word), *reinterpret_cast<const float*>(scale)}
               : Signs{load_word_within<uint32_t>(word, nbytes), load_float(scale)};
    scale += stride, word += stride;
    return signs;
  }
};

// A block in a warp's shared memory, as quads of four elements. In this order both the eight quads of each lane's word
// and those that 32 lanes store side by side come from all banks.
using Quads = float4[kBlock / 4];
__device__ inline int place_of_quad(int quad) { return quad ^ (quad / 8 % 8); }

// sum[i] += the payloads' element 32 l + i of the block, for lane l.
template <bool kWhole>
__device__ inline void add_signs(const Reduction<uint8_t>& a, int64_t block, float (&sum)[kWords]) {
  SignReader<kWhole> reader(a.rows, a.stride, a.numel, block);
  Signs next = reader.next();
  for (int64_t w = 0; w < a.workers; ++w) {
    const Signs signs = next;
    if (w + 1 < a.workers) next = reader.next();
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const float2 x = make_float2(signs.word >> i & 1 ? signs.scale : -signs.scale,
                                   signs.word >> (i + 1) & 1 ? signs.scale : -signs.scale);
      const float2 both = add_pair(make_float2(sum[i], sum[i + 1]), x);
      sum[i] = both.x, sum[i + 1] = both.y;
    }
  }
}

// The sum of `a.workers` payloads of one block and the addend, in shared memory.
__device__ inline void sum_block(const Reduction<uint8_t>& a, int64_t block, Quads& quads) {
  const int lane = static_cast<int>(lane_index());
  const int64_t first = block * kBlock;
  float sum[kWords] = {};
  if (a.addend) {
#pragma unroll
    for (int q = lane; q < kBlock / 4; q += static_cast<int>(kWarp))
      quads[place_of_quad(q)] = load4(a.addend + first + 4 * q, a.numel - first - 4 * q);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 x = quads[place_of_quad(8 * lane + i)];
      sum[4 * i] = x.x, sum[4 * i + 1] = x.y, sum[4 * i + 2] = x.z, sum[4 * i + 3] = x.w;
    }
  }
  if (aligned<uint32_t>(a.rows) && a.stride % 4 == 0 && a.numel - first >= kBlock) add_signs<true>(a, block, sum);
  else add_signs<false>(a, block, sum);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    quads[place_of_quad(8 * lane + i)] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads, kEncoding)
    onebit_encode(const float* gradient, const float* residual, float* new_residual, uint8_t* payloads, int64_t stride,
                  int64_t numel, int64_t width, int64_t blocks) {
  const int lane = static_cast<int>(lane_index());
  for (int64_t index = warp_index(); index < blocks; index += warp_count()) {
    const Place at = place_of<kBlock>({numel, width}, index);
    const int64_t first = at.start + at.block * kBlock + lane;
    const int count = static_cast<int>(least(kBlock, at.numel - at.block * kBlock)) - lane;  // for this lane
    float p[kWords];
#pragma unroll
    for (int j = 0; j < kWords; ++j) p[j] = 32 * j < count ? gradient[first + 32 * j] : 0.0f;
    if (residual) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) p[j] += 32 * j < count ? residual[first + 32 * j] : 0.0f;
    }
    encode_block(p, {new_residual ? new_residual + at.start : nullptr, payloads + at.piece * stride, at.numel},
                 at.block);
  }
}

// target = the sum of `a.workers` payloads of one block.
__device__ inline void decode_block(const Reduction<uint8_t>& a, int64_t block, Quads& quads) {
  sum_block(a, block, quads);
  const int64_t first = block * kBlock;
#pragma unroll
  for (int q = static_cast<int>(lane_index()); q < kBlock / 4; q += static_cast<int>(kWarp))
    store4(a.target + first + 4 * q, quads[place_of_quad(q)], a.numel - first - 4 * q);
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads, kDecoding)
    onebit_decode_reduce(const uint8_t* rows, int64_t stride, int64_t workers, const float* addend, float* target,
                         int64_t numel) {
  __shared__ Quads quads[kThreads / kWarp];
  for (int64_t block = warp_index(); block < block_count(numel); block += warp_count())
    decode_block({rows, stride, workers, addend, target, numel}, block, quads[threadIdx.x / kWarp]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    onebit_decode_pieces(const uint8_t* payloads, int64_t stride, float* target, int64_t numel, int64_t width,
                         int64_t blocks) {
  __shared__ Quads quads[kThreads / kWarp];
  for (int64_t index = warp_index(); index < blocks; index += warp_count()) {
    const Place at = place_of<kBlock>({numel, width}, index);
    decode_block({payloads + at.piece * stride, 0, 1, nullptr, target + at.start, at.numel}, at.block,
                 quads[threadIdx.x / kWarp]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    onebit_reduce_encode(const uint8_t* rows, int64_t stride, int64_t workers, const float* residual,
                         float* new_residual, uint8_t* reduced, int64_t numel) {
  __shared__ Quads quads[kThreads / kWarp];
  const int lane = static_cast<int>(lane_index());
  for (int64_t block = warp_index(); block < block_count(numel); block += warp_count()) {
    const int64_t first = block * kBlock + lane;
    const int count = static_cast<int>(least(kBlock, numel - block * kBlock)) - lane;  // for this lane
    float p[kWords];
    Quads& own = quads[threadIdx.x / kWarp];
    sum_block({rows, stride, workers, nullptr, nullptr, numel}, block, own);
#pragma unroll
    for (int j = 0; j < kWords; ++j)
      p[j] = reinterpret_cast<const float*>(own)[4 * place_of_quad(8 * j + lane / 4) + lane % 4];
    __syncwarp();
    if (residual) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) p[j] += 32 * j < count ? residual[first + 32 * j] : 0.0f;
    }
    if (count < kBlock - lane) {  // the last block may be cut short
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        if (32 * j >= count) p[j] = 0.0f;
    }
    encode_block(p, {new_residual, reduced, numel}, block);
  }
}

}  // namespace gradwire

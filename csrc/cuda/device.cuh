// What the kernels share: the indices of a thread, and loads and stores of 16 bytes at any address.
//
// A payload's row may start at any byte and a view of a bucket at any float. Whether an address is aligned is the same
// for a whole warp, so the test below costs an instruction and no divergence.
#pragma once
#include "common/cast_formula.h"
#include "common/portable.h"

namespace gradwire {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr unsigned kWarp = 32;

__device__ inline unsigned lane_index() { return threadIdx.x % kWarp; }
__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }
__device__ inline int64_t warp_index() { return thread_index() / kWarp; }
__device__ inline int64_t warp_count() { return thread_count() / kWarp; }

// Bytes of the eight of a (the lower four) and b, chosen by the four hexadecimal digits of `choice`, each 0 to 7.
__device__ inline uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t choice) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, choice);
#else
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) picked |= static_cast<uint32_t>(both >> 8 * (choice >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
#endif
}

__device__ inline uint32_t rotate_left(uint32_t x, uint32_t by) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_l(x, x, by);
#else
  return x << by % 32 | x >> (32 - by) % 32;
#endif
}

// Whole numbers below 2^23 as the lower bits of a float between 2^23 and 2^24, whose step is 1. That is one instruction
// of the float32 units each way, where a conversion occupies a unit of an eighth of the width.
constexpr float kWhole = 0x1p23f;

// 2^23 + floor(x), for 0 <= x < 2^23.
__device__ inline float whole_below(float x) {
#if defined(__CUDA_ARCH__)
  return __fadd_rz(x, kWhole);
#else
  return static_cast<float>(static_cast<uint32_t>(x)) + kWhole;
#endif
}

// The sums of two pairs of floats. From Blackwell on one instruction adds both pairs, each rounded as if alone: the same
// bits by half the additions, where these bind decoding because memory is as fast as B200's. Products are not paired:
// ptxas 13.0 fuses a paired product with the sum behind it, in spite of .rn and -fmad=false, which rounds differently.
// Source: PTX ISA 8.6, add with .f32x2 (sm_100 and later).
__device__ inline float2 add_pair(float2 a, float2 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  float2 c;
  asm("{ .reg .b64 a, b, c; mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5}; add.rn.f32x2 c, a, b; mov.b64 {%0, %1}, c; }"
      : "=f"(c.x), "=f"(c.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  return c;
#else
  return make_float2(a.x + b.x, a.y + b.y);
#endif
}

// low + code * unit of two codes, each as a float between 2^23 and 2^24 (`kWhole`).
__device__ inline float2 decoded_pair(float2 codes, float2 low, float2 unit) {
  const float2 whole = add_pair(codes, make_float2(-kWhole, -kWhole));
  return add_pair(low, make_float2(whole.x * unit.x, whole.y * unit.y));
}

// A warp's 32 words as a matrix of bits, turned over: bit i of lane j's word changes places with bit j of lane i's.
class BitTranspose {
 public:
  // What a lane needs for it: worked out once, and loaded where it is used. The compiler would else work parts of it out
  // anew for each word, or keep all of it in registers that it does not have.
  struct Lane {
    uint4 words[2];
  };

  __device__ static Lane prepare(uint32_t lane) {
    Lane prepared;
    prepared.words[0] = make_uint4(lane & 16 ? 0x3276 : 0x5410, lane & 8 ? 0x3715 : 0x6240, lane & 4 ? 28 : 4,
                                   lane & 2 ? 30 : 2);
    prepared.words[1] = make_uint4(lane & 1 ? 31 : 1, lane & 4 ? 0xf0f0f0f0u : 0x0f0f0f0fu,
                                   lane & 2 ? 0xccccccccu : 0x33333333u, lane & 1 ? 0xaaaaaaaau : 0x55555555u);
    prepared.words[0].z |= bits_of_float(kWhole);  // the upper bits of a rotation do not count
    return prepared;
  }

  __device__ explicit BitTranspose(const Lane& lane) {
    const uint4 first = lane.words[0], last = lane.words[1];
    halves_ = first.x, bytes_ = first.y;
    by_[0] = first.z, by_[1] = first.w, by_[2] = last.x;
    keep_[0] = last.y, keep_[1] = last.z, keep_[2] = last.w;
  }

  // Every lane of the warp calls it.
  __device__ uint32_t operator()(uint32_t x) const {
    x = pick_bytes(x, __shfl_xor_sync(kAllLanes, x, 16), halves_);
    x = pick_bytes(x, __shfl_xor_sync(kAllLanes, x, 8), bytes_);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint32_t moved = rotate_left(__shfl_xor_sync(kAllLanes, x, 4 >> i), by_[i]);
      x = (x & keep_[i]) | (moved & ~keep_[i]);
    }
    return x;
  }

  // Byte k of a word as a float.
  __device__ float byte_of(uint32_t x, int k) const {
    return float_of_bits(pick_bytes(x, by_[0], 0x7650u + static_cast<uint32_t>(k))) - kWhole;
  }

 private:
  uint32_t halves_, bytes_, keep_[3], by_[3];
};

// The arguments of decoding and summing: the payloads of all workers for a tensor, and where their sum goes.
template <class T>
struct Reduction {
  const T* rows;  // `workers` of them, `stride` elements of T apart
  int64_t stride, workers;
  const float* addend;  // may be null
  float* target;
  int64_t numel;
};

__device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// A tensor in pieces of `width` elements, of which the last may be shorter. Each piece has a payload of its own and its
// blocks begin at its own first element, so that one launch does what one for each piece would.
struct Pieces {
  int64_t numel, width;
};

// A block of a piece.
struct Place {
  int64_t piece, block;  // whose payload; which of its blocks
  int64_t start, numel;  // the piece in the tensor
};

template <int64_t kBlock>
__device__ inline int64_t blocks_in(int64_t numel) {
  return (numel + kBlock - 1) / kBlock;
}

// Where block `index` of all pieces' blocks lies. 32 bits hold the number of blocks of any tensor that fits a GPU, and
// a division in them takes a quarter of the instructions.
template <int64_t kBlock>
__device__ inline Place place_of(const Pieces& pieces, int64_t index) {
  const uint32_t blocks = static_cast<uint32_t>(blocks_in<kBlock>(pieces.width)), at = static_cast<uint32_t>(index);
  const uint32_t piece = at / blocks;
  const int64_t start = piece * pieces.width;
  return {piece, at - piece * blocks, start, least(pieces.width, pieces.numel - start)};
}

template <class T>
__device__ inline bool aligned(const void* at) {
  return reinterpret_cast<size_t>(at) % sizeof(T) == 0;
}

// An unsigned integer at any address.
template <class T>
__device__ inline T load_word(const uint8_t* at) {
  if (aligned<T>(at)) return *reinterpret_cast<const T*>(at);
  T word = 0;
  for (unsigned i = 0; i < sizeof(T); ++i) word = static_cast<T>(word | static_cast<T>(at[i]) << 8 * i);
  return word;
}

// The same, of which only `nbytes` (which may be negative, or more than all) belong to the payload.
template <class T>
__device__ inline T load_word_within(const uint8_t* at, int64_t nbytes) {
  if (nbytes >= static_cast<int64_t>(sizeof(T))) return load_word<T>(at);
  T word = 0;
  for (int i = 0; i < nbytes; ++i) word = static_cast<T>(word | static_cast<T>(at[i]) << 8 * i);
  return word;
}

template <class T>
__device__ inline void store_word_within(uint8_t* at, T word, int64_t nbytes) {
  const int64_t limit = nbytes < static_cast<int64_t>(sizeof(T)) ? nbytes : static_cast<int64_t>(sizeof(T));
  if (limit == static_cast<int64_t>(sizeof(T)) && aligned<T>(at)) {
    *reinterpret_cast<T*>(at) = word;
    return;
  }
  for (int i = 0; i < limit; ++i) at[i] = static_cast<uint8_t>(word >> 8 * i);
}

// Copies an aligned word to shared memory: it is there after `copies_arrived`, for the other threads after the barrier
// that follows. No register holds it meanwhile.
__device__ inline void copy_word(uint32_t* to, const uint8_t* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
#else
  *to = *reinterpret_cast<const uint32_t*>(from);
#endif
}

__device__ inline void copies_arrived() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}

__device__ inline float load_float(const uint8_t* at) { return float_of_bits(load_word<uint32_t>(at)); }
__device__ inline void store_float(uint8_t* at, float x) { store_word_within(at, bits_of_float(x), 4); }

// Four floats, of which `count` (which may be negative, or more than four) exist; the others read as zero.
__device__ inline float4 load4(const float* at, int64_t count) {
  if (count >= 4 && aligned<float4>(at)) return *reinterpret_cast<const float4*>(at);
  return make_float4(count > 0 ? at[0] : 0.0f, count > 1 ? at[1] : 0.0f, count > 2 ? at[2] : 0.0f,
                     count > 3 ? at[3] : 0.0f);
}

__device__ inline void store4(float* at, float4 x, int64_t count) {
  if (count >= 4 && aligned<float4>(at)) {
    *reinterpret_cast<float4*>(at) = x;
    return;
  }
  if (count > 0) at[0] = x.x;
  if (count > 1) at[1] = x.y;
  if (count > 2) at[2] = x.z;
  if (count > 3) at[3] = x.w;
}

}  // namespace gradwire

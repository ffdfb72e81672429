// Many tensors into one bucket and back, scaled and cast, in one launch however many there are.
//
// Bytes an element, read + written: the width of the one plus the width of the other (8 for float32 to float32, 6 with
// a cast to 16 bits). The table of tensors lives on the device, so that a bucket's layout is uploaded once and used in
// every step. A chunk of 8192 elements of one tensor is a CTA's unit of work; which tensor it belongs to is found by
// bisection in the table. No synchronisation.
#include "formats.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
constexpr int kResident = 6;  // CTAs of a multiprocessor; without it ptxas aims for more and spills
constexpr int64_t kChunk = 8192;

// Arguments.
struct Descriptor {
  void* tensor;
  int64_t offset;       // of its first element in the bucket
  int64_t numel;
  int64_t first_chunk;  // chunks of the tensors before it in the table
  float scale;
  uint32_t padding;
};
static_assert(sizeof(Descriptor) == 40, "compressors/kernels/cuda/pack.py writes five 64-bit words a tensor");

// Kernels.
// The last descriptor that starts at this chunk or before it; none is empty.
__device__ inline const Descriptor* find(const Descriptor* table, int64_t tensors, int64_t chunk) {
  int64_t low = 0, high = tensors;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (table[middle].first_chunk <= chunk) low = middle;
    else high = middle;
  }
  return table + low;
}

template <class From, class To>
__device__ inline void copy_chunk(const typename From::Stored* from, typename To::Stored* to, float scale,
                                  int64_t numel) {
  const int64_t first = kWarpRun * (threadIdx.x / kWarp) + kQuad * lane_index();
  for (int64_t i = first; i < numel; i += kRun * kThreads) {
    Run run = Memory<From>::load(from + i, numel - i);
#pragma unroll
    for (int j = 0; j < kRun; ++j) run.at[j] *= scale;
    Memory<To>::store(to + i, run, numel - i);
  }
}

template <class Tensor, class Bucket, bool kPack>
__device__ inline void pack(const Descriptor* table, int64_t tensors, int64_t chunks, typename Bucket::Stored* bucket) {
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const Descriptor item = *find(table, tensors, chunk);
    const int64_t start = (chunk - item.first_chunk) * kChunk, rest = item.numel - start;
    const int64_t numel = rest < kChunk ? rest : kChunk;
    auto* tensor = static_cast<typename Tensor::Stored*>(item.tensor) + start;
    auto* place = bucket + item.offset + start;
    if (kPack) copy_chunk<Tensor, Bucket>(tensor, place, item.scale, numel);
    else copy_chunk<Bucket, Tensor>(place, tensor, item.scale, numel);
  }
}

#define GRADWIRE_PACK(name, Tensor, Bucket)                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, kResident)                                                \
      pack_##name(const Descriptor* table, int64_t tensors, int64_t chunks, Bucket::Stored* bucket) {             \
    pack<Tensor, Bucket, true>(table, tensors, chunks, bucket);                                                   \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads, kResident)                                                \
      unpack_##name(const Descriptor* table, int64_t tensors, int64_t chunks, Bucket::Stored* bucket) {           \
    pack<Tensor, Bucket, false>(table, tensors, chunks, bucket);                                                  \
  }

GRADWIRE_PACK(f32_f32, Float32, Float32)
GRADWIRE_PACK(f32_f16, Float32, Float16)
GRADWIRE_PACK(f32_bf16, Float32, BFloat16)
GRADWIRE_PACK(f16_f32, Float16, Float32)
GRADWIRE_PACK(f16_f16, Float16, Float16)
GRADWIRE_PACK(f16_bf16, Float16, BFloat16)
GRADWIRE_PACK(bf16_f32, BFloat16, Float32)
GRADWIRE_PACK(bf16_f16, BFloat16, Float16)
GRADWIRE_PACK(bf16_bf16, BFloat16, BFloat16)

}  // namespace gradwire

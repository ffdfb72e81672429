// The largest few of each chunk at two bits each, and their places in the chunk: 64 of 4096 are 0.164 bits an element.
//
// A chunk's record is in common/chunk_topk_formula.h. The last chunk may be shorter; it keeps the same share, rounded up.
// The selection is exact: the k largest magnitudes, the lower place first among equals, inf and NaN before any number.
// Bytes an element, read + written, at 64 of 4096:
//   encode         4 + 0.02 (8 + 4 + 0.02 with residual)
//   decode_reduce  0.02 W + 4
//   reduce_encode  0.02 W + 8 + 0.02
// Source: Sarfi et al., SparseLoCo, arXiv 2508.15706; the levels are one step of Lloyd's algorithm from the mean.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/cast_formula.h"
#include "common/chunk_topk_formula.h"
#include "cpu/isa.h"
#include "cpu/stream.h"

namespace {

using namespace gradwire;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "entries, ones and levels are read as little-endian words");

constexpr size_t kMostChunk = 4096;
constexpr size_t kMostKeep = 512;
constexpr uint32_t kNan = 0x7f800001u;  // what the magnitude of every NaN counts as

// What is kept of each chunk, and the factor of the residual.
struct Rule {
  size_t chunk, keep;
  float decay;

  ChunkRecord record_of(size_t count) const {
    return chunk_record(static_cast<int>(chunk), static_cast<int>(keep), static_cast<int>(count));
  }
};

// The payloads of several workers for the same elements.
struct Payloads {
  const uint8_t* first;
  size_t stride, workers, numel;
};

inline uint32_t key_of(float x) { return std::min(bits_of_float(x) & 0x7fffffffu, kNan); }

#define GRADWIRE_LOOPS "cpu/kernels/chunk_topk_loops.h"
#include "cpu/foreach_isa.h"

float* floats(uintptr_t at) { return reinterpret_cast<float*>(at); }
uint8_t* bytes(uintptr_t at) { return reinterpret_cast<uint8_t*>(at); }

Rule rule_of(size_t chunk, size_t keep, float decay) {
  if (chunk < 256 || chunk > kMostChunk || (chunk & (chunk - 1)) != 0)
    throw std::invalid_argument("`chunk` must be a power of two from 256 to 4096");
  if (keep < 1 || keep > std::min(chunk, kMostKeep))
    throw std::invalid_argument("`keep` must be between 1 and min(`chunk`, 512)");
  return {chunk, keep, decay};
}

void chunk_topk_encode(size_t chunk, size_t keep, float decay, uintptr_t gradient, uintptr_t residual,
                       uintptr_t new_residual, uintptr_t payload, size_t numel) {
  const Rule rule = rule_of(chunk, keep, decay);
  GRADWIRE_DISPATCH(encode, rule, floats(gradient), floats(residual), floats(new_residual), bytes(payload), numel);
}

void chunk_topk_decode_reduce(size_t chunk, size_t keep, uintptr_t payloads, size_t stride, size_t workers,
                              uintptr_t addend, uintptr_t target, size_t numel) {
  const Rule rule = rule_of(chunk, keep, 0.0f);
  const Payloads all{bytes(payloads), stride, workers, numel};
  GRADWIRE_DISPATCH(decode_reduce, rule, all, floats(addend), floats(target));
}

void chunk_topk_reduce_encode(size_t chunk, size_t keep, float decay, uintptr_t payloads, size_t stride, size_t workers,
                              uintptr_t residual, uintptr_t new_residual, uintptr_t reduced, size_t numel) {
  const Rule rule = rule_of(chunk, keep, decay);
  const Payloads all{bytes(payloads), stride, workers, numel};
  GRADWIRE_DISPATCH(reduce_encode, rule, all, floats(residual), floats(new_residual), bytes(reduced));
}

}  // namespace

void bind_chunk_topk(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("chunk_topk_encode", &chunk_topk_encode, unlocked);
  m.def("chunk_topk_decode_reduce", &chunk_topk_decode_reduce, unlocked);
  m.def("chunk_topk_reduce_encode", &chunk_topk_reduce_encode, unlocked);
}

// 8 or 4 bits an element between the smallest and the largest of each block of 512.
//
// Payload of n elements: ceil(n / 512) pairs of float32 (unit, low), then the codes; of two 4-bit codes in a byte the
// even element's is the lower. An element is low + code * unit. Bytes an element, read + written, at 4 bits:
//   encode         4 + 1/2 (8 + 4 + 1/2 with residual)
//   decode_reduce  W/2 + 4
//   reduce_encode  W/2 + 8 + 1/2
// A block with inf or NaN has a NaN for both numbers, so that it decodes to nothing finite.
// Source: Alistarh et al., QSGD, NeurIPS 2017, section 4 (buckets, random rounding).
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/cast_formula.h"
#include "common/hash_formula.h"
#include "cpu/isa.h"
#include "cpu/stream.h"

namespace {

using namespace gradwire;
constexpr size_t kBlock = 512;
constexpr float kSmallestNormal = 0x1p-126f;  // below it 1 / unit is inf: such a range counts as empty

constexpr size_t meta_nbytes(size_t numel) { return (numel + kBlock - 1) / kBlock * 2 * sizeof(float); }

// The payloads of several workers for the same elements.
struct Payloads {
  const uint8_t* first;
  size_t stride, workers, numel;
};

#define GRADWIRE_LOOPS "cpu/kernels/quantize_loops.h"
#include "cpu/foreach_isa.h"

float* floats(uintptr_t at) { return reinterpret_cast<float*>(at); }
uint8_t* bytes(uintptr_t at) { return reinterpret_cast<uint8_t*>(at); }

void check_bits(int bits) {
  if (bits != 4 && bits != 8) throw std::invalid_argument("`bits` must be 4 or 8");
}

void quantize_encode(int bits, uintptr_t gradient, uintptr_t residual, uintptr_t new_residual, uintptr_t payload,
                     size_t numel, bool random, uint32_t key) {
  check_bits(bits);
  if (bits == 8)
    GRADWIRE_DISPATCH(encode<8>, floats(gradient), floats(residual), floats(new_residual), bytes(payload), numel,
                      random, key);
  else
    GRADWIRE_DISPATCH(encode<4>, floats(gradient), floats(residual), floats(new_residual), bytes(payload), numel,
                      random, key);
}

void quantize_decode_reduce(int bits, uintptr_t payloads, size_t stride, size_t workers, uintptr_t addend,
                            uintptr_t target, size_t numel) {
  check_bits(bits);
  const Payloads all{bytes(payloads), stride, workers, numel};
  if (bits == 8) GRADWIRE_DISPATCH(decode_reduce<8>, all, floats(addend), floats(target));
  else GRADWIRE_DISPATCH(decode_reduce<4>, all, floats(addend), floats(target));
}

void quantize_reduce_encode(int bits, uintptr_t payloads, size_t stride, size_t workers, uintptr_t residual,
                            uintptr_t new_residual, uintptr_t reduced, size_t numel, bool random, uint32_t key) {
  check_bits(bits);
  const Payloads all{bytes(payloads), stride, workers, numel};
  if (bits == 8)
    GRADWIRE_DISPATCH(reduce_encode<8>, all, floats(residual), floats(new_residual), bytes(reduced), random, key);
  else GRADWIRE_DISPATCH(reduce_encode<4>, all, floats(residual), floats(new_residual), bytes(reduced), random, key);
}

}  // namespace

void bind_quantize(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("quantize_encode", &quantize_encode, unlocked);
  m.def("quantize_decode_reduce", &quantize_decode_reduce, unlocked);
  m.def("quantize_reduce_encode", &quantize_reduce_encode, unlocked);
}

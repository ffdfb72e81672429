// One bit an element: sign and mean magnitude per block of 1024.
//
// Payload of n elements: ceil(n / 1024) float32 scales, then ceil(n / 8) bytes of signs, the lowest bit first; a bit
// is set where p >= 0. Bytes an element, read + written:
//   encode         8 + 4 + 1/8      gradient and residual in, new residual and payload out
//   decode_reduce  W/8 + 4          W payloads in, their sum out
//   reduce_encode  W/8 + 8 + 1/8    W payloads and the residual in, new residual and the payload of the sum out
// Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, section 4 (scale = L1 norm / n); Tang et al.,
// 1-bit Adam, ICML 2021, section 4 (two stages).
#include <nanobind/nanobind.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/cast_formula.h"
#include "cpu/isa.h"
#include "cpu/stream.h"

namespace {

using namespace gradwire;
constexpr size_t kBlock = 1024;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "sixteen signs are stored as one little-endian word");

constexpr size_t scales_nbytes(size_t numel) { return (numel + kBlock - 1) / kBlock * sizeof(float); }

#define GRADWIRE_LOOPS "cpu/kernels/onebit_loops.h"
#include "cpu/foreach_isa.h"

float* floats(uintptr_t at) { return reinterpret_cast<float*>(at); }
uint8_t* bytes(uintptr_t at) { return reinterpret_cast<uint8_t*>(at); }

void onebit_encode(uintptr_t gradient, uintptr_t residual, uintptr_t new_residual, uintptr_t payload, size_t numel) {
  GRADWIRE_DISPATCH(encode, floats(gradient), floats(residual), floats(new_residual), bytes(payload), numel);
}

void onebit_decode_reduce(uintptr_t payloads, size_t stride, size_t workers, uintptr_t addend, uintptr_t target,
                          size_t numel) {
  GRADWIRE_DISPATCH(decode_reduce, bytes(payloads), stride, workers, floats(addend), floats(target), numel);
}

void onebit_reduce_encode(uintptr_t payloads, size_t stride, size_t workers, uintptr_t residual, uintptr_t new_residual,
                          uintptr_t reduced, size_t numel) {
  GRADWIRE_DISPATCH(reduce_encode, bytes(payloads), stride, workers, floats(residual), floats(new_residual),
                    bytes(reduced), numel);
}

}  // namespace

void bind_onebit(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("onebit_encode", &onebit_encode, unlocked);
  m.def("onebit_decode_reduce", &onebit_decode_reduce, unlocked);
  m.def("onebit_reduce_encode", &onebit_reduce_encode, unlocked);
}

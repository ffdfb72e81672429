// Scale, add the residual, cast to float16 or bfloat16 and keep what the cast leaves out, in one pass; and back.
//
// Bytes an element, read + written: encode 4 + 2 (8 + 6 with residual), decode_reduce 2 W + 4.
// Scaling before the cast keeps a gradient whose mean fits finite: 70000 / 8 does, 70000 does not.
#include <nanobind/nanobind.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/cast_formula.h"
#include "cpu/isa.h"

namespace {

using namespace gradwire;

#define GRADWIRE_LOOPS "cpu/kernels/cast_loops.h"
#include "cpu/foreach_isa.h"

float* floats(uintptr_t at) { return reinterpret_cast<float*>(at); }
uint16_t* words(uintptr_t at) { return reinterpret_cast<uint16_t*>(at); }

void cast_encode(bool half, uintptr_t gradient, float scale, uintptr_t residual, uintptr_t new_residual,
                 uintptr_t target, size_t numel) {
  if (half)
    GRADWIRE_DISPATCH(encode<true>, floats(gradient), scale, floats(residual), floats(new_residual), words(target),
                      numel);
  else
    GRADWIRE_DISPATCH(encode<false>, floats(gradient), scale, floats(residual), floats(new_residual), words(target),
                      numel);
}

void cast_decode_reduce(bool half, uintptr_t sources, size_t stride, size_t workers, uintptr_t addend, uintptr_t target,
                        size_t numel) {
  if (half)
    GRADWIRE_DISPATCH(decode_reduce<true>, words(sources), stride, workers, floats(addend), floats(target), numel);
  else GRADWIRE_DISPATCH(decode_reduce<false>, words(sources), stride, workers, floats(addend), floats(target), numel);
}

}  // namespace

void bind_cast(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("cast_encode", &cast_encode, unlocked);
  m.def("cast_decode_reduce", &cast_decode_reduce, unlocked);
}

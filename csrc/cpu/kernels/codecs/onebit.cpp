// One bit an element: sign and mean magnitude per block of 1024.
//
// Payload of n elements: ceil(n / 1024) float32 scales, then ceil(n / 8) bytes of signs, the lowest bit first; a bit
// is set where p >= 0. Bytes an element, read + written:
//   encode         8 + 4 + 1/8      gradient and residual in, new residual and payload out
//   decode_reduce  W/8 + 4          W payloads in, their sum out
//   reduce_encode  W/8 + 8 + 1/8    W payloads and the residual in, new residual and the payload of the sum out
// Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, section 4 (scale = L1 norm / n); Tang et al.,
// 1-bit Adam, ICML 2021, section 4 (two stages).
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/cast_formula.h"
#include "cpu/intrinsics.h"
#include "cpu/isa.h"
#include "cpu/kernels/codecs/block_format.h"
#include "cpu/stream.h"

namespace {

using namespace gradwire;
constexpr size_t kBlock = 1024;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "sixteen signs are stored as one little-endian word");

constexpr size_t scales_nbytes(size_t numel) { return (numel + kBlock - 1) / kBlock * sizeof(float); }

#define GRADWIRE_LOOPS "cpu/kernels/codecs/onebit_loops.h"
#include "cpu/foreach_isa.h"

class OneBit final : public BlockFormat {
  void encode(const float* gradient, const float* residual, float* new_residual, uint8_t* payload,
              size_t numel) const override {
    GRADWIRE_DISPATCH(encode, gradient, residual, new_residual, payload, numel);
  }
  void decode_reduce(const Payloads& all, const float* addend, float* target) const override {
    GRADWIRE_DISPATCH(decode_reduce, all.first, all.stride, all.workers, addend, target, all.numel);
  }
  void reduce_encode(const Payloads& all, const float* residual, float* new_residual, uint8_t* reduced) const override {
    GRADWIRE_DISPATCH(reduce_encode, all.first, all.stride, all.workers, residual, new_residual, reduced, all.numel);
  }
};

}  // namespace

std::unique_ptr<gradwire::BlockFormat> gradwire::make_onebit(const Parameters&) { return std::make_unique<OneBit>(); }

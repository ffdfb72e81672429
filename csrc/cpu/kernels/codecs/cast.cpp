// Scale, add the residual, cast to float16 or bfloat16 and keep the compression error, in one pass; and back.
//
// Bytes an element, read + written: encode 4 + 2 (8 + 6 with residual), decode_reduce 2 W + 4.
// Scaling before the cast keeps a gradient whose mean fits finite: 70000 / 8 does, 70000 does not.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/cast_formula.h"
#include "cpu/intrinsics.h"
#include "cpu/isa.h"
#include "cpu/kernels/codecs/block_format.h"

namespace {

using namespace gradwire;

#define GRADWIRE_LOOPS "cpu/kernels/codecs/cast_loops.h"
#include "cpu/foreach_isa.h"

constexpr size_t kChunk = 4096;  // elements of a sum on its way from decoding to encoding: a first-level cache has room

template <bool kHalf>
class Cast final : public BlockFormat {
 public:
  explicit Cast(float scale) : scale_(scale) {}

 private:
  void encode(const float* gradient, const float* residual, float* new_residual, uint8_t* payload,
              size_t numel) const override {
    GRADWIRE_DISPATCH(encode<kHalf>, gradient, scale_, residual, new_residual, reinterpret_cast<uint16_t*>(payload),
                      numel);
  }
  void decode_reduce(const Payloads& all, const float* addend, float* target) const override {
    GRADWIRE_DISPATCH(decode_reduce<kHalf>, reinterpret_cast<const uint16_t*>(all.first), all.stride / 2, all.workers,
                      addend, target, all.numel);
  }
  void reduce_encode(const Payloads& all, const float* residual, float* new_residual, uint8_t* reduced) const override {
    float total[kChunk];
    for (size_t start = 0; start < all.numel; start += kChunk) {
      const size_t count = std::min(kChunk, all.numel - start);
      decode_reduce({all.first + 2 * start, all.stride, all.workers, count}, nullptr, total);
      encode(total, residual ? residual + start : nullptr, new_residual ? new_residual + start : nullptr,
             reduced + 2 * start, count);
    }
  }

  float scale_;
};

}  // namespace

std::unique_ptr<gradwire::BlockFormat> gradwire::make_cast(const Parameters& parameters) {
  const auto scale = static_cast<float>(parameters.at(1));
  if (parameters[0] != 0) return std::make_unique<Cast<true>>(scale);
  return std::make_unique<Cast<false>>(scale);
}

// 8 or 4 bits an element between the smallest and the largest of each block of 512.
//
// Payload of n elements: ceil(n / 512) pairs of float32 (step, low), then the codes; of two 4-bit codes in a byte the
// even element's is the lower. An element is low + code * step. Bytes an element, read + written, at 4 bits:
//   encode         4 + 1/2 (8 + 4 + 1/2 with residual)
//   decode_reduce  W/2 + 4
//   reduce_encode  W/2 + 8 + 1/2
// A block with inf or NaN has a NaN for both numbers, so that it decodes to nothing finite.
// Source: Alistarh et al., QSGD, NeurIPS 2017, section 4 (buckets, random rounding).
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "common/cast_formula.h"
#include "common/hash_formula.h"
#include "cpu/intrinsics.h"
#include "cpu/isa.h"
#include "cpu/kernels/codecs/block_format.h"
#include "cpu/stream.h"

namespace {

using namespace gradwire;
constexpr size_t kBlock = 512;
constexpr float kSmallestNormal = 0x1p-126f;  // below it 1 / unit is inf: such a range counts as empty

constexpr size_t meta_nbytes(size_t numel) { return (numel + kBlock - 1) / kBlock * 2 * sizeof(float); }

#define GRADWIRE_LOOPS "cpu/kernels/codecs/quantize_loops.h"
#include "cpu/foreach_isa.h"

template <int kBits>
class Quantize final : public BlockFormat {
 public:
  Quantize(bool random, uint32_t key) : random_(random), key_(key) {}

 private:
  void encode(const float* gradient, const float* residual, float* new_residual, uint8_t* payload,
              size_t numel) const override {
    GRADWIRE_DISPATCH(encode<kBits>, gradient, residual, new_residual, payload, numel, random_, key_);
  }
  void decode_reduce(const Payloads& all, const float* addend, float* target) const override {
    GRADWIRE_DISPATCH(decode_reduce<kBits>, all, addend, target);
  }
  void reduce_encode(const Payloads& all, const float* residual, float* new_residual, uint8_t* reduced) const override {
    GRADWIRE_DISPATCH(reduce_encode<kBits>, all, residual, new_residual, reduced, random_, key_);
  }

  bool random_;
  uint32_t key_;
};

}  // namespace

std::unique_ptr<gradwire::BlockFormat> gradwire::make_quantize(const Parameters& parameters) {
  const bool random = parameters.at(1) != 0;
  const auto key = static_cast<uint32_t>(parameters.at(2));
  if (parameters[0] == 8) return std::make_unique<Quantize<8>>(random, key);
  if (parameters[0] == 4) return std::make_unique<Quantize<4>>(random, key);
  throw std::invalid_argument("`bits` must be 4 or 8");
}

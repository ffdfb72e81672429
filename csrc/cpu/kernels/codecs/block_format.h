// The loops of a block codec: what a unit of this folder offers, and what block_format.cpp makes kernels of.
//
// compressors/kernels/block.py describes the formats to Python. A pointer to a residual may be null: there is none, or
// it is not kept; `new_residual` may be `residual`.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace gradwire {

// The payloads of several workers for the same elements; `stride` in bytes.
struct Payloads {
  const uint8_t* first;
  size_t stride, workers, numel;
};

class BlockFormat {
 public:
  virtual ~BlockFormat() = default;
  // Writes the payload of p = gradient + residual, and p - decode(payload) to new_residual.
  virtual void encode(const float* gradient, const float* residual, float* new_residual, uint8_t* payload,
                      size_t numel) const = 0;
  // Writes addend + the decoded payloads, in their order; `addend` may be null.
  virtual void decode_reduce(const Payloads& payloads, const float* addend, float* target) const = 0;
  // Decodes and sums the payloads, and encodes the sum plus residual.
  virtual void reduce_encode(const Payloads& payloads, const float* residual, float* new_residual,
                             uint8_t* reduced) const = 0;
};

// BlockFormat.parameters of compressors/kernels/block.py: every integer of 32 bits is a double.
using Parameters = std::vector<double>;

// std::invalid_argument where a parameter is out of range.
std::unique_ptr<BlockFormat> make_cast(const Parameters& parameters);
std::unique_ptr<BlockFormat> make_onebit(const Parameters& parameters);
std::unique_ptr<BlockFormat> make_quantize(const Parameters& parameters);
std::unique_ptr<BlockFormat> make_waterfill(const Parameters& parameters);

}  // namespace gradwire

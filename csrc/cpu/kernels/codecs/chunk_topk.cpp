// The largest few of each chunk at two bits each, and their places in the chunk: 64 of 4096 are 0.164 bits an element.
//
// A chunk's record is in common/chunk_topk_formula.h. The last chunk may be shorter; it keeps the same share, rounded up.
// The selection is exact: the k largest magnitudes, the lower place first among equals, inf and NaN before any number.
// Bytes an element, read + written, at 64 of 4096:
//   encode         4 + 0.02 (8 + 4 + 0.02 with residual)
//   decode_reduce  0.02 W + 4
//   reduce_encode  0.02 W + 8 + 0.02
// Source: Sarfi et al., SparseLoCo, arXiv 2508.15706; the levels are one step of Lloyd's algorithm from the mean.
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
#include "cpu/kernels/codecs/block_format.h"
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

inline uint32_t key_of(float x) { return std::min(bits_of_float(x) & 0x7fffffffu, kNan); }

#define GRADWIRE_LOOPS "cpu/kernels/codecs/chunk_topk_loops.h"
#include "cpu/foreach_isa.h"

class ChunkTopk final : public BlockFormat {
 public:
  explicit ChunkTopk(const Rule& rule) : rule_(rule) {
    if (rule.chunk < 256 || rule.chunk > kMostChunk || (rule.chunk & (rule.chunk - 1)) != 0)
      throw std::invalid_argument("`chunk` must be a power of two from 256 to 4096");
    if (rule.keep < 1 || rule.keep > std::min(rule.chunk, kMostKeep))
      throw std::invalid_argument("`keep` must be between 1 and min(`chunk`, 512)");
  }

 private:
  void encode(const float* gradient, const float* residual, float* new_residual, uint8_t* payload,
              size_t numel) const override {
    GRADWIRE_DISPATCH(encode, rule_, gradient, residual, new_residual, payload, numel);
  }
  void decode_reduce(const Payloads& all, const float* addend, float* target) const override {
    GRADWIRE_DISPATCH(decode_reduce, rule_, all, addend, target);
  }
  void reduce_encode(const Payloads& all, const float* residual, float* new_residual, uint8_t* reduced) const override {
    GRADWIRE_DISPATCH(reduce_encode, rule_, all, residual, new_residual, reduced);
  }

  Rule rule_;
};

}  // namespace

std::unique_ptr<gradwire::BlockFormat> gradwire::make_chunk_topk(const Parameters& parameters) {
  return std::make_unique<ChunkTopk>(Rule{static_cast<size_t>(parameters.at(0)), static_cast<size_t>(parameters.at(1)),
                                          static_cast<float>(parameters.at(2))});
}

// 2 to 5 bits an element, scales included, shared out between blocks of 32: more to those whose elements are large.
//
// A group of 16384 elements has a record, little-endian: the upper 12 bits of its largest scale in a word of 32 bits,
// for each block of 32 a byte that says how many eighths of an octave its scale lies below that (255: no bits), and the
// codes of one block after the other, a word for each bit, the lowest first. How many bits a block has both sides work
// out from the scales. Code c of w bits is the middle of the c-th of 2^w cells from -scale to scale. The last group may
// be shorter. Bytes an element, read + written, at 5 bits:
//   encode         4 + 5/8 (8 + 4 + 5/8 with residual)
//   decode_reduce  5/8 W + 4
//   reduce_encode  5/8 W + 8 + 5/8
// A group with inf or NaN decodes to NaN.
// Source: reverse water-filling: Cover and Thomas, Elements of Information Theory, section 10.3.3.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "common/cast_formula.h"
#include "common/waterfill_formula.h"
#include "cpu/intrinsics.h"
#include "cpu/isa.h"
#include "cpu/kernels/codecs/block_format.h"
#include "cpu/stream.h"

namespace {

using namespace gradwire;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are read as little-endian words");

constexpr size_t kGroup = kFillGroup;
constexpr size_t kBlock = kFillBlock;
constexpr size_t kBlocks = kFillBlocks;
constexpr int kLeastBits = 2, kMostBits = 5;
constexpr size_t kMostRecord = static_cast<size_t>(fill_record_nbytes(kFillGroup, kMostBits));
constexpr size_t kSlack = 4 * kFillMostWidth;  // bytes behind a block's last word that are read and written with it

size_t record_nbytes(size_t count, int bits) {
  return static_cast<size_t>(fill_record_nbytes(static_cast<int>(count), bits));
}

constexpr uint8_t kNoOctaves = 128;  // further than any level

// A byte that keeps a code's own bits, eight times over, by the code's width.
constexpr uint64_t kMasks[kFillMostWidth + 1] = {0,
                                                 0x0101010101010101u,
                                                 0x0303030303030303u,
                                                 0x0707070707070707u,
                                                 0x0f0f0f0f0f0f0f0fu,
                                                 0x1f1f1f1f1f1f1f1fu,
                                                 0x3f3f3f3f3f3f3f3fu,
                                                 0x7f7f7f7f7f7f7f7fu,
                                                 0xffffffffffffffffu};

// A group as a payload holds it: how its blocks are decoded.
struct Shares {
  alignas(64) uint8_t octaves[kBlocks];  // how far a block's scale lies below the group's; kNoOctaves without bits
  alignas(64) uint8_t eighths[kBlocks];  // the rest of it
  alignas(64) uint8_t least[kBlocks];  // bits that it has at any level
  alignas(64) uint8_t widths[kBlocks];
  alignas(64) float unit[kBlocks], low[kBlocks];  // code c stands for low + c * unit
  uint32_t base;
};

// A worker's record on its way through.
struct Decoding {
  Shares shares;
  const uint8_t* words;
  uint8_t record[kMostRecord + kSlack];  // a copy of one near the end of a payload: nothing is read past it
};

#define GRADWIRE_LOOPS "cpu/kernels/codecs/waterfill_loops.h"
#include "cpu/foreach_isa.h"

class Waterfill final : public BlockFormat {
 public:
  explicit Waterfill(int bits) : bits_(bits) {
    if (bits < kLeastBits || bits > kMostBits) throw std::invalid_argument("`bits` must be 2 to 5");
  }

 private:
  void encode(const float* gradient, const float* residual, float* new_residual, uint8_t* payload,
              size_t numel) const override {
    GRADWIRE_DISPATCH(encode, bits_, gradient, residual, new_residual, payload, numel);
  }
  void decode_reduce(const Payloads& all, const float* addend, float* target) const override {
    GRADWIRE_DISPATCH(decode_reduce, bits_, all, addend, target);
  }
  void reduce_encode(const Payloads& all, const float* residual, float* new_residual, uint8_t* reduced) const override {
    GRADWIRE_DISPATCH(reduce_encode, bits_, all, residual, new_residual, reduced);
  }

  int bits_;
};

}  // namespace

std::unique_ptr<gradwire::BlockFormat> gradwire::make_waterfill(const Parameters& parameters) {
  return std::make_unique<Waterfill>(static_cast<int>(parameters.at(0)));
}

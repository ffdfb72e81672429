// How a group's bits are shared out between its blocks of 32 elements, in whole numbers: sender and receiver, CPU and
// GPU must agree to the bit.
//
// A scale is the upper 12 bits of a float32, rounded up: eight in an octave. A bit more quarters a block's squared
// error, so a block of twice the scale has one bit more: at level l a block whose scale lies d eighths of an octave
// below the largest has floor((l - d) / 8) + 1 bits, `fill_least` to 8, and an empty one none. The level is the highest
// that takes fewer words of 32 bits than there are; what is left goes to the first of the blocks that would have one
// more at the next level.
// Source: reverse water-filling: Cover and Thomas, Elements of Information Theory, section 10.3.3.
#pragma once
#include "common/cast_formula.h"

namespace gradwire {

constexpr int kFillGroup = 16384;
constexpr int kFillBlock = 32;
constexpr int kFillBlocks = kFillGroup / kFillBlock;
constexpr int kFillMostWidth = 8;
constexpr int kFillLevels = 255 + 8 * (kFillMostWidth - 1);  // from this one on all blocks have all bits
constexpr uint32_t kFillEmpty = 255;          // the byte of a block without bits
constexpr int kNoScale = 0x4000;              // what such a block's distance counts as: no level reaches it
constexpr uint32_t kFillLeastScale = 72;      // 2^-118: the step of the widest code is a normal number still
constexpr uint32_t kFillLargestScale = 0x7f7; // the largest finite one
constexpr uint32_t kFillNan = 0x7fc;          // of a group with inf or NaN

// Words of 32 bits that a group shares out: what its scales leave of `bits` an element.
GRADWIRE_ANYWHERE constexpr int fill_words(int blocks, int bits) {
  return bits * blocks - (kFillBlocks / 4 + 1) * blocks / kFillBlocks;
}

GRADWIRE_ANYWHERE constexpr int fill_blocks(int count) { return (count + kFillBlock - 1) / kFillBlock; }

// Where the words begin in a record: behind the group's scale and a byte for each block, in whole words.
GRADWIRE_ANYWHERE constexpr int fill_head_nbytes(int blocks) { return 4 + (blocks + 3) / 4 * 4; }

GRADWIRE_ANYWHERE constexpr int fill_record_nbytes(int count, int bits) {
  return fill_head_nbytes(fill_blocks(count)) + 4 * fill_words(fill_blocks(count), bits);
}

// The scale of a block whose largest magnitude has these bits; 0 for too small a one.
GRADWIRE_ANYWHERE inline uint32_t fill_scale(uint32_t peak) {
  const uint32_t scale = (peak + 0xfffffu) >> 20;
  if (scale < kFillLeastScale) return 0;
  return scale < kFillLargestScale ? scale : kFillLargestScale;
}

// How far a block's scale lies below the group's, as the byte in the record.
GRADWIRE_ANYWHERE inline uint32_t fill_below(uint32_t base, uint32_t scale) {
  return scale == 0 || base - scale >= kFillEmpty ? kFillEmpty : base - scale;
}

// The fewest bits of a block that is not empty.
GRADWIRE_ANYWHERE constexpr int fill_least(int bits) { return bits - 1; }

// Bits of a block at a level, `least` being 0 for an empty one.
GRADWIRE_ANYWHERE inline int fill_width(int level, int below, int least) {
  const int width = ((level - below) >> 3) + 1;
  return width < least ? least : width < kFillMostWidth ? width : kFillMostWidth;
}

// Half the distance between the values of neighbouring codes: scale / 2^width; 0 without bits.
GRADWIRE_ANYWHERE inline float fill_step(uint32_t base, int below, int width) {
  const uint32_t bits = (base - static_cast<uint32_t>(below)) << 20;
  return width > 0 ? float_of_bits(bits - (static_cast<uint32_t>(width) << 23)) : 0.0f;
}

}  // namespace gradwire

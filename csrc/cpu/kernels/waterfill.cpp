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
#include "common/waterfill_formula.h"
#include "cpu/isa.h"
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

// The payloads of several workers for the same elements.
struct Payloads {
  const uint8_t* first;
  size_t stride, workers, numel;
};

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

#define GRADWIRE_LOOPS "cpu/kernels/waterfill_loops.h"
#include "cpu/foreach_isa.h"

float* floats(uintptr_t at) { return reinterpret_cast<float*>(at); }
uint8_t* bytes(uintptr_t at) { return reinterpret_cast<uint8_t*>(at); }

void check_bits(int bits) {
  if (bits < kLeastBits || bits > kMostBits) throw std::invalid_argument("`bits` must be 2 to 5");
}

void waterfill_encode(int bits, uintptr_t gradient, uintptr_t residual, uintptr_t new_residual, uintptr_t payload,
                      size_t numel) {
  check_bits(bits);
  GRADWIRE_DISPATCH(encode, bits, floats(gradient), floats(residual), floats(new_residual), bytes(payload), numel);
}

// The pieces of a shard, of `width` elements each but for the last, one payload in each row.
void waterfill_encode_pieces(int bits, uintptr_t gradient, uintptr_t residual, uintptr_t new_residual,
                             uintptr_t payloads, size_t stride, size_t width, size_t numel) {
  for (size_t start = 0; start < numel; start += width, payloads += stride) {
    const size_t nbytes = start * sizeof(float);
    waterfill_encode(bits, gradient + nbytes, residual ? residual + nbytes : 0, new_residual ? new_residual + nbytes : 0,
                     payloads, std::min(width, numel - start));
  }
}

void waterfill_decode_reduce(int bits, uintptr_t payloads, size_t stride, size_t workers, uintptr_t addend,
                             uintptr_t target, size_t numel) {
  check_bits(bits);
  const Payloads all{bytes(payloads), stride, workers, numel};
  GRADWIRE_DISPATCH(decode_reduce, bits, all, floats(addend), floats(target));
}

void waterfill_decode_pieces(int bits, uintptr_t payloads, size_t stride, uintptr_t target, size_t width,
                             size_t numel) {
  for (size_t start = 0; start < numel; start += width, payloads += stride)
    waterfill_decode_reduce(bits, payloads, stride, 1, 0, target + start * sizeof(float),
                            std::min(width, numel - start));
}

void waterfill_reduce_encode(int bits, uintptr_t payloads, size_t stride, size_t workers, uintptr_t residual,
                             uintptr_t new_residual, uintptr_t reduced, size_t numel) {
  check_bits(bits);
  const Payloads all{bytes(payloads), stride, workers, numel};
  GRADWIRE_DISPATCH(reduce_encode, bits, all, floats(residual), floats(new_residual), bytes(reduced));
}

}  // namespace

void bind_waterfill(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("waterfill_encode", &waterfill_encode, unlocked);
  m.def("waterfill_encode_pieces", &waterfill_encode_pieces, unlocked);
  m.def("waterfill_decode_pieces", &waterfill_decode_pieces, unlocked);
  m.def("waterfill_decode_reduce", &waterfill_decode_reduce, unlocked);
  m.def("waterfill_reduce_encode", &waterfill_reduce_encode, unlocked);
}

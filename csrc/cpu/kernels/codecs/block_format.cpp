// The block codecs by name, and their four operations for Python: addresses in, the interpreter's lock released.
#include "cpu/kernels/codecs/block_format.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace nb = nanobind;

namespace {

using namespace gradwire;

constexpr std::pair<const char*, std::unique_ptr<BlockFormat> (*)(const Parameters&)> kFamilies[] = {
    {"cast", make_cast},
    {"onebit", make_onebit},
    {"quantize", make_quantize},
    {"waterfill", make_waterfill},
};

BlockFormat* block_format(const std::string& family, const Parameters& parameters) {
  for (const auto& [name, make] : kFamilies)
    if (family == name) return make(parameters).release();
  throw std::invalid_argument("`family` is '" + family + "', which has no kernels in csrc/cpu/kernels");
}

float* floats(uintptr_t at) { return reinterpret_cast<float*>(at); }
uint8_t* bytes(uintptr_t at) { return reinterpret_cast<uint8_t*>(at); }
uintptr_t moved(uintptr_t at, size_t numel) { return at ? at + numel * sizeof(float) : 0; }

// The pieces of a shard, of `width` elements each but for the last, one payload in each row.
void encode_pieces(const BlockFormat& format, uintptr_t gradient, uintptr_t residual, uintptr_t new_residual,
                   uintptr_t payloads, size_t stride, size_t width, size_t numel) {
  for (size_t start = 0; start < numel; start += width, payloads += stride)
    format.encode(floats(moved(gradient, start)), floats(moved(residual, start)), floats(moved(new_residual, start)),
                  bytes(payloads), std::min(width, numel - start));
}

void decode_pieces(const BlockFormat& format, uintptr_t payloads, size_t stride, uintptr_t target, size_t width,
                   size_t numel) {
  for (size_t start = 0; start < numel; start += width, payloads += stride)
    format.decode_reduce({bytes(payloads), stride, 1, std::min(width, numel - start)}, nullptr,
                         floats(moved(target, start)));
}

void decode_reduce(const BlockFormat& format, uintptr_t payloads, size_t stride, size_t workers, uintptr_t addend,
                   uintptr_t target, size_t numel) {
  format.decode_reduce({bytes(payloads), stride, workers, numel}, floats(addend), floats(target));
}

void reduce_encode(const BlockFormat& format, uintptr_t payloads, size_t stride, size_t workers, uintptr_t residual,
                   uintptr_t new_residual, uintptr_t reduced, size_t numel) {
  format.reduce_encode({bytes(payloads), stride, workers, numel}, floats(residual), floats(new_residual),
                       bytes(reduced));
}

}  // namespace

void bind_block_formats(nb::module_& m) {
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  nb::class_<BlockFormat>(m, "BlockFormat")
      .def("encode_pieces", &encode_pieces, unlocked)
      .def("decode_pieces", &decode_pieces, unlocked)
      .def("decode_reduce", &decode_reduce, unlocked)
      .def("reduce_encode", &reduce_encode, unlocked);
  m.def("block_format", &block_format, nb::rv_policy::take_ownership);
}

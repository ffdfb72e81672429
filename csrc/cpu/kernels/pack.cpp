// Many tensors into one flat buffer and back, scaled in float32 and cast, in one pass over memory.
//
// Bytes an element, read + written: the width of the one plus the width of the other (8 for float32 to float32, 6 with
// a cast to 16 bits). A float32 buffer that no cache would hold is streamed past the caches.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/cast_formula.h"
#include "cpu/isa.h"
#include "cpu/stream.h"

namespace {

using namespace gradwire;

enum class Format : int { float32 = 0, float16 = 1, bfloat16 = 2 };

constexpr size_t width(Format format) { return format == Format::float32 ? 4 : 2; }

struct End {
  uintptr_t address;
  Format format;
};

struct Move {
  End from, to;
  size_t numel;
};

#define GRADWIRE_LOOPS "cpu/kernels/pack_loops.h"
#include "cpu/foreach_isa.h"

// A tensor: its address, where it begins in the buffer, how many elements it has, and its format.
using Piece = std::tuple<uintptr_t, size_t, size_t, int>;

Format format_of(int code) {
  if (code < 0 || code > 2) throw std::invalid_argument("a format must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  return static_cast<Format>(code);
}

void move(const std::vector<Piece>& pieces, float scale, uintptr_t buffer, int buffer_format, bool into_buffer) {
  std::vector<Move> moves;
  size_t total = 0;
  for (const auto& [address, offset, numel, format] : pieces) {
    const End tensor{address, format_of(format)}, whole{buffer, format_of(buffer_format)};
    const End place{buffer + offset * width(whole.format), whole.format};
    moves.push_back(into_buffer ? Move{tensor, place, numel} : Move{place, tensor, numel});
    total += numel;
  }
  GRADWIRE_DISPATCH(move_all, moves, scale, total >= kStreamNumel);
}

}  // namespace

void bind_pack(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("move", &move, unlocked);
}

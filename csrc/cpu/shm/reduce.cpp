// out = op over the ranks of scale * source: per element of `out`, reads `count` elements and writes 1, or 2 with a
// mirror.
//
// The outer loop walks blocks that fit in the first-level cache, the inner one the ranks in order, two operands at a
// time, so main memory sees each source once whatever `count` is.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/half.h"
#include "cpu/shm/isa.h"
#include "cpu/shm/kernels.h"
#include "cpu/shm/layout.h"

// A fused multiply-add rounds once where multiply and add round twice: with it the bits would depend on the CPU.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace gradwire::shm {
namespace {

/// Two operands and a result of 8 KB each stay in a 32 KB first-level cache.
constexpr std::uint64_t block_nbytes = 8 << 10;

template <ReduceOp op, class T>
GRADWIRE_ALWAYS_INLINE T combine(T a, T b) {
  if constexpr (op == ReduceOp::sum) {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;  // wraps as torch's integers do; signed overflow would be undefined
      return static_cast<T>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
    } else {
      return a + b;
    }
  } else if constexpr (op == ReduceOp::max) {
    return (a > b || a != a) ? a : b;
  } else {
    return (a < b || a != a) ? a : b;
  }
}

template <ReduceOp op, bool scaled, class T>
GRADWIRE_ALWAYS_INLINE void pair_loop(T* out, const T* a, const T* b, T scale, std::uint64_t numel) {
  GRADWIRE_ELEMENTWISE
  for (std::uint64_t index = 0; index < numel; ++index) {
    out[index] = combine<op, T>(a[index], scaled ? static_cast<T>(b[index] * scale) : b[index]);
  }
}

template <class T>
GRADWIRE_ALWAYS_INLINE void scale_loop(T* out, const T* a, T scale, std::uint64_t numel) {
  GRADWIRE_ELEMENTWISE
  for (std::uint64_t index = 0; index < numel; ++index) out[index] = static_cast<T>(a[index] * scale);
}

template <ReduceOp op, bool scaled, class T>
void pair_plain(T* out, const T* a, const T* b, T scale, std::uint64_t numel) {
  pair_loop<op, scaled, T>(out, a, b, scale, numel);
}

#if defined(__x86_64__)
template <ReduceOp op, bool scaled, class T>
GRADWIRE_AVX2 void pair_avx2(T* out, const T* a, const T* b, T scale, std::uint64_t numel) {
  pair_loop<op, scaled, T>(out, a, b, scale, numel);
}
template <ReduceOp op, bool scaled, class T>
GRADWIRE_AVX512 void pair_avx512(T* out, const T* a, const T* b, T scale, std::uint64_t numel) {
  pair_loop<op, scaled, T>(out, a, b, scale, numel);
}
#endif

/// out[i] = a[i] op (scaled ? scale * b[i] : b[i]).
template <ReduceOp op, bool scaled, class T>
void pair(T* out, const T* a, const T* b, T scale, std::uint64_t numel) {
#if defined(__x86_64__)
  switch (best_isa()) {
    case Isa::avx512: return pair_avx512<op, scaled, T>(out, a, b, scale, numel);
    case Isa::avx2: return pair_avx2<op, scaled, T>(out, a, b, scale, numel);
    case Isa::plain: break;
  }
#endif
  pair_plain<op, scaled, T>(out, a, b, scale, numel);
}

/// The type in which elements of type T are added.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>, float, T>;

/// `source` itself, or `source` widened into `buffer`.
template <class T>
const Accumulator<T>* as_accumulator(const T* source, Accumulator<T>* buffer, std::uint64_t numel) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    (void)buffer, (void)numel;
    return source;
  } else {
    widen(buffer, source, numel);
    return buffer;
  }
}

/// One block: at most `block_nbytes` of accumulators.
template <ReduceOp op, class T>
void reduce_block(T* out, const T* const* sources, std::uint32_t count, double scale, std::uint64_t numel) {
  using A = Accumulator<T>;
  constexpr bool direct = std::is_same_v<T, A>;
  alignas(64) A total[block_nbytes / sizeof(A)];
  alignas(64) A other[block_nbytes / sizeof(A)];
  const A factor = static_cast<A>(scale);
  const bool scaled = scale != 1.0;
  const A* sum = as_accumulator<T>(sources[0], total, numel);
  if (scaled) {
    scale_loop<A>(total, sum, factor, numel);
    sum = total;
  }
  for (std::uint32_t rank = 1; rank < count; ++rank) {
    const A* next = as_accumulator<T>(sources[rank], other, numel);
    A* target = total;
    if constexpr (direct) target = rank + 1 == count ? out : total;  // the last sum goes straight home
    if (scaled) {
      pair<op, true, A>(target, sum, next, factor, numel);
    } else {
      pair<op, false, A>(target, sum, next, factor, numel);
    }
    sum = target;
  }
  if constexpr (direct) {
    if (sum != out) std::memcpy(out, sum, numel * sizeof(T));
  } else {
    narrow(out, sum, numel);
  }
}

template <ReduceOp op, class T>
void reduce_typed(void* out, void* mirror, bool stream, const void* const* sources, std::uint32_t count,
                  double scale, std::uint64_t numel) {
  constexpr std::uint64_t block = block_nbytes / sizeof(Accumulator<T>);
  const T* at[max_ranks];
  for (std::uint64_t start = 0; start < numel; start += block) {
    const std::uint64_t length = std::min(block, numel - start);
    T* destination = static_cast<T*>(out) + start;
    for (std::uint32_t rank = 0; rank < count; ++rank) at[rank] = static_cast<const T*>(sources[rank]) + start;
    reduce_block<op, T>(destination, at, count, scale, length);
    if (mirror != nullptr) copy_to_slot(static_cast<T*>(mirror) + start, destination, length * sizeof(T), stream);
  }
}

template <class T>
void reduce_op(ReduceOp op, void* out, void* mirror, bool stream, const void* const* sources, std::uint32_t count,
               double scale, std::uint64_t numel) {
  switch (op) {
    case ReduceOp::sum: return reduce_typed<ReduceOp::sum, T>(out, mirror, stream, sources, count, scale, numel);
    case ReduceOp::max: return reduce_typed<ReduceOp::max, T>(out, mirror, stream, sources, count, scale, numel);
    case ReduceOp::min: return reduce_typed<ReduceOp::min, T>(out, mirror, stream, sources, count, scale, numel);
    case ReduceOp::count: return;
  }
}

}  // namespace

std::size_t element_nbytes(DType dtype) {
  switch (dtype) {
    case DType::float64: case DType::int64: return 8;
    case DType::float32: case DType::int32: return 4;
    case DType::float16: case DType::bfloat16: case DType::int16: return 2;
    default: return 1;
  }
}

bool is_floating(DType dtype) { return dtype <= DType::bfloat16; }

void reduce(DType dtype, ReduceOp op, void* out, void* mirror, bool stream, const void* const* sources,
            std::uint32_t count, double scale, std::uint64_t numel) {
  switch (dtype) {
    case DType::float32: return reduce_op<float>(op, out, mirror, stream, sources, count, scale, numel);
    case DType::float64: return reduce_op<double>(op, out, mirror, stream, sources, count, scale, numel);
    case DType::float16: return reduce_op<Float16>(op, out, mirror, stream, sources, count, scale, numel);
    case DType::bfloat16: return reduce_op<BFloat16>(op, out, mirror, stream, sources, count, scale, numel);
    case DType::int32: return reduce_op<std::int32_t>(op, out, mirror, stream, sources, count, scale, numel);
    case DType::int64: return reduce_op<std::int64_t>(op, out, mirror, stream, sources, count, scale, numel);
    case DType::uint8: return reduce_op<std::uint8_t>(op, out, mirror, stream, sources, count, scale, numel);
    case DType::int8: return reduce_op<std::int8_t>(op, out, mirror, stream, sources, count, scale, numel);
    case DType::int16: return reduce_op<std::int16_t>(op, out, mirror, stream, sources, count, scale, numel);
    case DType::count: return;
  }
}

}  // namespace gradwire::shm

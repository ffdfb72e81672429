// NCCL's arithmetic: in the dtype itself, one rank after the other, rounded after each, as a ring rounds.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "comm.h"

namespace standin {
namespace {

// A float of fewer bits, kept in a byte or two; its arithmetic is in float, rounded to nearest even.
struct Half {
  _Float16 value;
  float get() const { return value; }
  void set(float x) { value = static_cast<_Float16>(x); }
};

struct Bfloat16 {
  std::uint16_t bits;
  float get() const {
    std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
  }
  void set(float x) {
    std::uint32_t wide;
    memcpy(&wide, &x, sizeof wide);
    bits = std::isnan(x) ? 0x7fff : static_cast<std::uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
};

// E4M3 has no infinity and one NaN; E5M2 has both. What is too large becomes the largest number, as NCCL's casts do.
template <int exponent_bits, int mantissa_bits, bool has_infinity>
struct Float8 {
  std::uint8_t bits;
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int top = has_infinity ? (((1 << exponent_bits) - 2) << mantissa_bits) + (1 << mantissa_bits) - 1 : 0x7e;

  static float of(int code) {
    int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    return exponent ? std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits)
                    : std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  }
  float get() const {
    int code = bits & 0x7f;
    float x = code <= top ? of(code) : (has_infinity && code == top + 1 ? INFINITY : NAN);
    return bits & 0x80 ? -x : x;
  }
  void set(float x) {
    int sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) {
      bits = 0x7f;
      return;
    }
    float size = std::fabs(x);
    int low = 0, high = top;  // the largest code whose value is not above `size`
    while (low < high) {
      int middle = (low + high + 1) / 2;
      of(middle) <= size ? low = middle : high = middle - 1;
    }
    if (low < top) {
      float down = size - of(low), up = of(low + 1) - size;
      if (up < down || (up == down && (low & 1))) ++low;
    }
    bits = static_cast<std::uint8_t>(sign | low);
  }
};

template <class T>
struct Plain {
  T value;
  T get() const { return value; }
  void set(T x) { value = x; }
};

template <class T>
void reduce_typed(char* sum, const char* next, std::size_t count, const Operation& operation, bool first) {
  using Value = decltype(T{}.get());
  for (std::size_t i = 0; i < count; ++i) {
    T element, total;
    memcpy(&element, next + i * sizeof(T), sizeof(T));
    if (operation.scaled) element.set(static_cast<Value>(element.get() * static_cast<Value>(operation.factor)));
    if (first) {
      total = element;
    } else {
      memcpy(&total, sum + i * sizeof(T), sizeof(T));
      Value a = total.get(), b = element.get();
      switch (operation.op) {
        case ncclProd: total.set(static_cast<Value>(a * b)); break;
        case ncclMax: total.set(std::max(a, b)); break;
        case ncclMin: total.set(std::min(a, b)); break;
        default: total.set(static_cast<Value>(a + b));
      }
    }
    memcpy(sum + i * sizeof(T), &total, sizeof(T));
  }
}

// Calls `visitor` with a value of the C++ type of `dtype`.
template <class Visitor>
auto with_type(ncclDataType_t dtype, Visitor visitor) {
  switch (dtype) {
    case ncclInt8: return visitor(Plain<std::int8_t>{});
    case ncclUint8: return visitor(Plain<std::uint8_t>{});
    case ncclInt32: return visitor(Plain<std::int32_t>{});
    case ncclUint32: return visitor(Plain<std::uint32_t>{});
    case ncclInt64: return visitor(Plain<std::int64_t>{});
    case ncclUint64: return visitor(Plain<std::uint64_t>{});
    case ncclFloat16: return visitor(Half{});
    case ncclFloat32: return visitor(Plain<float>{});
    case ncclFloat64: return visitor(Plain<double>{});
    case ncclBfloat16: return visitor(Bfloat16{});
    case ncclFloat8e4m3: return visitor(Float8<4, 3, false>{});
    case ncclFloat8e5m2: return visitor(Float8<5, 2, true>{});
    default: give_up("a dtype that NCCL does not have");
  }
}

}  // namespace

std::size_t nbytes_of(ncclDataType_t dtype) {
  return with_type(dtype, [](auto type) { return sizeof type; });
}

const char* name_of(ncclDataType_t dtype) {
  static const char* names[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",       "uint64",
                                "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
  return dtype >= 0 && dtype < ncclNumTypes ? names[dtype] : "an unknown dtype";
}

void reduce_into(char* sum, const char* next, std::size_t count, ncclDataType_t dtype, const Operation& operation, bool first) {
  with_type(dtype, [&](auto type) { reduce_typed<decltype(type)>(sum, next, count, operation, first); });
}

void divide(char* sum, std::size_t count, ncclDataType_t dtype, int ranks) {
  with_type(dtype, [&](auto type) {
    using Value = decltype(type.get());
    for (std::size_t i = 0; i < count; ++i) {
      memcpy(&type, sum + i * sizeof type, sizeof type);
      type.set(static_cast<Value>(type.get() / static_cast<Value>(ranks)));
      memcpy(sum + i * sizeof type, &type, sizeof type);
    }
  });
}

double read_scalar(const void* scalar, ncclDataType_t dtype) {
  return with_type(dtype, [&](auto type) {
    memcpy(&type, scalar, sizeof type);
    return static_cast<double>(type.get());
  });
}

double as_held(double value, ncclDataType_t dtype) {
  return with_type(dtype, [&](auto type) {
    type.set(static_cast<decltype(type.get())>(value));
    return static_cast<double>(type.get());
  });
}

}  // namespace standin

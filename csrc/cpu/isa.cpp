// Detects the instruction set, and lets a test limit it so that every path runs on one machine.
#include "isa.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>

namespace gradwire {
namespace {

// In the order of Isa.
#if defined(__aarch64__)
constexpr const char* kNames[] = {"plain", "neon"};
constexpr const char* kWanted = "plain or neon";
#else
constexpr const char* kNames[] = {"plain", "avx2", "avx512"};
constexpr const char* kWanted = "plain, avx2 or avx512";
#endif

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("f16c")) return Isa::plain;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2")) return Isa::avx2;
  return Isa::plain;
#elif defined(__aarch64__)
  return Isa::neon;  // a part of every 64-bit Arm processor
#else
  return Isa::plain;
#endif
}

bool detect_fast_bit_moves() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("bmi2") && !__builtin_cpu_is("amdfam15h") && !__builtin_cpu_is("amdfam17h");
#else
  return false;
#endif
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{detect()};
  return isa;
}

void limit_isa(const std::string& name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name != kNames[i]) continue;
    const Isa wanted = static_cast<Isa>(i);
    current() = wanted < detect() ? wanted : detect();
    return;
  }
  throw std::invalid_argument("`name` is \"" + name + "\"; wanted " + kWanted);
}

}  // namespace

Isa active_isa() { return current().load(std::memory_order_relaxed); }

bool fast_bit_moves() {
  static const bool found = detect_fast_bit_moves();
  return found && active_isa() != Isa::plain;
}

}  // namespace gradwire

void bind_isa(nanobind::module_& m) {
  m.def("isa", [] { return std::string(gradwire::kNames[static_cast<int>(gradwire::active_isa())]); },
        "The instruction set in use: plain; avx2 or avx512 on x86-64; neon on 64-bit Arm.");
  m.def("limit_isa", &gradwire::limit_isa, nanobind::arg("name"),
        "Uses at most this instruction set from now on, in the whole process.");
}

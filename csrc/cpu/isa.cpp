// Detects the instruction set, and lets a test limit it so that every path runs on one machine.
#include "isa.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <stdexcept>
#include <string>

namespace gradwire {
namespace {

constexpr const char* kNames[] = {"plain", "avx2", "avx512"};

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("f16c")) return Isa::plain;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2")) return Isa::avx2;
#endif
  return Isa::plain;
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
  for (int i = 0; i <= static_cast<int>(Isa::avx512); ++i) {
    if (name != kNames[i]) continue;
    const Isa wanted = static_cast<Isa>(i);
    current() = wanted < detect() ? wanted : detect();
    return;
  }
  throw std::invalid_argument("`name` is \"" + name + "\"; wanted plain, avx2 or avx512");
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
        "The instruction set in use: plain, avx2 or avx512.");
  m.def("limit_isa", &gradwire::limit_isa, nanobind::arg("name"),
        "Uses at most this instruction set from now on, in the whole process.");
}

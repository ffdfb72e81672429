// Which instruction set the kernels use: the widest that this processor has, chosen once at run time.
#pragma once
#include <cstdint>

namespace gradwire {

#if defined(__aarch64__)
enum class Isa : int { plain, neon };
#else
enum class Isa : int { plain, avx2, avx512 };
#endif

Isa active_isa();

// Whether pext and pdep (BMI2) are there and take a few cycles. AMD's families 15h and 17h (Excavator, Zen, Zen 2) have
// them in microcode: hundreds of cycles. False where the instruction set is limited to plain.
// Source: A. Fog, Instruction tables, 2022, "AMD Zen 2" and "AMD Zen 3".
bool fast_bit_moves();

}  // namespace gradwire

// Calls `name` of the namespace that belongs to the active instruction set (see foreach_isa.h).
#if defined(__x86_64__)
#define GRADWIRE_DISPATCH(name, ...)                                                    \
  (::gradwire::active_isa() == ::gradwire::Isa::avx512 ? avx512::name(__VA_ARGS__)      \
   : ::gradwire::active_isa() == ::gradwire::Isa::avx2 ? avx2::name(__VA_ARGS__)        \
                                                       : plain::name(__VA_ARGS__))
#elif defined(__aarch64__)
#define GRADWIRE_DISPATCH(name, ...) \
  (::gradwire::active_isa() == ::gradwire::Isa::neon ? neon::name(__VA_ARGS__) : plain::name(__VA_ARGS__))
#else
#define GRADWIRE_DISPATCH(name, ...) plain::name(__VA_ARGS__)
#endif

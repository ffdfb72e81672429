// When a row of a matrix counts as dependent on the ones before it, and what takes its place.
#pragma once
#include "common/hash_formula.h"
#include "common/portable.h"

namespace gradwire {

constexpr double kDependent = 1e-6;  // a few times the rounding of float32: a shorter remainder is noise
constexpr uint32_t kAttempts = 8;    // random rows are dependent so rarely that the second attempt is unlikely

// Element i of the row that replaces row k: in [-1/2, 1/2), the same on every device.
GRADWIRE_ANYWHERE inline double replacement(uint32_t key, uint32_t k, uint32_t attempt, uint32_t i) {
  return static_cast<double>(uniform_of_hash(hash32(key + k * kAttempts + attempt, i)) - 0.5f);
}

}  // namespace gradwire

// Random numbers without a generator: a hash of (key, counter), the same on every device and in every order.
// Source: the 32-bit finaliser of MurmurHash3 (Austin Appleby, public domain); the counter is spread by the golden
// ratio, 2^32 / 1.618..., as in Weyl's sequence.
#pragma once
#include "common/portable.h"

namespace gradwire {

GRADWIRE_ANYWHERE inline uint32_t hash32(uint32_t key, uint32_t counter) {
  uint32_t h = counter * 0x9e3779b9u + key;
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  return h ^ h >> 16;
}

// In [0, 1): the upper 24 bits are what a float32 holds exactly.
GRADWIRE_ANYWHERE inline float uniform_of_hash(uint32_t hash) { return static_cast<float>(hash >> 8) * 0x1p-24f; }

}  // namespace gradwire

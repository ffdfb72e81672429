// When a result is written with streaming stores, past the caches.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gradwire {

// A buffer that is only written would be read first, line by line, to be owned by the cache. Past this size it would
// not stay there anyway, so it is streamed: one transfer over the memory bus is saved. 1 MiB is half of the L2 caches
// common today; the exact value matters little.
constexpr size_t kStreamNumel = size_t{1} << 18;

inline bool streams(const float* target, const float* first, const float* second, size_t numel) {
  return target && target != first && target != second && numel >= kStreamNumel &&
         reinterpret_cast<uintptr_t>(target) % 64 == 0;
}

}  // namespace gradwire

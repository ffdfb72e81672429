#include "cpu/shm/policy.h"

#include <algorithm>

namespace gradwire::shm {
namespace {

/// A try of the worse kind costs up to four calls' time (measured): one in 200 is 2 % at most.
constexpr std::uint32_t calls_between_tries = 200;

std::uint32_t size_class(std::uint64_t nbytes) {
  return nbytes == 0 ? 0 : 63u - static_cast<std::uint32_t>(__builtin_clzll(nbytes));
}

}  // namespace

bool StorePolicy::streams(const Header& header, std::uint64_t number, std::uint32_t kind, std::uint64_t nbytes) {
  if (nbytes < from_nbytes) return false;
  return (header.stream_plan[number % plans][kind].load(std::memory_order_relaxed) >> size_class(nbytes)) & 1u;
}

bool StorePolicy::Entry::wants_stream() const {
  if (seconds[0] == 0) return false;
  const bool better = seconds[1] != 0 && seconds[1] < seconds[0];
  const bool try_other = seconds[1] == 0 ? calls >= 3 : calls % calls_between_tries == 0;
  return better != try_other;
}

void StorePolicy::plan_next(Header& header, std::uint64_t number) const {
  for (std::uint32_t kind = 0; kind < plan_kinds; ++kind) {
    header.stream_plan[(number + 1) % plans][kind].store(masks_[kind], std::memory_order_relaxed);
  }
}

void StorePolicy::record(std::uint32_t kind, std::uint64_t nbytes, bool streamed, double seconds) {
  const std::uint32_t size = size_class(nbytes);
  Entry& entry = entries_[kind][size];
  ++entry.calls;
  double& mean = entry.seconds[streamed ? 1 : 0];
  // One late call (the core was taken away in the middle) must not overturn the choice; a change of state lasts.
  mean = mean == 0 ? seconds : 0.5 * (mean + std::min(seconds, 2 * mean));
  const std::uint64_t bit = std::uint64_t{1} << size;
  masks_[kind] = entry.wants_stream() ? masks_[kind] | bit : masks_[kind] & ~bit;
}

}  // namespace gradwire::shm

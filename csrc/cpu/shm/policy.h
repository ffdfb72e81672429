// Plain or non-temporal stores into the slots? Decided while running, because which is faster changes while running.
//
// Where the ranks' cores share a last-level cache, plain stores win: the reader takes the line out of the cache. Where
// they do not, or while the hypervisor has moved them apart, every such line is a slow transfer between caches.
// Measured on a 2-core EPYC VM, all_reduce of 1 MB on 2 ranks: plain 50 us or 500 us, non-temporal 84 to 110 us in
// both states, and the state changes between runs of one program. So rank 0 times its own copies (not its waiting),
// keeps the better kind for each collective and power of two of size, and tries the other one now and then.
//
// All ranks must change together, or the times would mean nothing: rank 0 writes the plan for collective i + 1 before
// the first barrier of collective i; the others read it after that barrier.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/shm/layout.h"

namespace gradwire::shm {

class StorePolicy {
 public:
  /// Below this a message fits in the first-level cache and plain stores win in both states (measured: 4 KB 2.3
  /// against 3.5 us, 32 KB 3.8 against 7.0 us).
  static constexpr std::uint64_t from_nbytes = 32 << 10;

  /// Whether collective number `number` streams; `kind` < plan_kinds.
  static bool streams(const Header& header, std::uint64_t number, std::uint32_t kind, std::uint64_t nbytes);

  /// Rank 0, before the first barrier of collective `number`: publishes what the next one does.
  void plan_next(Header& header, std::uint64_t number) const;

  /// Rank 0, after a collective: what its copies took.
  void record(std::uint32_t kind, std::uint64_t nbytes, bool streamed, double seconds);

 private:
  struct Entry {
    double seconds[2] = {0, 0};  // plain, streamed; 0 where never measured
    std::uint32_t calls = 0;
    bool wants_stream() const;
  };
  std::array<std::array<Entry, 64>, plan_kinds> entries_;
  std::array<std::uint64_t, plan_kinds> masks_{};  // bit c of masks_[kind]: entries_[kind][c].wants_stream()
};

}  // namespace gradwire::shm

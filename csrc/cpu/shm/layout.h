// What lies where in a shared-memory segment. A fresh file is all zeros, and all zeros is the valid initial state.
//
//   Header | RankBox x size | slots: rank 0 slot 0, 1, 2, rank 1 slot 0, 1, 2, ...
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gradwire::shm {

/// Stage s of chunk j runs in interval j + s, and an all-reduce has three stages: with three slots nobody overwrites
/// what another rank may still read (see group.h).
constexpr std::uint32_t slots_per_rank = 3;
constexpr std::uint32_t max_ranks = 256;
/// Two lines of 64 bytes: x86 fetches lines in pairs, so two ranks' words must be that far apart.
constexpr std::size_t line_nbytes = 128;
constexpr std::size_t page_nbytes = 4096;

/// What a rank is about to do; ranks whose descriptions differ must not exchange data.
struct Signature {
  std::uint32_t collective;
  std::uint32_t dtype;
  std::uint32_t reduce_op;
  std::uint32_t root;
  std::uint64_t numel;
  std::uint64_t bounds_hash;
  double scale;
};

/// One rank's words. `arrived` is the futex: the number of intervals that the rank has finished.
struct alignas(line_nbytes) RankBox {
  std::atomic<std::uint32_t> arrived;
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint32_t> closed;
  std::uint64_t process_token;
  /// Of the collective with even and with odd number; peers compare these, and read `signatures` only for the error
  /// message.
  std::uint64_t signature_hash[2];
  alignas(line_nbytes) Signature signatures[2];
};

/// Plans of the store policy (policy.h) that are in use at once: one being read, one written, two to spare.
constexpr std::uint32_t plans = 4;
/// Collectives whose copies differ: those with a write, reduce and gather stage, without gather, without reduce.
constexpr std::uint32_t plan_kinds = 3;

enum class Poison : std::uint32_t { none = 0, being_written = 1, readable = 2 };

struct alignas(page_nbytes) Header {
  std::atomic<std::uint32_t> poison;
  /// Bit c: collectives of 2^c bytes and up stream; by number of the collective, modulo `plans`, and by kind.
  std::atomic<std::uint64_t> stream_plan[plans][plan_kinds];
  char reason[1024];
  std::uint8_t missing[max_ranks];
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "a lock inside the library would be per process");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "likewise");
static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "the kernel's futex word has four bytes");
static_assert(sizeof(Signature) == 40, "no padding: signatures are compared and hashed as bytes");
static_assert(sizeof(RankBox) == 2 * line_nbytes, "the polled words and the descriptions lie in separate lines");
static_assert(sizeof(Header) == page_nbytes, "slots start at a page");

constexpr std::uint64_t round_up(std::uint64_t nbytes, std::uint64_t multiple) {
  return (nbytes + multiple - 1) / multiple * multiple;
}

constexpr std::uint64_t slots_offset(std::uint32_t size) {
  return sizeof(Header) + round_up(size * sizeof(RankBox), page_nbytes);
}

/// Size of the whole segment, in bytes.
constexpr std::uint64_t segment_nbytes(std::uint32_t size, std::uint64_t block_nbytes) {
  return slots_offset(size) + std::uint64_t{size} * slots_per_rank * block_nbytes;
}

}  // namespace gradwire::shm

#include "cpu/shm/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>

namespace gradwire::shm {
namespace {

using Clock = std::chrono::steady_clock;

/// About 10 us: longer than a peer that is a little late needs, shorter than a sleep and a wake-up.
constexpr std::uint32_t spins_with_a_core_each = 400;
/// With fewer cores than ranks the peer cannot run while this rank occupies the core.
constexpr std::uint32_t spins_when_crowded = 0;
/// Other programs may leave two ranks a single core, where spinning only keeps the peer from running (measured: 28 us a
/// call of 4 KB); after this many barriers spinning is tried again.
constexpr std::uint64_t passes_between_spins = 256;
/// A yield returns at once on an idle core and lets a peer run on a busy one.
constexpr std::uint32_t yields_before_sleep = 100;
/// How often a sleeper looks for dead peers.
constexpr long slice_nanoseconds = 100'000'000;
/// How long the process of a peer that has closed the group may take to end before the others fail. Launchers show the
/// error of the process that ends first: it should be the one that had an error of its own, not one that misses it.
/// Python takes 0.3 s to end with torch on an idle machine, seconds on a busy one.
constexpr std::chrono::seconds time_to_leave(5);

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::uint32_t usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;  // a machine with over 1024 cores: never crowded
  return static_cast<std::uint32_t>(CPU_COUNT(&cores));
}

// Not FUTEX_PRIVATE_FLAG: the word is shared between processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen) {
  const timespec slice{0, slice_nanoseconds};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &slice, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::string name_ranks(const std::vector<std::uint32_t>& ranks) {
  std::string names = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    names += (index == 0 ? " " : ", ") + std::to_string(ranks[index]);
  }
  return names;
}

}  // namespace

Meeting::Meeting(std::shared_ptr<Segment> segment, double timeout_seconds, std::function<bool()> interrupted)
    : segment_(std::move(segment)), timeout_seconds_(timeout_seconds), interrupted_(std::move(interrupted)),
      spin_limit_(segment_->size() <= usable_cores() ? spins_with_a_core_each : spins_when_crowded),
      spins_(spin_limit_) {}

bool Meeting::has_arrived(std::uint32_t peer) const {
  const std::uint32_t arrived = segment_->box(peer).arrived.load(std::memory_order_acquire);
  // The count wraps; ranks are never more than one interval apart, so the sign of the difference tells.
  return static_cast<std::int32_t>(arrived - static_cast<std::uint32_t>(interval_ + 1)) >= 0;
}

bool Meeting::pass(const char* what, Failure& failure) {
  RankBox& own = segment_->box(segment_->rank());
  // Sequentially consistent on both sides: either the sleeper sees the new count, or we see the sleeper.
  if (interval_ == 0) segment_->note_processes();
  own.arrived.store(static_cast<std::uint32_t>(interval_ + 1), std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(own.arrived);
  if (interval_ % passes_between_spins == 0) spins_ = spin_limit_;
  std::uint32_t spins = spins_;
  std::uint32_t yields = yields_before_sleep;
  for (std::uint32_t peer = 0; peer < segment_->size(); ++peer) {
    while (peer != segment_->rank() && !has_arrived(peer)) {
      if (spins > 0) {
        --spins;
        pause_briefly();
      } else if (yields > 0) {
        --yields;
        sched_yield();
      } else if (!sleep_until(peer, what, failure)) {
        return false;
      }
    }
  }
  if (yields < yields_before_sleep) {
    spins_ /= 2;
  } else if (spins < spins_) {  // spinning helped; a peer that had already arrived proves nothing
    spins_ = spin_limit_;
  }
  ++interval_;
  return true;
}

bool Meeting::sleep_until(std::uint32_t peer, const char* what, Failure& failure) {
  RankBox& box = segment_->box(peer);
  const Clock::time_point start = Clock::now();
  box.sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool usable = true;
  while (!has_arrived(peer)) {
    usable = !is_poisoned(failure);
    if (!usable) break;
    const std::uint32_t seen = box.arrived.load(std::memory_order_seq_cst);
    if (!has_arrived(peer)) futex_wait(box.arrived, seen);
    if (has_arrived(peer)) break;
    usable = check_peers(std::chrono::duration<double>(Clock::now() - start).count(), what, failure);
    if (!usable) break;
  }
  box.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return usable;
}

bool Meeting::is_still_leaving(std::uint32_t peer) {
  if (!segment_->is_leaving(peer)) return false;
  const Clock::time_point now = Clock::now();
  if (leaves_by_ == Clock::time_point{}) leaves_by_ = now + time_to_leave;
  return now < leaves_by_;
}

bool Meeting::check_peers(double waited_seconds, const char* what, Failure& failure) {
  std::vector<std::uint32_t> absent;
  std::vector<std::uint32_t> dead;
  for (std::uint32_t peer = 0; peer < segment_->size(); ++peer) {
    if (peer == segment_->rank() || has_arrived(peer)) continue;
    const bool alive = segment_->is_alive(peer);
    if (has_arrived(peer)) continue;  // it arrived, and left afterwards
    absent.push_back(peer);
    if (!alive && !is_still_leaving(peer)) dead.push_back(peer);
  }
  if (!dead.empty()) {
    if (is_poisoned(failure)) return false;  // it has given a reason before it left
    return give_up(name_ranks(dead) + (dead.size() == 1 ? " has" : " have") +
                   " died or closed the group before completing " + what, dead, failure);
  }
  if (!absent.empty() && waited_seconds >= timeout_seconds_) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", timeout_seconds_);
    return give_up(name_ranks(absent) + " did not come to " + what + " within `timeout` = " + seconds + " s",
                   absent, failure);
  }
  if (interrupted_()) {
    return give_up(name_ranks({segment_->rank()}) + " was interrupted in " + what, {}, failure);
  }
  return true;
}

bool Meeting::give_up(const std::string& reason, std::vector<std::uint32_t> missing, Failure& failure) const {
  poison(reason, missing);
  failure = {false, reason, std::move(missing)};
  return false;
}

bool Meeting::is_poisoned(Failure& failure) const {
  const Header& header = segment_->header();
  if (header.poison.load(std::memory_order_acquire) != static_cast<std::uint32_t>(Poison::readable)) return false;
  failure = {false, std::string(header.reason, strnlen(header.reason, sizeof header.reason)), {}};
  for (std::uint32_t rank = 0; rank < segment_->size(); ++rank) {
    if (header.missing[rank] != 0) failure.missing.push_back(rank);
  }
  return true;
}

void Meeting::poison(const std::string& reason, const std::vector<std::uint32_t>& missing) const {
  Header& header = segment_->header();
  std::uint32_t expected = static_cast<std::uint32_t>(Poison::none);
  if (!header.poison.compare_exchange_strong(expected, static_cast<std::uint32_t>(Poison::being_written))) return;
  const std::size_t length = std::min(reason.size(), sizeof header.reason - 1);
  std::memcpy(header.reason, reason.data(), length);
  for (const std::uint32_t rank : missing) header.missing[rank] = 1;
  header.poison.store(static_cast<std::uint32_t>(Poison::readable), std::memory_order_release);
  for (std::uint32_t rank = 0; rank < segment_->size(); ++rank) futex_wake_all(segment_->box(rank).arrived);
}

}  // namespace gradwire::shm

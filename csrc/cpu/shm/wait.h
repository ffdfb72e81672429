// The barrier of the ranks of a segment, and how they notice that one of them will not arrive.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpu/shm/segment.h"

namespace gradwire::shm {

/// Why a group cannot be used any more.
struct Failure {
  bool mismatch = false;  // the callers' fault, not a lost peer
  std::string reason;
  std::vector<std::uint32_t> missing;
};

/// The barrier between two intervals. Every member function is for the one thread that runs the rank's collectives,
/// except `poison`, which any thread may call.
class Meeting {
 public:
  /// `interrupted` is called every time slice of a long wait; where it returns true, the wait fails.
  Meeting(std::shared_ptr<Segment> segment, double timeout_seconds, std::function<bool()> interrupted);

  /// Number of barriers passed: names the interval, and thereby the slot, that the ranks are in.
  std::uint64_t interval() const { return interval_; }

  /// Says that this rank has finished its interval and waits until all others have. `what` names the collective in
  /// errors. Returns false, and fills `failure`, where one of them will not.
  bool pass(const char* what, Failure& failure);

  /// Whether any rank has made the group fail; fills `failure`.
  bool is_poisoned(Failure& failure) const;

  /// Makes every rank's current or next wait fail with `reason`. The first reason stands.
  void poison(const std::string& reason, const std::vector<std::uint32_t>& missing) const;

 private:
  bool has_arrived(std::uint32_t peer) const;
  bool sleep_until(std::uint32_t peer, const char* what, Failure& failure);
  bool check_peers(double waited_seconds, const char* what, Failure& failure);
  bool is_still_leaving(std::uint32_t peer);
  bool give_up(const std::string& reason, std::vector<std::uint32_t> missing, Failure& failure) const;

  std::shared_ptr<Segment> segment_;
  double timeout_seconds_;
  std::function<bool()> interrupted_;
  std::uint32_t spin_limit_;
  std::uint32_t spins_;  // at most spin_limit_: halved whenever spinning did not help
  std::uint64_t interval_ = 0;
  std::chrono::steady_clock::time_point leaves_by_{};  // when a rank that has closed the group is waited for no more
};

}  // namespace gradwire::shm

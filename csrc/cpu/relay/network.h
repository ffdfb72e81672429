// Links and paths between nodes, in nanoseconds of a clock that the caller owns: what is lost, and when the rest is there.
//
// A frame from s to t passes, in this order: the queue and the rate of s's link; the path from s to t, where it is lost
// or delayed; the queue and the rate of t's link. A queue is a time: a frame that would wait longer at a link is dropped
// there, as a router drops at the tail. Frames of one pair keep their order, unless asked otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <queue>
#include <vector>

namespace gradwire::relay {

using Nanoseconds = std::int64_t;

struct Link {
  double ns_per_byte = 0;     // 0: no limit
  Nanoseconds queue = 0;      // longest wait for the link; without a limit nothing waits
  Nanoseconds free_out = 0;   // when the last frame has left
  Nanoseconds free_in = 0;    // when the last frame has come in
};

struct Path {
  Nanoseconds delay = 0;
  Nanoseconds jitter = 0;     // each frame takes delay + uniform(-jitter, +jitter)
  double loss = 0;            // of frames, 0 to 1
};

struct Counts {
  std::uint64_t offered = 0, offered_nbytes = 0;
  std::uint64_t lost = 0;      // on the path, as asked for
  std::uint64_t dropped = 0;   // at a full queue
  std::uint64_t delivered = 0;
};

struct Delivery {
  Nanoseconds due;
  std::uint32_t source, target, nbytes;
  std::uintptr_t frame;
};

class Network {
 public:
  // `paths` has nodes x nodes entries, by source, then target.
  Network(std::vector<Link> links, std::vector<Path> paths, bool reorder, std::uint64_t seed);

  // Sends a frame; false where it is lost or dropped at once, and will not be delivered.
  bool offer(Nanoseconds now, std::uint32_t source, std::uint32_t target, std::uint32_t nbytes, std::uintptr_t frame);

  // The next frame that is with its target by `now`: true if there is one. `gone` gets frames dropped at the target's
  // queue on the way.
  bool next(Nanoseconds now, Delivery& delivery, std::vector<std::uintptr_t>& gone);

  // Before this time `next` has nothing; only if not `idle()`.
  Nanoseconds next_due() const { return waiting_.top().due; }
  bool idle() const { return waiting_.empty(); }
  std::size_t waiting_nbytes() const { return waiting_nbytes_; }
  std::size_t nodes() const { return links_.size(); }

  void limit(std::uint32_t node, double ns_per_byte) { links_.at(node).ns_per_byte = ns_per_byte; }
  // The least time that a frame takes: reading it so much later changes nothing.
  Nanoseconds least_delay() const { return least_delay_; }
  const std::vector<Counts>& counts() const { return counts_; }
  void count_undelivered(std::uint32_t source, std::uint32_t target);

 private:
  struct Waiting {
    Nanoseconds due;
    std::uint64_t number;  // of equal times the first come goes first
    std::uint32_t source, target, nbytes;
    bool passed_link;      // the target's link too: deliver it
    std::uintptr_t frame;
    bool operator>(const Waiting& other) const {
      return due != other.due ? due > other.due : number > other.number;
    }
  };
  std::size_t pair(std::uint32_t source, std::uint32_t target) const { return source * links_.size() + target; }
  double uniform(std::size_t pair);
  static bool pass(Nanoseconds now, const Link& link, Nanoseconds& free, std::uint32_t nbytes);

  std::vector<Link> links_;
  std::vector<Path> paths_;
  std::vector<Nanoseconds> last_;        // by pair: when the last frame came to the target's link
  std::vector<std::uint64_t> random_;    // by pair
  std::vector<Counts> counts_;           // by pair
  bool reorder_;
  Nanoseconds least_delay_;
  std::uint64_t numbered_ = 0;
  std::size_t waiting_nbytes_ = 0;
  std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> waiting_;
};

}  // namespace gradwire::relay

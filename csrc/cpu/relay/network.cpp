#include "cpu/relay/network.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace gradwire::relay {
namespace {

// What waits in all links and paths together; more is dropped, so that a fast sender cannot fill the memory.
constexpr std::size_t most_waiting_nbytes = std::size_t{1} << 30;

}  // namespace

Network::Network(std::vector<Link> links, std::vector<Path> paths, bool reorder, std::uint64_t seed)
    : links_(std::move(links)),
      paths_(std::move(paths)),
      last_(paths_.size(), 0),
      random_(paths_.size()),
      counts_(paths_.size()),
      reorder_(reorder),
      least_delay_(0) {
  for (std::size_t at = 0; at < random_.size(); ++at) random_[at] = (seed << 32) ^ (at * 0xd1342543de82ef95ULL);
  bool first = true;
  for (std::size_t at = 0; at < paths_.size(); ++at) {
    if (at % (links_.size() + 1) == 0) continue;  // a node and itself
    const Nanoseconds least = paths_[at].delay - paths_[at].jitter;
    least_delay_ = first ? least : std::min(least_delay_, least);
    first = false;
  }
}

// Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014), figure 16; 53 bits in [0, 1).
double Network::uniform(std::size_t pair) {
  std::uint64_t z = random_[pair] += 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// Has a frame wait for the link and pass it; `free` is the link's side. False: the queue is full.
bool Network::pass(Nanoseconds now, const Link& link, Nanoseconds& free, std::uint32_t nbytes) {
  const Nanoseconds start = std::max(now, free);
  if (link.ns_per_byte == 0) {  // nothing waits, but behind what came while there was a limit
    free = start;
    return true;
  }
  if (start - now > link.queue) return false;
  free = start + std::llround(nbytes * link.ns_per_byte);
  return true;
}

bool Network::offer(Nanoseconds now, std::uint32_t source, std::uint32_t target, std::uint32_t nbytes,
                    std::uintptr_t frame) {
  const std::size_t at = pair(source, target);
  Counts& counts = counts_[at];
  ++counts.offered;
  counts.offered_nbytes += nbytes;
  Link& link = links_[source];
  if (waiting_nbytes_ + nbytes > most_waiting_nbytes || !pass(now, link, link.free_out, nbytes)) {
    ++counts.dropped;
    return false;
  }
  const Path& path = paths_[at];
  if (path.loss > 0 && uniform(at) < path.loss) {
    ++counts.lost;
    return false;
  }
  Nanoseconds due = link.free_out + path.delay;
  if (path.jitter > 0) due += std::llround((2 * uniform(at) - 1) * static_cast<double>(path.jitter));
  if (!reorder_) due = last_[at] = std::max(due, last_[at]);
  waiting_nbytes_ += nbytes;
  waiting_.push({due, numbered_++, source, target, nbytes, false, frame});
  return true;
}

bool Network::next(Nanoseconds now, Delivery& delivery, std::vector<std::uintptr_t>& gone) {
  while (!waiting_.empty() && waiting_.top().due <= now) {
    Waiting frame = waiting_.top();
    waiting_.pop();
    Counts& counts = counts_[pair(frame.source, frame.target)];
    if (!frame.passed_link) {
      Link& link = links_[frame.target];
      if (!pass(frame.due, link, link.free_in, frame.nbytes)) {
        ++counts.dropped;
        waiting_nbytes_ -= frame.nbytes;
        gone.push_back(frame.frame);
        continue;
      }
      // Back into the row, even where it is due: one that passed the link before it may still stand there.
      frame.due = link.free_in;
      frame.passed_link = true;
      frame.number = numbered_++;
      waiting_.push(frame);
      continue;
    }
    waiting_nbytes_ -= frame.nbytes;
    ++counts.delivered;
    delivery = {frame.due, frame.source, frame.target, frame.nbytes, frame.frame};
    return true;
  }
  return false;
}

void Network::count_undelivered(std::uint32_t source, std::uint32_t target) {
  Counts& counts = counts_[pair(source, target)];
  --counts.delivered;
  ++counts.dropped;
}

}  // namespace gradwire::relay

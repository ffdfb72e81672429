#include "cpu/relay/relay.h"

#include <linux/if_ether.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <system_error>
#include <utility>

namespace gradwire::relay {
namespace {

// While frames come, they are read at most this often, and delivered so much late at most: 5,000 wakes a second, where a
// wake for each frame would be 33,000 at 200 Mbit/s both ways.
constexpr Nanoseconds tick = 200'000;
// With long delays frames are read less often still: what is read is not due yet.
constexpr Nanoseconds longest_tick = 1'000'000;
// Frames taken from one cable before the others have their turn.
constexpr int batch = 1024;
// Memory of the rings: of one, and of all together.
constexpr std::size_t most_ring_nbytes = std::size_t{16} << 20, all_rings_nbytes = std::size_t{256} << 20;
// Ethernet's header, and one VLAN tag.
constexpr std::size_t header_nbytes = ETH_HLEN + 4;

Nanoseconds clock_of(clockid_t id) {
  timespec now;
  clock_gettime(id, &now);
  return static_cast<Nanoseconds>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

std::uint64_t address_at(const std::uint8_t* bytes) {
  std::uint64_t address = 0;
  std::memcpy(&address, bytes, ETH_ALEN);
  return address;
}

}  // namespace

Relay::Relay(const std::vector<std::string>& interfaces, std::size_t mtu, Network network)
    : network_(std::move(network)), most_nbytes_(mtu + header_nbytes), outgoing_(interfaces.size()) {
  const std::size_t ring_nbytes = std::min(most_ring_nbytes, all_rings_nbytes / interfaces.size());
  rings_.reserve(interfaces.size());
  for (const std::string& interface : interfaces) rings_.emplace_back(interface, most_nbytes_, ring_nbytes);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Relay::~Relay() { close(wake_); }

std::uint8_t* Relay::take() {
  if (spare_.empty()) return new std::uint8_t[most_nbytes_];
  std::uint8_t* memory = spare_.back().release();
  spare_.pop_back();
  return memory;
}

void Relay::offer(Nanoseconds arrived, std::uint32_t source, std::uint32_t target, const std::uint8_t* data,
                  std::uint32_t nbytes) {
  std::uint8_t* memory = take();
  if (network_.offer(arrived, source, target, nbytes, reinterpret_cast<std::uintptr_t>(memory)))
    std::memcpy(memory, data, nbytes);
  else
    give_back(memory);
}

// Takes up to `batch` frames from a node's cable; false if there was none.
bool Relay::read(std::uint32_t node) {
  Ring& ring = rings_[node];
  // Frames carry the machine's real time; what is due is counted by a clock that nobody sets.
  const Nanoseconds now = clock_of(CLOCK_MONOTONIC), real_now = clock_of(CLOCK_REALTIME);
  std::uint32_t nbytes;
  Nanoseconds real_time;
  int taken = 0;
  for (; taken < batch; ++taken) {
    const std::uint8_t* frame = ring.peek(nbytes, real_time);
    if (frame == nullptr) break;
    // A second at most: a clock that is set while frames wait must not send them into the past.
    const Nanoseconds age = std::clamp<Nanoseconds>(real_now - real_time, 0, 1'000'000'000);
    if (nbytes >= ETH_HLEN) {
      nodes_[address_at(frame + ETH_ALEN)] = node;
      const auto target = nodes_.find(address_at(frame));
      if (target != nodes_.end() && !(frame[0] & 1)) {
        if (target->second != node) offer(now - age, node, target->second, frame, nbytes);
      } else {  // a broadcast, or an address that has not been heard from yet: to all others, as a switch does
        for (std::uint32_t other = 0; other < rings_.size(); ++other)
          if (other != node) offer(now - age, node, other, frame, nbytes);
      }
    }
    ring.release();
  }
  return taken > 0;
}

void Relay::deliver() {
  const Nanoseconds now = clock_of(CLOCK_MONOTONIC);
  Delivery delivery;
  while (network_.next(now, delivery, gone_))
    outgoing_[delivery.target].push_back(
        {reinterpret_cast<std::uint8_t*>(delivery.frame), delivery.nbytes, delivery.source});
  for (std::uint32_t target = 0; target < rings_.size(); ++target) {
    std::vector<Ring::Outgoing>& frames = outgoing_[target];
    if (frames.empty()) continue;
    for (const std::size_t failed : rings_[target].send(frames))
      network_.count_undelivered(frames[failed].source, target);
    for (const Ring::Outgoing& frame : frames) give_back(frame.data);
    frames.clear();
  }
  for (const std::uintptr_t frame : gone_) give_back(reinterpret_cast<std::uint8_t*>(frame));
  gone_.clear();
}

// Sleeps until something is due; for frames that come, too, unless they just did: then they may gather for a tick.
void Relay::wait(bool busy) {
  std::vector<pollfd> polled{{wake_, POLLIN, 0}};
  if (!busy)
    for (const Ring& ring : rings_) polled.push_back({ring.descriptor(), POLLIN, 0});
  timespec timeout{};
  const timespec* until = nullptr;
  if (busy || !network_.idle()) {
    const Nanoseconds now = clock_of(CLOCK_MONOTONIC);
    Nanoseconds left = busy ? std::clamp(network_.least_delay(), tick, longest_tick) : network_.next_due() - now;
    if (!network_.idle()) left = std::min(left, std::max(network_.next_due() - now, tick));
    left = std::max<Nanoseconds>(left, 0);
    timeout = {static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
    until = &timeout;
  }
  if (ppoll(polled.data(), polled.size(), until, nullptr) < 0 && errno != EINTR)
    throw std::system_error(errno, std::generic_category(), "poll");
  for (std::size_t at = 1; at < polled.size(); ++at)
    if (polled[at].revents & POLLERR) rings_[at - 1].clear_error();
}

void Relay::run() {
  prctl(PR_SET_TIMERSLACK, 10'000UL);  // nanoseconds; 50,000 by default
  for (bool stopped = false; !stopped;) {
    bool busy = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (std::uint32_t node = 0; node < rings_.size(); ++node) busy |= read(node);
      deliver();
      stopped = stopped_;
    }
    if (!stopped) wait(busy);
  }
}

void Relay::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  const std::uint64_t one = 1;
  if (write(wake_, &one, sizeof one) < 0 && errno != EAGAIN)
    throw std::system_error(errno, std::generic_category(), "cannot wake the relay");
}

void Relay::limit(std::uint32_t node, double ns_per_byte) {
  const std::lock_guard<std::mutex> lock(mutex_);
  network_.limit(node, ns_per_byte);
}

std::vector<Counts> Relay::counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return network_.counts();
}

std::uint64_t Relay::overrun() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Ring& ring : rings_) overrun_ += ring.overrun();
  return overrun_;
}

}  // namespace gradwire::relay

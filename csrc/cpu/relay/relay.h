// A switch between nodes with long cables: frames come from each node's packet socket and go to their targets' as late,
// and as incomplete, as `Network` says.
//
// It waits in poll and never spins. A frame's time is the one at which the kernel received it, so a relay that gets the
// processor late delays a frame only where it is later than the frame's own delay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpu/relay/network.h"
#include "cpu/relay/ring.h"

namespace gradwire::relay {

class Relay {
 public:
  Relay(const std::vector<std::string>& interfaces, std::size_t mtu, Network network);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  void run();   // until `stop`; throws where the kernel refuses
  void stop();
  void limit(std::uint32_t node, double ns_per_byte);
  std::vector<Counts> counts();
  std::uint64_t overrun();  // frames that came faster than this process could read them, on all cables

 private:
  using Bytes = std::unique_ptr<std::uint8_t[]>;

  bool read(std::uint32_t node);
  void offer(Nanoseconds arrived, std::uint32_t source, std::uint32_t target, const std::uint8_t* data,
             std::uint32_t nbytes);
  void deliver();
  void wait(bool busy);
  std::uint8_t* take();
  void give_back(std::uint8_t* memory) { spare_.emplace_back(memory); }

  std::mutex mutex_;  // held while frames are handled; not while waiting
  Network network_;
  std::size_t most_nbytes_;
  std::vector<Ring> rings_;
  std::unordered_map<std::uint64_t, std::uint32_t> nodes_;  // by Ethernet address
  std::vector<Bytes> spare_;
  std::vector<std::vector<Ring::Outgoing>> outgoing_;       // by target
  std::vector<std::uintptr_t> gone_;
  std::uint64_t overrun_ = 0;
  int wake_ = -1;
  bool stopped_ = false;
};

}  // namespace gradwire::relay

// The cable of one node: a packet socket on the switch's end, read from a ring that the kernel fills.
//
// Source: packet(7); Linux Documentation/networking/packet_mmap.rst, TPACKET_V2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/relay/network.h"

struct tpacket2_hdr;

namespace gradwire::relay {

class Ring {
 public:
  // An interface of the network namespace that this thread is in; frames of up to `most_nbytes`, headers included.
  Ring(const std::string& interface, std::size_t most_nbytes, std::size_t ring_nbytes);
  Ring(Ring&& other) noexcept;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  Ring& operator=(Ring&&) = delete;
  ~Ring();

  int descriptor() const { return descriptor_; }

  // The next frame that came in, and when, by the machine's real time; null if there is none. It is valid until `release`.
  const std::uint8_t* peek(std::uint32_t& nbytes, Nanoseconds& real_time);
  void release();

  struct Outgoing {
    std::uint8_t* data;
    std::uint32_t nbytes, source;
  };
  // Sends frames to the node. Returns the places of those that the kernel did not take.
  std::vector<std::size_t> send(const std::vector<Outgoing>& frames);

  // Frames that came while the ring was full, since the last call.
  std::uint64_t overrun();
  // The interface went down, or came up again: no reason to end, the node is without network meanwhile.
  void clear_error();

 private:
  tpacket2_hdr* slot() const;
  void close_all();

  std::string interface_;
  int descriptor_ = -1;
  std::uint8_t* memory_ = nullptr;
  std::size_t memory_nbytes_ = 0, slot_nbytes_, slots_a_block_, block_nbytes_, slots_ = 0, at_ = 0;
  std::size_t most_nbytes_;
};

}  // namespace gradwire::relay

#include "cpu/relay/ring.h"

#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#ifndef PACKET_IGNORE_OUTGOING
#define PACKET_IGNORE_OUTGOING 23  // Linux 4.20
#endif

namespace gradwire::relay {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

void set(int descriptor, int option, const void* value, socklen_t nbytes, const char* name) {
  if (setsockopt(descriptor, SOL_PACKET, option, value, nbytes) != 0) refuse(name);
}

}  // namespace

Ring::Ring(const std::string& interface, std::size_t most_nbytes, std::size_t ring_nbytes)
    : interface_(interface), most_nbytes_(most_nbytes) {
  // The kernel puts its header, an address and up to 64 bytes of padding before the frame.
  slot_nbytes_ = (most_nbytes + 192 + TPACKET_ALIGNMENT - 1) / TPACKET_ALIGNMENT * TPACKET_ALIGNMENT;
  block_nbytes_ = 1 << 16;
  while (block_nbytes_ < slot_nbytes_) block_nbytes_ *= 2;
  slots_a_block_ = block_nbytes_ / slot_nbytes_;
  const std::size_t blocks = std::max<std::size_t>(1, ring_nbytes / block_nbytes_);
  slots_ = blocks * slots_a_block_;
  const unsigned index = if_nametoindex(interface.c_str());
  if (index == 0) refuse("no interface " + interface);
  // Protocol 0: nothing comes before the ring is there and the socket is bound.
  descriptor_ = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
  if (descriptor_ < 0) refuse("cannot open a packet socket");
  try {
    const int version = TPACKET_V2, on = 1;
    set(descriptor_, PACKET_VERSION, &version, sizeof version, "PACKET_VERSION");
    set(descriptor_, PACKET_IGNORE_OUTGOING, &on, sizeof on, "PACKET_IGNORE_OUTGOING");
    tpacket_req request{};
    request.tp_block_size = static_cast<unsigned>(block_nbytes_);
    request.tp_block_nr = static_cast<unsigned>(blocks);
    request.tp_frame_size = static_cast<unsigned>(slot_nbytes_);
    request.tp_frame_nr = static_cast<unsigned>(slots_);
    set(descriptor_, PACKET_RX_RING, &request, sizeof request, "PACKET_RX_RING");
    memory_nbytes_ = block_nbytes_ * blocks;
    void* memory = mmap(nullptr, memory_nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (memory == MAP_FAILED) refuse("cannot map the ring");
    memory_ = static_cast<std::uint8_t*>(memory);
    sockaddr_ll address{};
    address.sll_family = AF_PACKET;
    address.sll_protocol = htons(ETH_P_ALL);
    address.sll_ifindex = static_cast<int>(index);
    if (bind(descriptor_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) refuse("cannot bind to " + interface);
  } catch (...) {
    close_all();
    throw;
  }
}

Ring::Ring(Ring&& other) noexcept
    : interface_(std::move(other.interface_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      memory_(std::exchange(other.memory_, nullptr)),
      memory_nbytes_(other.memory_nbytes_),
      slot_nbytes_(other.slot_nbytes_),
      slots_a_block_(other.slots_a_block_),
      block_nbytes_(other.block_nbytes_),
      slots_(other.slots_),
      at_(other.at_),
      most_nbytes_(other.most_nbytes_) {}

Ring::~Ring() { close_all(); }

void Ring::close_all() {
  if (memory_ != nullptr) munmap(memory_, memory_nbytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

tpacket2_hdr* Ring::slot() const {
  return reinterpret_cast<tpacket2_hdr*>(memory_ + at_ / slots_a_block_ * block_nbytes_ +
                                         at_ % slots_a_block_ * slot_nbytes_);
}

const std::uint8_t* Ring::peek(std::uint32_t& nbytes, Nanoseconds& real_time) {
  tpacket2_hdr* header = slot();
  const std::uint32_t status = __atomic_load_n(&header->tp_status, __ATOMIC_ACQUIRE);
  if (!(status & TP_STATUS_USER)) return nullptr;
  if (header->tp_len > most_nbytes_ || header->tp_snaplen < header->tp_len)
    throw std::runtime_error("a frame of " + std::to_string(header->tp_len) + " bytes came from " + interface_ +
                             ", more than the " + std::to_string(most_nbytes_) +
                             " of a packet: the node's NIC has segmentation offload on again");
  if (status & TP_STATUS_CSUMNOTREADY)
    throw std::runtime_error("a frame without its checksum came from " + interface_ +
                             ": the node's NIC has checksum offload on again");
  nbytes = header->tp_len;
  real_time = static_cast<Nanoseconds>(header->tp_sec) * 1'000'000'000 + header->tp_nsec;
  return reinterpret_cast<const std::uint8_t*>(header) + header->tp_mac;
}

void Ring::release() {
  __atomic_store_n(&slot()->tp_status, static_cast<std::uint32_t>(TP_STATUS_KERNEL), __ATOMIC_RELEASE);
  at_ = (at_ + 1) % slots_;
}

std::vector<std::size_t> Ring::send(const std::vector<Outgoing>& frames) {
  constexpr std::size_t batch = 64;
  std::array<mmsghdr, batch> messages;
  std::array<iovec, batch> pieces;
  std::vector<std::size_t> failed;
  for (std::size_t at = 0; at < frames.size();) {
    const std::size_t count = std::min(batch, frames.size() - at);
    for (std::size_t i = 0; i < count; ++i) {
      pieces[i] = {frames[at + i].data, frames[at + i].nbytes};
      messages[i] = {};
      messages[i].msg_hdr.msg_iov = &pieces[i];
      messages[i].msg_hdr.msg_iovlen = 1;
    }
    const int sent = sendmmsg(descriptor_, messages.data(), static_cast<unsigned>(count), MSG_DONTWAIT);
    if (sent > 0) {
      at += static_cast<std::size_t>(sent);
    } else if (errno != EINTR) {
      // The first one was refused: no room (ENOBUFS, EAGAIN), a NIC that is down (ENETDOWN, ENXIO) or a switch with a
      // smaller MTU (EMSGSIZE). On a real network it would be gone, too.
      failed.push_back(at++);
    }
  }
  return failed;
}

std::uint64_t Ring::overrun() {
  tpacket_stats statistics{};
  socklen_t nbytes = sizeof statistics;
  if (getsockopt(descriptor_, SOL_PACKET, PACKET_STATISTICS, &statistics, &nbytes) != 0) refuse("PACKET_STATISTICS");
  return statistics.tp_drops;
}

void Ring::clear_error() {
  int error = 0;
  socklen_t nbytes = sizeof error;
  if (getsockopt(descriptor_, SOL_SOCKET, SO_ERROR, &error, &nbytes) != 0) refuse("SO_ERROR");
}

}  // namespace gradwire::relay

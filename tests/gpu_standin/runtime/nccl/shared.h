// The memory that the ranks of one communicator share, each a process: who has arrived, what it calls, its data.
//
// It is an anonymous file (memfd): it has no name, and is gone with the last process that has it mapped, killed ones
// included. The communicator's id names a process and its descriptor of the file; the others open it through /proc.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "types.h"

namespace standin {

constexpr int max_ranks = 64;
constexpr std::size_t slice_nbytes = 1 << 20;    // of a collective: travels at once
constexpr std::size_t message_nbytes = 1 << 16;  // of a message between two ranks: travels at once
constexpr std::uint64_t message_slots = 4;

// What a rank calls; all ranks of a communicator must call the same.
struct CallRecord {
  int kind, dtype, op, root;
  std::uint64_t count;
  double factor;  // of a PreMulSum
};

// Written by its own rank, but for the doorbell.
struct RankArea {
  std::atomic<std::uint32_t> doorbell;  // a futex: counted up whenever something changed that the rank may wait for
  std::atomic<std::uint32_t> joined;
  std::atomic<std::uint64_t> step;  // of collectives, how many slices of this rank lie ready
  CallRecord calls[2];              // of even and odd steps
  std::atomic<std::uint64_t> exchange;  // of exchanges between hosts, how many lie ready
  char blobs[2][256];
  std::atomic<std::uint32_t> connected[16];         // by kind of collective
  std::atomic<std::uint32_t> sends_to[max_ranks];   // has once called ncclSend to, and
  std::atomic<std::uint32_t> receives_from[max_ranks];  // ncclRecv from
  std::atomic<std::uint32_t> finalized, aborted;
  std::int32_t process;
  std::uint64_t process_start;  // with `process`, tells the process from a later one of the same number
  std::uint64_t host;           // hash of NCCL_HOSTID, or of the machine's name
};

// From one rank to another: a ring of parts of messages.
struct Channel {
  std::atomic<std::uint64_t> written, read;
  std::uint64_t nbytes[message_slots];         // of the part
  std::uint64_t message_total[message_slots];  // of the whole message that the part belongs to
  char data[message_slots][message_nbytes];
};

struct Header {
  std::uint64_t key;  // as in the id
};

class SharedRegion {
 public:
  // Makes the file and the id that leads to it. It stays open in this process until the id is used or the process ends.
  static ncclResult_t make_id(ncclUniqueId* id, std::string* problem);
  // Maps the region of `id` for `ranks` ranks.
  static std::unique_ptr<SharedRegion> open(const ncclUniqueId& id, int ranks, std::string* problem);
  // Closes this process's descriptor, if it made the id: all have it mapped.
  static void forget(const ncclUniqueId& id);
  ~SharedRegion();

  RankArea& area(int rank) const;
  Channel& channel(int from, int to) const;
  char* slice(int rank, std::uint64_t step) const;
  // Tells a rank that something has changed.
  void ring(int rank) const;
  // Sleeps until the doorbell of `rank` differs from `seen`, or some milliseconds have passed.
  void wait_for_bell(int rank, std::uint32_t seen, int milliseconds) const;

  const int ranks;
  const std::uint64_t key;

 private:
  SharedRegion(char* memory, int ranks, std::uint64_t key) : ranks(ranks), key(key), memory_(memory) {}
  char* memory_;
};

// The start of a process, by /proc; 0 where it has ended.
std::uint64_t start_of_process(std::int32_t process);

}  // namespace standin

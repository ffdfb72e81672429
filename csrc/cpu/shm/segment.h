// One process's view of a segment: the mapping, and the record lock that says "this rank is alive".
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/shm/layout.h"

namespace gradwire::shm {

/// The file descriptors that one process has of one file: closed together, at the end.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number), numbers_{number} {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

  /// Takes over one more.
  void keep(int number);

 private:
  int number_;
  std::mutex mutex_;
  std::vector<int> numbers_;
};

/// Maps a file and locks byte `rank` of it for as long as the object lives.
///
/// A POSIX record lock belongs to the process, not to the descriptor: it works across pid namespaces, the kernel drops
/// it when the process dies, however it dies, and a forked child does not inherit it. But closing *any* descriptor of
/// the file drops it, so all ranks of one process share their descriptors.
class Segment {
 public:
  /// Takes over the descriptor `number`. Throws std::system_error where the file is smaller than it must be, or cannot be
  /// mapped.
  Segment(int number, std::uint32_t rank, std::uint32_t size, std::uint64_t block_nbytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::uint32_t rank() const { return rank_; }
  std::uint32_t size() const { return size_; }
  std::uint64_t block_nbytes() const { return block_nbytes_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankBox& box(std::uint32_t rank) const;
  std::byte* slot(std::uint32_t rank, std::uint64_t interval) const;

  /// Whether the process of `rank` still lives and has not closed the group.
  bool is_alive(std::uint32_t rank) const;

  /// Notes the process of each rank, as this one calls it; once all ranks have mapped the file, before the first wait.
  void note_processes();

  /// Whether `rank` has closed the group in a process that has not ended yet; false also where its process is not known.
  bool is_leaving(std::uint32_t rank) const;

  /// Whether this process is a fork of the one that made the object.
  bool is_inherited() const;

 private:
  std::uint32_t rank_;
  std::uint32_t size_;
  std::uint64_t block_nbytes_;
  std::uint64_t nbytes_;
  std::shared_ptr<Descriptor> descriptor_;
  std::byte* base_;
  std::vector<pid_t> processes_;  // of each rank; 0: not known, of another pid namespace, or this one
};

}  // namespace gradwire::shm

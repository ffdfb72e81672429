#include "cpu/shm/segment.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <random>
#include <system_error>
#include <utility>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // on every architecture; headers before Linux 5.3 have no name for it
#endif

namespace gradwire::shm {
namespace {

std::uint64_t random_token() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device() | 1u;
}

std::atomic<std::uint64_t> token_of_this_process{0};

/// A number that ranks of one process share and no other process has, in whatever pid namespace; a fork draws anew.
std::uint64_t process_token() {
  static std::once_flag once;
  std::call_once(once, [] {
    token_of_this_process = random_token();
    pthread_atfork(nullptr, nullptr, [] { token_of_this_process = random_token(); });
  });
  return token_of_this_process;
}

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

/// The descriptors that this process has of one file, as one object: see `Segment`.
std::shared_ptr<Descriptor> adopt(int number) {
  static std::mutex mutex;
  static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Descriptor>> opened;
  struct stat facts;
  if (fstat(number, &facts) != 0) fail(errno, "descriptor " + std::to_string(number));
  const std::lock_guard<std::mutex> guard(mutex);
  for (auto entry = opened.begin(); entry != opened.end();) {
    entry = entry->second.expired() ? opened.erase(entry) : std::next(entry);
  }
  const std::pair<dev_t, ino_t> file{facts.st_dev, facts.st_ino};
  if (const auto found = opened.find(file); found != opened.end()) {
    if (auto descriptor = found->second.lock()) {
      descriptor->keep(number);
      return descriptor;
    }
  }
  auto descriptor = std::make_shared<Descriptor>(number);
  opened[file] = descriptor;
  return descriptor;
}

struct flock record(short type, std::uint32_t rank) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Descriptor::~Descriptor() {
  for (const int number : numbers_) close(number);
}

void Descriptor::keep(int number) {
  const std::lock_guard<std::mutex> guard(mutex_);
  numbers_.push_back(number);
}

Segment::Segment(int number, std::uint32_t rank, std::uint32_t size, std::uint64_t block_nbytes)
    : rank_(rank), size_(size), block_nbytes_(block_nbytes), nbytes_(segment_nbytes(size, block_nbytes)),
      descriptor_(adopt(number)) {
  const std::string file = "shared memory";
  struct stat facts;
  if (fstat(descriptor_->number(), &facts) != 0) fail(errno, file);
  if (static_cast<std::uint64_t>(facts.st_size) < nbytes_) fail(EINVAL, file + " is smaller than its group needs");
  struct flock lock = record(F_WRLCK, rank);
  if (fcntl(descriptor_->number(), F_SETLK, &lock) != 0) fail(errno, file + ": another process holds this rank");
  // Populated at once, so that the first collectives take no page faults.
  void* address = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_->number(), 0);
  if (address == MAP_FAILED) fail(errno, file);
  base_ = static_cast<std::byte*>(address);
  box(rank).process_token = process_token();
}

Segment::~Segment() {
  if (!is_inherited()) {
    box(rank_).closed.store(1);
    struct flock lock = record(F_UNLCK, rank_);
    fcntl(descriptor_->number(), F_SETLK, &lock);
  }
  munmap(base_, nbytes_);
}

RankBox& Segment::box(std::uint32_t rank) const {
  return *reinterpret_cast<RankBox*>(base_ + sizeof(Header) + rank * sizeof(RankBox));
}

std::byte* Segment::slot(std::uint32_t rank, std::uint64_t interval) const {
  const std::uint64_t index = std::uint64_t{rank} * slots_per_rank + interval % slots_per_rank;
  return base_ + slots_offset(size_) + index * block_nbytes_;
}

bool Segment::is_alive(std::uint32_t rank) const {
  if (box(rank).closed.load() != 0) return false;
  if (box(rank).process_token == process_token()) return true;  // a thread of ours; our own locks never show
  struct flock lock = record(F_WRLCK, rank);
  if (fcntl(descriptor_->number(), F_GETLK, &lock) != 0) return true;  // cannot tell: the time-out will
  return lock.l_type != F_UNLCK;
}

void Segment::note_processes() {
  processes_.assign(size_, 0);
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    struct flock lock = record(F_WRLCK, rank);
    if (fcntl(descriptor_->number(), F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK) processes_[rank] = lock.l_pid;
  }
}

bool Segment::is_leaving(std::uint32_t rank) const {
  if (rank >= processes_.size() || processes_[rank] <= 0 || box(rank).closed.load() == 0) return false;
  // Readable once the process has ended, also if its parent has not asked for its status yet.
  const int process = static_cast<int>(syscall(SYS_pidfd_open, processes_[rank], 0));
  if (process < 0) return false;
  pollfd ended{process, POLLIN, 0};
  const bool lives = poll(&ended, 1, 0) == 0;
  close(process);
  return lives;
}

bool Segment::is_inherited() const { return box(rank_).process_token != process_token(); }

}  // namespace gradwire::shm

#include "cpu/shm/segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <random>
#include <system_error>

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

std::shared_ptr<Descriptor> open_once_per_process(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Descriptor>> opened;
  const std::lock_guard<std::mutex> guard(mutex);
  for (auto entry = opened.begin(); entry != opened.end();) {
    entry = entry->second.expired() ? opened.erase(entry) : std::next(entry);
  }
  if (const auto found = opened.find(path); found != opened.end()) {
    if (auto descriptor = found->second.lock()) return descriptor;
  }
  const int number = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (number < 0) fail(errno, path);
  auto descriptor = std::make_shared<Descriptor>(number);
  opened[path] = descriptor;
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

Descriptor::~Descriptor() { close(number_); }

Segment::Segment(const std::string& path, std::uint32_t rank, std::uint32_t size, std::uint64_t block_nbytes)
    : rank_(rank), size_(size), block_nbytes_(block_nbytes), nbytes_(segment_nbytes(size, block_nbytes)),
      descriptor_(open_once_per_process(path)) {
  struct stat facts;
  if (fstat(descriptor_->number(), &facts) != 0) fail(errno, path);
  if (static_cast<std::uint64_t>(facts.st_size) < nbytes_) fail(EINVAL, path + " is smaller than its group needs");
  struct flock lock = record(F_WRLCK, rank);
  if (fcntl(descriptor_->number(), F_SETLK, &lock) != 0) fail(errno, path + ": another process holds this rank");
  // Populated at once, so that the first collectives take no page faults.
  void* address = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_->number(), 0);
  if (address == MAP_FAILED) fail(errno, path);
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

bool Segment::is_inherited() const { return box(rank_).process_token != process_token(); }

}  // namespace gradwire::shm

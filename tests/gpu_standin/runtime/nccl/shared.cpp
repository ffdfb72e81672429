// The shared memory of a communicator: made, found by its id, waited on.
#include "shared.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>

#include "../standin.h"

namespace standin {
namespace {

constexpr char id_magic[8] = {'s', 't', 'a', 'n', 'd', 'i', 'n', '1'};

// What the 128 bytes of an id hold.
struct Id {
  char magic[8];
  std::int32_t process, descriptor;
  std::uint64_t key;
};

std::mutex ids_mutex;
std::map<std::uint64_t, int>& ids_made_here() {
  static auto* one = new std::map<std::uint64_t, int>;  // key -> descriptor
  return *one;
}

std::size_t page(std::size_t nbytes) { return (nbytes + 4095) / 4096 * 4096; }
std::size_t areas_nbytes(int ranks) { return page(sizeof(Header)) + page(sizeof(RankArea) * ranks); }
std::size_t channels_nbytes(int ranks) { return page(sizeof(Channel) * ranks * ranks); }
std::size_t total_nbytes(int ranks) { return areas_nbytes(ranks) + channels_nbytes(ranks) + 2 * slice_nbytes * ranks; }

}  // namespace

ncclResult_t SharedRegion::make_id(ncclUniqueId* out, std::string* problem) {
  Id id{};
  memcpy(id.magic, id_magic, sizeof id_magic);
  id.process = getpid();
  if (getrandom(&id.key, sizeof id.key, 0) != sizeof id.key) {
    *problem = "no random numbers: " + std::string(strerror(errno));
    return ncclSystemError;
  }
  id.descriptor = memfd_create("gpu_standin", MFD_CLOEXEC);
  Header header{id.key};
  if (id.descriptor < 0 || pwrite(id.descriptor, &header, sizeof header, 0) != sizeof header) {
    *problem = "no anonymous file for a communicator: " + std::string(strerror(errno));
    return ncclSystemError;
  }
  memset(out, 0, sizeof *out);
  memcpy(out, &id, sizeof id);
  std::lock_guard<std::mutex> lock(ids_mutex);
  ids_made_here()[id.key] = id.descriptor;
  return ncclSuccess;
}

std::unique_ptr<SharedRegion> SharedRegion::open(const ncclUniqueId& opaque, int ranks, std::string* problem) {
  Id id;
  memcpy(&id, &opaque, sizeof id);
  if (memcmp(id.magic, id_magic, sizeof id_magic) != 0) {
    *problem = "the communicator's id is none that ncclGetUniqueId has made";
    return nullptr;
  }
  std::string path = format("/proc/%d/fd/%d", id.process, id.descriptor);
  int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  Header header{};
  if (descriptor < 0 || pread(descriptor, &header, sizeof header, 0) != sizeof header || header.key != id.key) {
    if (descriptor >= 0) close(descriptor);
    *problem = format("process %d, which made the communicator's id, has ended or cannot be reached", id.process);
    return nullptr;
  }
  // Every rank sets the same size; bytes beyond what was written are zero.
  void* memory = MAP_FAILED;
  if (ftruncate(descriptor, static_cast<off_t>(total_nbytes(ranks))) == 0) {
    memory = mmap(nullptr, total_nbytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  }
  if (memory == MAP_FAILED) *problem = "no shared memory for a communicator: " + std::string(strerror(errno));
  close(descriptor);
  if (memory == MAP_FAILED) return nullptr;
  return std::unique_ptr<SharedRegion>(new SharedRegion(static_cast<char*>(memory), ranks, id.key));
}

void SharedRegion::forget(const ncclUniqueId& opaque) {
  Id id;
  memcpy(&id, &opaque, sizeof id);
  std::lock_guard<std::mutex> lock(ids_mutex);
  auto found = ids_made_here().find(id.key);
  if (found == ids_made_here().end() || id.process != getpid()) return;
  close(found->second);
  ids_made_here().erase(found);
}

SharedRegion::~SharedRegion() { munmap(memory_, total_nbytes(ranks)); }

RankArea& SharedRegion::area(int rank) const {
  return reinterpret_cast<RankArea*>(memory_ + page(sizeof(Header)))[rank];
}

Channel& SharedRegion::channel(int from, int to) const {
  return reinterpret_cast<Channel*>(memory_ + areas_nbytes(ranks))[from * ranks + to];
}

char* SharedRegion::slice(int rank, std::uint64_t step) const {
  return memory_ + areas_nbytes(ranks) + channels_nbytes(ranks) + (2 * rank + step % 2) * slice_nbytes;
}

void SharedRegion::ring(int rank) const {
  auto& bell = area(rank).doorbell;
  bell.fetch_add(1);
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SharedRegion::wait_for_bell(int rank, std::uint32_t seen, int milliseconds) const {
  timespec limit{milliseconds / 1000, milliseconds % 1000 * 1000000L};
  syscall(SYS_futex, &area(rank).doorbell, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

std::uint64_t start_of_process(std::int32_t process) {
  std::ifstream file(format("/proc/%d/stat", process));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  auto name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return 0;
  char state = text[name_end + 2];
  if (state == 'Z' || state == 'X') return 0;
  std::size_t at = name_end + 2;
  constexpr int fields_to_start_time = 19;  // proc(5): the state is field 3, the start time field 22
  for (int i = 0; i < fields_to_start_time && at != std::string::npos; ++i) at = text.find(' ', at + 1);
  return at == std::string::npos ? 0 : strtoull(text.c_str() + at, nullptr, 10);
}

}  // namespace standin

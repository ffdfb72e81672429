// A communicator's life: joined, used by the host, finalized or aborted.
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "comm.h"

namespace standin {
namespace {

std::atomic<int> next_number{0};
constexpr int default_ctas = 24;             // NCCL 2.29 takes 16 to 32 of an H100, by the plan
constexpr int bell_milliseconds = 100;       // a sleep's end at the latest, for what rings no bell: a peer's death
constexpr double seconds_between_looks = 0.2;

int ctas_of(const ncclConfig_t* config) {
  bool limited = config && config->max_ctas != NCCL_CONFIG_UNDEF_INT && config->max_ctas > 0;
  return limited ? std::min(config->max_ctas, default_ctas) : default_ctas;
}

std::uint64_t hash_of_host() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  const char* given = getenv("NCCL_HOSTID");
  return std::hash<std::string>{}(given && *given ? given : name);
}

struct Comms {
  std::mutex mutex;
  std::map<ncclComm_t, std::shared_ptr<Comm>> live;
};
Comms& comms() {
  static auto* one = new Comms;
  return *one;
}

}  // namespace

std::shared_ptr<Comm> find_comm(ncclComm_t handle) {
  std::lock_guard<std::mutex> lock(comms().mutex);
  auto found = comms().live.find(handle);
  return found == comms().live.end() ? nullptr : found->second;
}

ncclComm_t publish(std::shared_ptr<Comm> comm) {
  auto handle = reinterpret_cast<ncclComm_t>(comm.get());
  std::lock_guard<std::mutex> lock(comms().mutex);
  comms().live[handle] = std::move(comm);
  return handle;
}

void withdraw(ncclComm_t handle) {
  std::lock_guard<std::mutex> lock(comms().mutex);
  comms().live.erase(handle);
}

Comm::Comm(int of_rank, int of_ranks, int on_device, const ncclConfig_t* config)
    : rank(of_rank),
      ranks(of_ranks),
      device(on_device),
      blocking(!config || config->blocking != 0),
      ctas(ctas_of(config)),
      number(next_number++) {}

ncclResult_t Comm::join(const ncclUniqueId& id) {
  std::string problem;
  auto region = SharedRegion::open(id, ranks, &problem);
  if (!region) return fail(ncclSystemError, problem);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    shared_ = std::move(region);
  }
  RankArea& mine = shared_->area(rank);
  mine.process = getpid();
  mine.process_start = start_of_process(getpid());
  mine.host = hash_of_host();
  if (mine.joined.exchange(1)) return fail(ncclInvalidUsage, format("two processes join as rank %d of %d", rank, ranks));
  ring_others();
  bool all = wait([&] {
    for (int other = 0; other < ranks; ++other) {
      if (!shared_->area(other).joined) return false;
    }
    return true;
  });
  if (!all) return fail(ncclInternalError, "aborted while it waited for the other ranks");
  SharedRegion::forget(id);
  trace("nccl init", format("comm %d key %llx rank %d of %d on device %d, %d CTAs", number,
                            (unsigned long long)shared_->key, rank, ranks, device, ctas));
  return ncclSuccess;
}

bool Comm::wait(const std::function<bool()>& ready) {
  for (;;) {
    std::uint32_t seen = shared_->area(rank).doorbell.load();
    if (aborted_) return false;
    if (ready()) return true;
    shared_->wait_for_bell(rank, seen, bell_milliseconds);
    look_for_dead_peers();
  }
}

// On one machine real NCCL notices nothing; between machines a closed connection becomes an error.
void Comm::look_for_dead_peers() {
  if (setting("NCCL_DEAD_PEER", "hang") != "error") return;
  double now = seconds_since_boot();
  if (now - peers_looked_at_ < seconds_between_looks) return;
  peers_looked_at_ = now;
  for (int other = 0; other < ranks; ++other) {
    RankArea& area = shared_->area(other);
    if (area.joined && !area.finalized && start_of_process(area.process) != area.process_start) {
      fail(ncclRemoteError, format("rank %d, process %d, has ended", other, area.process));
    }
  }
}

void Comm::ring_others() {
  for (int other = 0; other < ranks; ++other) {
    if (other != rank) shared_->ring(other);
  }
}

std::vector<std::string> Comm::exchange(const std::string& blob, const std::vector<int>& among) {
  std::uint64_t round = ++exchanges_;
  RankArea& mine = shared_->area(rank);
  if (blob.size() > sizeof mine.blobs[0]) give_up("an exchange of more than a blob between the hosts");
  memcpy(mine.blobs[round % 2], blob.data(), blob.size());
  mine.exchange = round;
  ring_others();
  bool all = wait([&] {
    for (int other : among) {
      if (shared_->area(other).exchange < round) return false;
    }
    return true;
  });
  std::vector<std::string> blobs;
  if (!all) return blobs;
  for (int other : among) blobs.emplace_back(shared_->area(other).blobs[round % 2], blob.size());
  return blobs;
}

ncclResult_t Comm::host_job(std::function<ncclResult_t()> job) {
  if (blocking) return job();
  in_progress_ = true;
  std::thread([self = shared_from_this(), job = std::move(job)] {
    job();  // an error is in the state
    self->in_progress_ = false;
  }).detach();
  return ncclInProgress;
}

ncclResult_t Comm::state() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_ != ncclSuccess) return error_;
  return in_progress_ ? ncclInProgress : ncclSuccess;
}

bool Comm::failed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_ != ncclSuccess;
}

ncclResult_t Comm::fail(ncclResult_t error, const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_ != ncclSuccess) return error;
  error_ = error;
  message_ = message;
  if (!aborted_) say(format("NCCL, rank %d of %d: ", rank, ranks) + message);
  return error;
}

std::string Comm::last_error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

int Comm::create_op(Operation operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  operations_.push_back(operation);
  return ncclNumOps + static_cast<int>(operations_.size()) - 1;
}

ncclResult_t Comm::destroy_op(int op) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::size_t index = op - ncclNumOps;
  if (op < ncclNumOps || index >= operations_.size() || !operations_[index]) return ncclInvalidArgument;
  operations_[index].reset();
  return ncclSuccess;
}

std::optional<Operation> Comm::operation(int op, ncclDataType_t dtype) const {
  if (op < 0) return std::nullopt;
  Operation result;
  if (op < ncclAvg) {
    result.op = op;
  } else if (op == ncclAvg) {
    bool floating = dtype >= ncclFloat16;
    // NCCL multiplies floating types before the sum and divides integers after it.
    if (floating) {
      result.factor = as_held(1.0 / ranks, dtype);
      result.scaled = true;
    } else {
      result.op = ncclAvg;
    }
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    std::size_t index = op - ncclNumOps;
    if (index >= operations_.size()) return std::nullopt;
    return operations_[index];
  }
  return result;
}

// NCCL makes connections when they are first needed, in the host's call: the call then waits for the other ranks'.
ncclResult_t Comm::connect(const std::vector<Call>& calls) {
  if (setting("NCCL_CONNECT", "lazy") != "lazy") return ncclSuccess;
  RankArea& mine = shared_->area(rank);
  std::vector<std::function<bool()>> needed;
  for (const Call& call : calls) {
    int peer = call.peer;
    if (call.kind == Kind::send) {
      if (peer != rank && !mine.sends_to[peer].exchange(1)) {
        needed.push_back([=] { return shared_->area(peer).receives_from[rank] != 0; });
      }
    } else if (call.kind == Kind::receive) {
      if (peer != rank && !mine.receives_from[peer].exchange(1)) {
        needed.push_back([=] { return shared_->area(peer).sends_to[rank] != 0; });
      }
    } else if (int kind = static_cast<int>(call.kind); !mine.connected[kind].exchange(1)) {
      needed.push_back([=] {
        for (int other = 0; other < ranks; ++other) {
          if (!shared_->area(other).connected[kind]) return false;
        }
        return true;
      });
    }
  }
  if (needed.empty()) return ncclSuccess;
  ring_others();
  for (auto& ready : needed) {
    if (!wait([&] { return ready() || failed(); })) return fail(ncclInternalError, "aborted while it connected");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

ncclResult_t Comm::launch(std::vector<Call> calls) {
  if (aborted_) return ncclInvalidUsage;
  if (ncclResult_t error = connect(calls)) return error;
  std::string text;
  for (const Call& call : calls) {
    text += format("%s%s %zu %s", text.empty() ? "" : ", ", name_of(call.kind), call.count, name_of(call.dtype));
  }
  auto stream = calls.front().stream;
  trace("nccl launch", format("comm %d of %d ranks, stream %d: ", number, ranks, stream->number) + text);
  // One kernel a group, on the stream of the first call: the streams of the others wait for it, and it for them.
  std::lock_guard<std::mutex> lock(mutex_);
  if (last_kernel_.stream != stream) stream->wait_for(last_kernel_);
  std::vector<std::shared_ptr<Stream>> others;
  for (const Call& call : calls) {
    if (call.stream != stream && std::find(others.begin(), others.end(), call.stream) == others.end()) others.push_back(call.stream);
  }
  for (auto& other : others) stream->wait_for(other->mark());
  std::uint64_t issued = Residency::issue(device);
  last_kernel_ = stream->submit("NCCL kernel", [self = shared_from_this(), calls = std::move(calls), issued] {
    self->run(calls, issued);
  });
  for (auto& other : others) other->wait_for(last_kernel_);
  return ncclSuccess;
}

bool Comm::is_on_this_host(int other) const { return shared_->area(other).host == shared_->area(rank).host; }

// NCCL's page: destroying is a collective of the ranks of a node, which wait for each other. One that has aborted will
// not come any more, and is not waited for: in NCCL's sources only ranks of one process wait for each other.
ncclResult_t Comm::finalize() {
  if (finalized_.exchange(true)) return ncclSuccess;
  Mark last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last = last_kernel_;
  }
  last.wait();
  if (aborted_) return ncclInternalError;
  shared_->area(rank).finalized = 1;
  ring_others();
  if (setting("NCCL_DESTROY", "node") == "node") {
    bool all = wait([&] {
      for (int other = 0; other < ranks; ++other) {
        RankArea& area = shared_->area(other);
        if (is_on_this_host(other) && !area.finalized && !area.aborted) return false;
      }
      return true;
    });
    if (!all) return fail(ncclInternalError, "aborted while it waited for the others of its node to finalize");
  }
  trace("nccl finalize", format("comm %d", number));
  return ncclSuccess;
}

void Comm::abort() {
  trace("nccl abort", format("comm %d", number));
  aborted_ = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shared_) {
      shared_->area(rank).aborted = 1;
      shared_->ring(rank);
      ring_others();
    }
  }
  Residency::wake();
  timespec pause{0, 1000000};
  while (running_) nanosleep(&pause, nullptr);  // kernels see the flag and end
}

}  // namespace standin

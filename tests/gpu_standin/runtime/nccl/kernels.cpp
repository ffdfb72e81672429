// NCCL's kernels: what runs on a stream's thread and waits there for the other ranks'.
#include <cstring>

#include "comm.h"

namespace standin {
namespace {

std::atomic<long long> kernels_run{0};

std::string in_words(const CallRecord& call) {
  static const char* ops[] = {"sum", "prod", "max", "min", "avg"};
  std::string text = format("%s of %llu %s", name_of(static_cast<Kind>(call.kind)), (unsigned long long)call.count,
                            name_of(static_cast<ncclDataType_t>(call.dtype)));
  auto kind = static_cast<Kind>(call.kind);
  if (kind == Kind::broadcast || kind == Kind::reduce) text += format(", root %d", call.root);
  if (kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter) {
    text += format(", %s", call.op <= ncclAvg ? ops[call.op] : "an operation of the user");
  }
  return text;
}

bool same(const CallRecord& a, const CallRecord& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.count == b.count;
}

// A message under way, in parts.
struct Message {
  bool sends;
  char* data;
  std::size_t nbytes, done = 0;
  int peer;
  bool finished = false;
};

}  // namespace

const char* name_of(Kind kind) {
  static const char* names[] = {"AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Reduce", "AlltoAll", "Send", "Recv"};
  return names[static_cast<int>(kind)];
}

void Comm::run(const std::vector<Call>& calls, std::uint64_t issued) {
  ++running_;
  bool failed = false;
  if (Residency::take(device, ctas, issued, [this] { return aborted(); })) {
    long long index = ++kernels_run;
    if (index == setting("NCCL_FAIL_AT", 0LL) && setting("NCCL_FAIL_DEVICE", static_cast<long long>(device)) == device) {
      fail(ncclSystemError, format("GPU_STANDIN_NCCL_FAIL_AT=%lld: this kernel fails", index));
      failed = true;
    }
    std::vector<Call> messages;
    for (const Call& call : calls) {
      if (failed || aborted_) break;
      if (call.kind == Kind::send || call.kind == Kind::receive) {
        messages.push_back(call);
      } else {
        failed = !run_collective(call);
      }
    }
    if (!failed && !aborted_ && !messages.empty()) failed = !run_messages(messages);
    if (failed) stall();
    Residency::give_back(device, ctas);
  }
  --running_;
}

// After an error a kernel of NCCL goes on waiting until the communicator is aborted.
void Comm::stall() {
  wait([] { return false; });
}

bool Comm::meet(const CallRecord& mine) {
  RankArea& area = shared_->area(rank);
  area.calls[steps_ % 2] = mine;
  area.step = steps_;
  ring_others();
  bool all = wait([&] {
    for (int other = 0; other < ranks; ++other) {
      if (shared_->area(other).step < steps_) return false;
    }
    return true;
  });
  return all && agree(mine);
}

bool Comm::agree(const CallRecord& mine) {
  for (int other = 0; other < ranks; ++other) {
    const CallRecord& theirs = shared_->area(other).calls[steps_ % 2];
    if (!same(mine, theirs)) {
      fail(ncclInvalidUsage, format("the ranks' calls differ: rank %d calls ", rank) + in_words(mine) +
                                 format("; rank %d calls ", other) + in_words(theirs));
      return false;
    }
  }
  return true;
}

// Slice by slice: everybody lays a slice of their input out, waits for all, and takes from all slices what they need.
// Two buffers take turns: who writes one has met the others, who have read it, once since.
bool Comm::run_collective(const Call& call) {
  const std::size_t width = nbytes_of(call.dtype);
  // Of these every rank lays out a part for each rank.
  const bool to_each = call.kind == Kind::reduce_scatter || call.kind == Kind::all_to_all;
  const std::size_t parts = to_each ? ranks : 1;
  const std::size_t per_slice = std::max<std::size_t>(1, slice_nbytes / (width * parts));
  double factor = call.operation.factor;
  if (call.operation.factor_on_device) factor = read_scalar(call.operation.factor_on_device, call.dtype);
  // A factor may be another on each rank; the operation that it belongs to is compared as a sum.
  const CallRecord record{static_cast<int>(call.kind), call.dtype, call.operation.op, call.peer, call.count, factor};
  const bool gives = call.kind != Kind::broadcast || rank == call.peer;

  std::size_t at = 0;
  do {
    const std::size_t count = std::min(per_slice, call.count - at);
    ++steps_;
    char* slice = shared_->slice(rank, steps_);
    for (std::size_t part = 0; gives && part < parts; ++part) {
      memcpy(slice + part * count * width, call.in + (part * call.count + at) * width, count * width);
    }
    if (!meet(record)) return false;
    auto theirs = [&](int other) { return shared_->slice(other, steps_); };
    auto reduce = [&](std::size_t offset, char* out) {
      for (int other = 0; other < ranks; ++other) {
        Operation operation = call.operation;
        operation.factor = shared_->area(other).calls[steps_ % 2].factor;
        reduce_into(out, theirs(other) + offset, count, call.dtype, operation, other == 0);
      }
      if (call.operation.op == ncclAvg) divide(out, count, call.dtype, ranks);
    };
    char* out = call.out + at * width;
    switch (call.kind) {
      case Kind::all_reduce: reduce(0, out); break;
      case Kind::reduce:
        if (rank == call.peer) reduce(0, out);
        break;
      case Kind::reduce_scatter: reduce(rank * count * width, out); break;
      case Kind::broadcast: memcpy(out, theirs(call.peer), count * width); break;
      case Kind::all_gather:
        for (int other = 0; other < ranks; ++other) memcpy(out + other * call.count * width, theirs(other), count * width);
        break;
      case Kind::all_to_all:
        for (int other = 0; other < ranks; ++other) {
          memcpy(out + other * call.count * width, theirs(other) + rank * count * width, count * width);
        }
        break;
      default: give_up("a message among the collectives");
    }
    at += count;
  } while (at < call.count);
  return true;
}

// All messages of a group move at once: those to or from one peer in their order, the others independently.
bool Comm::run_messages(const std::vector<Call>& calls) {
  std::vector<Message> messages;
  for (const Call& call : calls) {
    bool sends = call.kind == Kind::send;
    messages.push_back({sends, sends ? const_cast<char*>(call.in) : call.out, call.count * nbytes_of(call.dtype), 0, call.peer});
  }
  bool wrong = false;
  auto move = [&](Message& message) {
    Channel& channel = message.sends ? shared_->channel(rank, message.peer) : shared_->channel(message.peer, rank);
    std::uint64_t written = channel.written, read = channel.read;
    if (message.sends ? written - read == message_slots : written == read) return false;
    std::uint64_t slot = (message.sends ? written : read) % message_slots;
    if (message.sends) {
      std::size_t nbytes = std::min(message_nbytes, message.nbytes - message.done);
      memcpy(channel.data[slot], message.data + message.done, nbytes);
      channel.nbytes[slot] = nbytes;
      channel.message_total[slot] = message.nbytes;
      channel.written = written + 1;
      message.done += nbytes;
    } else {
      if (channel.message_total[slot] != message.nbytes) {
        fail(ncclInvalidUsage, format("rank %d sends %llu bytes to rank %d, which receives %zu", message.peer,
                                      (unsigned long long)channel.message_total[slot], rank, message.nbytes));
        wrong = true;
        return false;
      }
      memcpy(message.data + message.done, channel.data[slot], channel.nbytes[slot]);
      message.done += channel.nbytes[slot];
      channel.read = read + 1;
    }
    message.finished = message.done == message.nbytes;
    shared_->ring(message.peer);
    return true;
  };
  auto move_all = [&] {
    bool moved = false;
    std::map<std::pair<bool, int>, bool> busy;  // direction and peer: an earlier message is under way
    for (Message& message : messages) {
      bool& taken = busy[{message.sends, message.peer}];
      if (message.finished || taken) continue;
      moved |= move(message);
      taken = !message.finished;
    }
    return moved;
  };
  auto finished = [&] {
    for (Message& message : messages) {
      if (!message.finished) return false;
    }
    return true;
  };
  while (!finished()) {
    if (!wait([&] { return move_all() || wrong; }) || wrong) return false;
  }
  return true;
}

}  // namespace standin

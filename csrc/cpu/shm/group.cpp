// What every collective shares: the signature that all ranks must agree on, and the loop over the intervals.
#include "cpu/shm/group.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iterator>

namespace gradwire::shm {
namespace {

const char* name_of(DType dtype) {
  constexpr const char* names[] = {"float32", "float64", "float16", "bfloat16", "int32",
                                   "int64",   "uint8",   "int8",    "int16"};
  const auto index = static_cast<std::size_t>(dtype);
  return index < std::size(names) ? names[index] : "?";
}

/// FNV-1a over 64-bit words: six multiplications. Source: Fowler, Noll, Vo, RFC 9923 section 4.1.
std::uint64_t hash(const Signature& signature) {
  std::uint64_t words[sizeof(Signature) / 8];
  std::memcpy(words, &signature, sizeof words);
  std::uint64_t value = 0xcbf29ce484222325u;
  for (const std::uint64_t word : words) value = (value ^ word) * 0x100000001b3u;
  return value;
}

/// Which plan a collective follows: broadcast and reduce, where rank 0's share is no measure, follow their relatives.
std::uint32_t plan_kind(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: case Collective::reduce: return 0;
    case Collective::reduce_scatter: case Collective::all_to_all: return 1;
    default: return 2;
  }
}

bool feeds_policy(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce_scatter ||
         collective == Collective::all_gather_slices;
}

std::string describe(std::uint32_t rank, const Signature& signature) {
  char text[256];
  std::snprintf(text, sizeof text, "rank %u called %s with numel %llu, dtype %s, op %s, root %u, scale %g", rank,
                name_of(static_cast<Collective>(signature.collective)),
                static_cast<unsigned long long>(signature.numel), name_of(static_cast<DType>(signature.dtype)),
                signature.reduce_op == 0 ? "sum" : signature.reduce_op == 1 ? "max" : "min", signature.root,
                signature.scale);
  return text;
}

}  // namespace

const char* name_of(Collective collective) {
  constexpr const char* names[] = {"all_reduce", "reduce", "reduce_scatter", "all_gather_slices",
                                   "all_gather", "all_to_all", "broadcast", "barrier"};
  const auto index = static_cast<std::size_t>(collective);
  return index < std::size(names) ? names[index] : "?";
}

SharedMemoryGroup::SharedMemoryGroup(std::shared_ptr<Segment> segment, double timeout_seconds,
                                     std::function<bool()> interrupted)
    : segment_(segment), meeting_(segment, timeout_seconds, std::move(interrupted)), rank_(segment->rank()),
      size_(segment->size()) {}

bool SharedMemoryGroup::may_start() {
  if (failed_) return false;
  failed_ = true;
  if (segment_->is_inherited()) {
    failure_ = {true, "this group belongs to the parent process: a forked child must make its own", {}};
    return false;
  }
  if (meeting_.is_poisoned(failure_)) return false;
  failed_ = false;
  return true;
}

bool SharedMemoryGroup::run(const Signature& signature, std::uint64_t chunks, std::initializer_list<Stage> stages) {
  if (!may_start()) return false;
  const std::uint64_t nbytes = signature.numel * element_nbytes(static_cast<DType>(signature.dtype));
  const std::uint32_t kind = plan_kind(static_cast<Collective>(signature.collective));
  stream_ = StorePolicy::streams(segment_->header(), collectives_, kind, nbytes);
  if (rank_ == 0) policy_.plan_next(segment_->header(), collectives_);
  const bool timed = rank_ == 0 && nbytes >= StorePolicy::from_nbytes &&
                     feeds_policy(static_cast<Collective>(signature.collective));
  double busy_seconds = 0;
  if (!walk(signature, std::max<std::uint64_t>(chunks, 1), stages, timed ? &busy_seconds : nullptr)) return false;
  if (timed) policy_.record(kind, nbytes, stream_, busy_seconds);
  ++collectives_;
  return true;
}

bool SharedMemoryGroup::walk(const Signature& signature, std::uint64_t chunks, std::initializer_list<Stage> stages,
                             double* busy_seconds) {
  using Clock = std::chrono::steady_clock;
  const std::uint64_t first = meeting_.interval();
  const std::uint64_t intervals = chunks + stages.size() - 1;
  for (std::uint64_t interval = 0; interval < intervals; ++interval) {
    const Clock::time_point start = busy_seconds != nullptr ? Clock::now() : Clock::time_point();
    std::uint64_t age = 0;
    for (const Stage& stage : stages) {
      if (age <= interval && interval - age < chunks) stage(interval - age, first + interval - age);
      ++age;
    }
    if (busy_seconds != nullptr) *busy_seconds += std::chrono::duration<double>(Clock::now() - start).count();
    if (stream_) finish_streaming();
    if (interval + 1 < intervals && !meet(signature, interval == 0)) return false;
  }
  return true;
}

bool SharedMemoryGroup::meet(const Signature& signature, bool first) {
  if (first) {
    RankBox& own = segment_->box(rank_);
    own.signatures[collectives_ % 2] = signature;
    own.signature_hash[collectives_ % 2] = hash(signature);
  }
  if (!meeting_.pass(name_of(static_cast<Collective>(signature.collective)), failure_)) return !(failed_ = true);
  return !first || check_signatures(signature);
}

bool SharedMemoryGroup::check_signatures(const Signature& own) {
  const std::uint64_t expected = hash(own);
  for (std::uint32_t peer = 0; peer < size_; ++peer) {
    const RankBox& box = segment_->box(peer);
    if (box.signature_hash[collectives_ % 2] == expected) continue;
    const Signature& other = box.signatures[collectives_ % 2];
    failure_ = {true, "`tensor` differs between the ranks: " + describe(rank_, own) + ", but ", {}};
    failure_.reason += describe(peer, other);
    if (own.bounds_hash != other.bounds_hash) failure_.reason += "; `bounds` differ";
    failure_.reason += "; every rank must issue the same collectives in the same order";
    return !(failed_ = true);
  }
  return true;
}

bool SharedMemoryGroup::barrier() {
  const auto nothing = [](std::uint64_t, std::uint64_t) {};
  return run({static_cast<std::uint32_t>(Collective::barrier), 0, 0, 0, 0, 0, 1.0}, 1, {nothing, nothing});
}

void SharedMemoryGroup::abort(const std::string& reason) const { meeting_.poison(reason, {}); }

}  // namespace gradwire::shm

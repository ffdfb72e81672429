// What every collective shares: the signature that all ranks must agree on, and the walk through the intervals.
#include "cpu/shm_group.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

namespace gradwire::shm {
namespace {

const char* name_of(DType dtype) {
  constexpr const char* names[] = {"float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8", "int16"};
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

bool SharedMemoryGroup::run(const Signature& signature, std::uint64_t chunks, const std::vector<Stage>& stages) {
  if (failed_) return false;
  if (segment_->is_inherited()) {
    failed_ = true;
    failure_ = {true, "this group belongs to the parent process: a forked child must make its own", {}};
    return false;
  }
  if (meeting_.is_poisoned(failure_)) return !(failed_ = true);
  const std::uint64_t first = meeting_.interval();
  chunks = std::max<std::uint64_t>(chunks, 1);  // even an empty collective meets once
  const std::uint64_t intervals = chunks + stages.size() - 1;
  for (std::uint64_t interval = 0; interval < intervals; ++interval) {
    for (std::uint64_t stage = 0; stage < stages.size() && stage <= interval; ++stage) {
      const std::uint64_t chunk = interval - stage;
      if (chunk < chunks && stages[stage]) stages[stage](chunk, first + chunk);
    }
    if (interval + 1 < intervals && !meet(signature, interval == 0)) return false;
  }
  ++collectives_;
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
    failure_ = {true, "`tensor` differs between the ranks: " + describe(rank_, own) + ", but " + describe(peer, other), {}};
    if (own.bounds_hash != other.bounds_hash) failure_.reason += "; `bounds` differ";
    failure_.reason += "; every rank must issue the same collectives in the same order";
    return !(failed_ = true);
  }
  return true;
}

bool SharedMemoryGroup::barrier() {
  return run({static_cast<std::uint32_t>(Collective::barrier), 0, 0, 0, 0, 0, 1.0}, 1, {nullptr, nullptr});
}

void SharedMemoryGroup::abort(const std::string& reason) const { meeting_.poison(reason, {}); }

}  // namespace gradwire::shm

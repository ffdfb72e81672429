// The collectives of one rank over a shared-memory segment.
//
// A collective cuts its tensor into chunks and passes each through a few *stages* (write into my slot, reduce what the
// others wrote, gather the results). Time is cut into *intervals* by barriers: stage s of chunk j runs in interval
// j + s, so different stages of neighbouring chunks share an interval, and one barrier a chunk is enough:
//
//   interval      0         1          2          3         4
//   write      chunk 0   chunk 1    chunk 2
//   reduce               chunk 0    chunk 1    chunk 2
//   gather                          chunk 0    chunk 1   chunk 2
//
// A chunk stays in the slot of the interval it was written in (number mod 3). What was written in interval k is read
// in k + 1 and k + 2; the slot is written again in k + 3, which no rank enters before all have finished k + 2. The
// count of intervals runs on from collective to collective, so the argument holds across them as well.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "cpu/shm/kernels.h"
#include "cpu/shm/policy.h"
#include "cpu/shm/wait.h"

namespace gradwire::shm {

enum class Collective : std::uint32_t {
  all_reduce, reduce, reduce_scatter, all_gather_slices, all_gather, all_to_all, broadcast, barrier,
};
const char* name_of(Collective collective);

using Bounds = std::vector<std::uint64_t>;

/// A tensor's memory: `numel` elements of `dtype` from `data` on, at any alignment.
struct Memory {
  std::byte* data;
  std::uint64_t numel;
  DType dtype;
  std::uint64_t element() const { return element_nbytes(dtype); }
  std::uint64_t nbytes() const { return numel * element(); }
};

/// One rank's end. Not for concurrent use, except `abort`. Every collective returns false, for good, once one failed.
class SharedMemoryGroup {
 public:
  SharedMemoryGroup(std::shared_ptr<Segment> segment, double timeout_seconds, std::function<bool()> interrupted);

  bool all_reduce(Memory tensor, ReduceOp op, double scale);
  bool reduce(Memory tensor, std::uint32_t root, ReduceOp op, double scale);
  bool reduce_scatter(Memory tensor, const Bounds& bounds, double scale);
  bool all_gather_slices(Memory tensor, const Bounds& bounds);
  bool all_gather(Memory output, Memory source);
  bool all_to_all(Memory output, Memory source);
  bool broadcast(Memory tensor, std::uint32_t root);
  bool barrier();

  void abort(const std::string& reason) const;
  const Failure& failure() const { return failure_; }

 private:
  /// Refers to a callable (chunk, slot_interval): called in the interval that its chunk has reached, with the interval
  /// the chunk was written in. Like std::function, but never allocates; lives as long as the call that it is made in.
  class Stage {
   public:
    template <class Body>
    Stage(const Body& body)  // NOLINT: a lambda turns into a stage where it stands
        : body_(&body), call_([](const void* object, std::uint64_t chunk, std::uint64_t slot_interval) {
            (*static_cast<const Body*>(object))(chunk, slot_interval);
          }) {}
    void operator()(std::uint64_t chunk, std::uint64_t slot_interval) const { call_(body_, chunk, slot_interval); }

   private:
    const void* body_;
    void (*call_)(const void*, std::uint64_t, std::uint64_t);
  };

  bool run(const Signature& signature, std::uint64_t chunks, std::initializer_list<Stage> stages);
  bool may_start();
  bool walk(const Signature& signature, std::uint64_t chunks, std::initializer_list<Stage> stages,
            double* busy_seconds);
  bool meet(const Signature& signature, bool first);
  bool check_signatures(const Signature& own);
  bool reduce_at_once(Memory tensor, const Signature& signature, ReduceOp op, double scale);
  bool reduce_in_slices(Memory tensor, const Signature& signature, ReduceOp op, double scale, std::uint32_t root);

  std::shared_ptr<Segment> segment_;
  Meeting meeting_;
  std::uint32_t rank_;
  std::uint32_t size_;
  std::uint64_t collectives_ = 0;
  StorePolicy policy_;  // rank 0 alone feeds it
  bool stream_ = false;  // what it says about the collective in progress
  bool failed_ = false;
  Failure failure_;
};

}  // namespace gradwire::shm

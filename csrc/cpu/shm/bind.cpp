// The Python bindings: addresses and counts in, true or false out. One call a collective, with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>

#include "cpu/shm/group.h"

namespace nb = nanobind;

namespace gradwire::shm {
namespace {

/// Whether a signal's handler has raised. Handlers run in the main thread alone; any other must not want the GIL in a
/// wait: while Python is being finalized it would never come back from there.
bool signal_arrived() {
  if (syscall(SYS_gettid) != getpid()) return false;
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

Memory memory_at(std::uintptr_t address, std::uint64_t numel, std::uint32_t dtype) {
  return {reinterpret_cast<std::byte*>(address), numel, static_cast<DType>(dtype)};
}

/// Keeps the group alive while a collective runs, whatever another thread does to the Python object.
class Handle {
 public:
  Handle(int descriptor, std::uint32_t rank, std::uint32_t size, std::uint64_t block_nbytes,
         double timeout_seconds)
      : rank_(rank) {
    try {
      auto segment = std::make_shared<Segment>(descriptor, rank, size, block_nbytes);
      group_ = std::make_shared<SharedMemoryGroup>(std::move(segment), timeout_seconds, signal_arrived);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrnoWithFilename(PyExc_OSError, error.what());
      throw nb::python_error();
    }
  }

  template <class Body>
  bool run(Body body) {
    const std::shared_ptr<SharedMemoryGroup> group = group_;
    if (!group) throw std::runtime_error("the group is closed: make a new one");
    bool passed;
    {
      const nb::gil_scoped_release no_gil;
      passed = body(*group);
    }
    if (PyErr_Occurred()) throw nb::python_error();  // what a signal handler raised: KeyboardInterrupt
    return passed;
  }

  void abort(const std::string& reason) const {
    if (group_) group_->abort(reason);
  }

  /// A thread that is in a collective keeps the group; it is woken, and so are those that wait for this rank.
  void close() {
    if (group_.use_count() > 1) group_->abort("rank " + std::to_string(rank_) + " has closed the group in a collective");
    group_.reset();
  }

  std::tuple<bool, std::string, std::vector<std::uint32_t>> failure() const {
    if (!group_) return {false, "the group is closed", {}};
    const Failure& failure = group_->failure();
    return {failure.mismatch, failure.reason, failure.missing};
  }

 private:
  std::uint32_t rank_;
  std::shared_ptr<SharedMemoryGroup> group_;  // its count of owners changes under the GIL alone
};

}  // namespace
}  // namespace gradwire::shm

void bind_shm(nb::module_& m) {
  using namespace gradwire::shm;
  using Address = std::uintptr_t;
  m.def("shm_segment_nbytes", &segment_nbytes, nb::arg("size"), nb::arg("block_nbytes"));
  m.attr("SHM_MAX_RANKS") = max_ranks;
  nb::class_<Handle>(m, "SharedMemoryGroup")
      .def(nb::init<int, std::uint32_t, std::uint32_t, std::uint64_t, double>(), nb::arg("descriptor"),
           nb::arg("rank"), nb::arg("size"), nb::arg("block_nbytes"), nb::arg("timeout_seconds"))
      .def("all_reduce",
           [](Handle& handle, Address data, std::uint64_t numel, std::uint32_t dtype, std::uint32_t op, double scale) {
             return handle.run([&](SharedMemoryGroup& group) {
               return group.all_reduce(memory_at(data, numel, dtype), static_cast<ReduceOp>(op), scale);
             });
           })
      .def("reduce",
           [](Handle& handle, Address data, std::uint64_t numel, std::uint32_t dtype, std::uint32_t root,
              std::uint32_t op, double scale) {
             return handle.run([&](SharedMemoryGroup& group) {
               return group.reduce(memory_at(data, numel, dtype), root, static_cast<ReduceOp>(op), scale);
             });
           })
      .def("reduce_scatter",
           [](Handle& handle, Address data, std::uint64_t numel, std::uint32_t dtype, const Bounds& bounds,
              double scale) {
             return handle.run([&](SharedMemoryGroup& group) {
               return group.reduce_scatter(memory_at(data, numel, dtype), bounds, scale);
             });
           })
      .def("all_gather_slices",
           [](Handle& handle, Address data, std::uint64_t numel, std::uint32_t dtype, const Bounds& bounds) {
             return handle.run([&](SharedMemoryGroup& group) {
               return group.all_gather_slices(memory_at(data, numel, dtype), bounds);
             });
           })
      .def("all_gather",
           [](Handle& handle, Address output, Address source, std::uint64_t numel, std::uint32_t dtype) {
             return handle.run([&](SharedMemoryGroup& group) {
               return group.all_gather(memory_at(output, numel, dtype), memory_at(source, numel, dtype));
             });
           })
      .def("all_to_all",
           [](Handle& handle, Address output, Address source, std::uint64_t numel, std::uint32_t dtype) {
             return handle.run([&](SharedMemoryGroup& group) {
               return group.all_to_all(memory_at(output, numel, dtype), memory_at(source, numel, dtype));
             });
           })
      .def("broadcast",
           [](Handle& handle, Address data, std::uint64_t numel, std::uint32_t dtype, std::uint32_t root) {
             return handle.run([&](SharedMemoryGroup& group) {
               return group.broadcast(memory_at(data, numel, dtype), root);
             });
           })
      .def("barrier",
           [](Handle& handle) { return handle.run([](SharedMemoryGroup& group) { return group.barrier(); }); })
      .def("abort", &Handle::abort, nb::arg("reason"))
      .def("close", &Handle::close)
      .def("failure", &Handle::failure);
}

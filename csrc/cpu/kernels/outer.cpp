// What an exchange of parameters between units does to them, each in one pass over memory: see comms/outer/fragments.py.
//
// Bytes an element, read + written: set_out 8 + 8, take_up 16 + 8. In operators of torch it is 12 + 8 and 24 + 12.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

// A parameter: its address, and how many elements it has. They follow each other in the flat tensors.
using Run = std::pair<uintptr_t, size_t>;

float* floats(uintptr_t at) { return reinterpret_cast<float*>(at); }

// sent = parameter; flat = anchor - parameter. No two of them overlap.
void set_out(const float* __restrict parameter, const float* __restrict anchor, float* __restrict sent,
             float* __restrict flat, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const float now = parameter[i];
    sent[i] = now;
    flat[i] = anchor[i] - now;
  }
}

// anchor -= mean; parameter = (parameter - sent) + anchor. No two of them overlap.
void take_up(float* __restrict parameter, const float* __restrict mean, const float* __restrict sent,
             float* __restrict anchor, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const float average = anchor[i] - mean[i];
    anchor[i] = average;
    parameter[i] = (parameter[i] - sent[i]) + average;
  }
}

void outer_set_out(const std::vector<Run>& parameters, uintptr_t anchor, uintptr_t sent, uintptr_t flat) {
  size_t start = 0;
  for (const auto& [address, numel] : parameters) {
    set_out(floats(address), floats(anchor) + start, floats(sent) + start, floats(flat) + start, numel);
    start += numel;
  }
}

void outer_take_up(const std::vector<Run>& parameters, uintptr_t mean, uintptr_t sent, uintptr_t anchor) {
  size_t start = 0;
  for (const auto& [address, numel] : parameters) {
    take_up(floats(address), floats(mean) + start, floats(sent) + start, floats(anchor) + start, numel);
    start += numel;
  }
}

// Whether no float32 is an infinity or a NaN: one pass, in runs whose verdict is kept in registers.
bool all_finite(uintptr_t values, size_t numel) {
  constexpr size_t kRun = 4096;
  constexpr uint32_t exponent = 0x7f800000u;
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(values);
  for (size_t start = 0; start < numel; start += kRun) {
    const size_t stop = start + kRun < numel ? start + kRun : numel;
    uint32_t found = 0;
    for (size_t i = start; i < stop; ++i) found |= (bits[i] & exponent) == exponent ? 1u : 0u;
    if (found) return false;
  }
  return true;
}

}  // namespace

void bind_outer(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("all_finite", &all_finite, unlocked);
  m.def("outer_set_out", &outer_set_out, unlocked);
  m.def("outer_take_up", &outer_take_up, unlocked);
}

// Deep gradient compression: momentum correction, the k largest totals, and their removal from the state.
//
// The selection is exact: the k largest magnitudes, the lower index first among equals, whatever the sample was. A
// threshold from a sample of the new totals only makes one pass over memory enough: it is set a little too low on
// purpose, what reaches it is collected in the pass, and the k largest of those are chosen. If the sample misled
// (fewer than k reach it, or far more), a radix select over the new totals finds the exact threshold.
// Magnitudes are compared as integers, in which order inf and NaN come first: a bad gradient is always sent.
// Bytes an element, read + written: 12 + 8 (gradient, velocity, total; velocity, total), and 8 for each selected one.
// Source: Lin et al., Deep Gradient Compression, ICLR 2018, algorithm 4 and sections 3.1 to 3.3.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "common/cast_formula.h"
#include "cpu/intrinsics.h"
#include "cpu/isa.h"
#include "cpu/stream.h"

namespace {

using namespace gradwire;

struct State {
  const float *gradient, *velocity, *total;
  float *velocity_out, *total_out;
  size_t numel;
};

struct Rule {
  float momentum, scale;
  bool nesterov;
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "sixteen marks are stored as one little-endian word");

constexpr uint32_t kOctave = uint32_t{1} << 23;  // from a magnitude's bits to those of its double

inline uint32_t magnitude_key(float x) { return bits_of_float(x) & 0x7fffffffu; }

// What the selection is ordered by: the magnitude, and of equals the lower index is the larger rank.
inline uint64_t rank_of(float x, size_t index) {
  return uint64_t{magnitude_key(x)} << 32 | ~static_cast<uint32_t>(index);
}

inline int32_t index_of(uint64_t rank) { return static_cast<int32_t>(~static_cast<uint32_t>(rank)); }

#define GRADWIRE_LOOPS "cpu/kernels/dgc_loops.h"
#include "cpu/foreach_isa.h"

constexpr size_t kSampleLines = 1024;  // 16384 elements: to read and order them is 5 % of the pass over 25 MiB
constexpr size_t kFewestLines = 32;    // of a small parameter, where a thirty-second of all would be too small a sample

uint32_t nth_largest(std::vector<uint32_t>& keys, size_t n) {
  const auto place = keys.begin() + static_cast<ptrdiff_t>(n);
  if (n < keys.size() / 64) std::partial_sort(keys.begin(), place + 1, keys.end(), std::greater<>());  // a small heap
  else std::nth_element(keys.begin(), place, keys.end(), std::greater<>());
  return *place;
}

// A magnitude that a few more than k elements should reach: four standard deviations of the sample's count above k.
uint32_t sampled_threshold(const State& state, const Rule& rule, size_t k) {
  const size_t all = state.numel / 16, lines = std::min({kSampleLines, all, std::max(kFewestLines, all / 32)});
  if (lines == 0) return 0;
  std::vector<uint32_t> keys(16 * lines);
  GRADWIRE_DISPATCH(sample, state, rule, lines, keys.data());
  const double expected = static_cast<double>(k) * static_cast<double>(keys.size()) / static_cast<double>(state.numel);
  const size_t rank = static_cast<size_t>(expected + 4 * std::sqrt(expected) + 8);
  return rank < keys.size() ? nth_largest(keys, rank) : 0;
}

// The k-th largest magnitude of all, and how many of the elements equal to it belong to the k largest.
struct Cut {
  uint32_t key;
  size_t equals;
};

Cut radix_select(const float* values, size_t numel, size_t k) {
  uint32_t prefix = 0, mask = 0;
  size_t wanted = k;
  for (int shift : {20, 10, 0}) {
    const uint32_t bins = shift == 20 ? 2048 : 1024;
    std::vector<size_t> counts(bins, 0);
    for (size_t i = 0; i < numel; ++i) {
      const uint32_t key = magnitude_key(values[i]);
      if ((key & mask) == prefix) ++counts[key >> shift & (bins - 1)];
    }
    uint32_t bin = bins - 1;
    while (counts[bin] < wanted) wanted -= counts[bin--];
    prefix |= bin << shift;
    mask |= (bins - 1) << shift;
  }
  return {prefix, wanted};
}

void select_all(const float* values, size_t numel, size_t k, int32_t* indices) {
  Cut cut = radix_select(values, numel, k);
  for (size_t i = 0, count = 0; i < numel && count < k; ++i) {
    const uint32_t key = magnitude_key(values[i]);
    if (key > cut.key || (key == cut.key && cut.equals > 0)) {
      if (key == cut.key) --cut.equals;
      indices[count++] = static_cast<int32_t>(i);
    }
  }
}

// The k-th largest of the candidates, none of which is below `key`. Their magnitudes lie close above it, so a count of
// them in 2048 equal steps of one octave narrows the search to the few in one step. Selecting 6553 among 16 thousand so
// took 0.05 ms, with std::nth_element on all of them 0.14 (one run beside other programs).
uint64_t kth_largest(const std::vector<uint64_t>& found, size_t count, size_t k, uint32_t key) {
  constexpr uint32_t kSteps = 2048;
  const auto step_of = [key](uint64_t rank) {
    return std::min((static_cast<uint32_t>(rank >> 32) - key) / (kOctave / kSteps), kSteps - 1);
  };
  uint32_t counts[kSteps] = {}, step = kSteps - 1;
  for (size_t i = 0; i < count; ++i) ++counts[step_of(found[i])];
  for (; counts[step] < k; --step) k -= counts[step];
  std::vector<uint64_t> few;
  for (size_t i = 0; i < count; ++i)
    if (step_of(found[i]) == step) few.push_back(found[i]);
  const auto place = few.begin() + static_cast<ptrdiff_t>(k - 1);
  std::nth_element(few.begin(), place, few.end(), std::greater<>());
  return *place;
}

// The k largest of the candidates, in the order of their indices; all of the k largest are among the candidates.
// Candidates below the cut are overwritten by those that follow, without a branch that nothing could predict.
void select_among(std::vector<uint64_t>& found, size_t count, size_t k, uint32_t key, int32_t* indices) {
  const uint64_t cut = kth_largest(found, count, k, key);
  for (size_t i = 0, kept = 0; i < count; ++i) {
    const uint64_t rank = found[i];
    found[kept] = rank;
    kept += rank >= cut;
  }
  for (size_t i = 0; i < k; ++i) indices[i] = index_of(found[i]);
}

// Moves the selected totals out of the state. They lie far apart, so each is prefetched well before it is needed.
void take(const State& state, const int32_t* indices, size_t k, float* values) {
  constexpr size_t kAhead = 32;
  for (size_t i = 0; i < k; ++i) {
    if (i + kAhead < k) {
      __builtin_prefetch(state.total_out + indices[i + kAhead], 1);
      __builtin_prefetch(state.velocity_out + indices[i + kAhead], 1);
    }
    values[i] = state.total_out[indices[i]];
    state.total_out[indices[i]] = state.velocity_out[indices[i]] = 0.0f;
  }
}

float* floats(uintptr_t at) { return reinterpret_cast<float*>(at); }

void dgc_step(uintptr_t gradient, uintptr_t velocity, uintptr_t total, uintptr_t velocity_out, uintptr_t total_out,
              size_t numel, float momentum, float scale, bool nesterov, size_t k, uintptr_t indices_out,
              uintptr_t values_out) {
  if (k < 1 || k > numel) throw std::invalid_argument("`k` must be between 1 and `numel`");
  if (numel > size_t{INT32_MAX}) throw std::invalid_argument("`numel` must fit in 31 bits");
  const State state{floats(gradient), floats(velocity), floats(total), floats(velocity_out), floats(total_out), numel};
  const Rule rule{momentum, scale, nesterov};
  const uint32_t key = sampled_threshold(state, rule, k);
  std::vector<uint64_t> found(std::min(numel, 2 * k + 8192));
  const size_t count = GRADWIRE_DISPATCH(advance, state, rule, key, found.data(), found.size());
  int32_t* indices = reinterpret_cast<int32_t*>(indices_out);
  if (count >= k && count <= found.size()) select_among(found, count, k, key, indices);
  else select_all(state.total_out, numel, k, indices);
  take(state, indices, k, floats(values_out));
}

void scatter_add(uintptr_t indices, uintptr_t values, size_t count, uintptr_t target, size_t numel) {
  const int32_t* places = reinterpret_cast<const int32_t*>(indices);
  for (size_t i = 0; i < count; ++i)
    if (places[i] < 0 || static_cast<size_t>(places[i]) >= numel)
      throw std::out_of_range(
          "`indices` reach outside the target: the payload is damaged or the ranks' layouts differ");
  for (size_t i = 0; i < count; ++i) floats(target)[places[i]] += floats(values)[i];
}

}  // namespace

void bind_dgc(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("dgc_step", &dgc_step, unlocked);
  m.def("scatter_add", &scatter_add, unlocked);
}

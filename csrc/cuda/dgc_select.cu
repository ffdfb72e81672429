// Deep gradient compression, the selection: exactly the k largest magnitudes, the lower index first among equals.
//
// Works on the elements that dgc_step.cu marked, a few more than k; if fewer than k were marked, on all of them. Three
// launches of dgc_radix find the k-th largest key, dgc_count what each tile contributes, dgc_write stores the chosen
// ones in the order of their indices: places come from sums of counts, never from the order in which CTAs finish, so
// the payload is the same bits every time. Integer atomics alone are used, whose order does not matter. All parameters
// of a bucket share the launches, each with CTAs of its own. Bytes an element, read: 1/8 in each of the five launches,
// and 32 for each marked one. Nothing waits for the host. The twin of the second half of csrc/cpu/kernels/dgc.cpp.
#include "formats.cuh"
#include "marks.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
static_assert(1024 % kThreads == 0 && kThreads / 32 <= kMostWarps, "pick_bin and exclusive_sum rely on it");

// Arguments.
struct TileCounts {
  uint32_t greater, equal;  // in the tile; after the sums, in all tiles before it
};

__device__ inline bool misled(const Selection* selection, int64_t k) { return selection->candidates < k; }

// Kernels.
extern "C" __global__ void __launch_bounds__(kThreads)
    dgc_radix(const Parameter* table, int64_t parameters, const float* total, const uint4* marks, int32_t shift,
              Selection* selections) {
  __shared__ uint32_t counts[kBins], sums[kMostWarps], ticket;
  const Part part = part_of_block(table, parameters);
  const int64_t numel = part.parameter.numel;
  Selection* selection = selections + part.index;
  total += part.parameter.start, marks += part.parameter.tile * kWarp;
  const uint32_t prefix = selection->prefix, wanted = selection->wanted, bins = bins_of(shift);
  const bool everything = misled(selection, part.parameter.k);
  for (unsigned bin = threadIdx.x; bin < bins; bin += kThreads) counts[bin] = 0;
  __syncthreads();
  for (int64_t tile = part.warp; tile < tile_count(numel); tile += part.warps) {
    const Marks found = load_marks(marks, tile, everything);
    for (unsigned busy = found.busy; busy; busy &= busy - 1) {
      const Quad quad = load_quad(found, total, tile, __ffs(static_cast<int>(busy)) - 1, numel, everything);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (quad.marked[c] && (quad.key[c] & digits_above(shift)) == prefix)
          atomicAdd(&counts[quad.key[c] >> shift & (bins - 1)], 1u);
    }
  }
  __syncthreads();
  for (unsigned bin = threadIdx.x; bin < bins; bin += kThreads)
    if (counts[bin]) atomicAdd(&selection->counts[bin], counts[bin]);
  if (!last_block(&selection->tickets, part.parameter.blocks, &ticket)) return;
  pick_bin(selection->counts, shift, prefix, wanted, sums, &selection->prefix, &selection->wanted);
  __syncthreads();
  for (unsigned bin = threadIdx.x; bin < kBins; bin += kThreads) selection->counts[bin] = 0;
  if (threadIdx.x == 0) selection->tickets = 0;
}

// Turns counts of tiles into sums over the tiles before each; one CTA, each thread a run of tiles.
__device__ inline void sum_tiles(volatile TileCounts* tiles, int64_t count, uint32_t* sums) {
  const int64_t per_thread = (count + kThreads - 1) / kThreads, first = threadIdx.x * per_thread;
  const int64_t stop = first + per_thread < count ? first + per_thread : count;
  uint32_t greater = 0, equal = 0;
  for (int64_t tile = first; tile < stop; ++tile) greater += tiles[tile].greater, equal += tiles[tile].equal;
  greater = exclusive_sum(greater, sums);
  equal = exclusive_sum(equal, sums);
  for (int64_t tile = first; tile < stop; ++tile) {
    const uint32_t own_greater = tiles[tile].greater, own_equal = tiles[tile].equal;
    tiles[tile].greater = greater, tiles[tile].equal = equal;
    greater += own_greater, equal += own_equal;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    dgc_count(const Parameter* table, int64_t parameters, const float* total, const uint4* marks, TileCounts* tiles,
              Selection* selections) {
  __shared__ uint32_t sums[kMostWarps], ticket;
  const Part part = part_of_block(table, parameters);
  const int64_t numel = part.parameter.numel;
  Selection* selection = selections + part.index;
  total += part.parameter.start, marks += part.parameter.tile * kWarp, tiles += part.parameter.tile;
  const uint32_t cut = selection->prefix;
  const bool everything = misled(selection, part.parameter.k);
  for (int64_t tile = part.warp; tile < tile_count(numel); tile += part.warps) {
    const Marks found = load_marks(marks, tile, everything);
    uint32_t greater = 0, equal = 0;
    for (unsigned busy = found.busy; busy; busy &= busy - 1) {
      const Quad quad = load_quad(found, total, tile, __ffs(static_cast<int>(busy)) - 1, numel, everything);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        greater += static_cast<uint32_t>(__popc(__ballot_sync(kAllLanes, quad.marked[c] && quad.key[c] > cut)));
        equal += static_cast<uint32_t>(__popc(__ballot_sync(kAllLanes, quad.marked[c] && quad.key[c] == cut)));
      }
    }
    if (lane_index() == 0) tiles[tile].greater = greater, tiles[tile].equal = equal;
  }
  if (last_block(&selection->tickets, part.parameter.blocks, &ticket)) sum_tiles(tiles, tile_count(numel), sums);
}

// Writes the chosen elements and sets them to zero in velocity and total.
extern "C" __global__ void __launch_bounds__(kThreads, 4)  // without the 4, ptxas aims for more CTAs and spills
    dgc_write(const Parameter* table, int64_t parameters, float* velocity, float* total, const uint4* marks,
              const TileCounts* tiles, const Selection* selections, int32_t* indices, float* values) {
  const Part part = part_of_block(table, parameters);
  const int64_t numel = part.parameter.numel, start = part.parameter.start;
  const Selection* selection = selections + part.index;
  total += start, velocity += start, marks += part.parameter.tile * kWarp, tiles += part.parameter.tile;
  indices += part.parameter.chosen, values += part.parameter.chosen;
  const uint32_t cut = selection->prefix, equals = selection->wanted;
  const bool everything = misled(selection, part.parameter.k);
  for (int64_t tile = part.warp; tile < tile_count(numel); tile += part.warps) {
    const Marks found = load_marks(marks, tile, everything);
    uint32_t greater_before = tiles[tile].greater, equal_before = tiles[tile].equal;
    for (unsigned busy = found.busy; busy; busy &= busy - 1) {
      const Quad quad = load_quad(found, total, tile, __ffs(static_cast<int>(busy)) - 1, numel, everything);
      bool greater[4], equal[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        greater[c] = quad.marked[c] && quad.key[c] > cut;
        equal[c] = quad.marked[c] && quad.key[c] == cut;
      }
      const Ranked greaters = rank_flags(greater), equals_here = rank_flags(equal);
      uint32_t above = greater_before + greaters.before, level = equal_before + equals_here.before;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (greater[c] || (equal[c] && level < equals)) {
          const uint32_t place = above + (level < equals ? level : equals);
          indices[place] = static_cast<int32_t>(start + quad.at + c);
          values[place] = total[quad.at + c];
          total[quad.at + c] = velocity[quad.at + c] = 0.0f;
        }
        above += greater[c], level += equal[c];
      }
      greater_before += greaters.all, equal_before += equals_here.all;
    }
  }
}

// A payload: `count` ascending int32 indices at any address, and their values behind them.
struct SparseRow {
  const uint8_t* indices;
  int64_t count;

  template <bool kAligned>
  __device__ int32_t index(int64_t i) const {
    if (kAligned) return reinterpret_cast<const int32_t*>(indices)[i];
    return static_cast<int32_t>(load_word<uint32_t>(indices + 4 * i));
  }

  template <bool kAligned>
  __device__ float value(int64_t i, int32_t format) const {
    const uint8_t *values = indices + 4 * count, *at = values + (format == 0 ? 4 : 2) * i;
    if (format == 0) return kAligned ? *reinterpret_cast<const float*>(at) : load_float(at);
    const uint16_t half = kAligned ? *reinterpret_cast<const uint16_t*>(at) : load_word<uint16_t>(at);
    return format == 1 ? Float16::widen(half) : BFloat16::widen(half);
  }

  // The place of the first index that is at least `least_index`; a whole warp calls it. Each round looks at 32 indices
  // at once and leaves a 32nd of the row, so that four wait for memory where halving has sixteen do so.
  __device__ int64_t find(int32_t least_index) const {
    uint32_t low = 0, high = static_cast<uint32_t>(count);
    while (low < high) {
      const uint32_t step = (high - low) / kWarp + 1, at = low + (lane_index() + 1) * step - 1;
      const bool before = at < high && index<false>(at) < least_index;
      const uint32_t passed = static_cast<uint32_t>(__popc(__ballot_sync(kAllLanes, before)));
      low += passed * step;
      high = low + step - 1 < high ? low + step - 1 : high;
    }
    return low;
  }
};

// Adds what a payload has for a tile to its sums, from the payload's place `first` on.
template <bool kAligned>
__device__ inline void add_row(const SparseRow& row, int64_t first, int32_t format, int64_t start, int64_t stop,
                               float* sums) {
  for (int64_t i = first + threadIdx.x; i < row.count; i += kThreads) {
    const int64_t index = row.index<kAligned>(i);
    if (index >= stop) return;
    if (index >= start) sums[index - start] += row.value<kAligned>(i, format);
  }
}

// target = the sum of all workers' payloads. A CTA owns the tile of the target that it sums up in shared memory, and
// takes the payloads in the order of their ranks: so every rank gets the same bits, without an atomic addition, and each
// element of the target is written once. Its warps find where the payloads' parts for the tile begin, a payload each;
// where they end shows while they are read. An index outside the target makes target[0] NaN, as below. Bytes: 4 an
// element written, 4 + the width of a value for each payload's value read, and the lines that the searches touch.
extern "C" __global__ void __launch_bounds__(kThreads)
    dgc_sum(const uint8_t* rows, int64_t stride, int64_t workers, int64_t count, int32_t format, float* target,
            int64_t numel) {
  __shared__ float sums[kTile];
  __shared__ int64_t firsts[kWarps];
  const int64_t warp = threadIdx.x / kWarp;
  for (int64_t tile = blockIdx.x; tile < tile_count(numel); tile += gridDim.x) {
    const int64_t start = tile * kTile, stop = least(start + kTile, numel);
#pragma unroll
    for (int i = 0; i < kTile; i += kThreads) sums[i + threadIdx.x] = 0.0f;
    bool outside = false;
    for (int64_t w = 0; w < workers; ++w) {
      if (w % kWarps == 0) {
        if (w + warp < workers) {
          const SparseRow row = {rows + (w + warp) * stride, count};
          const int64_t first = row.find(static_cast<int32_t>(start));
          if (lane_index() == 0) firsts[warp] = first;
        }
        __syncthreads();
      }
      const SparseRow row = {rows + w * stride, count};
      if (tile == 0 && count)
        outside = outside || row.index<false>(0) < 0 || row.index<false>(count - 1) >= numel;
      const int64_t first = firsts[w % kWarps];
      if (aligned<uint32_t>(row.indices)) add_row<true>(row, first, format, start, stop, sums);
      else add_row<false>(row, first, format, start, stop, sums);
      __syncthreads();
    }
    for (int64_t i = 4 * threadIdx.x; i < stop - start; i += 4 * kThreads) {
      const float head = outside && i == 0 ? float_of_bits(0x7fc00000u) : sums[i];
      store4(target + start + i, make_float4(head, sums[i + 1], sums[i + 2], sums[i + 3]), stop - start - i);
    }
    __syncthreads();
  }
}

// target[indices[i]] += values[i]. An index outside the target cannot be reported without waiting for the device: it
// makes the whole sum NaN instead, which the step's check of finiteness sees. The addition is a compare-and-swap
// because atomicAdd on floats turns subnormal numbers into zero. 8 + 8 bytes a value, read + written, and sectors.
extern "C" __global__ void __launch_bounds__(kThreads)
    dgc_scatter_add(const int32_t* indices, const float* values, int64_t count, float* target, int64_t numel) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    const int64_t place = indices[i];
    const bool inside = place >= 0 && place < numel;
    uint32_t* at = reinterpret_cast<uint32_t*>(target) + (inside ? place : 0);
    const float value = inside ? values[i] : float_of_bits(0x7fc00000u);
    uint32_t seen = __ldcg(at), assumed;  // from where atomics act: a line of L1 may be old, and another may write now
    do {
      assumed = seen;
      seen = atomicCAS(at, assumed, bits_of_float(float_of_bits(assumed) + value));
    } while (seen != assumed);
  }
}

}  // namespace gradwire

// Deep gradient compression, the pass over memory: a threshold from a sample, then momentum correction and marks.
//
// Bytes an element, read + written: 12 + 8 (gradient, velocity, total; velocity, total), 1/8 for the marks. Two
// launches for all parameters of a bucket: sample (a CTA a parameter), advance. The selection itself is in
// dgc_select.cu; nothing here waits for the host. The twin of the first half of csrc/cpu/kernels/dgc.cpp.
// Source: Lin et al., Deep Gradient Compression, ICLR 2018, algorithm 4 and sections 3.1 to 3.3.
#include "marks.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
constexpr int kSampleThreads = 1024;
constexpr int kSamples = 16;  // of each thread: 1024 lines of 16 elements, as on the CPU
constexpr int kLine = 16;
constexpr int kGroups = 8;    // of a tile that a warp handles: at 25 MiB a whole tile for each would leave warps idle
constexpr int kShares = static_cast<int>(kWarp) / kGroups;

// Arguments.
struct Rule {
  float momentum, scale;  // the scale is read from the device where it was computed there: the host need not wait
  bool nesterov;
};

struct Advanced {
  float velocity, total;
};

// Heavy ball: u = m u + g, v = v + u. Nesterov: u = m (u + g), v = v + u + g.
__device__ inline Advanced advance(float gradient, float velocity, float total, const Rule& rule) {
  const float g = gradient * rule.scale;
  if (!rule.nesterov) {
    const float next = rule.momentum * velocity + g;
    return {next, total + next};
  }
  const float next = rule.momentum * (velocity + g);
  return {next, total + next + g};
}

// Kernels.
// Finds the `rank`-th largest magnitude of the sample; with rank 0 every element will be marked. A CTA a parameter.
extern "C" __global__ void __launch_bounds__(kSampleThreads)
    dgc_sample(const Parameter* table, const float* gradient, const float* velocity, const float* total, float momentum,
               float scale, const float* scales, int32_t nesterov, Selection* selections) {
  __shared__ uint32_t counts[kBins], sums[kMostWarps], found[2];
  const Rule rule = {momentum, scales ? scales[blockIdx.x] : scale, nesterov != 0};
  const Parameter parameter = table[blockIdx.x];
  const int64_t lines = parameter.lines, rank = parameter.rank;
  Selection* selection = selections + blockIdx.x;
  for (unsigned bin = threadIdx.x; bin < kBins; bin += kSampleThreads) selection->counts[bin] = 0;
  uint32_t keys[kSamples];
  const int64_t stride = lines ? parameter.numel / kLine / lines * kLine : 0;
#pragma unroll
  for (int i = 0; i < kSamples; ++i) {
    const int64_t sample = i * kSampleThreads + threadIdx.x, line = sample / kLine;
    const int64_t at = parameter.start + line * stride + sample % kLine;
    keys[i] = rank && line < lines ? magnitude_key(advance(gradient[at], velocity[at], total[at], rule).total) : 0;
  }
  if (threadIdx.x == 0) found[0] = 0, found[1] = static_cast<uint32_t>(rank);
  for (int shift = 20; rank && shift >= 0; shift -= 10) {
    for (unsigned bin = threadIdx.x; bin < kBins; bin += kSampleThreads) counts[bin] = 0;
    __syncthreads();
    const uint32_t prefix = found[0], wanted = found[1];
#pragma unroll
    for (int i = 0; i < kSamples; ++i)
      if ((keys[i] & digits_above(shift)) == prefix) atomicAdd(&counts[keys[i] >> shift & (bins_of(shift) - 1)], 1u);
    __syncthreads();
    pick_bin(counts, shift, prefix, wanted, sums, &found[0], &found[1]);
    __syncthreads();
  }
  if (threadIdx.x) return;
  selection->threshold = rank ? found[0] : 0;
  selection->candidates = selection->prefix = selection->tickets = 0;
  selection->wanted = static_cast<uint32_t>(parameter.k);
}

// One pass over everything: new velocity and total, and a mark where the total's magnitude reaches the threshold.
extern "C" __global__ void __launch_bounds__(kThreads, 3)  // without the 3, ptxas aims for more CTAs and spills
    dgc_advance(const Parameter* table, int64_t parameters, int64_t tiles, const float* gradient, const float* velocity,
                const float* total, float* velocity_out, float* total_out, float momentum, float scale,
                const float* scales, int32_t nesterov, uint4* marks, Selection* selections) {
  const int lane = static_cast<int>(lane_index());
  for (int64_t share = warp_index(); share < kShares * tiles; share += warp_count()) {
    const int64_t tile = share / kShares, index = find(table, parameters, &Parameter::tile, tile);
    const Rule rule = {momentum, scales ? scales[index] : scale, nesterov != 0};
    const uint32_t threshold = selections[index].threshold;
    const int64_t start = table[index].start + (tile - table[index].tile) * kTile;
    const int64_t stop = table[index].start + table[index].numel;
    const int first = static_cast<int>(share % kShares) * kGroups;
    uint4 mine = make_uint4(0, 0, 0, 0);
    uint32_t marked = 0;
#pragma unroll 4
    for (int group = first; group < first + kGroups; ++group) {
      const int64_t at = start + group * kGroup + 4 * lane, count = stop - at;
      const float4 g = load4(gradient + at, count), u = load4(velocity + at, count), v = load4(total + at, count);
      const Advanced next[4] = {advance(g.x, u.x, v.x, rule), advance(g.y, u.y, v.y, rule),
                                advance(g.z, u.z, v.z, rule), advance(g.w, u.w, v.w, rule)};
      store4(velocity_out + at, make_float4(next[0].velocity, next[1].velocity, next[2].velocity, next[3].velocity),
             count);
      store4(total_out + at, make_float4(next[0].total, next[1].total, next[2].total, next[3].total), count);
      uint32_t words[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        words[c] = __ballot_sync(kAllLanes, c < count && magnitude_key(next[c].total) >= threshold);
        marked += static_cast<uint32_t>(__popc(words[c]));
      }
      if (lane == group) mine = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (lane / kGroups * kGroups == first) marks[tile * kWarp + lane] = mine;
    if (lane == 0 && marked) atomicAdd(&selections[index].candidates, marked);
  }
}

}  // namespace gradwire

// The marks that DGC's first pass leaves: which elements may be among the k largest, one bit each, and their order.
//
// A tile is 4096 elements and a warp's work: 32 groups of 128. In a group, lane l holds elements 4 l + (0..3), and
// the mark of element 4 l + c is bit l of word c: what four ballots give. Lane g keeps the words of group g.
#pragma once
#include "radix.cuh"

namespace gradwire {

constexpr int64_t kGroup = 128;
constexpr int64_t kTile = kWarp * kGroup;

__device__ inline int64_t tile_count(int64_t numel) { return (numel + kTile - 1) / kTile; }

// A run of one parameter in the shard. The table of them lives on the device and is uploaded once for a layout; a
// parameter's k largest are selected independently; its tiles, CTAs and places follow those of the parameters before
// it.
struct Parameter {
  int64_t start, numel;   // of the run in the shard
  int64_t chosen, k;      // its first place in indices and values, and how many it has
  int64_t lines, rank;    // of its sample; see dgc_sample
  int64_t tile;           // its first one
  int64_t block, blocks;  // its first CTA, and how many work on its selection
};

// The last parameter whose `first` is at most `place`; none is empty.
__device__ inline int64_t find(const Parameter* table, int64_t count, int64_t Parameter::* first, int64_t place) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (table[middle].*first <= place) low = middle;
    else high = middle;
  }
  return low;
}

// A CTA's part in the selection of one parameter: tiles `warp`, `warp + warps`, ... of it.
struct Part {
  Parameter parameter;
  int64_t index, warp, warps;
};

__device__ inline Part part_of_block(const Parameter* table, int64_t count) {
  const int64_t index = find(table, count, &Parameter::block, blockIdx.x), warps = blockDim.x / kWarp;
  const Parameter parameter = table[index];
  return {parameter, index, (blockIdx.x - parameter.block) * warps + threadIdx.x / kWarp, parameter.blocks * warps};
}

struct Marks {
  uint4 words;    // of group `lane`
  unsigned busy;  // groups that have any mark
};

// If too few were marked (the sample misled), every element counts as marked.
__device__ inline Marks load_marks(const uint4* marks, int64_t tile, bool everything) {
  const uint4 words = marks[tile * kWarp + lane_index()];
  const unsigned busy = __ballot_sync(kAllLanes, (words.x | words.y | words.z | words.w) != 0);
  return {words, everything ? kAllLanes : busy};
}

// This lane's four elements of a group: their keys, and 0 or 1 for each that is marked.
struct Quad {
  int64_t at;
  uint32_t key[4], marked[4];
};

__device__ inline Quad load_quad(const Marks& marks, const float* total, int64_t tile, int group, int64_t numel,
                                 bool everything) {
  const unsigned lane = lane_index();
  const uint32_t words[4] = {
      __shfl_sync(kAllLanes, marks.words.x, group), __shfl_sync(kAllLanes, marks.words.y, group),
      __shfl_sync(kAllLanes, marks.words.z, group), __shfl_sync(kAllLanes, marks.words.w, group)};
  Quad quad;
  quad.at = tile * kTile + group * kGroup + 4 * lane;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    quad.marked[c] = everything ? quad.at + c < numel : words[c] >> lane & 1;
    quad.key[c] = quad.marked[c] ? magnitude_key(total[quad.at + c]) : 0;
  }
  return quad;
}

// How many of the lower lanes' four flags are set, and of all lanes'.
struct Ranked {
  uint32_t before, all;
};

__device__ inline Ranked rank_flags(const bool (&flags)[4]) {
  const uint32_t lower = (1u << lane_index()) - 1u;
  Ranked ranked = {0, 0};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint32_t word = __ballot_sync(kAllLanes, flags[c]);
    ranked.before += static_cast<uint32_t>(__popc(word & lower));
    ranked.all += static_cast<uint32_t>(__popc(word));
  }
  return ranked;
}

}  // namespace gradwire

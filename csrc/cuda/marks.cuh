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

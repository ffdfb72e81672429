// How slices of a tensor are cut into chunks: chunk j of a slice is its j-th run of at most `piece` elements.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/shm/group.h"

namespace gradwire::shm {

struct Piece {
  std::uint64_t start;
  std::uint64_t numel;
};

inline std::uint64_t chunks_of(std::uint64_t numel, std::uint64_t piece) { return (numel + piece - 1) / piece; }

/// The chunks that the longest slice needs.
inline std::uint64_t chunks_of(const Bounds& bounds, std::uint64_t piece) {
  std::uint64_t chunks = 0;
  for (std::size_t index = 0; index + 1 < bounds.size(); ++index) {
    chunks = std::max(chunks, chunks_of(bounds[index + 1] - bounds[index], piece));
  }
  return chunks;
}

/// Chunk `chunk` of slice `slice`; empty where the slice is shorter than that.
inline Piece piece_of(const Bounds& bounds, std::uint64_t slice, std::uint64_t chunk, std::uint64_t piece) {
  const std::uint64_t start = std::min(bounds[slice] + chunk * piece, bounds[slice + 1]);
  return {start, std::min(piece, bounds[slice + 1] - start)};
}

/// Elements of `element` bytes in each of `parts` regions of a block; every region starts at a line of 64 bytes.
inline std::uint64_t piece_numel(std::uint64_t block_nbytes, std::uint64_t parts, std::uint64_t element) {
  return block_nbytes / parts / 64 * 64 / element;
}

/// Slices of nearly equal length that start at multiples of 64 bytes.
inline Bounds even_bounds(std::uint64_t numel, std::uint64_t parts, std::uint64_t element) {
  const std::uint64_t line = 64 / element;
  const std::uint64_t lines = (numel + line - 1) / line;
  Bounds bounds(parts + 1);
  for (std::uint64_t part = 0; part <= parts; ++part) bounds[part] = std::min(numel, lines * part / parts * line);
  return bounds;
}

/// Slices of exactly equal length.
inline Bounds equal_bounds(std::uint64_t numel, std::uint64_t parts) {
  Bounds bounds(parts + 1);
  for (std::uint64_t part = 0; part <= parts; ++part) bounds[part] = numel / parts * part;
  return bounds;
}

/// FNV-1a over 64-bit words, so that ranks with other bounds notice. Source: RFC 9923 section 4.1.
inline std::uint64_t hash_bounds(const Bounds& bounds) {
  std::uint64_t value = 0xcbf29ce484222325u;
  for (const std::uint64_t bound : bounds) value = (value ^ bound) * 0x100000001b3u;
  return value;
}

}  // namespace gradwire::shm

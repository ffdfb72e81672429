// all_gather, all_gather_slices, all_to_all, broadcast: the collectives that only move bytes.
#include <cstring>

#include "cpu/shm/group.h"
#include "cpu/shm/pieces.h"

namespace gradwire::shm {
namespace {

Signature sign(Collective collective, Memory memory, std::uint32_t root) {
  return {static_cast<std::uint32_t>(collective), static_cast<std::uint32_t>(memory.dtype), 0, root, memory.numel, 0,
          1.0};
}

}  // namespace

// Each rank: writes its slice into its slot and reads all others.
bool SharedMemoryGroup::all_gather_slices(Memory tensor, const Bounds& bounds) {
  const std::uint64_t element = tensor.element();
  const std::uint64_t piece = piece_numel(segment_->block_nbytes(), 1, element);
  Signature signature = sign(Collective::all_gather_slices, tensor, 0);
  signature.bounds_hash = hash_bounds(bounds);
  return run(signature, chunks_of(bounds, piece), {
    [&](std::uint64_t chunk, std::uint64_t slot) {
      const Piece part = piece_of(bounds, rank_, chunk, piece);
      copy_to_slot(segment_->slot(rank_, slot), tensor.data + part.start * element, part.numel * element,
                   stream_);
    },
    [&](std::uint64_t chunk, std::uint64_t slot) {
      for (std::uint32_t step = 1; step < size_; ++step) {
        const std::uint32_t peer = (rank_ + step) % size_;
        const Piece part = piece_of(bounds, peer, chunk, piece);
        copy_from_slot(tensor.data + part.start * element, segment_->slot(peer, slot), part.numel * element);
      }
    }});
}

// Each rank: writes its source into its slot and reads all others; its own part goes straight into `output`.
bool SharedMemoryGroup::all_gather(Memory output, Memory source) {
  const std::uint64_t element = source.element();
  const std::uint64_t piece = piece_numel(segment_->block_nbytes(), 1, element);
  const Bounds whole = {0, source.numel};
  return run(sign(Collective::all_gather, source, 0), chunks_of(whole, piece), {
    [&](std::uint64_t chunk, std::uint64_t slot) {
      const Piece part = piece_of(whole, 0, chunk, piece);
      const std::byte* from = source.data + part.start * element;
      copy_to_slot(segment_->slot(rank_, slot), from, part.numel * element, stream_);
      std::byte* home = output.data + (rank_ * source.numel + part.start) * element;
      if (home != from && part.numel > 0) std::memmove(home, from, part.numel * element);
    },
    [&](std::uint64_t chunk, std::uint64_t slot) {
      const Piece part = piece_of(whole, 0, chunk, piece);
      for (std::uint32_t step = 1; step < size_; ++step) {
        const std::uint32_t peer = (rank_ + step) % size_;
        copy_from_slot(output.data + (peer * source.numel + part.start) * element, segment_->slot(peer, slot),
                       part.numel * element);
      }
    }});
}

// Each rank: writes all parts but its own into its slot, reads the part meant for it from every other.
bool SharedMemoryGroup::all_to_all(Memory output, Memory source) {
  const std::uint64_t element = source.element();
  const std::uint64_t piece = piece_numel(segment_->block_nbytes(), size_, element);
  const Bounds bounds = equal_bounds(source.numel, size_);
  return run(sign(Collective::all_to_all, source, 0), chunks_of(bounds, piece), {
    [&](std::uint64_t chunk, std::uint64_t slot) {
      for (std::uint32_t step = 0; step < size_; ++step) {
        const std::uint32_t peer = (rank_ + step) % size_;
        const Piece part = piece_of(bounds, peer, chunk, piece);
        const std::byte* from = source.data + part.start * element;
        if (peer == rank_) {
          if (part.numel > 0) std::memcpy(output.data + part.start * element, from, part.numel * element);
          continue;
        }
        copy_to_slot(segment_->slot(rank_, slot) + peer * piece * element, from, part.numel * element,
                     stream_);
      }
    },
    [&](std::uint64_t chunk, std::uint64_t slot) {
      for (std::uint32_t step = 1; step < size_; ++step) {
        const std::uint32_t peer = (rank_ + step) % size_;
        const Piece part = piece_of(bounds, peer, chunk, piece);
        copy_from_slot(output.data + part.start * element, segment_->slot(peer, slot) + rank_ * piece * element,
                       part.numel * element);
      }
    }});
}

// The root writes S into its slot, every other rank reads S.
bool SharedMemoryGroup::broadcast(Memory tensor, std::uint32_t root) {
  const std::uint64_t element = tensor.element();
  const std::uint64_t piece = piece_numel(segment_->block_nbytes(), 1, element);
  const Bounds whole = {0, tensor.numel};
  return run(sign(Collective::broadcast, tensor, root), chunks_of(whole, piece), {
    [&](std::uint64_t chunk, std::uint64_t slot) {
      const Piece part = piece_of(whole, 0, chunk, piece);
      if (rank_ != root) return;
      copy_to_slot(segment_->slot(root, slot), tensor.data + part.start * element, part.numel * element,
                   stream_);
    },
    [&](std::uint64_t chunk, std::uint64_t slot) {
      const Piece part = piece_of(whole, 0, chunk, piece);
      if (rank_ == root) return;
      copy_from_slot(tensor.data + part.start * element, segment_->slot(root, slot), part.numel * element);
    }});
}

}  // namespace gradwire::shm

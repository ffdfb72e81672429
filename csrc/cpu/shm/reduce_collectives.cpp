// all_reduce, reduce, reduce_scatter: the collectives that add. S below is the tensor's size in bytes, n the ranks.
#include <string>

#include "cpu/shm/group.h"
#include "cpu/shm/pieces.h"

namespace gradwire::shm {
namespace {

/// Up to here every rank reduces everything: one barrier instead of two, n S read instead of (2 - 2/n) S.
/// Measured on a 2-core EPYC VM, 2 and 4 ranks.
constexpr std::uint64_t at_once_nbytes = 16 << 10;

Signature sign(Collective collective, Memory tensor, ReduceOp op, std::uint32_t root, double scale) {
  return {static_cast<std::uint32_t>(collective), static_cast<std::uint32_t>(tensor.dtype),
          static_cast<std::uint32_t>(op), root, tensor.numel, 0, scale};
}

}  // namespace

bool SharedMemoryGroup::all_reduce(Memory tensor, ReduceOp op, double scale) {
  const Signature signature = sign(Collective::all_reduce, tensor, op, 0, scale);
  const bool at_once = tensor.nbytes() <= std::min(at_once_nbytes, segment_->block_nbytes());
  return at_once ? reduce_at_once(tensor, signature, op, scale)
                 : reduce_in_slices(tensor, signature, op, scale, size_);
}

bool SharedMemoryGroup::reduce(Memory tensor, std::uint32_t root, ReduceOp op, double scale) {
  return reduce_in_slices(tensor, sign(Collective::reduce, tensor, op, root, scale), op, scale, root);
}

// Each rank: writes S into its slot, reads n S, writes S.
bool SharedMemoryGroup::reduce_at_once(Memory tensor, const Signature& signature, ReduceOp op, double scale) {
  return run(signature, 1, {
    [&](std::uint64_t, std::uint64_t slot) {
      copy_to_slot(segment_->slot(rank_, slot), tensor.data, tensor.nbytes(), stream_);
    },
    [&](std::uint64_t, std::uint64_t slot) {
      const void* sources[max_ranks];
      for (std::uint32_t peer = 0; peer < size_; ++peer) sources[peer] = segment_->slot(peer, slot);
      sources[rank_] = tensor.data;
      shm::reduce(tensor.dtype, op, tensor.data, nullptr, false, sources, size_, scale, tensor.numel);
    }});
}

// Each rank: writes the (n-1)/n S that others own into its slot; reads n slices of S/n and writes their sum home and
// into its slot; reads the (n-1)/n S that others summed. `root` == size_ means that everybody wants the result.
bool SharedMemoryGroup::reduce_in_slices(Memory tensor, const Signature& signature, ReduceOp op, double scale,
                                         std::uint32_t root) {
  const std::uint64_t element = tensor.element();
  const Bounds bounds = even_bounds(tensor.numel, size_, element);
  const std::uint64_t piece = piece_numel(segment_->block_nbytes(), size_, element);
  const auto region = [&](std::uint32_t peer, std::uint64_t slot, std::uint32_t slice) {
    return segment_->slot(peer, slot) + slice * piece * element;
  };
  const bool wanted = root == size_ || root == rank_;
  return run(signature, chunks_of(bounds, piece), {
    [&](std::uint64_t chunk, std::uint64_t slot) {
      for (std::uint32_t step = 1; step < size_; ++step) {
        const std::uint32_t slice = (rank_ + step) % size_;
        const Piece part = piece_of(bounds, slice, chunk, piece);
        copy_to_slot(region(rank_, slot, slice), tensor.data + part.start * element, part.numel * element,
                     stream_);
      }
    },
    [&](std::uint64_t chunk, std::uint64_t slot) {
      const Piece part = piece_of(bounds, rank_, chunk, piece);
      const void* sources[max_ranks];
      for (std::uint32_t peer = 0; peer < size_; ++peer) sources[peer] = region(peer, slot, rank_);
      std::byte* own = tensor.data + part.start * element;
      sources[rank_] = own;
      void* result = region(rank_, slot, rank_);
      shm::reduce(tensor.dtype, op, wanted ? own : result, wanted ? result : nullptr, stream_, sources, size_, scale,
                  part.numel);
    },
    [&](std::uint64_t chunk, std::uint64_t slot) {
      for (std::uint32_t step = 1; wanted && step < size_; ++step) {
        const std::uint32_t slice = (rank_ + step) % size_;
        const Piece part = piece_of(bounds, slice, chunk, piece);
        copy_from_slot(tensor.data + part.start * element, region(slice, slot, slice), part.numel * element);
      }
    }});
}

// Each rank: writes all but its own slice into its slot, reads n slices, writes one.
bool SharedMemoryGroup::reduce_scatter(Memory tensor, const Bounds& bounds, double scale) {
  const std::uint64_t element = tensor.element();
  const std::uint64_t piece = piece_numel(segment_->block_nbytes(), size_, element);
  Signature signature = sign(Collective::reduce_scatter, tensor, ReduceOp::sum, 0, scale);
  signature.bounds_hash = hash_bounds(bounds);
  return run(signature, chunks_of(bounds, piece), {
    [&](std::uint64_t chunk, std::uint64_t slot) {
      for (std::uint32_t step = 1; step < size_; ++step) {
        const std::uint32_t slice = (rank_ + step) % size_;
        const Piece part = piece_of(bounds, slice, chunk, piece);
        copy_to_slot(segment_->slot(rank_, slot) + slice * piece * element, tensor.data + part.start * element,
                     part.numel * element, stream_);
      }
    },
    [&](std::uint64_t chunk, std::uint64_t slot) {
      const Piece part = piece_of(bounds, rank_, chunk, piece);
      const void* sources[max_ranks];
      for (std::uint32_t peer = 0; peer < size_; ++peer) {
        sources[peer] = segment_->slot(peer, slot) + rank_ * piece * element;
      }
      std::byte* own = tensor.data + part.start * element;
      sources[rank_] = own;
      shm::reduce(tensor.dtype, ReduceOp::sum, own, nullptr, false, sources, size_, scale, part.numel);
    }});
}

}  // namespace gradwire::shm

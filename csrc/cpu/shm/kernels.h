// The arithmetic and the copies of the shared-memory collectives; every function is plain memory to memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::shm {

/// Numbers are part of the segment's signature and of `gradwire.comms.transport.shm`.
enum class DType : std::uint32_t { float32, float64, float16, bfloat16, int32, int64, uint8, int8, int16, count };
enum class ReduceOp : std::uint32_t { sum, max, min, count };

std::size_t element_nbytes(DType dtype);
bool is_floating(DType dtype);

/// out[i] = op over r, in order, of scale * sources[r][i]; `mirror`, where given, receives a copy of
/// `out`, past the cache if `stream`.
///
/// float16 and bfloat16 are combined in float32 and rounded once. max and min propagate NaN. `out` may be one of the
/// sources; `mirror` must be aligned to 64 bytes and overlap nothing. `scale` must be 1 for integers.
void reduce(DType dtype, ReduceOp op, void* out, void* mirror, bool stream, const void* const* sources,
            std::uint32_t count, double scale, std::uint64_t numel);

/// Copies into a slot that another core reads next; `stream` sends it past the cache (see policy.h).
/// `destination` must be aligned to 64 bytes.
void copy_to_slot(void* destination, const void* source, std::uint64_t nbytes, bool stream);

/// Orders streamed copies before everything that follows; a release store does not.
void finish_streaming();

/// Copies out of a slot into a tensor of any alignment.
void copy_from_slot(void* destination, const void* source, std::uint64_t nbytes);

}  // namespace gradwire::shm

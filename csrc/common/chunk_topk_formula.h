// How the record of a chunk is laid out: sender and receiver, CPU and GPU must agree to the bit.
//
// Two bfloat16 levels (the smaller, the larger); then an entry for each of the k kept, in the order of their places:
// two bits of code (has the larger level; is negative) and the l low bits of the place; then a bit vector, in which the
// ones say the places' high parts. What is coded is not place i itself but place i - i, which never falls and ends at
// n - k at most: one i stands at bit ((place i - i) >> l) + i. With l = 0 that is a bitmap of the chunk. l is what makes
// the record smallest. Entries and vector start at a byte, the lowest bit first.
// Source: Elias, Efficient storage and retrieval by content and address of static files, JACM 21(2), 1974; Fano, On the
// number of bits required to implement an associative memory, MIT Project MAC memo 61, 1971.
//
// Whatever a damaged record holds, nothing outside it is read and nothing outside its chunk's sums is written; where it
// names a place twice, all are added on the CPU, in the order of the entries, but a GPU may lose some of them, and not
// the same ones each time.
#pragma once
#include "common/portable.h"

namespace gradwire {

struct ChunkRecord {
  int kept, low_bits;
  int entries_nbytes, vector_nbytes;

  GRADWIRE_ANYWHERE int entry_bits() const { return 2 + low_bits; }
  GRADWIRE_ANYWHERE int nbytes() const { return 4 + entries_nbytes + vector_nbytes; }
};

// The record of `count` elements where `keep` of `chunk` are sent (of fewer the same share, rounded up), with so many
// low bits in an entry.
GRADWIRE_ANYWHERE inline ChunkRecord chunk_record_of(int chunk, int keep, int count, int low_bits) {
  const int kept = (keep * count + chunk - 1) / chunk;
  return {kept, low_bits, ((2 + low_bits) * kept + 7) / 8, (kept + ((count - kept) >> low_bits) + 7) / 8};
}

// The smallest of them; of equal ones that with the most low bits.
GRADWIRE_ANYWHERE inline ChunkRecord chunk_record(int chunk, int keep, int count) {
  ChunkRecord best = chunk_record_of(chunk, keep, count, 0);
  for (int low_bits = 1; chunk >> low_bits; ++low_bits) {
    const ChunkRecord next = chunk_record_of(chunk, keep, count, low_bits);
    if (next.nbytes() <= best.nbytes()) best = next;
  }
  return best;
}

// Bit of the vector in which the i-th of the kept has its one.
GRADWIRE_ANYWHERE inline uint32_t chunk_bit(int low_bits, uint32_t place, uint32_t i) {
  return ((place - i) >> low_bits) + i;
}

GRADWIRE_ANYWHERE inline uint32_t chunk_entry(int low_bits, uint32_t place, uint32_t i, uint32_t code) {
  return code | ((place - i) & ((1u << low_bits) - 1u)) << 2;
}

// The place of the i-th of the kept, whose one stands at `bit`, which is i or more; within the full chunk, whatever the
// record holds. Bits above the entry's own do not count.
GRADWIRE_ANYWHERE inline uint32_t chunk_place(int low_bits, int chunk, uint32_t bit, uint32_t i, uint32_t entry) {
  const uint32_t low = entry >> 2 & ((1u << low_bits) - 1u);
  return (((bit - i) << low_bits | low) + i) & static_cast<uint32_t>(chunk - 1);
}

}  // namespace gradwire

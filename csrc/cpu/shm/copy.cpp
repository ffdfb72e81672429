// Copies between tensors and slots. Each reads nbytes and writes nbytes; a plain store first reads the line it writes,
// a non-temporal one goes to memory and leaves no line in this core's cache.
#include <cstring>

#include "cpu/shm/isa.h"
#include "cpu/shm/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradwire::shm {
namespace {

#if defined(__x86_64__)
constexpr std::uint64_t stride_nbytes = 256;

GRADWIRE_AVX512 std::uint64_t stream_avx512(char* destination, const char* source, std::uint64_t nbytes) {
  std::uint64_t offset = 0;
  for (; offset + stride_nbytes <= nbytes; offset += stride_nbytes) {
    const __m512i a = _mm512_loadu_si512(source + offset);
    const __m512i b = _mm512_loadu_si512(source + offset + 64);
    const __m512i c = _mm512_loadu_si512(source + offset + 128);
    const __m512i d = _mm512_loadu_si512(source + offset + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + offset), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + offset + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + offset + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + offset + 192), d);
  }
  return offset;
}

GRADWIRE_AVX2 std::uint64_t stream_avx2(char* destination, const char* source, std::uint64_t nbytes) {
  std::uint64_t offset = 0;
  for (; offset + 64 <= nbytes; offset += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + offset));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + offset + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + offset), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + offset + 32), b);
  }
  return offset;
}

std::uint64_t copy_streaming(char* destination, const char* source, std::uint64_t nbytes) {
  switch (best_isa()) {
    case Isa::avx512: return stream_avx512(destination, source, nbytes);
    case Isa::avx2: return stream_avx2(destination, source, nbytes);
    case Isa::plain: return 0;
  }
  return 0;
}
#else
std::uint64_t copy_streaming(char*, const char*, std::uint64_t) { return 0; }
#endif

}  // namespace

void copy_to_slot(void* destination, const void* source, std::uint64_t nbytes, bool stream) {
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  const std::uint64_t streamed = stream ? copy_streaming(to, from, nbytes) : 0;
  if (streamed < nbytes) std::memcpy(to + streamed, from + streamed, nbytes - streamed);
}

void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void copy_from_slot(void* destination, const void* source, std::uint64_t nbytes) {
  if (nbytes > 0) std::memcpy(destination, source, nbytes);
}

}  // namespace gradwire::shm

// Runs a CUDA kernel's own source on the CPU: every thread of a CTA is a fiber, and a warp's or CTA's collective waits
// until all of them have come to it. It shows the arithmetic, the order of bits and the indices; it shows nothing of
// memory ordering between CTAs (they run one after the other) and nothing of speed.
//
// A fiber starts with makecontext and switches with _setjmp and _longjmp: swapcontext makes two system calls each time,
// which took most of a test's time.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct Triple {
  unsigned x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulation {

constexpr size_t kStackNbytes = 64 << 10;
constexpr unsigned kLanes = 32;

struct Barrier {
  unsigned arrived = 0, generation = 0;
};

struct Warp {
  Barrier barrier;
  uint64_t slots[2][kLanes];
};

struct Fiber {
  jmp_buf place;  // where it paused
  std::vector<char> stack = std::vector<char>(kStackNbytes);
  bool started = false, done = false;
};

inline jmp_buf scheduler;
inline std::deque<Fiber> fibers;  // kept for all blocks and launches: a fiber that is done waits for its next body
inline std::vector<Warp> warps;
inline Barrier block_barrier;
inline std::function<void()> body;
inline Triple thread_place, block_place, block_shape, grid_shape;
inline bool moved;

// Returns to the scheduler, and from here when the fiber is resumed. Not inlined: its frame must outlast the jump.
__attribute__((noinline)) inline void pause(Fiber& fiber) {
  if (!_setjmp(fiber.place)) _longjmp(scheduler, 1);
}

inline void run_bodies() {
  const unsigned me = thread_place.x;
  for (;;) {
    body();
    fibers[me].done = moved = true;
    pause(fibers[me]);
  }
}

// Returns when the fiber pauses.
__attribute__((noinline)) inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  ucontext_t fresh;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = fiber.stack.data();
  fresh.uc_stack.ss_size = fiber.stack.size();
  fresh.uc_link = nullptr;
  makecontext(&fresh, run_bodies, 0);
  setcontext(&fresh);
}

inline void wait(Barrier& barrier, unsigned members) {
  const unsigned me = thread_place.x, generation = barrier.generation;
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    ++barrier.generation;
    moved = true;
    return;
  }
  while (barrier.generation == generation) pause(fibers[me]);
}

template <class T>
T exchange(T value, unsigned from) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a slot holds 64 bits");
  const unsigned lane = thread_place.x % kLanes;
  Warp& warp = warps[thread_place.x / kLanes];
  uint64_t* slots = warp.slots[warp.barrier.generation % 2];
  std::memcpy(&slots[lane], &value, sizeof value);
  wait(warp.barrier, kLanes);
  std::memcpy(&value, &slots[from % kLanes], sizeof value);
  return value;
}

inline void run_block() {
  warps.assign(block_shape.x / kLanes, Warp{});
  block_barrier = Barrier{};
  for (unsigned i = 0; i < block_shape.x; ++i) fibers[i].done = false;
  for (bool running = true; running;) {
    running = moved = false;
    for (unsigned i = 0; i < block_shape.x; ++i) {
      if (fibers[i].done) continue;
      thread_place = {i, 0, 0};
      resume(fibers[i]);
      running = running || !fibers[i].done;
    }
    if (running && !moved) {
      std::fprintf(stderr, "the threads of a CTA wait for each other at different places\n");
      std::abort();
    }
  }
}

template <class... P, size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<P>*>(arguments[I])...);
}

template <class... P>
int launch(void (*kernel)(P...), unsigned blocks, unsigned threads, void** arguments, size_t* nbytes, unsigned count) {
  const size_t wanted[] = {sizeof(P)...};
  if (count != sizeof...(P) || threads % kLanes) return -1;
  for (unsigned i = 0; i < count; ++i)
    if (nbytes[i] != wanted[i]) return static_cast<int>(i) + 1;
  if (fibers.size() < threads) fibers.resize(threads);
  block_shape = {threads, 1, 1}, grid_shape = {blocks, 1, 1};
  body = [=] { call(kernel, arguments, std::index_sequence_for<P...>{}); };
  for (unsigned block = 0; block < blocks; ++block) {
    block_place = {block, 0, 0};
    run_block();
  }
  return 0;
}

}  // namespace emulation

#define threadIdx (::emulation::thread_place)
#define blockIdx (::emulation::block_place)
#define blockDim (::emulation::block_shape)
#define gridDim (::emulation::grid_shape)

inline void __syncthreads() { emulation::wait(emulation::block_barrier, emulation::block_shape.x); }
inline void __threadfence() {}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::exchange(value, static_cast<unsigned>(lane));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange(value, emulation::thread_place.x ^ static_cast<unsigned>(mask));
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = emulation::thread_place.x % emulation::kLanes;
  return emulation::exchange(value, lane >= delta ? lane - delta : lane);
}
inline unsigned __ballot_sync(unsigned, bool flag) {
  using namespace emulation;
  Warp& warp = warps[thread_place.x / kLanes];
  uint64_t* slots = warp.slots[warp.barrier.generation % 2];
  slots[thread_place.x % kLanes] = flag;
  wait(warp.barrier, kLanes);
  unsigned word = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) word |= static_cast<unsigned>(slots[lane]) << lane;
  return word;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned atomicAdd(unsigned* at, unsigned x) { return std::exchange(*at, *at + x); }
inline unsigned atomicOr(unsigned* at, unsigned x) { return std::exchange(*at, *at | x); }
inline unsigned atomicCAS(unsigned* at, unsigned assumed, unsigned x) {
  const unsigned seen = *at;
  if (seen == assumed) *at = x;
  return seen;
}

#define EMULATE(kernel)                                                                                            \
  extern "C" int emulate_##kernel(unsigned blocks, unsigned threads, void** arguments, size_t* nbytes,             \
                                  unsigned count) {                                                                \
    return emulation::launch(&gradwire::kernel, blocks, threads, arguments, nbytes, count);                        \
  }

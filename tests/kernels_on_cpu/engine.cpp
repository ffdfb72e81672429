// Runs a launch: CTA after CTA, each thread a fiber, in an order that a seed gives.
//
// A GPU runs CTAs in any order and lets any warp go first. So each round through a CTA's threads takes them in another
// order and leaves some warps out, CTAs come in another order in each launch, and shared memory begins with whatever. A
// seed of 0 is the plain order: CTAs and threads ascending.
//
// A fiber starts with makecontext and switches with _setjmp and _longjmp: swapcontext makes two system calls each time,
// which took most of a test's time.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda_on_cpu.h"
#include "race.h"

namespace emulation {

Now now;

namespace {

constexpr size_t kStackNbytes = 64 << 10;
constexpr size_t kStackShiftNbytes = 256, kStackShifts = 61;  // or what threads use most shares a set of the caches
constexpr unsigned kMostThreads = 1024;

struct Warp {
  unsigned arrived = 0, generation = 0;
  uint64_t slots[2][kLanes];
};

struct Fiber {
  jmp_buf place;  // where it paused
  bool started = false, done = false;
  const unsigned* generation = nullptr;  // what it waits for: that this is no longer `before`
  unsigned before = 0;

  bool waits() const { return generation && *generation == before; }
};

struct Engine {
  std::mutex one_launch;  // shared memory lies at one place, whichever stream a kernel runs on
  jmp_buf scheduler;
  Fiber fibers[kMostThreads];  // kept for all blocks and launches: a fiber that is done waits for its next body
  char* stacks = nullptr;
  std::vector<Warp> warps;
  unsigned arrived = 0, generation = 0;
  const Kernel* kernel = nullptr;
  void** arguments = nullptr;
  bool moved = false;
  uint64_t seed = 0, drawn = 0;
};
Engine engine;

// SplitMix64. Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 16.
uint64_t draw() {
  uint64_t z = engine.drawn += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

void shuffle(std::vector<unsigned>& order) {
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
}

// Returns to the scheduler, and from here when the fiber is resumed. Not inlined: its frame must outlast the jump.
__attribute__((noinline)) void pause(Fiber& fiber) {
  if (!_setjmp(fiber.place)) _longjmp(engine.scheduler, 1);
}

void run_bodies() {
  const unsigned me = now.thread.x;
  for (;;) {
    engine.kernel->call(engine.arguments);
    engine.fibers[me].done = engine.moved = true;
    pause(engine.fibers[me]);
  }
}

// Returns when the fiber pauses.
__attribute__((noinline)) void resume(unsigned index) {
  Fiber& fiber = engine.fibers[index];
  if (_setjmp(engine.scheduler)) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  ucontext_t fresh;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = engine.stacks + index * kStackNbytes;
  fresh.uc_stack.ss_size = kStackNbytes - index % kStackShifts * kStackShiftNbytes;
  fresh.uc_link = nullptr;
  makecontext(&fresh, run_bodies, 0);
  setcontext(&fresh);
}

template <class Passed>
void wait(unsigned& arrived, unsigned& generation, unsigned members, Passed passed) {
  if (++arrived == members) {
    arrived = 0;
    ++generation;
    engine.moved = true;
    passed();
    return;
  }
  Fiber& fiber = engine.fibers[now.thread.x];
  fiber.generation = &generation, fiber.before = generation;
  pause(fiber);
  fiber.generation = nullptr;
}

void wait_lanes(Warp& warp, bool orders_memory) {
  const unsigned index = now.thread.x / kLanes;
  wait(warp.arrived, warp.generation, kLanes, [=] {
    if (orders_memory) race::warp_barrier(index);
  });
}

void run_block(std::vector<unsigned>& order) {
  const unsigned threads = now.block_shape.x;
  engine.warps.assign(threads / kLanes, Warp{});
  engine.arrived = engine.generation = 0;
  for (unsigned i = 0; i < threads; ++i) engine.fibers[i].done = false;
  for (char* at = engine.kernel->shared_begin; engine.seed && at < engine.kernel->shared_end; ++at)
    *at = static_cast<char>(draw());
  const bool lazy = engine.seed && draw() % 2;  // half of the blocks leave some warps out in each round
  engine.moved = true;
  for (bool running = true; running;) {
    const uint64_t out = lazy && engine.moved ? draw() & draw() : 0;
    running = engine.moved = false;
    if (engine.seed) shuffle(order);
    for (const unsigned i : order) {
      if (engine.fibers[i].done) continue;
      running = true;
      if (engine.fibers[i].waits() || out >> i / kLanes % 64 & 1) continue;
      now.thread = {i, 0, 0};
      resume(i);
    }
    if (running && !engine.moved && !out) {
      std::fprintf(stderr, "%s: the threads of a CTA wait for each other at different places\n", engine.kernel->name);
      std::abort();
    }
  }
}

}  // namespace

void wait_block() { wait(engine.arrived, engine.generation, now.block_shape.x, race::block_barrier); }
void wait_warp() { wait_lanes(engine.warps[now.thread.x / kLanes], true); }

uint64_t exchange(uint64_t mine, unsigned from) {
  Warp& warp = engine.warps[now.thread.x / kLanes];
  uint64_t* slots = warp.slots[warp.generation % 2];  // who is late may still read the other ones
  slots[now.thread.x % kLanes] = mine;
  wait_lanes(warp, false);
  return slots[from % kLanes];
}

unsigned ballot(bool flag) {
  Warp& warp = engine.warps[now.thread.x / kLanes];
  uint64_t* slots = warp.slots[warp.generation % 2];
  slots[now.thread.x % kLanes] = flag;
  wait_lanes(warp, false);
  unsigned word = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) word |= static_cast<unsigned>(slots[lane]) << lane;
  return word;
}

void fence() { race::fence(); }

void note_coherent_read(const void* at, size_t nbytes) {
  race::note(at, nbytes, race::Kind::kCoherentRead, __builtin_return_address(0));
}

}  // namespace emulation

#define GRADWIRE_ATOMIC(T, name, result)                                                                \
  T name(T* at, T x) {                                                                                  \
    emulation::race::note(at, sizeof(T), emulation::race::Kind::kAtomic, __builtin_return_address(0));  \
    return std::exchange(*at, result);                                                                  \
  }
GRADWIRE_ATOMIC(unsigned, atomicAdd, *at + x)
GRADWIRE_ATOMIC(int, atomicAdd, *at + x)
GRADWIRE_ATOMIC(unsigned long long, atomicAdd, *at + x)
GRADWIRE_ATOMIC(unsigned, atomicOr, *at | x)
GRADWIRE_ATOMIC(unsigned, atomicAnd, *at & x)
GRADWIRE_ATOMIC(unsigned, atomicMax, *at > x ? *at : x)
GRADWIRE_ATOMIC(unsigned, atomicMin, *at < x ? *at : x)
GRADWIRE_ATOMIC(unsigned, atomicExch, x)

template <class T>
static T compare_and_swap(T* at, T assumed, T x, const void* pc) {
  emulation::race::note(at, sizeof(T), emulation::race::Kind::kAtomic, pc);
  const T seen = *at;
  if (seen == assumed) *at = x;
  return seen;
}
unsigned atomicCAS(unsigned* at, unsigned assumed, unsigned x) {
  return compare_and_swap(at, assumed, x, __builtin_return_address(0));
}
unsigned long long atomicCAS(unsigned long long* at, unsigned long long assumed, unsigned long long x) {
  return compare_and_swap(at, assumed, x, __builtin_return_address(0));
}

// Runs a kernel to its end.
//
// seed: gives the order; 0 is the plain one. check: find races; keep_ranges: remember the bytes that are read and written.
// Both need a library that was compiled for it. Returns 0, or -1 where a CTA cannot have so many threads.
extern "C" int emulation_launch(const emulation::Kernel* kernel, unsigned blocks, unsigned threads, void** arguments,
                                uint64_t seed, int check, int keep_ranges) {
  using namespace emulation;
  if (!threads || threads % kLanes || threads > kMostThreads) return -1;
  std::lock_guard<std::mutex> one(engine.one_launch);
  if (!engine.stacks) {
    void* made = mmap(nullptr, kMostThreads * kStackNbytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return -1;
    engine.stacks = static_cast<char*>(made);
  }
  engine.kernel = kernel, engine.arguments = arguments, engine.seed = engine.drawn = seed;
  now.block_shape = {threads, 1, 1}, now.grid_shape = {blocks, 1, 1};
  race::begin_launch(check, keep_ranges, threads, kernel->shared_begin, kernel->shared_end, engine.stacks,
                     engine.stacks + kMostThreads * kStackNbytes);
  std::vector<unsigned> ctas(blocks), order(threads);
  std::iota(ctas.begin(), ctas.end(), 0u), std::iota(order.begin(), order.end(), 0u);
  if (seed) shuffle(ctas);
  for (const unsigned block : ctas) {
    now.block = {block, 0, 0};
    race::begin_block(block);
    run_block(order);
  }
  race::end_launch();
  return 0;
}

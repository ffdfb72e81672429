#include "race.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "cuda_on_cpu.h"

namespace emulation::race {
namespace {

constexpr size_t kSlots = 8;  // accesses remembered of four bytes: four threads' bytes, each read and written
constexpr size_t kCellNbytes = 4, kPageNbytes = 4096;
constexpr size_t kMostFaults = 32;

struct Slot {
  uint32_t cta, generation;
  uint16_t thread, warp_generation, fences;
  Kind kind;
  uint8_t mask;  // of the cell's bytes; 0 is an empty slot
  uint64_t pc;
};

struct Cell {
  std::array<Slot, kSlots> slots;
  uint8_t read, written;  // masks, of the launch
};
using Page = std::array<Cell, kPageNbytes / kCellNbytes>;
using Pages = std::unordered_map<uintptr_t, std::unique_ptr<Page>>;

// What a CTA had fenced when one of its threads made an atomic operation.
struct Released {
  uintptr_t at;  // of the atomic operation: it is seen itself, although no fence follows it
  uint32_t cta, generation, fence_generation;
  uint16_t thread, fences;
  std::shared_ptr<const std::vector<uint16_t>> at_barrier;  // fences of each thread before the last barrier

  bool covers(const Slot& old, uintptr_t where) const {
    if (old.kind == Kind::kAtomic && where == at) return true;
    if (old.thread == thread) return fences > old.fences;
    return old.generation < generation && ((*at_barrier)[old.thread] > old.fences || old.generation < fence_generation);
  }
};
using Releases = std::map<uint32_t, Released>;  // by CTA: the last one's covers what the ones before it do

struct Pending {
  uint16_t thread;
  uint32_t generation;
  Releases releases;
};

struct State {
  bool on = false, check = false, keep_ranges = false;
  const char *shared_begin, *shared_end, *stacks_begin, *stacks_end;
  Pages global, shared;
  uintptr_t last_base[2] = {1, 1};
  Page* last_page[2] = {};
  // Of the CTA that runs.
  uint32_t cta = 0, generation = 0;
  std::vector<uint16_t> warp_generation, fences;
  std::vector<uint32_t> fence_generation;
  std::shared_ptr<const std::vector<uint16_t>> at_barrier;
  std::vector<Pending> pending;
  std::vector<Releases> acquired;
  Releases acquired_by_all;
  bool fenced = false;
  // Of the launch.
  std::map<uintptr_t, Releases> released;  // by the address of the atomic operation
  std::vector<Fault> faults;
  std::set<std::tuple<uint64_t, uint64_t, int>> seen;
  std::vector<Range> ranges;
};
State state;

bool is_write(Kind kind) { return kind == Kind::kWrite || kind == Kind::kAtomic; }
bool is_coherent(Kind kind) { return kind == Kind::kAtomic || kind == Kind::kCoherentRead; }

bool acquired_from(const Releases& releases, const Slot& old, uintptr_t where) {
  const auto found = releases.find(old.cta);
  return found != releases.end() && found->second.covers(old, where);
}

bool ordered(const Slot& old, uintptr_t where) {
  const unsigned thread = now.thread.x;
  if (old.cta == state.cta) {
    const bool same_warp = old.thread / kLanes == thread / kLanes;
    return old.thread == thread || old.generation < state.generation ||
           (same_warp && old.warp_generation < state.warp_generation[thread / kLanes]);
  }
  return acquired_from(state.acquired_by_all, old, where) || acquired_from(state.acquired[thread], old, where);
}

void report(const Slot* old, uintptr_t at, size_t nbytes, Kind kind, uint64_t pc, bool shared) {
  if (state.faults.size() >= kMostFaults) return;
  const uint64_t before = old ? old->pc : 0;
  if (!state.seen.insert({before, pc, static_cast<int>(kind)}).second) return;
  state.faults.push_back({at,
                          {before, pc},
                          {old ? old->cta : 0, state.cta},
                          {old ? old->thread : 0u, now.thread.x},
                          static_cast<uint32_t>(nbytes),
                          {static_cast<uint8_t>(old ? old->kind : Kind::kRead), static_cast<uint8_t>(kind)},
                          static_cast<uint8_t>(shared)});
}

Cell& cell_at(uintptr_t at, bool shared) {
  const uintptr_t base = at / kPageNbytes;
  if (state.last_base[shared] != base) {
    auto& page = (shared ? state.shared : state.global)[base];
    if (!page) page = std::make_unique<Page>();
    state.last_base[shared] = base, state.last_page[shared] = page.get();
  }
  return (*state.last_page[shared])[at % kPageNbytes / kCellNbytes];
}

void note_cell(Cell& cell, uintptr_t at, uint8_t mask, Kind kind, uint64_t pc, bool shared) {
  (is_write(kind) ? cell.written : cell.read) |= mask;
  if (kind == Kind::kAtomic) cell.read |= mask;
  if (!state.check) return;
  const unsigned thread = now.thread.x;
  uint8_t unwritten = shared && !is_write(kind) ? mask : 0;
  Slot* free = nullptr;
  for (Slot& old : cell.slots) {
    if (!(old.mask & mask)) {
      if (!old.mask) free = &old;
      continue;
    }
    if (is_write(old.kind)) unwritten &= static_cast<uint8_t>(~old.mask);
    const bool before = ordered(old, at);
    if (!before && (is_write(old.kind) || is_write(kind)) && !(is_coherent(old.kind) && is_coherent(kind)))
      report(&old, at, kCellNbytes, kind, pc, shared);
    // What comes after this access comes after one that is ordered before it, too.
    if (kind == Kind::kWrite || (before && (is_write(kind) || !is_write(old.kind)))) old.mask &= static_cast<uint8_t>(~mask);
    if (!old.mask) free = &old;
  }
  if (unwritten) report(nullptr, at, kCellNbytes, kind, pc, shared);
  if (!free) {  // rather a read than a write: any of the others that conflicts is reported, too
    for (Slot& old : cell.slots)
      if (!is_write(old.kind)) free = &old;
    if (!free) free = &cell.slots[pc % kSlots];
  }
  *free = {state.cta,
           state.generation,
           static_cast<uint16_t>(thread),
           state.warp_generation[thread / kLanes],
           state.fences[thread],
           kind,
           mask,
           pc};
}

// An atomic operation on global memory: publishes what its CTA has fenced, and may see what others have published.
void meet(uintptr_t at) {
  const unsigned thread = now.thread.x;
  Releases& here = state.released[at];
  Releases others = here;
  others.erase(state.cta);
  if (!others.empty())
    state.pending.push_back({static_cast<uint16_t>(thread), state.generation, std::move(others)});
  if (!state.fenced) return;
  here[state.cta] = {at,
                     state.cta,
                     state.generation,
                     state.fence_generation[thread],
                     static_cast<uint16_t>(thread),
                     state.fences[thread],
                     state.at_barrier};
}

void close_ranges() {
  std::vector<uintptr_t> bases;
  for (const auto& [base, page] : state.global) bases.push_back(base);
  std::sort(bases.begin(), bases.end());
  for (const uintptr_t base : bases)
    for (size_t i = 0; i < kPageNbytes; ++i) {
      const Cell& cell = (*state.global[base])[i / kCellNbytes];
      const uint32_t read = cell.read >> i % kCellNbytes & 1, written = cell.written >> i % kCellNbytes & 1;
      if (!read && !written) continue;
      const uint64_t at = base * kPageNbytes + i;
      Range* last = state.ranges.empty() ? nullptr : &state.ranges.back();
      if (last && last->stop == at && last->read == read && last->written == written) ++last->stop;
      else state.ranges.push_back({at, at + 1, read, written});
    }
}

}  // namespace

void begin_launch(bool check, bool keep_ranges, unsigned threads, const char* shared_begin, const char* shared_end,
                  const char* stacks_begin, const char* stacks_end) {
  state = State{};
  state.on = check || keep_ranges, state.check = check, state.keep_ranges = keep_ranges;
  state.shared_begin = shared_begin, state.shared_end = shared_end;
  state.stacks_begin = stacks_begin, state.stacks_end = stacks_end;
  state.fences.resize(threads), state.fence_generation.resize(threads), state.acquired.resize(threads);
  state.warp_generation.resize(threads / kLanes);
}

void begin_block(unsigned index) {
  if (!state.on) return;
  state.shared.clear();
  state.last_base[1] = 1;
  state.cta = index, state.generation = 0, state.fenced = false;
  std::fill(state.fences.begin(), state.fences.end(), uint16_t{0});
  std::fill(state.fence_generation.begin(), state.fence_generation.end(), 0u);
  std::fill(state.warp_generation.begin(), state.warp_generation.end(), uint16_t{0});
  state.at_barrier = std::make_shared<std::vector<uint16_t>>(state.fences);
  for (Releases& each : state.acquired) each.clear();
  state.pending.clear(), state.acquired_by_all.clear();
}

void block_barrier() {
  if (!state.on) return;
  ++state.generation;
  if (state.fenced) state.at_barrier = std::make_shared<std::vector<uint16_t>>(state.fences);
  for (Releases& each : state.acquired) {
    for (auto& [cta, release] : each) state.acquired_by_all[cta] = release;
    each.clear();
  }
}

void warp_barrier(unsigned warp) {
  if (state.on) ++state.warp_generation[warp];
}

void fence() {
  if (!state.on) return;
  const unsigned thread = now.thread.x;
  ++state.fences[thread];
  state.fence_generation[thread] = state.generation;
  state.fenced = true;
  for (const Pending& each : state.pending)
    if (each.thread == thread || each.generation < state.generation)
      for (const auto& [cta, release] : each.releases) state.acquired[thread][cta] = release;
}

void note(const void* address, size_t nbytes, Kind kind, const void* pc) {
  if (!state.on) return;
  const char* at = static_cast<const char*>(address);
  if (at >= state.stacks_begin && at < state.stacks_end) return;
  if (at >= reinterpret_cast<const char*>(&now) && at < reinterpret_cast<const char*>(&now + 1)) return;
  const bool shared = at >= state.shared_begin && at < state.shared_end;
  const uintptr_t first = reinterpret_cast<uintptr_t>(at), stop = first + nbytes;
  for (uintptr_t from = first; from < stop;) {
    const uintptr_t to = std::min(stop, from / kCellNbytes * kCellNbytes + kCellNbytes);
    const uint8_t mask = static_cast<uint8_t>(((1u << (to - from)) - 1u) << from % kCellNbytes);
    note_cell(cell_at(from, shared), from, mask, kind, reinterpret_cast<uint64_t>(pc), shared);
    from = to;
  }
  if (kind == Kind::kAtomic && !shared && state.check) meet(first);
}

void end_launch() {
  if (state.keep_ranges) close_ranges();
  state.on = false;
  state.global.clear(), state.shared.clear();
  state.last_base[0] = state.last_base[1] = 1;
}

}  // namespace emulation::race

// What the last launch left, for the tests: how many there are; as many as fit are copied.
extern "C" size_t emulation_faults(emulation::race::Fault* into, size_t most) {
  const auto& faults = emulation::race::state.faults;
  std::copy_n(faults.begin(), std::min(most, faults.size()), into);
  return faults.size();
}
extern "C" size_t emulation_ranges(emulation::race::Range* into, size_t most) {
  const auto& ranges = emulation::race::state.ranges;
  std::copy_n(ranges.begin(), std::min(most, ranges.size()), into);
  return ranges.size();
}

// What -fsanitize=thread makes the compiler call before each access to memory that another thread may see.
#define GRADWIRE_ACCESS(name, nbytes, kind)                                                            \
  extern "C" void __tsan_##name(const void* at) {                                                      \
    emulation::race::note(at, nbytes, emulation::race::Kind::kind, __builtin_return_address(0));       \
  }
#define GRADWIRE_ACCESSES(nbytes)                          \
  GRADWIRE_ACCESS(read##nbytes, nbytes, kRead)             \
  GRADWIRE_ACCESS(write##nbytes, nbytes, kWrite)           \
  GRADWIRE_ACCESS(unaligned_read##nbytes, nbytes, kRead)   \
  GRADWIRE_ACCESS(unaligned_write##nbytes, nbytes, kWrite) \
  GRADWIRE_ACCESS(volatile_read##nbytes, nbytes, kRead)    \
  GRADWIRE_ACCESS(volatile_write##nbytes, nbytes, kWrite)
GRADWIRE_ACCESSES(1)
GRADWIRE_ACCESSES(2)
GRADWIRE_ACCESSES(4)
GRADWIRE_ACCESSES(8)
GRADWIRE_ACCESSES(16)
extern "C" void __tsan_read_range(const void* at, size_t nbytes) {
  emulation::race::note(at, nbytes, emulation::race::Kind::kRead, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(const void* at, size_t nbytes) {
  emulation::race::note(at, nbytes, emulation::race::Kind::kWrite, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

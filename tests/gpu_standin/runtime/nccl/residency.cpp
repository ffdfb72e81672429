// How many of NCCL's kernels a device holds at a time.
//
// NCCL_LAUNCH_ORDER_IMPLICIT=1 is NCCL's own variable: kernels of all communicators of a device become resident in the
// order in which the host has issued them. They may still run at the same time.
// NCCL's kernels wait for each other across devices, so all of them must be resident at once. A full device holds fewer:
// GPU_STANDIN_NCCL_KERNELS=1 lets one kernel in at a time, GPU_STANDIN_NCCL_CTAS=28 as many as fit into so many CTAs.
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "comm.h"

namespace standin {
namespace {

struct Device {
  int kernels = 0, ctas = 0;
  std::uint64_t issued = 0;
  std::set<std::uint64_t> not_resident;  // numbers of issued kernels, under NCCL_LAUNCH_ORDER_IMPLICIT=1
};
struct Devices {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, Device> by_number;
};
Devices& devices() {
  static auto* one = new Devices;
  return *one;
}

// NCCL reads the variable once in a process, at its first launch.
bool in_host_order() {
  static const bool asked = [] {
    const char* value = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    return value && strcmp(value, "1") == 0;
  }();
  return asked;
}

}  // namespace

std::uint64_t Residency::issue(int device) {
  std::lock_guard<std::mutex> lock(devices().mutex);
  Device& on = devices().by_number[device];
  if (in_host_order()) on.not_resident.insert(++on.issued);
  return on.issued;
}

bool Residency::take(int device, int ctas, std::uint64_t issued, const std::function<bool()>& given_up) {
  const long long kernels_limit = setting("NCCL_KERNELS", 0LL), ctas_limit = setting("NCCL_CTAS", setting("SMS", 132LL));
  std::unique_lock<std::mutex> lock(devices().mutex);
  Device& on = devices().by_number[device];
  devices().changed.wait(lock, [&] {
    bool fits = (!kernels_limit || on.kernels < kernels_limit) && (!on.kernels || on.ctas + ctas <= ctas_limit);
    bool first = on.not_resident.empty() || *on.not_resident.begin() >= issued;
    return (fits && first) || given_up();
  });
  on.not_resident.erase(issued);
  devices().changed.notify_all();
  if (given_up()) return false;
  ++on.kernels;
  on.ctas += ctas;
  return true;
}

void Residency::give_back(int device, int ctas) {
  std::lock_guard<std::mutex> lock(devices().mutex);
  --devices().by_number[device].kernels;
  devices().by_number[device].ctas -= ctas;
  devices().changed.notify_all();
}

void Residency::wake() {
  std::lock_guard<std::mutex> lock(devices().mutex);
  devices().changed.notify_all();
}

}  // namespace standin

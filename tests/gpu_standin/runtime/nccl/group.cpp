// NCCL's groups.
#include "group.h"

#include <algorithm>
#include <thread>

namespace standin {
namespace {

struct Job {
  std::shared_ptr<Comm> comm;
  std::function<ncclResult_t()> run;
};

struct Group {
  int depth = 0;
  std::vector<std::pair<std::shared_ptr<Comm>, std::vector<Call>>> calls;  // in the order of each communicator's first
  std::vector<Job> jobs;
};
thread_local Group group;

ncclResult_t first_error(const std::vector<ncclResult_t>& results) {
  for (ncclResult_t wanted : {ncclSuccess, ncclInProgress}) {
    for (ncclResult_t result : results) {
      if (wanted == ncclSuccess && result != ncclSuccess && result != ncclInProgress) return result;
      if (wanted == ncclInProgress && result == ncclInProgress) return result;
    }
  }
  return ncclSuccess;
}

ncclResult_t launch_blocking_or_not(const std::shared_ptr<Comm>& comm, std::vector<Call> calls) {
  return comm->host_job([comm, calls = std::move(calls)] { return comm->launch(calls); });
}

ncclResult_t run_all(std::vector<std::function<ncclResult_t()>> works) {
  std::vector<ncclResult_t> results(works.size(), ncclSuccess);
  if (works.size() == 1) return works[0]();
  int device = current_device();
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < works.size(); ++i) {
    threads.emplace_back([&, i] {
      cudaSetDevice(device);
      results[i] = works[i]();
    });
  }
  for (auto& thread : threads) thread.join();
  return first_error(results);
}

ncclResult_t flush() {
  std::vector<std::function<ncclResult_t()>> works;
  for (Job& job : group.jobs) {
    works.push_back([job] { return job.comm->host_job(job.run); });
  }
  for (auto& [comm, calls] : group.calls) {
    works.push_back([comm = comm, calls = calls] { return launch_blocking_or_not(comm, calls); });
  }
  group.jobs.clear();
  group.calls.clear();
  return works.empty() ? ncclSuccess : run_all(std::move(works));
}

}  // namespace

void group_start() { ++group.depth; }

ncclResult_t group_end() {
  if (group.depth == 0) {
    say("ncclGroupEnd without ncclGroupStart");
    return ncclInvalidUsage;
  }
  return --group.depth ? ncclSuccess : flush();
}

ncclResult_t enqueue(std::shared_ptr<Comm> comm, Call call) {
  auto same = [&](auto& entry) { return entry.first == comm; };
  auto found = std::find_if(group.calls.begin(), group.calls.end(), same);
  if (found == group.calls.end()) {
    group.calls.push_back({comm, {}});
    found = std::prev(group.calls.end());
  }
  found->second.push_back(std::move(call));
  return group.depth ? ncclSuccess : flush();
}

ncclResult_t enqueue_job(std::shared_ptr<Comm> comm, std::function<ncclResult_t()> job) {
  group.jobs.push_back({std::move(comm), std::move(job)});
  return group.depth ? ncclSuccess : flush();
}

}  // namespace standin

// Events: marks in streams, with the time at which they were reached.
#include <map>

#include "standin.h"

namespace standin {
namespace {

struct Recorded {
  Mark mark;
  std::shared_ptr<std::atomic<double>> seconds;  // when it was reached
};

struct Event {
  unsigned flags;
  std::mutex mutex;
  std::optional<Recorded> last;

  std::optional<Recorded> recorded() {
    std::lock_guard<std::mutex> lock(mutex);
    return last;
  }
};

struct Registry {
  std::mutex mutex;
  std::map<cudaEvent_t, std::shared_ptr<Event>> events;
};
Registry& registry() {
  static auto* one = new Registry;
  return *one;
}

std::shared_ptr<Event> find_event(cudaEvent_t handle) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().events.find(handle);
  return found == registry().events.end() ? nullptr : found->second;
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  CALLED();
  auto event = std::make_shared<Event>();
  event->flags = flags;
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().events[*handle] = std::move(event);
  return returned(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  CALLED();
  std::lock_guard<std::mutex> lock(registry().mutex);
  return returned(registry().events.erase(handle) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  CALLED();
  auto event = find_event(handle);
  auto stream = find_stream(stream_handle);
  if (!event || !stream) return returned(cudaErrorInvalidResourceHandle);
  auto seconds = std::make_shared<std::atomic<double>>(0);
  Mark mark = stream->submit("event", [seconds] { seconds->store(seconds_since_boot()); });
  std::lock_guard<std::mutex> lock(event->mutex);
  event->last = Recorded{mark, seconds};
  return returned(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) { return cudaEventRecordWithFlags(handle, stream, 0); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  CALLED();
  auto event = find_event(handle);
  auto stream = find_stream(stream_handle);
  if (!event || !stream) return returned(cudaErrorInvalidResourceHandle);
  // An event that was never recorded is no wait, as in CUDA.
  if (auto recorded = event->recorded(); recorded && recorded->mark.stream != stream) stream->wait_for(recorded->mark);
  return returned(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  CALLED();
  auto event = find_event(handle);
  if (!event) return returned(cudaErrorInvalidResourceHandle);
  auto recorded = event->recorded();
  return returned(!recorded || recorded->mark.reached() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  CALLED();
  auto event = find_event(handle);
  if (!event) return returned(cudaErrorInvalidResourceHandle);
  if (auto recorded = event->recorded()) recorded->mark.wait();
  return returned(cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  CALLED();
  auto first = find_event(from), second = find_event(to);
  if (!first || !second) return returned(cudaErrorInvalidResourceHandle);
  if ((first->flags | second->flags) & cudaEventDisableTiming) return returned(cudaErrorInvalidResourceHandle);
  auto begin = first->recorded(), end = second->recorded();
  if (!begin || !end) return returned(cudaErrorInvalidResourceHandle);
  if (!begin->mark.reached() || !end->mark.reached()) return returned(cudaErrorNotReady);
  *milliseconds = static_cast<float>((end->seconds->load() - begin->seconds->load()) * 1e3);
  return returned(cudaSuccess);
}

}  // extern "C"

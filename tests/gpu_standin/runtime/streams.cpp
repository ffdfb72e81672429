// Streams: queues with a thread each, and the default streams.
#include <time.h>

#include <map>
#include <thread>

#include "standin.h"

namespace standin {
namespace {

std::atomic<int> next_number{0};

// Never destroyed: streams' threads may outlive main().
struct Registry {
  std::mutex mutex;
  std::map<cudaStream_t, std::shared_ptr<Stream>> streams;  // those that cudaStreamCreate made
  std::map<int, std::shared_ptr<Stream>> legacy;            // the default stream of each device
  std::vector<std::shared_ptr<Stream>> per_thread;
};
Registry& registry() {
  static auto* one = new Registry;
  return *one;
}

std::shared_ptr<Stream> legacy_stream(int device) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto& stream = registry().legacy[device];
  if (!stream) stream = std::make_shared<Stream>(device, cudaStreamDefault, 0);
  return stream;
}

std::shared_ptr<Stream> stream_of_thread(int device) {
  static thread_local std::map<int, std::shared_ptr<Stream>> streams;
  auto& stream = streams[device];
  if (!stream) {
    stream = std::make_shared<Stream>(device, cudaStreamDefault, 0);
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().per_thread.push_back(stream);
  }
  return stream;
}

bool is_legacy(const Stream* stream) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().legacy.find(stream->device);
  return found != registry().legacy.end() && found->second.get() == stream;
}

}  // namespace

bool Mark::reached() const { return !stream || stream->reached(ticket); }
void Mark::wait() const {
  if (stream) stream->wait_until(ticket);
}

Stream::Stream(int on_device, unsigned with_flags, int with_priority)
    : device(on_device),
      flags(with_flags),
      priority(with_priority),
      number(next_number++),
      random_(0) {
  seed(setting("SEED", 0LL));
}

Mark Stream::submit(const char* name, std::function<void()> work) {
  if (!(flags & cudaStreamNonBlocking)) {
    if (is_legacy(this)) {
      for (auto& other : streams_of(device)) {
        if (other.get() != this && !(other->flags & cudaStreamNonBlocking) && !other->idle()) wait_for(other->mark());
      }
    } else if (auto legacy = legacy_stream(device); !legacy->idle()) {
      wait_for(legacy->mark());
    }
  }
  return append({name, std::move(work), true});
}

void Stream::wait_for(const Mark& mark) {
  if (!mark.reached()) append({"wait for another stream", [mark] { mark.wait(); }, false});
}

Mark Stream::append(Work work) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  ++submitted_;
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([self = shared_from_this()] { self->work_off(); }).detach();
  }
  changed_.notify_all();
  return {shared_from_this(), submitted_};
}

void Stream::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Stream::work_off() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    while (queue_.empty()) {
      if (closed_) {
        has_thread_ = false;
        return;
      }
      changed_.wait(lock);
    }
    Work work = std::move(queue_.front());
    queue_.pop_front();
    running_ = work.name;
    running_since_ = seconds_since_boot();
    lock.unlock();
    if (work.delayed) delay();
    work.run();
    work.run = nullptr;  // what it holds is let go before anybody is told
    lock.lock();
    running_ = nullptr;
    ++completed_;
    changed_.notify_all();
  }
}

void Stream::delay() {
  long long microseconds = setting("JITTER_US", 0LL);
  if (!microseconds) return;
  // Half of all work starts at once: short and long delays side by side reorder more than long ones alone.
  std::uint64_t drawn;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    drawn = random_();
  }
  if (drawn & 1) return;
  timespec pause{0, static_cast<long>((drawn >> 1) % (microseconds * 1000))};
  nanosleep(&pause, nullptr);
}

Mark Stream::mark() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {shared_from_this(), submitted_};
}

bool Stream::reached(std::uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= ticket;
}

void Stream::wait_until(std::uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return completed_ >= ticket; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ == submitted_;
}

void Stream::drain() { mark().wait(); }

void Stream::seed(std::uint64_t value) {
  std::lock_guard<std::mutex> lock(mutex_);
  random_.seed(value * 1000003 + device * 1009 + number);
}

std::string Stream::describe() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (completed_ == submitted_) return "";
  return format("device %d stream %d: %s for %.1f s, %zu more in its queue\n", device, number,
                running_ ? running_ : "about to start", running_ ? seconds_since_boot() - running_since_ : 0.0,
                queue_.size());
}

std::shared_ptr<Stream> find_stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return legacy_stream(current_device());
  if (handle == cudaStreamPerThread) return stream_of_thread(current_device());
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().streams.find(handle);
  return found == registry().streams.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Stream>> streams_of(int device) {
  std::vector<std::shared_ptr<Stream>> streams;
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (auto& [handle, stream] : registry().streams) streams.push_back(stream);
  for (auto& [number, stream] : registry().legacy) streams.push_back(stream);
  for (auto& stream : registry().per_thread) streams.push_back(stream);
  std::vector<std::shared_ptr<Stream>> of_device;
  for (auto& stream : streams) {
    if (stream->device == device) of_device.push_back(stream);
  }
  return of_device;
}

void drain_device(int device) {
  for (auto& stream : streams_of(device)) stream->drain();
}

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  CALLED();
  auto stream = std::make_shared<Stream>(current_device(), flags, priority);
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().streams[*handle] = std::move(stream);
  return returned(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  CALLED();
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = registry().streams.find(handle);
    if (found == registry().streams.end()) return returned(cudaErrorInvalidResourceHandle);
    stream = found->second;
    registry().streams.erase(found);
  }
  stream->close();  // returns at once, as in CUDA: what was submitted still runs
  return returned(cudaSuccess);
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  CALLED();
  auto stream = find_stream(handle);
  if (!stream) return returned(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return returned(cudaSuccess);
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  CALLED();
  auto stream = find_stream(handle);
  if (!stream) return returned(cudaErrorInvalidResourceHandle);
  *flags = stream->flags;
  return returned(cudaSuccess);
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  CALLED();
  auto stream = find_stream(handle);
  if (!stream) return returned(cudaErrorInvalidResourceHandle);
  *device = stream->device;
  return returned(cudaSuccess);
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  CALLED();
  auto stream = find_stream(handle);
  if (!stream) return returned(cudaErrorInvalidResourceHandle);
  *id = stream->number;
  return returned(cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  CALLED();
  auto stream = find_stream(handle);
  if (!stream) return returned(cudaErrorInvalidResourceHandle);
  return returned(stream->idle() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CALLED();
  auto stream = find_stream(handle);
  if (!stream) return returned(cudaErrorInvalidResourceHandle);
  if (is_legacy(stream.get())) stream->submit("synchronize", [] {});  // waits for the blocking streams as well
  stream->drain();
  return returned(cudaSuccess);
}

cudaError_t cudaDeviceSynchronize() {
  CALLED();
  drain_device(current_device());
  return returned(cudaSuccess);
}

// Graphs are not modelled: cudaStreamBeginCapture is a stub that ends the process with its name.
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  CALLED();
  *status = cudaStreamCaptureStatusNone;
  return returned(cudaSuccess);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  CALLED();
  *status = cudaStreamCaptureStatusNone;
  return returned(cudaSuccess);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  CALLED();
  return returned(cudaSuccess);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  CALLED();
  return returned(static_cast<cudaError_t>(gpu_standin_submit(handle, "host function", function, argument)));
}

int gpu_standin_submit(void* handle, const char* name, void (*run)(void*), void* argument) {
  auto stream = find_stream(static_cast<cudaStream_t>(handle));
  if (!stream) return cudaErrorInvalidResourceHandle;
  stream->submit(name, [run, argument] { run(argument); });
  return cudaSuccess;
}

void gpu_standin_seed(unsigned long long seed) {
  gpu_standin_set("SEED", std::to_string(seed).c_str());
  for (int device = 0; device < device_count(); ++device) {
    for (auto& stream : streams_of(device)) stream->seed(seed);
  }
}

const char* gpu_standin_describe(void) {
  static thread_local std::string text;
  text.clear();
  for (int device = 0; device < device_count(); ++device) {
    for (auto& stream : streams_of(device)) text += stream->describe();
  }
  return text.c_str();
}

}  // extern "C"

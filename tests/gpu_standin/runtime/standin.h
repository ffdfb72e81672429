// What the files of the stand-in share: settings, call counts, streams, marks in streams, memory.
//
// A device is a number. A stream is a queue with a thread that works it off in order. Device memory is host memory:
// whatever runs on a stream's thread reads and writes it through the device pointer.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gpu_standin.h"

namespace standin {

// ---------------------------------------------------------------------------------------------- settings.cpp

// The value of GPU_STANDIN_<name>, or of gpu_standin_set(name, ...) where that was called later; else `otherwise`.
std::string setting(const char* name, const std::string& otherwise = "");
long long setting(const char* name, long long otherwise);

double seconds_since_boot();

// Counts the calls of one function of the API; one static object in each function, see CALLED.
class CallCount {
 public:
  explicit CallCount(const char* name);
  void add();

  const char* const name;
  std::atomic<std::uint64_t> calls{0};
  CallCount* const next;

 private:
  static std::atomic<CallCount*> first_;
  friend std::string counts_as_json();
  friend void reset_counts();
};

std::string counts_as_json();
void reset_counts();

// First line of every function of the API: counts the call, and writes it to the trace.
#define CALLED()                                    \
  static standin::CallCount call_count_(__func__);  \
  call_count_.add()

// Writes one line to the trace, where GPU_STANDIN_TRACE asks for one: {"seconds": .., "what": .., "detail": ..}.
bool tracing();
void trace(const char* what, const std::string& detail = "");

// printf into a string.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// Says on stderr that the process meets something that the stand-in cannot do, and ends it.
[[noreturn]] void give_up(const std::string& reason);
// Says something on stderr, with the process and the stand-in named.
void say(const std::string& message);

// ---------------------------------------------------------------------------------------------- device.cpp

int device_count();
int current_device();                 // of this thread
cudaError_t returned(cudaError_t error);  // remembers an error for cudaGetLastError; every function returns through it

// ---------------------------------------------------------------------------------------------- streams.cpp

class Stream;

// A place in a stream: reached once everything that was submitted before it has run.
struct Mark {
  std::shared_ptr<Stream> stream;
  std::uint64_t ticket = 0;

  bool reached() const;
  void wait() const;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(int device, unsigned flags, int priority);

  // Appends `work`, named for traces and for gpu_standin_describe. `work` runs on the stream's thread; it may block.
  // Streams without cudaStreamNonBlocking and the legacy default stream wait for each other, as in CUDA.
  // Returns the mark after it.
  Mark submit(const char* name, std::function<void()> work);
  // Appends a wait for `mark`, which is of another stream.
  void wait_for(const Mark& mark);

  // Lets the thread end once all work is done; cudaStreamDestroy.
  void close();

  Mark mark();
  bool idle();
  void drain();
  bool reached(std::uint64_t ticket);
  void wait_until(std::uint64_t ticket);
  std::string describe();
  // Begins the delays of GPU_STANDIN_JITTER_US anew.
  void seed(std::uint64_t value);

  const int device;
  const unsigned flags;
  const int priority;
  const int number;  // in the order of creation in this process; 0.. also for default streams

 private:
  struct Work {
    const char* name;
    std::function<void()> run;
    bool delayed;  // by GPU_STANDIN_JITTER_US
  };
  Mark append(Work work);
  void work_off();
  void delay();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  std::uint64_t submitted_ = 0, completed_ = 0;
  bool has_thread_ = false, closed_ = false;
  const char* running_ = nullptr;
  double running_since_ = 0;
  std::mt19937_64 random_;
};

// The stream of a handle, default streams included; nullptr where there is no such stream.
std::shared_ptr<Stream> find_stream(cudaStream_t handle);
std::vector<std::shared_ptr<Stream>> streams_of(int device);
void drain_device(int device);

// ---------------------------------------------------------------------------------------------- memory.cpp

enum class Place { unknown, host, device, managed };

struct Found {
  Place place = Place::unknown;
  int device = 0;
  std::uintptr_t base = 0;
  std::size_t nbytes = 0;
};
// The allocation that `pointer` lies in.
Found find_memory(const void* pointer);
cudaError_t allocate(void** pointer, std::size_t nbytes, Place place, int device);
cudaError_t release(void* pointer, Place place);
// nullopt where `nbytes` at `pointer` are no overrun of an allocation; else the error in words.
std::optional<std::string> overrun(const void* pointer, std::size_t nbytes);

}  // namespace standin

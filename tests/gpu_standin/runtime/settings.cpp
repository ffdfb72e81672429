// Variables, call counts, the trace, and how the stand-in speaks.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "standin.h"

namespace standin {
namespace {

// Never destroyed: streams' threads may outlive main().
struct Settings {
  std::mutex mutex;
  std::map<std::string, std::string> overridden;
};
Settings& settings() {
  static auto* one = new Settings;
  return *one;
}

// The file that GPU_STANDIN_<name> asks for, its %p replaced by the process's number; nullptr without the variable.
FILE* open_for_process(const char* name) {
  std::string path = setting(name);
  if (path.empty()) return nullptr;
  if (auto at = path.find("%p"); at != std::string::npos) path.replace(at, 2, std::to_string(getpid()));
  FILE* file = fopen(path.c_str(), "w");
  if (!file) give_up("GPU_STANDIN_" + std::string(name) + " names " + path + ", which cannot be written");
  return file;
}

// A forked process has a trace of its own.
struct Trace {
  std::mutex mutex;
  pid_t process = 0;
  FILE* file = nullptr;
};
Trace& trace_file() {
  static auto* one = new Trace;
  return *one;
}

void write_counts() {
  if (FILE* file = open_for_process("COUNTS")) {
    fputs(counts_as_json().c_str(), file);
    fclose(file);
  }
}

}  // namespace

std::string setting(const char* name, const std::string& otherwise) {
  {
    std::lock_guard<std::mutex> lock(settings().mutex);
    auto found = settings().overridden.find(name);
    if (found != settings().overridden.end()) return found->second;
  }
  const char* value = getenv(("GPU_STANDIN_" + std::string(name)).c_str());
  return value && *value ? value : otherwise;
}

long long setting(const char* name, long long otherwise) {
  std::string text = setting(name, std::string());
  if (text.empty()) return otherwise;
  char* end = nullptr;
  long long value = strtoll(text.c_str(), &end, 10);
  if (*end || value < 0) give_up("GPU_STANDIN_" + std::string(name) + " is " + text + "; it must be a number >= 0");
  return value;
}

double seconds_since_boot() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

std::atomic<CallCount*> CallCount::first_{nullptr};

CallCount::CallCount(const char* function) : name(function), next(first_.load()) {
  static const bool at_exit = [] { return atexit(write_counts) == 0; }();
  (void)at_exit;
  while (!first_.compare_exchange_weak(const_cast<CallCount*&>(next), this)) {
  }
}

void CallCount::add() {
  calls.fetch_add(1, std::memory_order_relaxed);
  if (tracing()) trace(name);
}

std::string counts_as_json() {
  std::map<std::string, std::uint64_t> counts;
  for (CallCount* one = CallCount::first_.load(); one; one = one->next) counts[one->name] += one->calls.load();
  std::string json = "{";
  for (auto& [name, calls] : counts) {
    if (calls) json += (json.size() > 1 ? ", " : "") + format("\"%s\": %llu", name.c_str(), (unsigned long long)calls);
  }
  return json + "}\n";
}

void reset_counts() {
  for (CallCount* one = CallCount::first_.load(); one; one = one->next) one->calls = 0;
}

// Asked for anew after a fork: the variable may have been set since.
bool tracing() {
  static std::atomic<pid_t> asked_in{0};
  static std::atomic<bool> asked{false};
  if (asked_in != getpid()) {
    asked = !setting("TRACE").empty();
    asked_in = getpid();
  }
  return asked;
}

void trace(const char* what, const std::string& detail) {
  if (!tracing()) return;
  Trace& out = trace_file();
  std::lock_guard<std::mutex> lock(out.mutex);
  if (out.process != getpid()) {
    out.process = getpid();
    out.file = open_for_process("TRACE");
    setvbuf(out.file, nullptr, _IOLBF, 1 << 12);
  }
  fprintf(out.file, "{\"seconds\": %.6f, \"thread\": %ld, \"what\": \"%s\", \"detail\": \"%s\"}\n", seconds_since_boot(),
          syscall(SYS_gettid), what, detail.c_str());
}

std::string format(const char* pattern, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

void say(const std::string& message) {
  fprintf(stderr, "GPU stand-in, process %d: %s\n", getpid(), message.c_str());
  fflush(stderr);
  trace("said", message);
}

void give_up(const std::string& reason) {
  say(reason);
  abort();
}

}  // namespace standin

extern "C" {

void gpu_standin_set(const char* name, const char* value) {
  std::lock_guard<std::mutex> lock(standin::settings().mutex);
  standin::settings().overridden[name] = value;
}

const char* gpu_standin_counts(void) {
  static thread_local std::string text;
  text = standin::counts_as_json();
  return text.c_str();
}

int gpu_standin_unknown(const char* what) {
  std::string message = std::string("not modelled: ") + what;
  if (standin::setting("UNKNOWN", "abort") != "error") standin::give_up(message);
  standin::say(message);
  return 1;
}

void gpu_standin_reset_counts(void) { standin::reset_counts(); }

void gpu_standin_called(const char* function) {
  static auto* mutex = new std::mutex;
  static auto* counts = new std::map<std::string, standin::CallCount*>;
  standin::CallCount* count;
  {
    std::lock_guard<std::mutex> lock(*mutex);
    auto& slot = (*counts)[function];
    if (!slot) slot = new standin::CallCount((new std::string(function))->c_str());
    count = slot;
  }
  count->add();
}

}  // extern "C"

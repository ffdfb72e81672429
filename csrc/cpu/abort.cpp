// Two ends that C++ puts to a process, and what is done about them.
//
// An abort is held up for a moment, so that another thread of the process can still say what it knows: gloo ends the
// process from a thread of its own where two ranks send unlike sizes. Nothing is wrong with the rest of the process
// then: the handler writes the signal to a descriptor, and waits until a Python thread lets it go on.
//
// A thread that wants the GIL back while Python is being finalized is ended by pthread_exit, before Python 3.14. That
// unwinds its stack into the destructor that wants the GIL, which may not be left so, and std::terminate ends the
// process by SIGABRT in the middle of an orderly end. Such a thread is stopped there instead, as Python 3.14 does.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <exception>

namespace nb = nanobind;

namespace {

constexpr int kLookMilliseconds = 10;
constexpr int kHeld = 128;  // added to the signal: Python writes the bare number where the program has a handler of its own

enum State { off, armed, held };

std::atomic<State> state{off};
int descriptor = -1;
int most_milliseconds = 0;
pid_t owner = 0;
struct sigaction before;
std::atomic<bool> passed{false};
int (*has_interpreter)() = nullptr;  // PyGILState_Check, which the stable interface of Python has not

// Only what may be called in a handler: write, nanosleep, sigaction, raise, and what reads atomics.
void hold(int number) {
  // A forked child has nobody who would let it go; nor has a thread with the interpreter, while no other runs Python.
  if (getpid() == owner && !has_interpreter()) {
    State wanted = armed;
    if (state.compare_exchange_strong(wanted, held)) {
      const unsigned char word = static_cast<unsigned char>(kHeld + number);
      if (write(descriptor, &word, 1) != 1) state = off;
    }
    const timespec look{0, kLookMilliseconds * 1000000L};
    for (int left = most_milliseconds; left > 0 && state == held; left -= kLookMilliseconds) nanosleep(&look, nullptr);
  }
  // What was there before does the rest, once this handler has returned. It may have found this one in its turn, and put
  // it back: then the system ends the process.
  if (passed.exchange(true)) {
    signal(SIGABRT, SIG_DFL);
  } else {
    sigaction(SIGABRT, &before, nullptr);
  }
  raise(SIGABRT);
}

bool hold_abort(int told, int milliseconds) {
  if (has_interpreter == nullptr) {
    has_interpreter = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    if (has_interpreter == nullptr) return false;
  }
  descriptor = told;
  most_milliseconds = milliseconds;
  owner = getpid();
  struct sigaction now {};
  if (sigaction(SIGABRT, nullptr, &now) != 0) return false;
  if (now.sa_handler != hold) {  // not yet, or faulthandler.disable() has put back what it had found itself
    struct sigaction mine {};
    mine.sa_handler = hold;
    sigemptyset(&mine.sa_mask);
    before = now;
    passed = false;
    if (sigaction(SIGABRT, &mine, nullptr) != 0) return false;
  }
  State idle = off;
  state.compare_exchange_strong(idle, armed);  // one that is held already goes on waiting
  return true;
}

void let_abort_go() { state = off; }

/// Far longer than the rest of an end takes; then the process ends as it would have, should it wait for this thread.
constexpr int stopped_seconds = 10;

std::terminate_handler terminate_before = nullptr;
int (*is_finalizing)() = nullptr;

[[noreturn]] void stop_thread() {
  if (syscall(SYS_gettid) != getpid() && is_finalizing()) {
    const timespec pause{stopped_seconds, 0};
    nanosleep(&pause, nullptr);
  }
  if (terminate_before != nullptr) terminate_before();
  std::abort();
}

// Called once Python is about to be finalized: before that nothing is changed for the rest of the process.
bool stop_unwound_threads() {
  for (const char* name : {"Py_IsFinalizing", "_Py_IsFinalizing"}) {  // the latter before Python 3.13
    if (is_finalizing == nullptr) is_finalizing = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, name));
  }
  if (is_finalizing == nullptr) return false;
  const std::terminate_handler found = std::set_terminate(stop_thread);
  if (found != stop_thread) terminate_before = found;
  return true;
}

}  // namespace

void bind_abort(nb::module_& m) {
  m.def("hold_abort", hold_abort, nb::arg("descriptor"), nb::arg("milliseconds"));
  m.def("let_abort_go", let_abort_go);
  m.def("stop_unwound_threads", stop_unwound_threads);
}

// gradwire._native: the door from Python to everything compiled. Each unit of csrc/cpu has one bind_*() function.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.doc() = "gradwire's CPU kernels and shared-memory collectives.";
}

// gradwire._native: the door from Python to everything compiled. Each unit of csrc/cpu has one bind_*() function.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_shm(nb::module_& m);

NB_MODULE(_native, m) {
  m.doc() = "gradwire's CPU kernels and shared-memory collectives.";
  bind_shm(m);
}

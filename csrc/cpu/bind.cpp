// gradwire._native: the Python module of everything compiled. Each unit of csrc/cpu has one bind_*() function.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_abort(nb::module_& m);
void bind_shm(nb::module_& m);
void bind_block_formats(nb::module_& m);
void bind_dgc(nb::module_& m);
void bind_isa(nb::module_& m);
void bind_outer(nb::module_& m);
void bind_powersgd(nb::module_& m);
void bind_relay(nb::module_& m);

NB_MODULE(_native, m) {
  // Groups may outlive the interpreter, because lanes are daemon threads; the operating system frees what they hold.
  nb::set_leak_warnings(false);
  m.doc() = "gradwire's CPU kernels and shared-memory collectives.";
  // Add 1 here and in compressors/compiled.py, which refuses a module compiled before, whenever the bytes of a
  // payload, the parameters of a function, or which functions there are change.
  m.attr("INTERFACE") = 5;
  bind_abort(m);
  bind_shm(m);
  bind_block_formats(m);
  bind_dgc(m);
  bind_isa(m);
  bind_outer(m);
  bind_powersgd(m);
  bind_relay(m);
}

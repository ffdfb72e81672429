// PowerSGD's local work on one matrix. Factors lie rank-major (rank rows), so that every loop runs along memory.
//
// Bytes an element, read + written, factors not counted: project 8 + 4 (gradient and residual; their sum, in place),
// back_project 4, restore 4 + 8. No fused multiply-add: see vec.h.
// Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithm 1.
#include <nanobind/nanobind.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "common/cast_formula.h"
#include "common/orthogonal_formula.h"
#include "cpu/intrinsics.h"
#include "cpu/isa.h"
#include "cpu/stream.h"

namespace {

using namespace gradwire;

struct Shape {
  size_t rows, columns, rank;
};

#define GRADWIRE_LOOPS "cpu/kernels/powersgd_loops.h"
#include "cpu/foreach_isa.h"

float* floats(uintptr_t at) { return reinterpret_cast<float*>(at); }

void powersgd_project(uintptr_t matrix, uintptr_t residual, size_t rows, size_t columns, size_t rank, uintptr_t q,
                      uintptr_t p) {
  const Shape shape{rows, columns, rank};
  GRADWIRE_DISPATCH(project, floats(matrix), floats(residual), shape, floats(q), floats(p));
}

void powersgd_back_project(uintptr_t matrix, size_t rows, size_t columns, size_t rank, uintptr_t p, uintptr_t q) {
  const Shape shape{rows, columns, rank};
  GRADWIRE_DISPATCH(back_project, floats(matrix), shape, floats(p), floats(q));
}

void powersgd_restore(uintptr_t matrix, uintptr_t new_residual, size_t rows, size_t columns, size_t rank, uintptr_t p,
                      uintptr_t q_own, uintptr_t q_sum) {
  const Shape shape{rows, columns, rank};
  GRADWIRE_DISPATCH(restore, floats(matrix), floats(new_residual), shape, floats(p), floats(q_own), floats(q_sum));
}

void orthogonalize(uintptr_t matrix, size_t rank, size_t columns, uint32_t key) {
  if (rank > columns) throw std::invalid_argument("`rank` must be at most `columns`");
  orthonormal_rows(floats(matrix), rank, columns, key);
}

}  // namespace

void bind_powersgd(nanobind::module_& m) {
  const nanobind::call_guard<nanobind::gil_scoped_release> unlocked;
  m.def("powersgd_project", &powersgd_project, unlocked);
  m.def("powersgd_back_project", &powersgd_back_project, unlocked);
  m.def("powersgd_restore", &powersgd_restore, unlocked);
  m.def("orthogonalize", &orthogonalize, unlocked);
}

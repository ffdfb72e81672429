// Gram-Schmidt in float64, twice, that gives orthonormal rows for any input, zero included.
//
// A row that depends on the ones before it (or is zero) is replaced by random numbers from a hash, so that the next
// step's warm start spans a full space again; a row with inf or NaN becomes NaN, so that the step is recognised as not
// finite. Plain loops with a fixed order: every rank must get the same bits from the same input.
// Source: Giraud, Langou, Rozloznik, Comput. Math. Appl. 50 (2005), 1069: a second pass restores orthogonality.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/dependent_formula.h"

namespace gradwire {

inline double dot(const double* a, const double* b, size_t n) {
  double sum[8] = {};
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (size_t j = 0; j < 8; ++j) sum[j] += a[i + j] * b[i + j];
  for (; i < n; ++i) sum[0] += a[i] * b[i];
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

// Takes out of row k what the rows before it span, twice; returns the length that remains.
inline double remove_previous(std::vector<double>& rows, size_t k, size_t n) {
  double* row = rows.data() + k * n;
  for (int pass = 0; pass < 2; ++pass) {
    for (size_t previous = 0; previous < k; ++previous) {
      const double* other = rows.data() + previous * n;
      const double share = dot(row, other, n);
      for (size_t i = 0; i < n; ++i) row[i] -= share * other[i];
    }
  }
  return std::sqrt(dot(row, row, n));
}

// matrix: rank rows of n, rank <= n, replaced by orthonormal rows.
inline void orthonormal_rows(float* matrix, size_t rank, size_t n, uint32_t key) {
  std::vector<double> rows(matrix, matrix + rank * n);
  for (size_t k = 0; k < rank; ++k) {
    double* row = rows.data() + k * n;
    const double before = std::sqrt(dot(row, row, n));
    double length = remove_previous(rows, k, n);
    for (uint32_t attempt = 0; length <= kDependent * before && attempt < kAttempts; ++attempt) {
      for (size_t i = 0; i < n; ++i)
        row[i] = replacement(key, static_cast<uint32_t>(k), attempt, static_cast<uint32_t>(i));
      length = remove_previous(rows, k, n);
      if (length > kDependent) break;
    }
    for (size_t i = 0; i < n; ++i) row[i] /= length;
    for (size_t i = 0; i < n; ++i) matrix[k * n + i] = static_cast<float>(row[i]);
  }
}

}  // namespace gradwire

// PowerSGD's work besides the two products, which are torch.mm: orthonormal rows, and from factors back to a matrix.
//
// orthogonalize: one CTA a matrix, a bucket's matrices in one launch; Gram-Schmidt in float64, each row against the
// ones before it, twice, with sums in a fixed order. Its arithmetic order is not the CPU's, so the two agree within
// rounding, and all GPUs of one kind agree in every bit. The factors are small: what one launch saves is the other
// launches.
// restore: bytes an element, read + written, factors not counted: 4 + 8, one launch for all. Bit for bit the CPU's.
// Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithm 1; Giraud, Langou, Rozloznik, Comput. Math. Appl. 50 (2005),
// 1069: twice is enough.
#include "common/dependent_formula.h"
#include "device.cuh"

namespace gradwire {

// Configuration.
constexpr int kThreads = 256;
constexpr int kTallThreads = 1024;  // of a CTA that has a whole matrix to itself: as many loads under way as there can be
static_assert(kTallThreads == kWarp * kWarp, "dot adds up one number of each warp by the lanes of one warp");
constexpr int kColumns = 1024;  // of a row, a warp's work in restore, so that they share one 64-bit division

// Arguments.
struct Matrix {
  float* data;   // `rank` rows of `columns`, replaced by orthonormal rows
  double* rows;  // as many numbers of scratch memory
  int64_t rank, columns, key;
};

// A matrix of a shard, and its factors in the buffers of all factors; as compressors/kernels/cuda/powersgd.py writes it.
struct Factors {
  int64_t start, rows, columns, rank;
  int64_t p_start, q_start;
  int64_t unit;  // its first; a unit is kColumns columns of a row, or the rest of it
};

// Kernels.
__device__ inline double sum_of_lanes(double sum) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) sum += __shfl_xor_sync(kAllLanes, sum, width);
  return sum;
}

// The same bits in every thread of the CTA: each multiplies the elements i, i + kTallThreads, ... of both rows, and
// every warp adds up the warps' sums alike.
__device__ inline double dot(const double* a, const double* b, int64_t columns, double* shared) {
  double sum = 0.0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < columns; i += kTallThreads) sum += a[i] * b[i];
  sum = sum_of_lanes(sum);
  if (lane_index() == 0) shared[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const double all = sum_of_lanes(shared[lane_index()]);
  __syncthreads();
  return all;
}

// Takes out of row k what the rows before it span, twice; returns the length that remains.
__device__ inline double remove_previous(const Matrix& matrix, int64_t k, double* shared) {
  double* row = matrix.rows + k * matrix.columns;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t previous = 0; previous < k; ++previous) {
      const double* other = matrix.rows + previous * matrix.columns;
      const double share = dot(row, other, matrix.columns, shared);
#pragma unroll 4
      for (int64_t i = threadIdx.x; i < matrix.columns; i += kTallThreads) row[i] -= share * other[i];
    }
  }
  return sqrt(dot(row, row, matrix.columns, shared));
}

// A thread touches the same elements of every row, so only the sums need the other threads.
extern "C" __global__ void __launch_bounds__(kTallThreads) powersgd_orthogonalize(const Matrix* matrices) {
  __shared__ double shared[kTallThreads / kWarp];
  const Matrix matrix = matrices[blockIdx.x];
  const int64_t columns = matrix.columns;
  for (int64_t k = 0; k < matrix.rank; ++k) {
    float* data = matrix.data + k * columns;
    double* row = matrix.rows + k * columns;
    for (int64_t i = threadIdx.x; i < columns; i += kTallThreads) row[i] = static_cast<double>(data[i]);
    const double before = sqrt(dot(row, row, columns, shared));
    double length = remove_previous(matrix, k, shared);
    for (uint32_t attempt = 0; length <= kDependent * before && attempt < kAttempts; ++attempt) {
      for (int64_t i = threadIdx.x; i < columns; i += kTallThreads)
        row[i] =
            replacement(static_cast<uint32_t>(matrix.key), static_cast<uint32_t>(k), attempt, static_cast<uint32_t>(i));
      length = remove_previous(matrix, k, shared);
      if (length > kDependent) break;
    }
    for (int64_t i = threadIdx.x; i < columns; i += kTallThreads) {
      row[i] /= length;
      data[i] = static_cast<float>(row[i]);
    }
  }
}

__device__ inline float4 multiply_add(float4 sum, float weight, float4 x) {
  return make_float4(sum.x + weight * x.x, sum.y + weight * x.y, sum.z + weight * x.z, sum.w + weight * x.w);
}

// The last matrix whose first unit is at most `unit`; none is empty.
__device__ inline const Factors* find(const Factors* table, int64_t matrices, int64_t unit) {
  int64_t low = 0, high = matrices;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (table[middle].unit <= unit) low = middle;
    else high = middle;
  }
  return table + low;
}

// new_residual = matrix - P Q_own and matrix = P Q_sum, factor after factor in this order, as on every other device.
extern "C" __global__ void __launch_bounds__(kThreads)
    powersgd_restore(const Factors* table, int64_t matrices, int64_t units, float* flat, float* new_residual,
                     const float* p, const float* q_own, const float* q_sum) {
  for (int64_t index = warp_index(); index < units; index += warp_count()) {
    const Factors shape = *find(table, matrices, index);
    const int64_t unit = index - shape.unit, parts = (shape.columns + kColumns - 1) / kColumns;
    const int64_t row = unit / parts, start = (unit - row * parts) * kColumns;
    const int64_t stop = start + kColumns < shape.columns ? start + kColumns : shape.columns;
    const float* weights = p + shape.p_start + row;
    for (int64_t column = start + 4 * lane_index(); column < stop; column += 4 * kWarp) {
      const int64_t count = shape.columns - column;
      float4 all = make_float4(0, 0, 0, 0), own = all;
      for (int64_t k = 0; k < shape.rank; ++k) {
        const float weight = weights[k * shape.rows];
        const int64_t place = shape.q_start + k * shape.columns + column;
        all = multiply_add(all, weight, load4(q_sum + place, count));
        if (new_residual) own = multiply_add(own, weight, load4(q_own + place, count));
      }
      const int64_t place = shape.start + row * shape.columns + column;
      float* at = flat + place;
      if (new_residual) {
        const float4 x = load4(at, count);
        store4(new_residual + place,
               make_float4(x.x - own.x, x.y - own.y, x.z - own.z, x.w - own.w), count);
      }
      store4(at, all, count);
    }
  }
}

}  // namespace gradwire

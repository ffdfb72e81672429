// The loops of powersgd.cpp for one instruction set; included by foreach_isa.h, no include guard.

// Rows handled at once: as many as leave their running sums in registers.
constexpr size_t kRows = GRADWIRE_ISA == 512 ? 4 : 1;
constexpr size_t kFactors = 4;
constexpr size_t kColumns = 1024;  // a tile of back_project: 4 factors of it are half of a 32 KiB L1 cache

// p[k][row] = sum over columns of (matrix + residual)[row][column] * q[k][column], for R rows and K factors.
// With `first` the residual is added and the sum stored in place; later factors find it there.
template <size_t R, size_t K>
inline void project_tile(float* matrix, const float* residual, bool first, size_t columns, const float* q, float* p,
                         size_t p_stride) {
  Vec sum[R][K];
  float rest[R][K] = {};
  for (size_t r = 0; r < R; ++r)
    for (size_t k = 0; k < K; ++k) sum[r][k] = fill(0.0f);
  size_t j = 0;
  for (; j + 16 <= columns; j += 16) {
    Vec x[R];
    for (size_t r = 0; r < R; ++r) {
      x[r] = load(matrix + r * columns + j);
      if (!first || !residual) continue;
      x[r] = add(x[r], load(residual + r * columns + j));
      store(matrix + r * columns + j, x[r]);
    }
    for (size_t k = 0; k < K; ++k) {
      const Vec factor = load(q + k * columns + j);
      for (size_t r = 0; r < R; ++r) sum[r][k] = add(sum[r][k], mul(x[r], factor));
    }
  }
  for (; j < columns; ++j) {
    for (size_t r = 0; r < R; ++r) {
      float& x = matrix[r * columns + j];
      if (first && residual) x += residual[r * columns + j];
      for (size_t k = 0; k < K; ++k) rest[r][k] += x * q[k * columns + j];
    }
  }
  for (size_t r = 0; r < R; ++r)
    for (size_t k = 0; k < K; ++k) p[k * p_stride + r] = sum_lanes(sum[r][k]) + rest[r][k];
}

template <size_t R>
inline void project_rows(float* matrix, const float* residual, const Shape& shape, const float* q, float* p) {
  size_t k = 0;
  for (; k + kFactors <= shape.rank; k += kFactors)
    project_tile<R, kFactors>(matrix, residual, k == 0, shape.columns, q + k * shape.columns, p + k * shape.rows,
                              shape.rows);
  for (; k < shape.rank; ++k)
    project_tile<R, 1>(matrix, residual, k == 0, shape.columns, q + k * shape.columns, p + k * shape.rows, shape.rows);
}

inline void project(float* matrix, const float* residual, const Shape& shape, const float* q, float* p) {
  size_t i = 0;
  const size_t columns = shape.columns;
  for (; i + kRows <= shape.rows; i += kRows)
    project_rows<kRows>(matrix + i * columns, residual ? residual + i * columns : nullptr, shape, q, p + i);
  for (; i < shape.rows; ++i)
    project_rows<1>(matrix + i * columns, residual ? residual + i * columns : nullptr, shape, q, p + i);
}

// q[k][column] += p[k][row] * matrix[row][column], for R rows, K factors and one tile of columns.
template <size_t R, size_t K>
inline void back_project_tile(const float* matrix, const Shape& shape, size_t start, size_t stop, const float* p,
                              float* q) {
  Vec weight[R][K];
  for (size_t r = 0; r < R; ++r)
    for (size_t k = 0; k < K; ++k) weight[r][k] = fill(p[k * shape.rows + r]);
  size_t j = start;
  for (; j + 16 <= stop; j += 16) {
    Vec x[R];
    for (size_t r = 0; r < R; ++r) x[r] = load(matrix + r * shape.columns + j);
    for (size_t k = 0; k < K; ++k) {
      Vec sum = load(q + k * shape.columns + j);
      for (size_t r = 0; r < R; ++r) sum = add(sum, mul(weight[r][k], x[r]));
      store(q + k * shape.columns + j, sum);
    }
  }
  for (; j < stop; ++j)
    for (size_t k = 0; k < K; ++k)
      for (size_t r = 0; r < R; ++r) q[k * shape.columns + j] += p[k * shape.rows + r] * matrix[r * shape.columns + j];
}

template <size_t R>
inline void back_project_rows(const float* matrix, const Shape& shape, size_t start, size_t stop, const float* p,
                              float* q) {
  size_t k = 0;
  for (; k + kFactors <= shape.rank; k += kFactors)
    back_project_tile<R, kFactors>(matrix, shape, start, stop, p + k * shape.rows, q + k * shape.columns);
  for (; k < shape.rank; ++k)
    back_project_tile<R, 1>(matrix, shape, start, stop, p + k * shape.rows, q + k * shape.columns);
}

inline void back_project(const float* matrix, const Shape& shape, const float* p, float* q) {
  std::memset(q, 0, shape.rank * shape.columns * sizeof(float));
  for (size_t start = 0; start < shape.columns; start += kColumns) {
    const size_t stop = start + kColumns < shape.columns ? start + kColumns : shape.columns;
    size_t i = 0;
    for (; i + kRows <= shape.rows; i += kRows)
      back_project_rows<kRows>(matrix + i * shape.columns, shape, start, stop, p + i, q);
    for (; i < shape.rows; ++i) back_project_rows<1>(matrix + i * shape.columns, shape, start, stop, p + i, q);
  }
}

// matrix = P Q_sum and new_residual = matrix - P Q_own, factor after factor in this order on every processor: each rank
// multiplies the same factors, and all must get the same bits.
template <size_t R>
inline void restore_rows(float* matrix, float* new_residual, const Shape& shape, const float* p, const float* own,
                         const float* sum, bool past_cache) {
  const size_t columns = shape.columns;
  size_t j = 0;
  for (; j + 16 <= columns; j += 16) {
    Vec all[R], mine[R];
    for (size_t r = 0; r < R; ++r) all[r] = mine[r] = fill(0.0f);
    for (size_t k = 0; k < shape.rank; ++k) {
      const Vec q_sum = load(sum + k * columns + j), q_own = load(own + k * columns + j);
      for (size_t r = 0; r < R; ++r) {
        const Vec weight = fill(p[k * shape.rows + r]);
        all[r] = add(all[r], mul(weight, q_sum));
        mine[r] = add(mine[r], mul(weight, q_own));
      }
    }
    for (size_t r = 0; r < R; ++r) {
      float* at = matrix + r * columns + j;
      if (new_residual) put(new_residual + r * columns + j, sub(load(at), mine[r]), past_cache);
      store(at, all[r]);
    }
  }
  for (; j < columns; ++j) {
    for (size_t r = 0; r < R; ++r) {
      float all = 0.0f, mine = 0.0f;
      for (size_t k = 0; k < shape.rank; ++k) {
        all += p[k * shape.rows + r] * sum[k * columns + j];
        mine += p[k * shape.rows + r] * own[k * columns + j];
      }
      if (new_residual) new_residual[r * columns + j] = matrix[r * columns + j] - mine;
      matrix[r * columns + j] = all;
    }
  }
}

inline void restore(float* matrix, float* new_residual, const Shape& shape, const float* p, const float* own,
                    const float* sum) {
  const bool past_cache = streams(new_residual, matrix, nullptr, shape.rows * shape.columns) && shape.columns % 16 == 0;
  size_t i = 0;
  for (; i + kRows <= shape.rows; i += kRows)
    restore_rows<kRows>(matrix + i * shape.columns, new_residual ? new_residual + i * shape.columns : nullptr, shape,
                        p + i, own, sum, past_cache);
  for (; i < shape.rows; ++i)
    restore_rows<1>(matrix + i * shape.columns, new_residual ? new_residual + i * shape.columns : nullptr, shape, p + i,
                    own, sum, past_cache);
  if (past_cache) fence();
}

// Source: Ioffe and Szegedy, "Batch Normalization", 2015, algorithm 1 and section 3; Chan, Golub and LeVeque, "Updating Formulae and a
// Pairwise Algorithm for Computing Sample Variances", 1979, for variances of several ranks. Numbers are float32 where tensors are half.
#include "batch_norm.h"

#include <ATen/ATen.h>

#include <set>

namespace gpu_standin {

namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Tensor precise(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

bool given(const Optional& tensor) {
  return tensor.has_value() && tensor->defined();
}

/// A number a channel, in the shape that it takes beside an input of shape (batch, channels, ...).
Tensor beside(const Tensor& numbers, const Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = numbers.numel();
  return precise(numbers).view(shape);
}

/// All dimensions but that of the channels.
std::vector<int64_t> within_channel(const Tensor& input) {
  std::vector<int64_t> dimensions;
  for (int64_t dimension = 0; dimension < input.dim(); ++dimension) {
    if (dimension != 1) dimensions.push_back(dimension);
  }
  return dimensions;
}

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const auto values = precise(input);
  const auto dimensions = within_channel(input);
  const auto variance = values.var(dimensions, /*unbiased=*/false);
  return {values.mean(dimensions), variance.add(eps).rsqrt()};
}

/// `means` and `inverse_deviations` have shape (ranks, channels), `counts` has as many elements as there are ranks.
std::tuple<Tensor, Tensor> gather_stats(const Tensor&, const Tensor& means, const Tensor& inverse_deviations, const Optional& running_mean,
                                        const Optional& running_variance, double momentum, double eps, const Tensor& counts) {
  const auto weights = counts.to(means.scalar_type()).view({-1, 1});
  const auto number = weights.sum();
  const auto mean = means.mul(weights).sum(0).div(number);
  const auto variances = inverse_deviations.pow(-2).sub(eps);
  const auto squares = variances.add(means.sub(mean).square()).mul(weights).sum(0);
  if (given(running_mean)) running_mean->mul_(1 - momentum).add_(mean, momentum);
  if (given(running_variance)) running_variance->mul_(1 - momentum).add_(squares.div(number.sub(1)), momentum);
  return {mean, squares.div(number).add(eps).rsqrt()};
}

Tensor apply(const Tensor& input, const Optional& weight, const Optional& bias, const Tensor& mean, const Tensor& inverse_deviation, double) {
  auto result = precise(input).sub(beside(mean, input)).mul(beside(inverse_deviation, input));
  if (given(weight)) result = result.mul(beside(*weight, input));
  if (given(bias)) result = result.add(beside(*bias, input));
  return result.to(input.scalar_type());
}

/// Sums of the gradient and of the gradient times the distance from the mean, and the gradients of weight and bias.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward_sums(const Tensor& gradient, const Tensor& input, const Tensor& mean,
                                                         const Tensor& inverse_deviation, const Optional& weight, bool, bool weight_wanted,
                                                         bool bias_wanted) {
  const auto dimensions = within_channel(input);
  const auto plain = precise(gradient).sum(dimensions);
  const auto moved = precise(gradient).mul(precise(input).sub(beside(mean, input))).sum(dimensions);
  const auto dtype = given(weight) ? weight->scalar_type() : plain.scalar_type();
  const auto of_weight = weight_wanted ? moved.mul(inverse_deviation).to(dtype) : Tensor();
  return {plain, moved, of_weight, bias_wanted ? plain.to(dtype, /*non_blocking=*/false, /*copy=*/true) : Tensor()};
}

Tensor backward_apply(const Tensor& gradient, const Tensor& input, const Tensor& mean, const Tensor& inverse_deviation, const Optional& weight,
                      const Tensor& sum, const Tensor& sum_moved, const Tensor& counts) {
  const auto number = counts.sum().to(sum.scalar_type());
  const auto factor = sum_moved.mul(inverse_deviation.square()).div(number);
  const auto moved = precise(input).sub(beside(mean, input)).mul(beside(factor, input));
  auto result = precise(gradient).sub(beside(sum.div(number), input)).sub(moved).mul(beside(inverse_deviation, input));
  if (given(weight)) result = result.mul(beside(*weight, input));
  return result.to(input.scalar_type());
}

}  // namespace

bool is_batch_norm(const std::string& name) {
  static const std::set<std::string> names = {"aten::batch_norm_stats", "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_elemt",
                                             "aten::batch_norm_backward_reduce", "aten::batch_norm_backward_elemt"};
  return names.count(name) != 0;
}

void register_batch_norm(torch::Library& library) {
  library.impl("batch_norm_stats", stats);
  library.impl("batch_norm_gather_stats_with_counts", gather_stats);
  library.impl("batch_norm_elemt", apply);
  library.impl("batch_norm_backward_reduce", backward_sums);
  library.impl("batch_norm_backward_elemt", backward_apply);
}

}  // namespace gpu_standin

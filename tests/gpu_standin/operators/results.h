// What an operator will return, known before it runs: the caller of a CUDA operator gets tensors at once, their values come later.
#pragma once

#include "arguments.h"

#include <memory>
#include <optional>
#include <vector>

namespace gpu_standin {

/// One value that an operator returns.
struct Result {
  /// The argument that is returned, for in-place and out= operators.
  std::optional<size_t> argument;
  /// Tensor[] instead of one Tensor.
  bool is_list = false;
  /// The new tensors; nothing stands for an undefined one.
  std::vector<std::optional<Layout>> tensors;
};

/// An out= argument that the operator resizes.
struct Resized {
  size_t argument;
  size_t element;
  Layout layout;
};

struct Results {
  std::vector<Result> returned;
  std::vector<Resized> resized;
};

/// Lets the operator's CPU kernel run on tensors of the same layouts with other values, and reads what it returned; a call with the same
/// signature is not repeated. Raises what the CPU kernel raises, as for wrong shapes.
std::shared_ptr<const Results> results_of(const c10::OperatorHandle& op, const Arguments& arguments);

/// The argument that the return value `index` aliases, or nothing where it is new.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t index);

}  // namespace gpu_standin

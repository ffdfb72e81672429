// The arguments of one operator call on CUDA tensors, in the form that a launched kernel has them: addresses and layouts, no hold on any memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace gpu_standin {

/// What is known of a tensor without its memory.
struct Layout {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  static Layout of(const at::Tensor& tensor);
  bool operator==(const Layout&) const = default;
  /// A CPU tensor of this layout with memory of its own; every element, those between the strides too, is `value`.
  at::Tensor scratch(int value) const;
};

/// A CUDA tensor as a kernel sees it. It keeps no storage alive: memory that the caching allocator hands out again before the kernel has
/// run is overwritten here as it is on the device, and a missing record_stream shows as a wrong value.
struct RawTensor {
  void* data;
  Layout layout;
  bool conjugate;
  bool negative;

  static RawTensor of(const at::Tensor& tensor);
  /// A CPU tensor over the same memory.
  at::Tensor on_host() const;
};

/// Undefined tensor or None | a CUDA tensor | a copy of a CPU tensor, whose value the device takes when the call is made.
using Element = std::variant<std::monostate, RawTensor, at::Tensor>;

/// One argument: `elements` where it is a tensor or a list of tensors, `constant` where it is neither.
struct Argument {
  enum class Kind { constant, tensor, tensors, optional_tensors };
  Kind kind = Kind::constant;
  c10::IValue constant;
  std::vector<Element> elements;
};

/// The arguments of a call: what the dispatcher left on the stack, taken apart.
class Arguments {
 public:
  /// Reads the last arguments of `stack` (they stay there). Throws as CUDA's kernels do where tensors are on several devices.
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  /// The CUDA device that the call runs on.
  c10::Device device() const { return device_; }
  /// The arguments for the operator's CPU kernel, over the CUDA tensors' memory.
  torch::jit::Stack on_host() const;
  /// The same with memory of its own, filled with `value`, for finding out what the operator returns.
  torch::jit::Stack rehearsal(int value) const;
  /// Bytes that are equal for two calls of one operator that return tensors of the same layouts. `with_doubles`: floating-point
  /// arguments count, too.
  std::string signature(bool with_doubles) const;

  /// Whether an index is a mask: then the shape of what is returned depends on data.
  bool has_mask() const;
  /// Whether a tensor in the lists lies on a CPU: torch then goes through the list one by one.
  bool has_host_list() const { return has_host_list_; }

  std::vector<Argument>& all() { return arguments_; }
  const std::vector<Argument>& all() const { return arguments_; }

 private:
  Element take(const c10::OperatorHandle& op, const at::Tensor& tensor, bool in_list);
  template <class MakeTensor>
  torch::jit::Stack stack_of(const MakeTensor& make_tensor) const;

  std::vector<Argument> arguments_;
  c10::Device device_{c10::kCUDA};
  bool has_host_list_ = false;
};

}  // namespace gpu_standin

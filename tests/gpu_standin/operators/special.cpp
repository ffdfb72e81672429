#include "special.h"

#include "batch_norm.h"
#include "enqueue.h"

#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAGuard.h>

#include <chrono>
#include <set>
#include <thread>

#include "gpu_standin.h"

namespace gpu_standin {

namespace {

/// The kernel of torch.cuda._sleep: its stream is busy for so many cycles, of a clock of 1 GHz.
void spin(void** arguments, const unsigned*, const unsigned*, size_t) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(*static_cast<const int64_t*>(arguments[0])));
}

bool plain_memory_copy(const at::Tensor& destination, const at::Tensor& source) {
  return destination.scalar_type() == source.scalar_type() && destination.is_conj() == source.is_conj() && destination.is_neg() == source.is_neg() &&
         destination.is_contiguous() && source.is_contiguous() && destination.sizes() == source.sizes();
}

/// ATen's own copy_ wherever it needs no kernel: copies of memory, to and from the CPU with its waits and pinned memory. What casts or
/// moves elements on a device is enqueued.
void copy(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto non_blocking = torch::jit::peek(*stack, 2, 3).toBool();
  auto source = torch::jit::peek(*stack, 1, 3).toTensor();
  auto destination = torch::jit::peek(*stack, 0, 3).toTensor();
  const bool on_devices = destination.is_cuda() && source.is_cuda();
  if (on_devices && !destination.is_same(source) && !plain_memory_copy(destination, source)) {
    if (destination.device() == source.device()) {
      enqueue(op, stack);
      return;
    }
    // to another device: as it shall be there, then as memory
    const auto prepared = source.to(destination.scalar_type()).expand(destination.sizes()).contiguous().resolve_conj().resolve_neg();
    if (destination.is_contiguous() && !destination.is_conj() && !destination.is_neg()) {
      at::native::copy_(destination, prepared, non_blocking);
    } else {
      auto received = at::empty_like(destination, at::TensorOptions(), at::MemoryFormat::Contiguous);
      at::native::copy_(received, prepared, non_blocking);
      destination.copy_(received);
    }
  } else {
    at::native::copy_(destination, source, non_blocking);
    check_for_failure();
  }
  torch::jit::drop(*stack, 3);
  stack->emplace_back(std::move(destination));
}

/// A number that the host reads is where a failed kernel shows.
at::Scalar local_scalar(const at::Tensor& tensor) {
  const c10::cuda::CUDAGuard on_device(tensor.device());  // ATen's wrapper, which is replaced, sets it
  auto number = at::native::_local_scalar_dense_cuda(tensor);
  check_for_failure();
  return number;
}

/// CUDA's generator decides, through bernoulli_: the CPU's native_dropout would ask the CPU's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double probability, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  if (probability == 1.0) return {at::zeros_like(input), at::zeros_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1.0 - probability);
  return {input.mul(mask).mul_(1.0 / (1.0 - probability)), mask};
}

/// Softmax, or its logarithm, whose result is float32 while its input is half: on the CPU the input has to be cast before.
void softmax(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  constexpr size_t self = 0, half_to_float = 2, arguments = 3;
  if (torch::jit::peek(*stack, half_to_float, arguments).toBool()) {
    torch::jit::peek(*stack, self, arguments) = torch::jit::peek(*stack, self, arguments).toTensor().to(at::kFloat);
    torch::jit::peek(*stack, half_to_float, arguments) = false;
  }
  enqueue(op, stack);
}

/// Its backward: the gradient of a half input from a float32 one is cast afterwards.
void softmax_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  constexpr size_t gradient = 0, input_dtype = 3, arguments = 4;
  const auto wanted = torch::jit::peek(*stack, input_dtype, arguments).toScalarType();
  torch::jit::peek(*stack, input_dtype, arguments) = torch::jit::peek(*stack, gradient, arguments).toTensor().scalar_type();
  enqueue(op, stack);
  auto result = torch::jit::pop(*stack).toTensor().to(wanted);
  stack->emplace_back(std::move(result));
}

}  // namespace

bool is_special(const std::string& name) {
  static const std::set<std::string> names = {"aten::copy_", "aten::native_dropout", "aten::_local_scalar_dense", "aten::_softmax",
                                             "aten::_log_softmax", "aten::_softmax_backward_data", "aten::_log_softmax_backward_data"};
  return names.count(name) != 0 || is_batch_norm(name);
}

void register_special(torch::Library& library) {
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
  library.impl("native_dropout", native_dropout);
  library.impl("_local_scalar_dense", local_scalar);
  for (const char* name : {"_softmax", "_log_softmax"}) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax>());
  for (const char* name : {"_softmax_backward_data", "_log_softmax_backward_data"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax_backward>());
  }
  register_batch_norm(library);
  const size_t cycles_nbytes = sizeof(int64_t);
  gpu_standin_register_kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", &spin, &cycles_nbytes, 1);
}

}  // namespace gpu_standin

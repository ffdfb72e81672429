#include "enqueue.h"

#include "arguments.h"
#include "host_call.h"
#include "results.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/resize.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gpu_standin.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>

namespace gpu_standin {

namespace {

// The first kernel that raised where a device would have stopped at an assertion; null while there is none.
std::atomic<const std::string*> failed{nullptr};

/// What lies on the stream until its turn comes.
struct Launch {
  c10::OperatorHandle op;
  Arguments arguments;
  std::vector<RawTensor> outputs;
};

std::vector<at::Tensor> new_tensors(const c10::OperatorHandle& op, const torch::jit::Stack& returned) {
  std::vector<at::Tensor> tensors;
  for (size_t index = 0; index < returned.size(); ++index) {
    if (written_argument(op.schema(), index).has_value()) continue;
    if (returned[index].isTensorList()) {
      for (const at::Tensor& tensor : returned[index].toTensorList()) tensors.push_back(tensor);
    } else if (returned[index].isTensor()) {
      tensors.push_back(returned[index].toTensor());
    }
  }
  return tensors;
}

void fail(const c10::OperatorHandle& op, const std::string& reason) {
  auto message = std::make_unique<std::string>(c10::toString(op.operator_name()) + ": " + reason);
  std::fprintf(stderr, "GPU stand-in: device-side assertion in %s\n", message->c_str());
  const std::string* none = nullptr;
  if (failed.compare_exchange_strong(none, message.get())) static_cast<void>(message.release());  // for good, as on the device
}

void run(void* data) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(data));
  try {
    auto stack = launch->arguments.on_host();
    call_on_host(launch->op, stack);
    size_t next = 0;
    for (const at::Tensor& tensor : new_tensors(launch->op, stack)) {
      if (!tensor.defined()) continue;
      const auto& output = launch->outputs.at(next++);
      TORCH_INTERNAL_ASSERT(output.layout.sizes == tensor.sizes() && output.layout.dtype == tensor.scalar_type(), "returned ", tensor.sizes(), ' ', tensor.scalar_type());
      output.on_host().copy_(tensor);
    }
  } catch (const c10::Error& error) {
    fail(launch->op, error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(launch->op, error.what());
  }
}

uint64_t mixed(uint64_t value) {  // splitmix64's finish: a seed and its neighbour have nothing in common
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

bool takes_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return argument.type()->kind() == c10::TypeKind::GeneratorType || (optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType);
}

/// Puts a CPU generator in the place of CUDA's, seeded by its seed and offset; CUDA's moves on by a launch.
void replace_generator(const c10::OperatorHandle& op, Arguments& arguments) {
  const auto& schema = op.schema();
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    if (!takes_generator(schema.arguments()[index])) continue;
    auto& value = arguments.all()[index].constant;
    const auto given = value.isNone() ? std::optional<at::Generator>() : value.to<at::Generator>();
    auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(given, at::cuda::detail::getDefaultCUDAGenerator(arguments.device().index()));
    std::pair<uint64_t, uint64_t> state;
    {
      const std::lock_guard lock(generator->mutex_);
      state = generator->philox_engine_inputs(4);
    }
    value = c10::IValue(at::make_generator<at::CPUGeneratorImpl>(mixed(state.first + 0x9e3779b97f4a7c15ULL * (state.second + 1))));
  }
}

bool shape_depends_on_data(const c10::OperatorHandle& op, const Arguments& arguments) {
  const auto& name = op.operator_name().name;
  if (name == "aten::index" || name == "aten::_unsafe_index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") return arguments.has_mask();
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return true;
  // their layouts depend on lengths, offsets or samples that no made-up values stand for
  if (name == "aten::segment_reduce" || name == "aten::_ctc_loss" || name == "aten::_ctc_loss_backward" || name == "aten::cholesky" ||
      name == "aten::_cholesky_solve_helper") return true;
  for (const auto& returned : op.schema().returns()) {
    const auto kind = returned.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  return false;
}

at::Tensor allocate(const Layout& layout, c10::Device device) {
  return at::Tensor(at::detail::empty_strided_cuda(layout.sizes, layout.strides, layout.dtype, device));
}

void resize(const at::Tensor& tensor, const Layout& layout) {
  tensor.resize_(layout.sizes);
  if (tensor.strides() != layout.strides) tensor.as_strided_(layout.sizes, layout.strides);
}

at::Tensor element_of(const c10::IValue& argument, size_t element) { return argument.isTensor() ? argument.toTensor() : argument.toTensorVector().at(element); }

void finish(torch::jit::Stack* stack, size_t arguments, torch::jit::Stack returned) {
  torch::jit::drop(*stack, arguments);
  for (auto& value : returned) stack->push_back(std::move(value));
}

/// Waits for the stream, and runs now.
void run_now(const c10::OperatorHandle& op, torch::jit::Stack* stack, const Arguments& arguments) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(arguments.device().index())));
  auto on_host = arguments.on_host();
  // memory that is not torch's own cannot grow: an out= argument is written beside, and copied
  for (size_t index = 0; index < count; ++index) {
    if (schema.arguments()[index].is_out() && on_host[index].isTensor()) on_host[index] = at::empty({0}, on_host[index].toTensor().options());
  }
  call_on_host(op, on_host);
  torch::jit::Stack returned;
  const auto given = torch::jit::last(*stack, count).vec();
  const auto to_device = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    const auto output = allocate(Layout::of(tensor), arguments.device());
    RawTensor::of(output).on_host().copy_(tensor);
    return output;
  };
  for (size_t index = 0; index < on_host.size(); ++index) {
    const auto written = written_argument(schema, index);
    const auto& value = on_host[index];
    if (written.has_value()) {
      if (schema.arguments()[*written].is_out()) {
        const auto tensor = given[*written].toTensor();
        if (tensor.sizes() != value.toTensor().sizes()) tensor.resize_(value.toTensor().sizes());
        RawTensor::of(tensor).on_host().copy_(value.toTensor());
      }
      returned.push_back(given[*written]);
    } else if (value.isTensor()) {
      returned.emplace_back(to_device(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(to_device(tensor));
      returned.emplace_back(std::move(list));
    } else {
      returned.push_back(value);
    }
  }
  finish(stack, count, std::move(returned));
}

}  // namespace

void check_for_failure() {
  const auto* failure = failed.load();
  TORCH_CHECK(failure == nullptr, "CUDA error: device-side assert triggered\n", *failure);
}

void enqueue(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_for_failure();
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Arguments arguments(op, *stack);
  if (arguments.has_host_list()) {  // a loop over the tensors, each to its own device
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  const c10::cuda::CUDAGuard on_device(arguments.device());
  replace_generator(op, arguments);
  if (shape_depends_on_data(op, arguments)) {
    run_now(op, stack, arguments);
    return;
  }
  const auto results = results_of(op, arguments);
  const auto given = torch::jit::last(*stack, count).vec();
  for (const auto& [argument, element, layout] : results->resized) {
    const auto tensor = element_of(given[argument], element);
    resize(tensor, layout);
    arguments.all()[argument].elements[element] = RawTensor::of(tensor);
  }
  std::vector<RawTensor> outputs;
  torch::jit::Stack returned;
  for (const auto& result : results->returned) {
    if (result.argument.has_value()) {
      returned.push_back(given[*result.argument]);
      continue;
    }
    c10::List<at::Tensor> list;
    for (const auto& layout : result.tensors) {
      list.push_back(layout.has_value() ? allocate(*layout, arguments.device()) : at::Tensor());
      if (layout.has_value()) outputs.push_back(RawTensor::of(list.get(list.size() - 1)));
    }
    if (result.is_list) {
      returned.emplace_back(std::move(list));
    } else {
      returned.emplace_back(list.get(0));
    }
  }
  const auto stream = c10::cuda::getCurrentCUDAStream(arguments.device().index());
  auto launch = std::make_unique<Launch>(Launch{op, std::move(arguments), std::move(outputs)});
  C10_CUDA_CHECK(static_cast<cudaError_t>(gpu_standin_submit(stream, op.operator_name().name.c_str(), run, launch.get())));
  static_cast<void>(launch.release());  // `run` owns it from here
  finish(stack, count, std::move(returned));
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "the GPU stand-in has no ", op.operator_name(), ": torch has no CPU kernel for it");
}

}  // namespace gpu_standin

#include "sparse.h"

#include "arguments.h"
#include "host_call.h"
#include "results.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <set>

namespace gpu_standin {

namespace {

// These look at a sparse tensor or put one together, and launch nothing.
const std::set<std::string>& without_launch() {
  static const std::set<std::string> names = {
      "aten::_coalesced_", "aten::_dimI", "aten::_dimV", "aten::_indices", "aten::_nnz", "aten::_sparse_coo_tensor_with_dims",
      "aten::_sparse_coo_tensor_with_dims_and_tensors", "aten::_values", "aten::clone", "aten::copy_sparse_to_sparse_", "aten::dense_dim", "aten::empty",
      "aten::empty_like", "aten::indices", "aten::is_coalesced", "aten::is_pinned", "aten::record_stream", "aten::sparse_dim", "aten::sparse_resize_",
      "aten::sparse_resize_and_clear_", "aten::values", "aten::_pin_memory", "aten::isnan", "aten::zero_",
  };
  return names;
}

at::Tensor to_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  if (tensor.layout() == at::kStrided) return RawTensor::of(tensor).on_host();
  return at::_sparse_coo_tensor_unsafe(RawTensor::of(tensor._indices()).on_host(), RawTensor::of(tensor._values()).on_host(), tensor.sizes(),
                                       at::TensorOptions(), tensor.is_coalesced());
}

at::Tensor dense_to_device(const at::Tensor& tensor, c10::Device device) {
  const at::Tensor moved(at::detail::empty_strided_cuda(tensor.sizes(), tensor.strides(), tensor.scalar_type(), device));
  RawTensor::of(moved).on_host().copy_(tensor);
  return moved;
}

at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return tensor;
  if (tensor.layout() == at::kStrided) return dense_to_device(tensor, device);
  const auto options = tensor.options().device(device);
  return at::_sparse_coo_tensor_unsafe(dense_to_device(tensor._indices(), device), dense_to_device(tensor._values(), device), tensor.sizes(), options,
                                       tensor.is_coalesced());
}

/// Gives `tensor`, sparse and on CUDA, what was written to its twin on the CPU.
void take_over(const at::Tensor& tensor, const at::Tensor& written) {
  auto* implementation = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
  implementation->raw_resize_(written.sparse_dim(), written.dense_dim(), written.sizes());
  implementation->set_indices_and_values_unsafe(dense_to_device(written._indices(), tensor.device()), dense_to_device(written._values(), tensor.device()));
  tensor._coalesced_(written.is_coalesced());
}

}  // namespace

bool makes_sparse(const std::string& name) { return name.rfind("aten::_to_sparse", 0) == 0 || name.rfind("aten::sparse_mask", 0) == 0; }

void run_sparse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const auto given = torch::jit::last(*stack, count).vec();
  auto device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  for (const auto& value : given) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) device = value.toTensor().device();
  }
  const c10::cuda::CUDAGuard on_device(device);
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(device.index())));
  torch::jit::Stack on_host;
  for (const auto& value : given) {
    TORCH_CHECK_NOT_IMPLEMENTED(!value.isTensorList() || value.toTensorList().empty() || value.toTensorList().get(0).layout() == at::kStrided,
                                "the GPU stand-in has no ", op.operator_name(), " of a list of sparse tensors");
    if (value.isTensor()) {
      on_host.emplace_back(to_host(value.toTensor()));
    } else {
      on_host.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value);
    }
  }
  const auto arguments = on_host;
  call_on_host_of_any_layout(op, on_host);
  torch::jit::drop(*stack, count);
  for (size_t index = 0; index < on_host.size(); ++index) {
    const auto written = written_argument(schema, index);
    if (!written.has_value()) {
      stack->push_back(on_host[index].isTensor() ? c10::IValue(to_device(on_host[index].toTensor(), device)) : on_host[index]);
      continue;
    }
    const auto& tensor = given[*written].toTensor();
    if (tensor.layout() != at::kStrided) take_over(tensor, on_host[index].toTensor());
    stack->push_back(given[*written]);
  }
}

void register_sparse(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || name.getNamespace() != std::string_view("aten")) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::SparseCUDA) || without_launch().count(name.name) != 0) continue;
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_sparse>());
  }
}

}  // namespace gpu_standin

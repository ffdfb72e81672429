#include "arguments.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAFunctions.h>

#include <array>
#include <string_view>

namespace gpu_standin {

namespace {

// CUDA's kernels for these move indices that lie on the CPU to the device by themselves.
constexpr std::array<std::string_view, 4> host_indices = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

bool takes_host_indices(const c10::OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  for (const auto known : host_indices) {
    if (name == known) return true;
  }
  return false;
}

template <class T>
void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append(std::string& bytes, const std::vector<int64_t>& values) {
  append(bytes, values.size());
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
}

void append(std::string& bytes, const Layout& layout) {
  append(bytes, layout.dtype);
  append(bytes, layout.sizes);
  append(bytes, layout.strides);
}

void append(std::string& bytes, const c10::IValue& value, bool with_doubles) {
  bytes.push_back(static_cast<char>('a' + (value.isNone() ? 0 : value.isInt() ? 1 : value.isBool() ? 2 : value.isDouble() ? 3 : value.isString() ? 4 : value.isList() ? 5 : 6)));
  if (value.isInt()) {
    append(bytes, value.toInt());
  } else if (value.isBool()) {
    append(bytes, value.toBool());
  } else if (value.isDouble()) {
    if (with_doubles) append(bytes, value.toDouble());
  } else if (value.isString()) {
    bytes += value.toStringRef();
    bytes.push_back('\0');
  } else if (value.isList()) {
    const auto list = value.toListRef();
    append(bytes, list.size());
    for (const auto& element : list) append(bytes, element, with_doubles);
  }
}

at::Tensor with_bits(at::Tensor tensor, const RawTensor& raw) {
  tensor._set_conj(raw.conjugate);
  tensor._set_neg(raw.negative);
  return tensor;
}

}  // namespace

Layout Layout::of(const at::Tensor& tensor) { return {tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()}; }

at::Tensor Layout::scratch(int value) const {
  int64_t elements = 1;
  for (size_t axis = 0; axis < sizes.size(); ++axis) elements = sizes[axis] == 0 || elements == 0 ? 0 : elements + (sizes[axis] - 1) * strides[axis];
  auto memory = at::empty({elements}, at::TensorOptions().dtype(dtype));
  if (elements != 0) memory.fill_(value);
  // an empty tensor keeps its own strides, and may be resized by an out= call
  if (elements == 0) return at::empty(sizes, at::TensorOptions().dtype(dtype));
  return memory.as_strided(sizes, strides);
}

RawTensor RawTensor::of(const at::Tensor& tensor) { return {tensor.data_ptr(), Layout::of(tensor), tensor.is_conj(), tensor.is_neg()}; }

at::Tensor RawTensor::on_host() const {
  return with_bits(at::from_blob(data, layout.sizes, layout.strides, at::TensorOptions().dtype(layout.dtype)), *this);
}

Arguments::Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const auto values = torch::jit::last(stack, count);
  std::optional<c10::Device> named;
  bool found = false;
  // the device first: it is that of the first CUDA tensor, or the one that is asked for by name
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return;
    TORCH_CHECK(!found || tensor.device() == device_, "Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
                tensor.device(), "! (when checking the arguments of ", op.operator_name(), ")");
    device_ = tensor.device();
    found = true;
  };
  for (const auto& value : values) {
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) look(tensor);
    } else if (value.isList() && !value.toListRef().empty()) {
      for (const auto& element : value.toListRef()) {
        if (element.isTensor()) look(element.toTensor());
      }
    } else if (value.isDevice()) {
      named = value.toDevice();
    }
  }
  if (!found && named.has_value()) device_ = *named;
  if (!device_.has_index()) device_ = c10::Device(c10::kCUDA, c10::cuda::current_device());

  for (const auto& value : values) {
    Argument argument;
    if (value.isTensor()) {
      argument.kind = Argument::Kind::tensor;
      argument.elements.push_back(take(op, value.toTensor(), false));
    } else if (value.isTensorList()) {
      argument.kind = Argument::Kind::tensors;
      for (const at::Tensor& tensor : value.toTensorList()) argument.elements.push_back(take(op, tensor, true));
    } else if (value.isOptionalTensorList()) {
      argument.kind = Argument::Kind::optional_tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        argument.elements.push_back(tensor.has_value() ? take(op, *tensor, false) : Element{});
      }
    } else {
      argument.constant = value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value;
    }
    arguments_.push_back(std::move(argument));
  }
}

Element Arguments::take(const c10::OperatorHandle& op, const at::Tensor& tensor, bool in_list) {
  if (!tensor.defined()) return {};
  if (tensor.is_cuda()) return RawTensor::of(tensor);
  TORCH_CHECK(tensor.is_cpu(), op.operator_name(), ": a tensor on ", tensor.device(), " beside those on ", device_);
  const bool one_by_one = in_list && op.operator_name().name.rfind("aten::_foreach_", 0) == 0;
  has_host_list_ = has_host_list_ || one_by_one;
  TORCH_CHECK(tensor.dim() == 0 || one_by_one || takes_host_indices(op), "Expected all tensors to be on the same device, but found at least two devices, ", device_,
              " and cpu! (when checking the arguments of ", op.operator_name(), ")");
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

template <class MakeTensor>
torch::jit::Stack Arguments::stack_of(const MakeTensor& make_tensor) const {
  const auto tensor_of = [&](const Element& element) {
    if (const auto* raw = std::get_if<RawTensor>(&element)) return make_tensor(*raw);
    if (const auto* copy = std::get_if<at::Tensor>(&element)) return *copy;
    return at::Tensor();
  };
  torch::jit::Stack stack;
  stack.reserve(arguments_.size());
  for (const auto& argument : arguments_) {
    switch (argument.kind) {
      case Argument::Kind::constant:
        stack.push_back(argument.constant);
        break;
      case Argument::Kind::tensor:
        stack.emplace_back(tensor_of(argument.elements[0]));
        break;
      case Argument::Kind::tensors: {
        c10::List<at::Tensor> list;
        for (const auto& element : argument.elements) list.push_back(tensor_of(element));
        stack.emplace_back(std::move(list));
        break;
      }
      case Argument::Kind::optional_tensors: {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& element : argument.elements) {
          list.push_back(std::holds_alternative<std::monostate>(element) ? std::optional<at::Tensor>() : tensor_of(element));
        }
        stack.emplace_back(std::move(list));
        break;
      }
    }
  }
  return stack;
}

torch::jit::Stack Arguments::on_host() const {
  return stack_of([](const RawTensor& raw) { return raw.on_host(); });
}

torch::jit::Stack Arguments::rehearsal(int value) const {
  auto stack = stack_of([value](const RawTensor& raw) { return with_bits(raw.layout.scratch(value), raw); });
  for (auto& argument : stack) {
    if (argument.isGenerator()) argument = c10::IValue(argument.toGenerator().clone());  // the call itself shall draw the first numbers
  }
  return stack;
}

std::string Arguments::signature(bool with_doubles) const {
  std::string bytes;
  for (const auto& argument : arguments_) {
    append(bytes, argument.kind);
    if (argument.kind == Argument::Kind::constant) {
      append(bytes, argument.constant, with_doubles);
      continue;
    }
    append(bytes, argument.elements.size());
    for (const auto& element : argument.elements) {
      append(bytes, element.index());
      if (const auto* raw = std::get_if<RawTensor>(&element)) {
        append(bytes, raw->layout);
        append(bytes, raw->conjugate);
        append(bytes, raw->negative);
      } else if (const auto* copy = std::get_if<at::Tensor>(&element)) {
        append(bytes, Layout::of(*copy));
        append(bytes, copy->unsafeGetTensorImpl()->is_wrapped_number());
      }
    }
  }
  return bytes;
}

bool Arguments::has_mask() const {
  for (const auto& argument : arguments_) {
    if (argument.kind != Argument::Kind::optional_tensors) continue;
    for (const auto& element : argument.elements) {
      const auto* raw = std::get_if<RawTensor>(&element);
      const auto* copy = std::get_if<at::Tensor>(&element);
      const auto dtype = raw != nullptr ? raw->layout.dtype : copy != nullptr ? copy->scalar_type() : at::kLong;
      if (dtype == at::kBool || dtype == at::kByte) return true;
    }
  }
  return false;
}

}  // namespace gpu_standin

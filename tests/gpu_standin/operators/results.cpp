#include "results.h"

#include "host_call.h"

#include <mutex>
#include <unordered_map>

namespace gpu_standin {

namespace {

// Training repeats its calls; a program that does not (sizes that grow with each step) must not fill the memory.
constexpr size_t most_signatures = 1 << 14;

// Floating-point arguments decide about shapes in these alone.
bool shapes_by_doubles(const std::string& name) {
  return name.find("arange") != std::string::npos || name.find("range") != std::string::npos || name.find("upsample") != std::string::npos;
}

std::optional<Layout> layout_of(const at::Tensor& tensor) { return tensor.defined() ? std::optional(Layout::of(tensor)) : std::nullopt; }

Results rehearse(const c10::OperatorHandle& op, const Arguments& arguments, int value) {
  auto stack = arguments.rehearsal(value);
  std::vector<std::vector<at::Tensor>> given;
  for (const auto& argument : stack) {
    given.push_back(argument.isTensor() ? std::vector{argument.toTensor()} : argument.isTensorList() ? argument.toTensorVector() : std::vector<at::Tensor>{});
  }
  call_on_host(op, stack);
  Results results;
  const auto& schema = op.schema();
  for (size_t index = 0; index < stack.size(); ++index) {
    Result result;
    result.argument = written_argument(schema, index);
    result.is_list = stack[index].isTensorList();
    if (!result.argument.has_value()) {
      if (result.is_list) {
        for (const at::Tensor& tensor : stack[index].toTensorList()) result.tensors.push_back(layout_of(tensor));
      } else {
        result.tensors.push_back(layout_of(stack[index].toTensor()));
      }
    }
    results.returned.push_back(std::move(result));
  }
  for (size_t index = 0; index < given.size(); ++index) {
    if (!schema.arguments()[index].is_out()) continue;
    for (size_t element = 0; element < given[index].size(); ++element) {
      const auto* raw = std::get_if<RawTensor>(&arguments.all()[index].elements[element]);
      auto now = Layout::of(given[index][element]);
      if (raw != nullptr && now.sizes != raw->layout.sizes) results.resized.push_back({index, element, std::move(now)});
    }
  }
  return results;
}

}  // namespace

std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t index) {
  const auto* returned = schema.returns()[index].alias_info();
  if (returned == nullptr) return std::nullopt;
  for (size_t argument = 0; argument < schema.arguments().size(); ++argument) {
    const auto* taken = schema.arguments()[argument].alias_info();
    if (taken != nullptr && taken->beforeSets() == returned->beforeSets()) return argument;
  }
  return std::nullopt;
}

std::shared_ptr<const Results> results_of(const c10::OperatorHandle& op, const Arguments& arguments) {
  static std::mutex mutex;
  static auto& known = *new std::unordered_map<std::string, std::shared_ptr<const Results>>;
  const auto* schema = &op.schema();
  std::string key(reinterpret_cast<const char*>(&schema), sizeof schema);
  key += arguments.signature(shapes_by_doubles(op.operator_name().name));
  {
    const std::lock_guard lock(mutex);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
  }
  std::shared_ptr<const Results> results;
  try {
    // 0 is an index of every table, ...
    results = std::make_shared<Results>(rehearse(op, arguments, 0));
  } catch (const c10::Error& error) {
    // ... but no divisor and no probability of anything
    try {
      results = std::make_shared<Results>(rehearse(op, arguments, 1));
    } catch (const c10::Error&) {
      throw error;
    }
  }
  const std::lock_guard lock(mutex);
  if (known.size() >= most_signatures) known.clear();
  known.emplace(std::move(key), results);
  return results;
}

}  // namespace gpu_standin

// Puts the stand-in's kernels in the place of torch's CUDA kernels, when this library is loaded.
#include "enqueue.h"
#include "sparse.h"
#include "special.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <set>
#include <string>

namespace gpu_standin {

namespace {

// These launch nothing: they allocate, copy memory, look, or change what a tensor says of itself.
const std::set<std::string>& without_launch() {
  static const std::set<std::string> names = {
      "aten::_efficientzerotensor", "aten::_has_compatible_shallow_copy_type", "aten::_pin_memory", "aten::_resize_output_",
      "aten::empty", "aten::empty_strided", "aten::is_pinned", "aten::is_set_to", "aten::record_stream", "aten::resize_", "aten::resize_as_", "aten::set_",
      "aten::set_data", "aten::_embedding_bag_backward", "aten::_fused_sdp_choice", "aten::_nested_view_from_buffer",
  };
  return names;
}

// One CUDA kernel chosen among cuDNN's and ATen's own: the CPU's choice is the whole operator.
constexpr std::array<const char*, 2> whole = {"aten::convolution", "aten::convolution_backward"};

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns()) {
    if (returned.alias_info() != nullptr && !returned.alias_info()->isWrite()) return true;
  }
  return false;
}

bool is_one_of_whole(const std::string& name) {
  for (const auto* known : whole) {
    if (name == known) return true;
  }
  return false;
}

class Silent : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

/// Registers all; the returned library keeps the registrations alive.
torch::Library* install() {
  // a warning for the first kernel that is replaced: all of them are, on purpose
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard without_warning(&silent);
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != std::string_view("aten")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value()) continue;
    const auto full = c10::toString(name);
    if (is_special(full) || (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !is_one_of_whole(full))) continue;
    if (without_launch().count(name.name) != 0 || returns_view(op->schema())) continue;
    if (makes_sparse(full)) {
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_sparse>());
    } else if (op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&enqueue>());
    } else {
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
    }
  }
  register_special(*library);
  // never destroyed: what has been registered stays to the process's end
  register_sparse(*new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::SparseCUDA, __FILE__, __LINE__));
  // chosen in C++ before any operator is called: the paths of ATen alone
  auto& context = at::globalContext();
  context.setUserEnabledCuDNN(false);
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
  return library;
}

[[maybe_unused]] torch::Library* const library = install();

}  // namespace

}  // namespace gpu_standin

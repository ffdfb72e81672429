// Operators whose CUDA kernels do what no CPU kernel does.
#pragma once

#include <torch/library.h>

namespace gpu_standin {

/// Registers copies, dropout and the reading of numbers for dispatch key CUDA, and the one kernel that torch launches itself.
void register_special(torch::Library& library);

/// Whether register_special has `name`, an operator's name with its overload.
bool is_special(const std::string& name);

}  // namespace gpu_standin

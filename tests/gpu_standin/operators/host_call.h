// Runs operators' CPU kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace gpu_standin {

/// Calls the CPU kernel of `op` below autograd, with one thread: the arguments on `stack` are replaced by what it returns. One thread, so
/// that the bits do not depend on which thread calls.
void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// The same for arguments that may be sparse: the kernel is that of their layouts.
void call_on_host_of_any_layout(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace gpu_standin

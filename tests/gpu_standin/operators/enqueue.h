// CUDA operators that run their CPU kernel on the current stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace gpu_standin {

/// The kernel for dispatch key CUDA of every operator that would launch one: allocates what it returns from CUDA's caching allocator,
/// puts the operator's CPU kernel on the current stream, over the same memory, and returns. Where the shape of the result depends on
/// data it waits for the stream and runs at once, as CUDA's does.
void enqueue(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Raises where an operator's CPU kernel has raised on a stream, as an index out of range does: CUDA's device-side assertion, which every
/// later call reports.
void check_for_failure();

/// The kernel for operators without a CPU kernel.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace gpu_standin

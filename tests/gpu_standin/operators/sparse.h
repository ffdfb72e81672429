// Operators on sparse COO tensors on CUDA, by the CPU's.
#pragma once

#include <torch/library.h>

#include <string>

namespace gpu_standin {

/// The kernel for dispatch key SparseCUDA: waits for the stream and runs the CPU's kernel at once. The device's waits, too, in most of
/// them: how many elements a sparse tensor has depends on data.
void run_sparse(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Registers run_sparse for all operators with a kernel for SparseCUDA that may launch one.
void register_sparse(torch::Library& library);

/// Whether a dense operator returns a sparse tensor.
bool makes_sparse(const std::string& name);

}  // namespace gpu_standin

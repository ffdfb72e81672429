// The parts of a batch norm over several ranks, which torch has for CUDA alone.
#pragma once

#include <torch/library.h>

namespace gpu_standin {

/// Registers what torch.nn.SyncBatchNorm calls, made of other operators on CUDA tensors.
void register_batch_norm(torch::Library& library);

/// Whether register_batch_norm has `name`, an operator's name with its overload.
bool is_batch_norm(const std::string& name);

}  // namespace gpu_standin

// NCCL's groups: what a thread calls between ncclGroupStart and ncclGroupEnd happens at the end, together.
#pragma once
#include "comm.h"

namespace standin {

void group_start();
ncclResult_t group_end();
// At once where the thread has no group open.
ncclResult_t enqueue(std::shared_ptr<Comm> comm, Call call);
// A job that waits for other ranks, which may be other jobs of the same group: each runs on a thread of its own.
ncclResult_t enqueue_job(std::shared_ptr<Comm> comm, std::function<ncclResult_t()> job);

}  // namespace standin

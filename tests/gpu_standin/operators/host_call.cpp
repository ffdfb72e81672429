#include "host_call.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <omp.h>

namespace gpu_standin {

namespace {

/// One OpenMP thread in the calling thread; ATen, oneDNN and MKL ask OpenMP.
class OneThread {
 public:
  OneThread() {
    at::get_num_threads();  // ATen's own first look, which would set the number
    before_ = omp_get_max_threads();
    omp_set_num_threads(1);
  }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

}  // namespace

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OneThread one_thread;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void call_on_host_of_any_layout(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OneThread one_thread;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  op.callBoxed(&stack);
}

}  // namespace gpu_standin

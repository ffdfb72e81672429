// A communicator of one rank, and what it may be asked to do.
#pragma once
#include <map>
#include <optional>

#include "../standin.h"
#include "shared.h"

namespace standin {

enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, send, receive };
const char* name_of(Kind kind);

// What NCCL does with the elements: one of its operations, and a factor before it.
struct Operation {
  int op = ncclSum;
  double factor = 1;              // PreMulSum
  bool scaled = false;
  const void* factor_on_device = nullptr;  // read when the collective runs
};

struct Call {
  Kind kind;
  const char* in = nullptr;
  char* out = nullptr;
  std::size_t count = 0;
  ncclDataType_t dtype = ncclInt8;
  Operation operation;
  int peer = 0;  // the root, or the other rank of a message
  std::shared_ptr<Stream> stream;
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  Comm(int rank, int ranks, int device, const ncclConfig_t* config);

  // Waits until all ranks of the id have come; by init and split. False where the communicator was aborted.
  ncclResult_t join(const ncclUniqueId& id);
  // What the host does for a call: connects where it must, and submits the calls to their streams as one kernel.
  ncclResult_t launch(std::vector<Call> calls);
  ncclResult_t finalize();
  void abort();
  // Every rank's `blob`, in rank order; collective over all ranks of `among`. Empty where it was aborted.
  std::vector<std::string> exchange(const std::string& blob, const std::vector<int>& among);

  // Runs a host's job: here where the communicator blocks; else on a thread, and the state says when it is done.
  ncclResult_t host_job(std::function<ncclResult_t()> job);

  ncclResult_t state();
  // Remembers an asynchronous error; the first one counts.
  ncclResult_t fail(ncclResult_t error, const std::string& message);
  std::string last_error();
  bool aborted() const { return aborted_; }

  int create_op(Operation operation);
  ncclResult_t destroy_op(int op);
  // Of an op of a call, over `dtype`; nullopt where there is none such.
  std::optional<Operation> operation(int op, ncclDataType_t dtype) const;

  const int rank, ranks, device;
  const bool blocking;
  const int ctas;  // that its kernels take
  const int number;  // in the order of creation in this process

 private:
  // Waits for `ready`, which others' changes make true. False where the communicator was aborted.
  bool wait(const std::function<bool()>& ready);
  [[nodiscard]] bool failed() const;
  void ring_others();
  ncclResult_t connect(const std::vector<Call>& calls);
  void look_for_dead_peers();
  [[nodiscard]] bool is_on_this_host(int other) const;

  // Kernels, on a stream's thread.
  void run(const std::vector<Call>& calls, std::uint64_t issued);
  bool run_collective(const Call& call);
  bool run_messages(const std::vector<Call>& calls);
  // Says that this rank's slice of a collective lies ready, and waits for all others'. False where it was aborted.
  bool meet(const CallRecord& mine);
  // False, with the error remembered, where the ranks' calls differ.
  bool agree(const CallRecord& mine);
  void stall();  // until the communicator is aborted

  std::unique_ptr<SharedRegion> shared_;
  std::uint64_t steps_ = 0, exchanges_ = 0;
  std::atomic<bool> aborted_{false}, in_progress_{false}, finalized_{false};
  std::atomic<int> running_{0};
  mutable std::mutex mutex_;
  ncclResult_t error_ = ncclSuccess;
  std::string message_;
  std::vector<std::optional<Operation>> operations_;
  Mark last_kernel_;
  std::atomic<double> peers_looked_at_{0};
};

// sums.cpp: `sum` op= `factor` * `next`, element by element in the dtype; where `first`, sum = factor * next.
void reduce_into(char* sum, const char* next, std::size_t count, ncclDataType_t dtype, const Operation& operation, bool first);
// The division after the sum of ncclAvg of integers.
void divide(char* sum, std::size_t count, ncclDataType_t dtype, int ranks);
double read_scalar(const void* scalar, ncclDataType_t dtype);
// `value` as the dtype holds it.
double as_held(double value, ncclDataType_t dtype);

// residency.cpp: a kernel of NCCL holds its share of the device from its first to its last instruction.
class Residency {
 public:
  // The kernel's number in the order in which the host issues kernels to the device.
  static std::uint64_t issue(int device);
  // Waits for a share. False where `given_up` became true before; then there is nothing to give back.
  static bool take(int device, int ctas, std::uint64_t issued, const std::function<bool()>& given_up);
  static void give_back(int device, int ctas);
  static void wake();
};

// The communicator of a handle; nullptr where it was destroyed or never was.
std::shared_ptr<Comm> find_comm(ncclComm_t handle);
ncclComm_t publish(std::shared_ptr<Comm> comm);
void withdraw(ncclComm_t handle);

}  // namespace standin

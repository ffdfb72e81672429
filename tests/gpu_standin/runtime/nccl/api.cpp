// NCCL's functions, as torch calls them.
#include <algorithm>
#include <cstring>

#include "group.h"

using namespace standin;

namespace {

ncclResult_t refuse(const std::string& why) {
  say("NCCL: " + why);
  return ncclInvalidArgument;
}

// The communicator, where it may be used; else the error.
std::pair<std::shared_ptr<Comm>, ncclResult_t> usable(ncclComm_t handle) {
  auto comm = find_comm(handle);
  if (!comm) return {nullptr, refuse("a communicator that was destroyed or aborted, or never made, is used")};
  if (comm->state() == ncclInProgress) {
    return {nullptr, refuse("a communicator is used before its previous call is done (ncclInProgress)")};
  }
  return {comm, comm->state()};
}

ncclResult_t call(Kind kind, const void* in, void* out, std::size_t count, ncclDataType_t dtype, int op, int peer,
                  ncclComm_t handle, cudaStream_t stream_handle) {
  auto [comm, error] = usable(handle);
  if (error) return error;
  auto stream = find_stream(stream_handle);
  auto operation = comm->operation(op, dtype);
  std::string name = name_of(kind);
  if (!stream) return refuse(name + ": no such stream");
  if (stream->device != comm->device) {
    return refuse(name + format(": its stream is of device %d, its communicator of device %d", stream->device, comm->device));
  }
  if (!operation) return refuse(name + format(": no such operation: %d", op));
  if (dtype < 0 || dtype >= ncclNumTypes) return refuse(name + format(": no such dtype: %d", dtype));
  if (peer < 0 || peer >= comm->ranks) return refuse(name + format(": no such rank: %d", peer));
  std::size_t nbytes = count * nbytes_of(dtype), all = nbytes * comm->ranks;
  bool wide_in = kind == Kind::reduce_scatter || kind == Kind::all_to_all;
  bool wide_out = kind == Kind::all_gather || kind == Kind::all_to_all;
  bool reads = kind != Kind::receive && (kind != Kind::broadcast || peer == comm->rank);
  bool writes = kind != Kind::send && (kind != Kind::reduce || peer == comm->rank);
  struct {
    bool used;
    const void* pointer;
    std::size_t nbytes;
  } buffers[] = {{reads, in, wide_in ? all : nbytes}, {writes, out, wide_out ? all : nbytes}};
  for (auto& buffer : buffers) {
    if (!buffer.used || !nbytes) continue;
    Found found = find_memory(buffer.pointer);
    if (found.place == Place::unknown) return refuse(name + ": a buffer that is neither device nor pinned memory");
    if (found.place == Place::device && found.device != comm->device) {
      return refuse(name + format(": a buffer of device %d, in a communicator of device %d", found.device, comm->device));
    }
    if (auto problem = overrun(buffer.pointer, buffer.nbytes)) return refuse(name + ": " + *problem);
  }
  Call one;
  one.kind = kind;
  one.in = static_cast<const char*>(in);
  one.out = static_cast<char*>(out);
  one.count = count;
  one.dtype = dtype;
  one.operation = *operation;
  one.peer = peer;
  one.stream = stream;
  return enqueue(comm, std::move(one));
}

struct SplitEntry {
  int color, key;
  ncclUniqueId id;
};

template <class T>
std::string bytes_of(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

// Makes communicators of parts of `parent`: of its ranks `among`, those of one color, in the order of their keys.
ncclResult_t make_part(Comm& parent, const std::vector<int>& among, int color, int key,
                       const std::function<std::shared_ptr<Comm>(int rank, int ranks)>& make) {
  SplitEntry mine{color, key, {}};
  std::string problem;
  // Everybody brings an id; the one of the part's first rank is used.
  if (ncclResult_t error = SharedRegion::make_id(&mine.id, &problem)) return parent.fail(error, problem);
  std::vector<std::string> blobs = parent.exchange(bytes_of(mine), among);
  if (blobs.empty()) return parent.fail(ncclInternalError, "aborted while it was split");
  std::vector<std::pair<int, int>> members;  // key and rank of the parent
  std::map<int, SplitEntry> entries;
  for (std::size_t i = 0; i < among.size(); ++i) {
    SplitEntry entry;
    memcpy(&entry, blobs[i].data(), sizeof entry);
    entries[among[i]] = entry;
    if (entry.color == color) members.push_back({entry.key, among[i]});
  }
  std::sort(members.begin(), members.end());
  ncclResult_t result = ncclSuccess;
  if (color != NCCL_SPLIT_NOCOLOR) {
    auto me = std::find(members.begin(), members.end(), std::make_pair(key, parent.rank));
    auto part = make(static_cast<int>(me - members.begin()), static_cast<int>(members.size()));
    result = part->join(entries[members.front().second].id);
  }
  // All have joined their parts when they meet again: nobody needs the ids any more.
  if (parent.exchange("", among).empty()) return parent.fail(ncclInternalError, "aborted while it was split");
  SharedRegion::forget(mine.id);
  return result;
}

std::vector<int> all_but(const Comm& comm, const int* excluded, int count) {
  std::vector<int> ranks;
  for (int rank = 0; rank < comm.ranks; ++rank) {
    if (std::find(excluded, excluded + count, rank) == excluded + count) ranks.push_back(rank);
  }
  return ranks;
}

// The new communicator of split and shrink: known to the caller at once where it does not block.
ncclResult_t divide_comm(ncclComm_t handle, const std::vector<int>& among, int color, int key, ncclComm_t* out,
                         ncclConfig_t* config) {
  auto parent = find_comm(handle);
  *out = nullptr;
  auto made = std::make_shared<std::shared_ptr<Comm>>();
  // Its size is not known before the others have said their colors: the handle's communicator is made then.
  auto job = [=] {
    return make_part(*parent, among, color, key, [&](int rank, int ranks) {
      *made = std::make_shared<Comm>(rank, ranks, parent->device, config);
      *out = publish(*made);
      return *made;
    });
  };
  return enqueue_job(parent, job);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  CALLED();
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  CALLED();
  std::string problem;
  ncclResult_t error = SharedRegion::make_id(id, &problem);
  if (error) say("NCCL: " + problem);
  return error;
}

const char* ncclGetErrorString(ncclResult_t result) {
  static const char* words[] = {"no error",
                                "unhandled cuda error",
                                "unhandled system error",
                                "internal error",
                                "invalid argument",
                                "invalid usage",
                                "remote process exited or there was a network error",
                                "NCCL operation in progress"};
  return result >= 0 && result <= ncclInProgress ? words[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t handle) {
  CALLED();
  static thread_local std::string text;
  auto comm = find_comm(handle);
  text = comm ? comm->last_error() : "";
  return text.c_str();
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  CALLED();
  if (ranks < 1 || ranks > max_ranks) return refuse(format("%d ranks; the stand-in has 1 to %d", ranks, max_ranks));
  if (rank < 0 || rank >= ranks) return refuse(format("rank %d of %d", rank, ranks));
  auto comm = std::make_shared<Comm>(rank, ranks, current_device(), config);
  ncclComm_t handle = publish(comm);
  // Known to the caller at once where it does not block; a communicator that blocks is there when it has joined.
  *out = comm->blocking ? nullptr : handle;
  return enqueue_job(comm, [=] {
    ncclResult_t error = comm->join(id);
    if (comm->blocking && error) withdraw(handle);
    if (comm->blocking && !error) *out = handle;
    return error;
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int ranks, int rank, int ids, ncclUniqueId* id, ncclConfig_t* config) {
  CALLED();
  if (ids < 1) return refuse("ncclCommInitRankScalable without an id");
  return ncclCommInitRankConfig(out, ranks, id[0], rank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t* out, int ranks, const int* devices) {
  CALLED();
  ncclUniqueId id;
  int before = current_device();
  if (ncclResult_t error = ncclGetUniqueId(&id)) return error;
  group_start();
  for (int rank = 0; rank < ranks; ++rank) {
    cudaSetDevice(devices ? devices[rank] : rank);
    ncclCommInitRankConfig(&out[rank], ranks, id, rank, nullptr);
  }
  cudaSetDevice(before);
  return group_end();
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  CALLED();
  auto [parent, error] = usable(handle);
  if (error) return error;
  return divide_comm(handle, all_but(*parent, nullptr, 0), color, key, out, config);
}

ncclResult_t ncclCommShrink(ncclComm_t handle, int* excluded, int count, ncclComm_t* out, ncclConfig_t* config, int) {
  CALLED();
  auto parent = find_comm(handle);
  if (!parent) return refuse("ncclCommShrink of a communicator that was destroyed");
  return divide_comm(handle, all_but(*parent, excluded, count), 0, parent->rank, out, config);
}

ncclResult_t ncclCommCount(ncclComm_t handle, int* count) {
  CALLED();
  auto [comm, error] = usable(handle);
  if (error) return error;
  *count = comm->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
  CALLED();
  auto [comm, error] = usable(handle);
  if (error) return error;
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t handle, int* device) {
  CALLED();
  auto [comm, error] = usable(handle);
  if (error) return error;
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
  CALLED();
  auto comm = find_comm(handle);
  if (!comm) return refuse("ncclCommGetAsyncError of a communicator that was destroyed or aborted");
  *result = comm->state();
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  CALLED();
  if (!handle) return ncclSuccess;  // as NCCL: torch forgets the handle of one that it has aborted
  auto comm = find_comm(handle);
  if (!comm) return refuse("ncclCommFinalize of a communicator that was destroyed or aborted");
  return enqueue_job(comm, [comm] { return comm->finalize(); });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  CALLED();
  if (!handle) return ncclSuccess;  // as NCCL: torch forgets the handle of one that it has aborted
  auto comm = find_comm(handle);
  if (!comm) return refuse("ncclCommDestroy of a communicator that was destroyed or aborted");
  ncclResult_t result = comm->finalize();
  withdraw(handle);
  return result;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  CALLED();
  if (!handle) return ncclSuccess;  // as NCCL: torch forgets the handle of one that it has aborted
  auto comm = find_comm(handle);
  if (!comm) return refuse("ncclCommAbort of a communicator that was destroyed or aborted");
  comm->abort();
  withdraw(handle);
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  CALLED();
  group_start();
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  CALLED();
  return group_end();
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype, ncclScalarResidence_t residence,
                                      ncclComm_t handle) {
  CALLED();
  auto [comm, error] = usable(handle);
  if (error) return error;
  Operation operation;
  operation.scaled = true;
  if (residence == ncclScalarDevice) {
    operation.factor_on_device = scalar;
  } else {
    operation.factor = read_scalar(scalar, dtype);
  }
  *op = comm->create_op(operation);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  CALLED();
  auto [comm, error] = usable(handle);
  return error ? error : comm->destroy_op(op);
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  CALLED();
  return call(Kind::all_reduce, in, out, count, dtype, op, 0, comm, stream);
}

ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  CALLED();
  return call(Kind::reduce, in, out, count, dtype, op, root, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  CALLED();
  return call(Kind::reduce_scatter, in, out, count, dtype, op, 0, comm, stream);
}

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  CALLED();
  return call(Kind::all_gather, in, out, count, dtype, ncclSum, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  CALLED();
  return call(Kind::broadcast, in, out, count, dtype, ncclSum, root, comm, stream);
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream) {
  CALLED();
  return call(Kind::broadcast, buffer, buffer, count, dtype, ncclSum, root, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  CALLED();
  return call(Kind::all_to_all, in, out, count, dtype, ncclSum, 0, comm, stream);
}

ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  CALLED();
  return call(Kind::send, in, nullptr, count, dtype, ncclSum, peer, comm, stream);
}

ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  CALLED();
  return call(Kind::receive, nullptr, out, count, dtype, ncclSum, peer, comm, stream);
}

ncclResult_t ncclMemAlloc(void** pointer, size_t nbytes) {
  CALLED();
  return allocate(pointer, nbytes, Place::device, current_device()) ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t ncclMemFree(void* pointer) {
  CALLED();
  drain_device(current_device());
  return release(pointer, Place::device) ? ncclInvalidArgument : ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t handle, void* buffer, size_t nbytes, void** registration) {
  CALLED();
  auto [comm, error] = usable(handle);
  if (error) return error;
  if (auto problem = overrun(buffer, nbytes)) return refuse("ncclCommRegister: " + *problem);
  *registration = buffer;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t handle, void*) {
  CALLED();
  return usable(handle).second;
}

// No symmetric memory here: NCCL then gives no window, and that is no error.
ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void*, size_t, void** window, int) {
  CALLED();
  *window = nullptr;
  return usable(handle).second;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, void*) {
  CALLED();
  return usable(handle).second;
}

}  // extern "C"

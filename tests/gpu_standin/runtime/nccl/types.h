// NCCL's types, as far as torch's wheel passes them; NCCL's own header is not needed.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Of the release that torch's wheel names in its requirements; build.py sets it.
#ifndef NCCL_VERSION_CODE
#error "NCCL_VERSION_CODE is not set; build.py reads it from the wheel"
#endif

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7
};

enum ncclDataType_t {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16,
  ncclFloat8e4m3,
  ncclFloat8e5m2,
  ncclNumTypes
};

// Above ncclAvg: operations that ncclRedOpCreatePreMulSum made.
using ncclRedOp_t = int;
enum : int { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps };

enum ncclScalarResidence_t { ncclScalarDevice, ncclScalarHostImmediate };

struct ncclUniqueId {
  char internal[128];
};

// The first members of NCCL's struct; those that follow change no result.
struct ncclConfig_t {
  std::size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char* net_name;
  int split_share;
};
constexpr int NCCL_CONFIG_UNDEF_INT = INT32_MIN;
constexpr int NCCL_SPLIT_NOCOLOR = -1;

using ncclComm_t = struct ncclComm*;

namespace standin {
std::size_t nbytes_of(ncclDataType_t dtype);
const char* name_of(ncclDataType_t dtype);
}  // namespace standin

/* libnccl: its version is all that the checker asks the library itself for. Source: nccl.h. */
#include "standin.h"

int ncclGetVersion(int *version) {
  *version = planned("nccl", 22703);
  return planned("ncclGetVersion", 0);
}

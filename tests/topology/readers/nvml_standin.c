/* libnvidia-ml with the signatures, structures and return codes of nvml.h (CUDA 13): GPUs shaped by constants.

   GPUS 2         how many, at most two
   SM 90          compute capability times ten
   LINKS 18       NVLinks of a GPU, all of them up
   SWITCH 1       they lead to a switch; 0: to the other GPU
   HIDDEN 0       their far end cannot be seen
   NO_P2P 0       links, counted from 0, that carry no traffic between GPUs
   ASLEEP 0       the links sleep
   LOST 0         the second GPU fell off the bus
   MIG 3          return code of the question for MIG: 0 on, 3 not supported
   INIT 0         return code of the start
   OLD            a driver without fields, fabric, kinds of far ends and confidential computing */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };

typedef struct {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} pci_info;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct {
  unsigned fieldId, scopeId;
  long long timestamp, latencyUsec;
  int valueType, nvmlReturn;
  union { double d; unsigned ui; unsigned long long ull; } value;
} field_value;
typedef struct { unsigned version; unsigned char clusterUuid[16]; int status; unsigned cliqueId; unsigned char state; unsigned health; } fabric;
typedef struct { unsigned environment, ccFeature, devToolsMode; } confidential;

static int gpus[2];
static const char *const BUS[2] = {GPUS == 1 ? "00000000:03:00.0" : "00000000:3B:00.0", "00010000:4C:00.0"};
static int number(void *gpu) { return (int)((int *)gpu - gpus); }

static int fill(pci_info *info, const char *bus) {
  memset(info, 0, sizeof *info);
  snprintf(info->busId, sizeof info->busId, "%s", bus);
  snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%s", bus + 4);
  return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "stand-in"; }
int nvmlInitWithFlags(unsigned flags) { return flags ? INVALID_ARGUMENT : INIT; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "580.65.06"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
  *gpu = &gpus[index];
  return index >= GPUS ? INVALID_ARGUMENT : LOST && index ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(void *gpu, pci_info *info) { return fill(info, BUS[number(gpu)]); }
int nvmlDeviceGetName(void *gpu, char *name, unsigned length) { snprintf(name, length, "NVIDIA H100 80GB HBM3"); return SUCCESS; }
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) { *major = SM / 10; *minor = SM % 10; return SUCCESS; }
int nvmlDeviceGetMemoryInfo(void *gpu, memory *m) { m->total = 80ull << 30; return SUCCESS; }
int nvmlDeviceGetMaxClockInfo(void *gpu, int kind, unsigned *clock) { *clock = kind == 2 ? 2619 : 1980; return SUCCESS; }
int nvmlDeviceGetMemoryBusWidth(void *gpu, unsigned *bits) { *bits = 5120; return SUCCESS; }
int nvmlDeviceGetBAR1MemoryInfo(void *gpu, memory *m) { m->total = 128ull << 30; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *gpu, unsigned *generation) { *generation = 5; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(void *gpu, unsigned *width) { *width = 16; return SUCCESS; }
int nvmlDeviceGetMigMode(void *gpu, unsigned *current, unsigned *pending) { *current = *pending = 1; return MIG; }
static int slices[2][7]; /* of which 0 and 2 are there: indices need not be dense */
int nvmlDeviceGetMaxMigDeviceCount(void *gpu, unsigned *count) { *count = MIG ? 0 : 7; return MIG; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *gpu, unsigned index, void **slice) {
  *slice = &slices[number(gpu)][index];
  return index == 0 || index == 2 ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
  int slice = (int)((int *)handle - slices[0]);
  if (slice >= 0 && slice < 14) snprintf(text, length, "MIG-41b36412-ae44-5021-baa2-86b1036cd2%02d", slice);
  else snprintf(text, length, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f%d", number(handle));
  return SUCCESS;
}
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *active) {
  *active = link < LINKS && !ASLEEP;
  return link < LINKS ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetNvLinkCapability(void *gpu, unsigned link, int capability, unsigned *result) {
  *result = capability == 0 && link >= NO_P2P;
  return link < LINKS ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *gpu, unsigned link, pci_info *info) {
  if (link >= LINKS) return INVALID_ARGUMENT;
  return fill(info, HIDDEN ? "fffffff:ffff:ff" : SWITCH ? "00000000:85:00.0" : BUS[1 - number(gpu)]);
}
#ifndef OLD
int nvmlDeviceGetNvLinkRemoteDeviceType(void *gpu, unsigned link, unsigned *kind) { *kind = SWITCH ? 2 : 0; return SUCCESS; }
int nvmlDeviceGetFieldValues(void *gpu, int count, field_value *values) {
  for (int i = 0; i < count; i++) {
    int known = values[i].fieldId == 165 && values[i].scopeId < LINKS;
    values[i].nvmlReturn = known ? SUCCESS : NOT_SUPPORTED;
    values[i].value.ui = ASLEEP ? 2 : 1;
  }
  return SUCCESS;
}
int nvmlDeviceGetGpuFabricInfoV(void *gpu, fabric *info) {
  if (info->version != (sizeof *info | 2u << 24)) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
  info->state = 3;
  info->status = SUCCESS;
  return SUCCESS;
}
int nvmlSystemGetConfComputeState(confidential *state) { state->ccFeature = 0; return SUCCESS; }
#endif

"""The native probes against small stand-ins for libcuda and libibverbs, built on the spot: every errno, no hardware."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.topology.gdr.environment import child_environment
from gradwire.topology.gdr.native import merged

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the stand-ins with")

CUDA = r"""
#include <stdio.h>
#include <string.h>
#include <fcntl.h>
int cuInit(unsigned f) { return INIT; }
int cuDriverGetVersion(int *v) { *v = 12040; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:19:00.0"); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 116 || DMABUF; return a == 116 || a == 124 ? 0 : 1; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuMemAlloc_v2(unsigned long long *p, size_t n) { *p = 0x7f0000000000ull; return n == 2097152 ? 0 : 2; }
int cuMemFree_v2(unsigned long long p) { return p == 0x7f0000000000ull ? 0 : 1; }
int cuMemGetHandleForAddressRange(int *fd, unsigned long long p, size_t n, int t, unsigned long long f) {
  if (!DMABUF || t != 1 || p != 0x7f0000000000ull) return 801;
  *fd = open("/dev/null", O_RDONLY); return 0; }
"""
VERBS = r"""
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <fcntl.h>
static int device, context, domain, region;
static void *list[2] = {&device, 0};
void **ibv_get_device_list(int *n) { *n = 1; return list; }
const char *ibv_get_device_name(void *d) { return d == &device ? "mlx5_0" : "?"; }
void *ibv_open_device(void *d) { return d == &device ? &context : 0; }
int ibv_close_device(void *c) { return c != &context; }
int ibv_query_port(void *c, uint8_t p, int *a) { a[0] = 4; a[1] = 5; a[2] = 5; return 0; }
void *ibv_alloc_pd(void *c) { return c == &context ? &domain : 0; }
int ibv_dealloc_pd(void *p) { return p != &domain; }
void *ibv_reg_mr(void *p, void *a, size_t n, int f) {
  if (p != &domain || a != (void *)0x7f0000000000ull || n != 2097152 || f != 7) { errno = EINVAL; return 0; }
  errno = PEERMEM; return PEERMEM ? 0 : &region; }
void *ibv_reg_dmabuf_mr(void *p, uint64_t o, size_t n, uint64_t v, int fd, int f) {
  if (p != &domain || o || n != 2097152 || v != 0x7f0000000000ull || fcntl(fd, F_GETFD) < 0) { errno = EINVAL; return 0; }
  return &region; }
int ibv_dereg_mr(void *r) { return r != &region; }
"""


def build(folder: Path, name: str, source: str, **constants: int) -> None:
    code = folder / f"{name}.c"
    code.write_text(source)
    flags = [f"-D{key}={value}" for key, value in constants.items()]
    command = [str(COMPILER), "-shared", "-fPIC", "-w", *flags, str(code), "-o", str(folder / name)]
    subprocess.run(command, check=True, capture_output=True)


def answers(folder: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "gradwire.topology.gdr.native", "--prove"],
        env=child_environment({"LD_LIBRARY_PATH": str(folder)}),
        capture_output=True,
        timeout=60,
        check=True,
    )
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


@needs_compiler
@pytest.mark.parametrize(
    ("peermem", "dmabuf", "expected"),
    [
        (0, 1, {"peermem_errno": 0, "dmabuf_errno": 0}),
        (14, 1, {"peermem_errno": 14, "dmabuf_errno": 0}),
        (14, 0, {"peermem_errno": 14, "note": "the GPU exports no dma-buf: CUDA error 801"}),
    ],
)
def test_registration(tmp_path: Path, peermem: int, dmabuf: int, expected: dict[str, object]) -> None:
    build(tmp_path, "libcuda.so.1", CUDA, INIT=0, DMABUF=dmabuf)
    build(tmp_path, "libibverbs.so.1", VERBS, PEERMEM=peermem)
    found = answers(tmp_path)
    assert found["registrations"] == [{"gpu": "0000:19:00.0", "device": "mlx5_0"} | expected]
    assert found["gpus"] == [{"bus_id": "0000:19:00.0", "gdr_supported": True, "dmabuf_supported": bool(dmabuf)}]
    assert found["cuda_version"] == 12040 and found["active_mtu"] == {"mlx5_0/1": 4096}
    assert found["verbs_dmabuf"] is True and found["verbs_relaxed_ordering"] is False


@needs_compiler
def test_a_driver_that_does_not_start(tmp_path: Path) -> None:
    build(tmp_path, "libcuda.so.1", CUDA, INIT=802, DMABUF=1)
    build(tmp_path, "libibverbs.so.1", VERBS, PEERMEM=0)
    found = answers(tmp_path)
    assert found["cuda_error"] == "cuInit returned 802" and "802" in str(found["probe_error"])


def test_missing_libraries_are_stated(tmp_path: Path) -> None:
    found = answers(tmp_path)
    if "registrations" not in found:
        assert found["probe_error"] and (
            found.get("cuda_error") or found.get("verbs_error") or found.get("gpus") is not None
        )


def test_two_answers_about_one_gpu_become_one() -> None:
    both = merged({"gpus": [{"bus_id": "a", "x": 1}], "p": 1}, {"gpus": [{"bus_id": "a", "y": 2}], "q": 2})
    assert both == {"gpus": [{"bus_id": "a", "x": 1, "y": 2}], "p": 1, "q": 2}

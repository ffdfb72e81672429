"""Law: no two threads of a kernel touch the same bytes unordered, and no result depends on the order in which they run.

Races are found in a shadow of the memory, whatever order the threads run in: tests/kernels_on_cpu/race.h.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.compressors.kernels import cuda, reference
from gradwire.compressors.kernels.cuda.load import ENTRY_POINTS, kernel_source
from kernels_on_cpu.cases import APPROXIMATE, CASES
from kernels_on_cpu.emulator import Emulator, KernelRaceError, Library, build_kernels
from kernels_on_cpu.run_on import run_on

ORDERS = (0, 1, 2, 3)
"""The ascending one, and three drawn ones."""


def same(ours: list[Tensor], wanted: list[Tensor]) -> bool:
    pairs = zip(ours, wanted, strict=True)
    return all(torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)) for one, other in pairs)


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_has_a_race_and_no_order_changes_its_bits(
    watched_emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    device = run_on(watched_emulator, monkeypatch, most_ctas=5)
    results = []
    for order in ORDERS:
        monkeypatch.setattr(watched_emulator, "order", 1000 * order)
        results.append(CASES[name](cuda, device))
    assert all(same(each, results[0]) for each in results[1:])
    wanted = CASES[name](reference, device)
    if name in APPROXIMATE:
        for one, other in zip(results[0], wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-5)
    else:
        assert same(results[0], wanted)


def test_the_cases_start_every_kernel(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    device = run_on(emulator, monkeypatch)
    monkeypatch.setattr(emulator, "launched", set())
    for case in CASES.values():
        case(cuda, device)
    assert emulator.launched == {kernel for kernels in ENTRY_POINTS.values() for kernel in kernels}


PLANTED: dict[str, tuple[str, str]] = {
    "no barrier before a neighbour's value is read": (
        """__shared__ int shared[64];
        shared[threadIdx.x] = static_cast<int>(threadIdx.x);
        out[threadIdx.x] = shared[threadIdx.x ^ 1];""",
        "reads shared memory at `out[threadIdx.x]",
    ),
    "a shuffle in the place of a barrier": (
        """__shared__ int shared[64];
        shared[threadIdx.x] = 1;
        __shfl_sync(kAllLanes, 1, 0);
        out[threadIdx.x] = shared[threadIdx.x ^ 1];""",
        "nothing orders",
    ),
    "a warp's barrier for two warps": (
        """__shared__ int shared[64];
        shared[threadIdx.x] = 1;
        __syncwarp();
        out[threadIdx.x] = shared[threadIdx.x ^ 32];""",
        "nothing orders",
    ),
    "shared memory that is used again too early": (
        """__shared__ int shared[64];
        for (int i = 0; i < 2; ++i) {
          shared[threadIdx.x] = i;
          __syncthreads();
          out[threadIdx.x] = shared[threadIdx.x ^ 1];
        }""",
        "writes shared memory at `shared[threadIdx.x] = i",
    ),
    "shared memory that nobody has written": (
        """__shared__ int shared[64];
        if (threadIdx.x) shared[threadIdx.x] = 1;
        __syncthreads();
        out[threadIdx.x] = shared[threadIdx.x];""",
        "no thread of the CTA has written it",
    ),
    "bytes of one word by two CTAs": (
        "reinterpret_cast<uint8_t*>(out)[63 * blockIdx.x + threadIdx.x] = 1;",
        "writes global memory",
    ),
    "an addition that is not atomic": (
        "if (threadIdx.x == 0) *ticket += 1;",
        "thread 0 of CTA",
    ),
    "the last CTA without a fence before its ticket": (
        """__shared__ uint32_t mine;
        out[64 * blockIdx.x + threadIdx.x] = 1;
        __syncthreads();
        if (threadIdx.x == 0) mine = atomicAdd(ticket, 1u);
        __syncthreads();
        if (mine + 1 < gridDim.x) return;
        __threadfence();
        out[256 + threadIdx.x] = out[threadIdx.x] + out[64 + threadIdx.x];""",
        "reads global memory at `out[256 + threadIdx.x]",
    ),
    "the last CTA without a fence after its ticket": (
        """__shared__ uint32_t mine;
        out[64 * blockIdx.x + threadIdx.x] = 1;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) mine = atomicAdd(ticket, 1u);
        __syncthreads();
        if (mine + 1 < gridDim.x) return;
        out[256 + threadIdx.x] = out[threadIdx.x] + out[64 + threadIdx.x];""",
        "reads global memory at `out[256 + threadIdx.x]",
    ),
    "the last CTA without a barrier before its ticket": (
        """__shared__ uint32_t mine;
        out[64 * blockIdx.x + threadIdx.x] = 1;
        __threadfence();
        if (threadIdx.x == 0) mine = atomicAdd(ticket, 1u);
        __syncthreads();
        if (mine + 1 < gridDim.x) return;
        __threadfence();
        out[256 + threadIdx.x] = out[threadIdx.x] + out[64 + threadIdx.x];""",
        "reads global memory at `out[256 + threadIdx.x]",
    ),
}
"""What is wrong -> body of a kernel, and a part of what is said of it."""

RIGHT: dict[str, str] = {
    "neighbours behind a barrier": """__shared__ int shared[64];
        for (int i = 0; i < 2; ++i) {
          shared[threadIdx.x] = i;
          __syncthreads();
          out[64 * blockIdx.x + threadIdx.x] = shared[threadIdx.x ^ 1];
          __syncthreads();
        }""",
    "a warp's own barrier": """__shared__ int shared[64];
        shared[threadIdx.x] = 1;
        __syncwarp();
        out[64 * blockIdx.x + threadIdx.x] = shared[threadIdx.x ^ 1];""",
    "bytes beside each other": "reinterpret_cast<uint8_t*>(out)[64 * blockIdx.x + threadIdx.x] = 1;",
    "atomic additions": "atomicAdd(ticket, 1u);",
    "the last CTA": """__shared__ uint32_t mine;
        out[64 * blockIdx.x + threadIdx.x] = 1;
        const bool last = last_block(ticket, gridDim.x, &mine);
        if (last) out[256 + threadIdx.x] = out[threadIdx.x] + out[64 + threadIdx.x] + out[128 + threadIdx.x];""",
}


def run_planted(folder: Path, engine: ctypes.CDLL, name: str, body: str, order: int) -> None:
    source = f"""
    {kernel_source("dgc_select").split("// Kernels.")[0]}
    extern "C" __global__ void planted(int* out, uint32_t* ticket) {{
        {body}
    }}
    }}  // namespace gradwire
    """
    out, ticket = np.zeros(1024, dtype=np.int32), np.zeros(1, dtype=np.uint32)
    library = Library(build_kernels(folder, f"planted_{name}", source, ["planted"], watched=True), engine)
    library.launch("planted", 3, 64, [out.ctypes.data, ticket.ctypes.data], seed=order, check=True)


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_race_is_found_in_any_order(what: str, watched_emulator: Emulator) -> None:
    body, said = PLANTED[what]
    folder = watched_emulator.libraries["cast"].path.parent
    for order in (0, 1, 2, 3, 4, 5):
        with pytest.raises(KernelRaceError, match="planted") as raised:
            run_planted(folder, watched_emulator.engine, str(list(PLANTED).index(what)), body, order)
        assert said in str(raised.value), str(raised.value)


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_ordered_is_no_race(what: str, watched_emulator: Emulator) -> None:
    folder = watched_emulator.libraries["cast"].path.parent
    for order in (0, 1, 2, 3, 4, 5):
        run_planted(folder, watched_emulator.engine, f"right_{list(RIGHT).index(what)}", RIGHT[what], order)


MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "no fence before the ticket": (
        "dgc_select",
        "  __threadfence();\n  __syncthreads();",
        "  __syncthreads();",
        "dgc step",
    ),
    "no fence after the ticket": ("dgc_select", "  if (last) __threadfence();", "", "dgc step"),
    "sums that are used again at once": (
        "dgc_select",
        "  __syncthreads();\n  return before + inclusive - x;",
        "  return before + inclusive - x;",
        "dgc step",
    ),
    "a payload that is added beside the one before it": (
        "dgc_select",
        "      else add_row<false>(row, first, format, start, stop, sums);\n      __syncthreads();\n",
        "      else add_row<false>(row, first, format, start, stop, sums);\n",
        "dgc sum torch.float32",
    ),
    "a tile of two CTAs": (
        "dgc_select",
        "for (int64_t tile = blockIdx.x; tile < tile_count(numel); tile += gridDim.x) {\n    const int64_t start",
        "for (int64_t tile = blockIdx.x / 2; tile < tile_count(numel); tile += gridDim.x) {\n    const int64_t start",
        "dgc sum torch.float32",
    ),
    "sums that are stored before all lanes have them": (
        "onebit",
        "sum[4 * i + 2], sum[4 * i + 3]);\n  __syncwarp();\n}",
        "sum[4 * i + 2], sum[4 * i + 3]);\n}",
        "onebit decode_reduce",
    ),
    "an addend that is read before all lanes have it": (
        "onebit",
        "a.numel - first - 4 * q);\n    __syncwarp();\n",
        "a.numel - first - 4 * q);\n",
        "onebit decode_reduce",
    ),
    "words that are stored before all threads have added theirs": (
        "waterfill",
        "  __syncthreads();\n  const int taken = ",
        "  const int taken = ",
        "waterfill 5 encode",
    ),
    "a product that is used again at once": (
        "powersgd",
        "  const double all = sum_of_lanes(shared[lane_index()]);\n  __syncthreads();\n",
        "  const double all = sum_of_lanes(shared[lane_index()]);\n",
        "orthogonalize",
    ),
    "a sample that is read before it is there": ("dgc_step", "    __syncthreads();", "", "dgc step"),
}
"""What is wrong -> the file, its text, what stands there instead, and the case that runs it."""


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_race_in_a_kernel_of_gradwire_is_found(
    what: str, watched_emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, text, instead, case = MUTATIONS[what]
    source = kernel_source(file)
    assert text in source
    folder = watched_emulator.libraries["cast"].path.parent
    name = f"mutant_{list(MUTATIONS).index(what)}"
    path = build_kernels(folder, name, source.replace(text, instead), ENTRY_POINTS[file], watched=True)
    monkeypatch.setitem(watched_emulator.libraries, file, Library(path, watched_emulator.engine))
    device = run_on(watched_emulator, monkeypatch, most_ctas=5)
    with pytest.raises(KernelRaceError, match="nothing orders them"):
        CASES[case](cuda, device)

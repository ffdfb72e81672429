"""What `gradwire selftest` calls: every kernel there is, each equal to its reference, their bytes counted right."""

from dataclasses import replace
from typing import cast

import pytest
import torch

from gradwire.bench.kernels.calls import (
    CALLS,
    CPU,
    KernelInputs,
    cpu_kernels,
    cuda_kernels,
    reference_kernels,
)
from gradwire.bench.kernels.cases import all_cases
from gradwire.bench.selftest.checks import Mismatch, compare
from gradwire.bench.selftest.coverage import (
    RecordedKernels,
    all_functions,
    recorded_launches,
    touched_functions,
    touched_kernels,
)
from gradwire.bench.selftest.kernel_checks import kernel_attempts
from gradwire.compressors.kernels.dispatch import Kernels

NUMEL = 5000


def test_every_kernel_of_cuda_is_called_and_is_the_reference(device: torch.device) -> None:
    """On a GPU, and with the kernels' source on the CPU; a kernel that nobody calls, or a new one, fails here."""
    functions: set[str] = set()
    ours = cuda_kernels(device)
    ours = replace(ours, kernels=cast(Kernels, RecordedKernels(ours.kernels, functions)))
    with recorded_launches() as launched:
        for name, attempt in kernel_attempts(ours, NUMEL):
            try:
                attempt()
            except Mismatch as error:
                pytest.fail(f"{name}: {error}")
    assert not touched_kernels(launched).missing
    assert not touched_functions(functions, "cuda").missing
    assert launched == set(touched_kernels(launched).all)


def test_every_function_of_the_cpu_is_called_and_is_the_reference() -> None:
    functions: set[str] = set()
    ours = cpu_kernels()
    attempts = dict(kernel_attempts(replace(ours, kernels=cast(Kernels, RecordedKernels(ours.kernels, functions))), 1))
    assert attempts.keys() == CALLS.keys()
    for attempt in attempts.values():
        attempt()
    assert functions >= set(all_functions())


@pytest.mark.parametrize(
    ("case", "call"),
    [
        ("fp16_encode", "cast_encode f16"),
        ("onebit_encode", "onebit_encode"),
        ("int8_decode_reduce", "quantize_decode_reduce 8 bits"),
        ("waterfill5_encode", "waterfill_encode 5 bits"),
    ],
)
def test_bytes_are_those_of_the_table_of_kernels(case: str, call: str) -> None:
    """The table leaves out addends, residuals that it has not, and the heads of payloads."""
    numel = 65_536
    made = CALLS[call](cpu_kernels(), KernelInputs(CPU, numel))
    spared = {"fp16_encode": 2, "int8_decode_reduce": 1, "waterfill5_encode": 2}
    wanted = all_cases(numel, CPU)[case]().nbytes
    assert made.nbytes - 4 * numel * spared.get(case, 0) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("ours", "wanted", "tolerance", "message"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.0, "1 of 2 elements differ; element 1 is 2, wanted 2.5"),
        ([0.0], [-0.0], 0.0, "1 of 1 elements differ"),
        ([1.0, float("nan")], [1.0, 2.0], 0.5, "element 1 is nan"),
        ([1.0, 2.0], [1.0, 3.0], 0.3, "element 1 is 2, wanted 3"),
    ],
)
def test_what_differs_is_said(ours: list[float], wanted: list[float], tolerance: float, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        compare(torch.tensor(ours), torch.tensor(wanted), tolerance)


def test_what_is_the_same_passes() -> None:
    nan = float("nan")
    assert compare(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0])) == 0.0
    assert compare(torch.tensor([255], dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8)) == 0.0
    assert compare(torch.tensor([1.0]), torch.tensor([1.5]), 0.5) == 0.5


def test_a_wrong_kernel_is_found() -> None:
    """One that leaves its outputs as they are is none of the calls' reference."""

    class Idle:
        def __getattr__(self, name: str) -> object:
            return lambda *_: None

    idle = replace(reference_kernels(), kernels=cast(Kernels, Idle()))
    found = []
    for name, attempt in kernel_attempts(idle, 2000):
        with pytest.raises(Mismatch):
            attempt()
        found.append(name)
    assert found == list(CALLS)

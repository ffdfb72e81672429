"""Streams are a law, compressed: every compressor over several steps, migration, resume, flush and loss scaling.

Results are those of the CPU path, bit for bit where the order of the sums is the same, and close for PowerSGD, whose
matrix products are made by other kernels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda.drive import FIRST, OPTIONS, REBUILT, Job, gradient, make_state, on_cpu, on_cuda, train
from fake_cuda.machine import Machine
from fake_cuda.nccl import FakeNccl
from gradwire.comms.fusion import FusionPlan
from gradwire.comms.plan.owners import owner_shares
from gradwire.compressors.composite import Composite, make_composite
from gradwire.compressors.two_stage import TwoStage

OTHERS = (("three_bias", "three_weight"), ("norm", "two_bias", "two_weight", "one_bias", "one_weight"))
"""Buckets cut elsewhere than `REBUILT`: parameters move to other shards."""
STEPS = (FIRST, REBUILT, REBUILT, REBUILT)
APPROXIMATE = {"powersgd"}
COMPRESSORS = tuple(OPTIONS)
FAMILIES = ("bf16", "int8", "onebit", "dgc", "powersgd")
"""One of each way of exchanging and of keeping state: fp16 is bf16's, int4 int8's."""

IN_ONE, IN_TWO = ({"name": "hierarchical", "chunks": chunks} for chunks in (1, 2))


def compared(
    compressor: str,
    buckets: Sequence[Sequence[Sequence[str]]] = STEPS,
    nodes: str = "aabb",
    quiet: bool = False,
    **more: Any,
) -> Machine:
    """Trains on CUDA and on the CPU, and compares all averages; returns the recorder, whose faults were looked at."""
    settings: dict[str, Any] = {
        "plan": IN_ONE,
        "compressor": compressor,
        "compressor_options": OPTIONS[compressor],
    }
    settings |= more
    body = train(nodes, buckets, quiet=quiet, **settings)
    results, running = on_cuda(len(nodes), body, check=False)
    for rank, (have, want) in enumerate(zip(results, on_cpu(len(nodes), body), strict=True)):
        for step, (one, other) in enumerate(zip(have, want, strict=True)):
            for mine, theirs in zip(one, other, strict=True):
                if compressor in APPROXIMATE:
                    largest = float(theirs.nan_to_num(0.0, 0.0, 0.0).abs().max())
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * max(1.0, largest), equal_nan=True)
                else:
                    same = torch.equal(mine.nan_to_num(nan=7.0), theirs.nan_to_num(nan=7.0))
                    assert same, f"rank {rank}, step {step}: not the bits of the CPU"
    running.check()
    return running


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_several_steps_in_the_same_buckets(compressor: str) -> None:
    compared(compressor, (REBUILT,) * 4)


@pytest.mark.parametrize("nodes", ["aabb", "ab"])
@pytest.mark.parametrize("compressor", FAMILIES)
def test_a_bucket_in_several_pieces(compressor: str, nodes: str) -> None:
    """Pieces end on both side streams: the bucket is there when the last of them is."""
    compared(compressor, (FIRST,) * 3, nodes, before=in_pieces, quiet=True)


def in_pieces(job: Job, step: int) -> None:
    """From the second step on."""
    if step == 1:
        job.state.fuse(FusionPlan(piece_nbytes=8192))


@pytest.mark.parametrize("compressor", ["int8", "onebit"])
def test_thirty_steps(compressor: str) -> None:
    """Past step 23 nothing is timed any more."""
    shapes = {"three_weight": (24, 8), "two_weight": (40,), "one_weight": (16, 9)}
    compared(compressor, ((("three_weight",), ("two_weight", "one_weight")),) * 30, shapes=shapes, quiet=True)


@pytest.mark.parametrize("nodes", ["aabb", "ab"])
@pytest.mark.parametrize("compressor", ["int8", "dgc", "powersgd"])
def test_chunks(compressor: str, nodes: str) -> None:
    """Of one GPU a node, a chunk ends with a kernel of its own: no all-gather orders it before the next one's."""
    compared(compressor, (FIRST,) * 3, nodes, plan=IN_TWO)


@pytest.mark.parametrize("compressor", FAMILIES)
def test_rebuilt_buckets(compressor: str) -> None:
    compared(compressor, (FIRST, FIRST, FIRST, REBUILT, REBUILT, OTHERS, OTHERS))


@pytest.mark.parametrize("compressor", ["int8", "powersgd"])
def test_joined_buckets(compressor: str) -> None:
    compared(compressor, (REBUILT, REBUILT, REBUILT), fusion=0.015)


@pytest.mark.parametrize("compressor", ["onebit", "powersgd"])
def test_a_plan_over_all_ranks(compressor: str) -> None:
    compared(compressor, (REBUILT,) * 3, plan="flat", whole=True)  # the dense step sums four ranks in another order


@pytest.mark.parametrize("compressor", ["onebit", "dgc"])
def test_uneven_nodes(compressor: str) -> None:
    compared(compressor, (REBUILT,) * 3, nodes="aaab", whole=True)  # of three ranks the order matters otherwise


@pytest.mark.parametrize("compressor", ["bf16", "int8", "onebit", "powersgd"])
def test_owners_by_their_links(compressor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node sends (1 + (N - 2) f) of a payload, f being its share; what is summed exactly has equal parts.

    Three chunks: in fewer the model finds equal parts quicker. What goes back has a communicator of its own, made
    before the first step and ended at the end.
    """
    warmup = int(OPTIONS[compressor].get("warmup_steps", 0))
    shapes, steps, chunks = {"weight": (384, 512)}, ((("weight",),),) * (warmup + 2), 3
    connect, abort = FakeNccl._connect, FakeNccl.abort
    made: list[str] = []
    ended: list[str] = []
    stepping: set[int] = set()

    def connecting(group: FakeNccl, index: int) -> Any:
        if group._clique is None:
            made.append(group.options.group_name)
            assert index not in stepping
        return connect(group, index)

    def ending(group: FakeNccl) -> None:
        ended.append(group.options.group_name)
        abort(group)

    monkeypatch.setattr(FakeNccl, "_connect", connecting)
    monkeypatch.setattr(FakeNccl, "abort", ending)
    settings: dict[str, Any] = {"plan": {"name": "hierarchical", "chunks": chunks}, "compressor": compressor}
    settings["compressor_options"] = options = OPTIONS[compressor]
    main = make_composite(compressor, options)
    assert isinstance(main, Composite)
    payload = chunks * 64 * main.main.codec.wire_nbytes(1024) if isinstance(main.main, TwoStage) else 0
    compressed = len(steps) - warmup
    found: list[Tensor] = []
    links = ((4e9, 1e9, 4e9, 4e9), (4e9, 2e9, 3e9, 1e9))
    for rates in links if compressor in ("bf16", "powersgd") else links[1:]:
        made.clear()
        ended.clear()
        stepping.clear()
        body = train(
            "abcd", steps, shapes=shapes, rates=rates, before=lambda job, step: stepping.add(job.rank), **settings
        )
        results, running = on_cuda(4, body)
        assert not ended  # the communicator is the user's own
        found += [torch.cat([step[0] for step in run]) for run in results]
        sent = running.exchange.sent  # type: ignore[attr-defined]
        left = [sum(nbytes for (one, other), nbytes in sent.items() if rank == one != other) for rank in range(4)]
        assert left == [compressed * payload * (64 + 2 * share) // 64 for share in owner_shares(rates)]
    assert all(torch.equal(each, found[0]) for each in found)
    on_a_cpu = torch.cat([step[0] for step in on_cpu(4, body)[3]])
    if compressor in APPROXIMATE:
        torch.testing.assert_close(found[0], on_a_cpu, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(found[0], on_a_cpu)


@pytest.mark.parametrize("compressor", FAMILIES)
def test_no_host_wait_during_backward(compressor: str) -> None:
    # One flag a step and rank may be read, a step late.
    steps = (REBUILT,) * 4
    settings: dict[str, Any] = {"plan": "hierarchical", "compressor": compressor}
    settings["compressor_options"] = OPTIONS[compressor]
    _, running = on_cuda(4, train("aabb", steps, quiet=True, **settings))
    waits = [wait for wait in running.host_waits if wait.forbidden]
    assert all(wait.late for wait in waits)
    assert len(waits) <= len(steps) * len(running.devices)


def loads_its_own(job: Job, step: int) -> None:
    """Puts the state that it has in the place of the state that it has: every tensor is a new one."""
    if step == 2:
        job.state.load_state_dict(job.state.state_dict())


@pytest.mark.parametrize("compressor", FAMILIES)
def test_a_loaded_state(compressor: str) -> None:
    compared(compressor, (REBUILT,) * 4, before=loads_its_own)


@pytest.mark.parametrize("compressor", ["int8", "dgc"])
def test_a_state_that_is_loaded_for_other_buckets(compressor: str) -> None:
    compared(compressor, (REBUILT, REBUILT, OTHERS, OTHERS), before=loads_its_own, plan=IN_TWO)


@pytest.mark.parametrize("compressor", ["onebit", "powersgd"])
def test_a_run_that_resumes_in_a_new_state(compressor: str) -> None:
    def before(job: Job, step: int) -> None:
        if step == 2:
            saved = job.state.state_dict()
            node = job.state.config.hostname
            config = {"plan": IN_ONE, "compressor": compressor, "compressor_options": OPTIONS[compressor]}
            job.state.close()
            job.state = make_state(job.model.process_group, job.model, node, **config)
            job.state.load_state_dict(saved)

    compared(compressor, (REBUILT, REBUILT, FIRST, REBUILT), before=before)


@pytest.mark.parametrize("compressor", ["int8", "onebit", "dgc"])
def test_flush(compressor: str) -> None:
    def before(job: Job, step: int) -> None:
        if step == 2:
            job.state.flush()

    compared(compressor, (REBUILT,) * 4, before=before)


class Scaler:
    """What gradwire needs of torch.amp.GradScaler; its scale is a tensor on the GPU, as there."""

    def __init__(self, device: torch.device, scales: Sequence[float]) -> None:
        self._scales = [torch.full((), scale, device=device) for scale in scales]
        self.step = 0

    def get_scale(self) -> float:
        return float(self._scales[self.step].item())


def amp(poison: float) -> tuple[Callable[[Job, int], None], Callable[[int, int], dict[str, Tensor]]]:
    """Loss scales that change, and a step in which one rank's gradient is not finite."""
    scales = (1024.0, 1024.0, 512.0, 512.0, 2048.0)

    def before(job: Job, step: int) -> None:
        if step == 0:
            job.scaler = Scaler(job.device, scales)  # type: ignore[attr-defined]
            job.state.watch(job.scaler)  # type: ignore[attr-defined]
        job.scaler.step = step  # type: ignore[attr-defined]

    def gradients(rank: int, step: int) -> dict[str, Tensor]:
        found = {name: value * scales[step] for name, value in gradient(rank, step).items()}
        if step == 2 and rank == 1:
            found["two_weight"][3, 5] = poison
        return found

    return before, gradients


@pytest.mark.parametrize(
    ("compressor", "poison"), [("int8", math.inf), ("int8", math.nan), ("onebit", 1.0), ("powersgd", math.inf)]
)
def test_loss_scaling(compressor: str, poison: float) -> None:
    before, gradients = amp(poison)
    compared(compressor, (REBUILT,) * 5, before=before, gradients=gradients)


def test_the_saved_state_is_that_of_the_cpu() -> None:
    def body(rank: int, device: torch.device, group: Any) -> dict[str, Any]:
        kept: dict[str, Any] = {}

        def before(job: Job, step: int) -> None:
            if step == 3:
                for entry in job.state.state_dict().values():
                    kept.update((key, value.cpu() if isinstance(value, Tensor) else value) for key, value in entry)

        settings: dict[str, Any] = {"compressor": "int8", "plan": IN_ONE}
        train("aabb", (REBUILT,) * 4, before=before, **settings)(rank, device, group)
        return kept

    results, running = on_cuda(4, body, check=False)
    for have, want in zip(results, on_cpu(4, body), strict=True):
        assert have.keys() == want.keys()
        for key, value in have.items():
            assert torch.equal(value, want[key]) if isinstance(value, Tensor) else value == want[key], key
    running.check()

"""Elastic training on CUDA: a rank that is lost after all ranks have the averages ends no other, and changes none."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda.drive import REBUILT, SHAPES, TIMEOUT, Job, Model, first_module, gradient, on_cuda
from fake_cuda.ranks import FakeProcessGroup

STEPS = 3
LOST_IN = 1
"""Number of the step in which a rank is lost, from 0."""


class Gone(Exception):
    """Ends the rank that is lost."""


def lost_at(deadline: float, state: Any) -> None:
    """Waits until the rank has heard that another one is lost: its communicator has failed then."""
    executor = state._session.communicator.executor
    while executor.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def elastic_job(compressor: str | None, *, loses: bool, behind: bool = False) -> list[Any]:
    """Trains on four ranks on two nodes; in step `LOST_IN` rank 3 ends as soon as all ranks have the averages.

    Args:
        compressor: Of the hook.
        loses: Whether rank 3 ends.
        behind: Whether rank 0 hears of the loss before it has heard that all ranks have the averages.

    Returns:
        For each rank (averages, `state_dict` behind step `LOST_IN`, norm of its residuals then, members at the end).
    """
    config, hook = first_module("gradwire.comms.config").Config, first_module("gradwire.comms.hook").HookState
    have_averages, ended = threading.Barrier(4), threading.Semaphore(0)

    def body(rank: int, device: torch.device, group: FakeProcessGroup) -> Any:
        model = Model(group, device, SHAPES)
        options = config(timeout=TIMEOUT, elastic=True, hostname="aabb"[rank], compressor=compressor)
        state = hook(group, config=options)
        job, said = Job(state, model, device, rank), list[int]()

        def lose() -> None:
            have_averages.wait(TIMEOUT.total_seconds())
            if rank == 3:
                # As the kernel closes the connections of a process.
                state._elastic.resilient_ops.membership.close(orderly=False)
                raise Gone
            lost_at(time.monotonic() + TIMEOUT.total_seconds(), state)

        def plant(complete: Callable[[], None]) -> None:
            complete()
            if loses and state.steps == LOST_IN and not said:
                said.append(rank)
                if not (behind and rank == 0):
                    lose()

        state._elastic.complete_step = lambda real=state._elastic.complete_step: plant(real)
        try:
            for step in range(STEPS):
                if behind and rank == 0 and step == LOST_IN:
                    _interrupt_last_wait(state._elastic.resilient_ops, lose)
                job.step(REBUILT, gradient(rank, step, whole=True))
                if step == LOST_IN:
                    # An optimizer steps, and a checkpoint is made, before the next operation of all ranks.
                    state.raise_failure()
                    saved, compression = state.state_dict(), state._session.compression
                    norm = 0.0 if compression is None else compression.residual_norm()
            return job.averages(), saved, norm, state.view.members
        except Gone:
            for _ in range(3):
                assert ended.acquire(timeout=TIMEOUT.total_seconds())
            return None
        finally:
            ended.release()
            state.close()

    results, _ = on_cuda(4, body)
    return results


def _interrupt_last_wait(resilient_ops: Any, lose: Callable[[], None]) -> None:
    """Makes the next `wait` of a rank, for the all-reduce that shows that all have the averages, fail by the loss."""
    real = resilient_ops.wait

    def wait(future: Any) -> Tensor:
        resilient_ops.wait = real
        real(future)
        lose()
        raise RuntimeError("planted: this rank heard of the loss first")

    resilient_ops.wait = wait


def mean(ranks: int, step: int) -> list[Tensor]:
    own = [gradient(rank, step, whole=True) for rank in range(ranks)]
    each = {name: torch.stack([one[name] for one in own]).mean(0).view(-1) for name in SHAPES}
    return [torch.cat([each[name] for name in names]) for names in REBUILT]


@pytest.mark.parametrize("behind", [False, True])
def test_averages_stay_and_the_others_go_on(behind: bool) -> None:
    *left, lost = elastic_job(None, loses=True, behind=behind)
    assert lost is None
    for averages, _, _, members in left:
        assert members == ("rank 0", "rank 1", "rank 2")
        for step, found in enumerate(averages):
            for one, wanted in zip(found, mean(3 if step > LOST_IN else 4, step), strict=True):
                torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("behind", [False, True])
def test_residuals_are_those_of_a_job_that_lost_no_rank(behind: bool) -> None:
    *left, _ = elastic_job("int8", loses=True, behind=behind)
    *whole, _ = elastic_job("int8", loses=False)
    for (averages, saved, norm, _), (wanted, saved_there, norm_there, _) in zip(left, whole, strict=True):
        assert saved.keys() == saved_there.keys()
        assert norm == pytest.approx(norm_there, rel=1e-6) and norm > 0
        for step in range(LOST_IN + 1):
            for one, other in zip(averages[step], wanted[step], strict=True):
                assert torch.equal(one, other)

"""The hook inside real DDP jobs, four processes on two logical nodes: equal to plain DDP, equal on all ranks."""

import gc
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.comms.bootstrap.compat import PYTHON_REDUCER, PrefixStore, TCPStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.step import features
from support.processes import Processes

NODES = "aabb"
TRAINING = {
    "default": 1e-6,
    "many_small_buckets": 1e-6,
    "static_graph": 1e-6,
    "gradient_as_bucket_view": 1e-6,
    "bucket_cap_mb_list": 1e-6,
    "find_unused_parameters": 1e-6,
    "convolution_channels_last": 1e-6,
    "sparse_embedding": 1e-6,
    "no_sync": 1e-6,
    "compiled": 1e-6,
    "sub_group": 1e-6,
    "two_models": 0.0,
    "state_before_model": 1e-6,
    "uneven_inputs": 1e-6,
    "uneven_inputs_of_which_those_present_count": 1e-6,
    "uneven_inputs_counted_without_the_model": 1e-6,
    "uneven_inputs_in_few_bits": 1e-3,  # 8 bits of 0.1 of each gradient
    "uneven_inputs_by_samples": 1e-6,
    "uneven_inputs_and_a_momentum": 1e-6,
    "counted_otherwise_in_each_epoch": 1e-6,
    "mixed_dtypes": 4e-3,  # one bfloat16 rounding of a weight below 0.5
}
"""Scenario -> largest difference to plain DDP: another order of the same float32 sums."""

Results = list[dict[str, dict[str, object]]]
RunJob = Callable[[Path, Path, str], Results]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_job: RunJob) -> Results:
    return run_job(Path(__file__).parent / "jobs" / "hook_scenarios.py", tmp_path_factory.mktemp("hook"), NODES)


@pytest.mark.parametrize("scenario", TRAINING)
def test_training_equals_plain_ddp(results: Results, scenario: str) -> None:
    for rank, result in enumerate(results):
        assert "raised" not in result[scenario], (rank, result[scenario])
        assert result[scenario]["difference"] <= TRAINING[scenario], rank  # type: ignore[operator]


@pytest.mark.parametrize("scenario", [name for name in TRAINING if name != "sub_group"])
def test_all_ranks_hold_the_same_bits(results: Results, scenario: str) -> None:
    assert len({str(result[scenario]["digest"]) for result in results}) == 1


@pytest.mark.parametrize(
    "scenario", ["default", "many_small_buckets", "static_graph", "find_unused_parameters", "no_sync"]
)
def test_each_backward_with_synchronisation_is_one_step(results: Results, scenario: str) -> None:
    assert [result[scenario]["steps"] for result in results] == [4] * len(NODES)


@pytest.mark.parametrize("scenario", ["compressed", "overflow_under_a_grad_scaler"])
def test_compressed_training_is_equal_on_all_ranks(results: Results, scenario: str) -> None:
    assert len({str(result[scenario].get("digest")) for result in results}) == 1, results[0][scenario]


@pytest.mark.parametrize(
    ("name", "apart"),
    [
        ("fp16", 1e-3),
        ("bf16", 1e-2),
        ("int8", 0.02),
        ("int4", 0.2),
        ("powersgd", 0.8),
        ("onebit", 1.0),
        ("dgc", 1.0),
    ],
)
def test_compressed_training_converges_as_plain_training_does(results: Results, name: str, apart: float) -> None:
    assert 0 < results[0]["compressed"]["apart"][name] < apart, results[0]["compressed"]  # type: ignore[index]


def test_torchs_default_device_changes_no_bit(results: Results) -> None:
    """A script sets it for tensors of its own."""
    for result in results:
        assert result["default_device"] == result["default"]


def test_an_overflow_skips_one_step_and_leaves_no_trace(results: Results) -> None:
    found = [result["overflow_under_a_grad_scaler"] for result in results]
    assert all(each["finite"] and each["scale"] == 512.0 for each in found), found


def test_registering_the_hook_twice_is_refused(results: Results) -> None:
    assert all("can only be called once" in str(result["registered_twice_and_copied"]["error"]) for result in results)


def test_a_copied_state_is_new_and_keeps_its_configuration(results: Results) -> None:
    found = [result["registered_twice_and_copied"] for result in results]
    assert all(each["config"] and not each["same"] for each in found)


def test_the_compiled_autograd_reducer_is_refused_in_clear_words(results: Results) -> None:
    assert all(PYTHON_REDUCER in str(result["compiled_python_reducer"].get("error")) for result in results)


def train_in_one_group_after_the_other(rank: int) -> list[float]:
    """This rank's gradient in each of three default groups, which have other ranks, and other models before."""
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False
    )
    found = []
    for number, size in enumerate((2, 3, 3)):
        if rank < size:
            dist.init_process_group("gloo", store=PrefixStore(str(number), store), rank=rank, world_size=size)
            for compressor in ("none", "int8"):
                model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1, bias=False))
                model.register_comm_hook(gradwire.HookState(model, compressor=compressor), gradwire.comm_hook)
                model(torch.full((1, 4), float(rank))).sum().backward()
                found.append(next(model.parameters()).grad[0, 0].item())  # type: ignore[index]
            dist.barrier()
            dist.destroy_process_group()
    return found


def test_a_default_group_that_follows_another_one_may_have_other_ranks(processes: Processes) -> None:
    """`destroy_process_group()`, then `init_process_group()` with another world size, in processes that live on."""
    results = processes(3, train_in_one_group_after_the_other, nodes="aab")
    assert results == [pytest.approx(wanted, abs=1e-6) for wanted in ([0.5] * 2 + [1.0] * 4,) * 2 + ([1.0] * 4,)]


class HandMadeBucket:
    """What DDP hands over, for a hook that is called outside of a backward pass, as `Join` does."""

    def __init__(self, buffer: Tensor, parameter: Tensor, last: bool) -> None:
        self._buffer, self._parameter, self._last = buffer, parameter, last

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return [self._parameter]

    def is_last(self) -> bool:
        return self._last


def reduce_outside_backward(_: int) -> None:
    """The first step after a load, and steps whose last bucket is sparse, by a rank that has no inputs left."""
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    first, last = model.parameters()
    state = gradwire.HookState(model, compressor="int4", fusion=1)

    def reduce(buffer: Tensor, parameter: Tensor, is_last: bool) -> torch.futures.Future[Tensor]:
        return state.reduce(HandMadeBucket(buffer, parameter, is_last))  # type: ignore[arg-type]

    for step in range(2):
        futures = [reduce(torch.ones(16), first, False), reduce(torch.ones(16), last, True)]
        assert all(torch.equal(future.wait(), torch.ones(16)) for future in futures)
        assert state.steps == step + 1
    saved = state.state_dict()
    state.load_state_dict(saved)
    futures = [reduce(torch.ones(16), first, False), reduce(torch.ones(16), last, True)]
    assert all(torch.equal(future.wait(), torch.ones(16)) for future in futures)  # nothing is held back for a next step
    rows = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 4), (4, 4))
    dense, sparse = reduce(torch.ones(16), first, False), reduce(rows, last, True)
    sparse.wait()
    assert torch.equal(dense.wait(), torch.ones(16)) and state.steps == 4
    dist.destroy_process_group()


def test_a_step_outside_backward_ends_with_its_last_bucket(processes: Processes) -> None:
    processes(1, reduce_outside_backward)


def refuse(*_: object) -> None:
    raise ValueError("not today")


def fail_to_connect(_: int) -> int:
    """How often the communicator is closed when what is made after it cannot be made."""
    dist.init_process_group("gloo")
    closed: list[Communicator] = []
    with (
        patch.object(Communicator, "close", lambda communicator: closed.append(communicator)),
        patch.object(features, "StepWatch", refuse),
    ):
        with suppress(ValueError):
            gradwire.HookState(nn.Linear(2, 2))
        gc.collect()
        count = len(closed)
    dist.destroy_process_group()
    return count


def test_a_state_that_cannot_be_made_leaves_nothing_behind(processes: Processes) -> None:
    assert processes(1, fail_to_connect) == [1]


def test_what_is_no_scaler_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"`scaler` is a SGD; wanted a torch\.amp\.GradScaler"):
        gradwire.HookState().watch(torch.optim.SGD([torch.zeros(1)]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "use"),
    [
        ("watch()", lambda state: state.watch(torch.amp.GradScaler("cpu"))),
        ("set_loss_scale()", lambda state: state.set_loss_scale(8.0)),
        ("flush()", lambda state: state.flush()),
    ],
)
def test_what_needs_a_compressor_says_whether_it_or_the_model_is_missing(
    call: str, use: Callable[[gradwire.HookState], None]
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"gradients are exact, there are no residuals, and {call}")):
        use(gradwire.HookState(compressor="none"))
    with pytest.raises(ValueError, match=re.escape(f"has not seen a bucket yet: call {call} after")):
        use(gradwire.HookState(compressor="int8"))

"""A real DDP job of four processes: the hook names the late rank with the parameter, and traces its steps."""

import json
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.processes import Processes

LATE, NAME, MOST_STEPS = 3, "2.weight", 120


def train(rank: int, file: str) -> dict[str, object]:
    """Trains until a rank is named, then traces two steps; rank 3 takes 60 ms longer for one parameter."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)  # a bucket for each layer
    state = gradwire.HookState(model)
    model.register_comm_hook(state, gradwire.comm_hook)

    def dawdle(gradient: Tensor) -> Tensor:
        time.sleep(0.06)
        return gradient

    if rank == LATE:
        dict(layers.named_parameters())[NAME].register_hook(dawdle)  # type: ignore[no-untyped-call]
    while not state.report().stragglers and state.steps < MOST_STEPS:
        model(torch.randn(8, 64)).sum().backward()
    state.trace(file, steps=2)
    for _ in range(2):
        model(torch.randn(8, 64)).sum().backward()
    report = state.report()
    state.close()
    dist.destroy_process_group()
    return {"stragglers": [each for each in report.to_dict()["stragglers"] if not each["once"]], "text": str(report)}  # type: ignore[attr-defined]


def test_a_job_names_its_late_rank_and_is_traced(processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    results = processes(4, train, str(file), nodes=["a", "a", "b", "b"])
    for result in results:
        assert isinstance(result, dict)
        (found,) = result["stragglers"]
        assert (found["ranks"], found["node"], found["parameters"]) == ([LATE], "b", [NAME])
        assert f"waited for: rank {LATE} on node b computes late" in result["text"]
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(4):
        buckets = [event["args"] for event in events if event["pid"] == rank and event["cat"] == "buckets"]
        assert {each["parameters"][0] for each in buckets} == {f"{layer}.weight" for layer in range(4)}
        assert len(buckets) == 2 * 4


def run_in_another_order(rank: int) -> str | None:
    """Runs two models, on each rank first the one that the other runs last; then the missing one as well."""
    dist.init_process_group("gloo")
    models = [DistributedDataParallel(nn.Linear(4, 4, bias=False)) for _ in range(2)]
    states = [gradwire.HookState(model, stall_seconds=0.2, straggler_every=0) for model in models]
    for model, state in zip(models, states, strict=True):
        model.register_comm_hook(state, gradwire.comm_hook)
        model(torch.ones(2, 4)).sum().backward()
    first = threading.Thread(target=lambda: models[rank](torch.ones(2, 4)).sum().backward())
    first.start()
    until = time.monotonic() + 60
    while (found := states[rank].report().stall) is None or "another order" not in found:
        if time.monotonic() > until:
            return found
        time.sleep(0.05)
    models[1 - rank](torch.ones(2, 4)).sum().backward()
    first.join()
    dist.destroy_process_group()
    return found


def test_processes_that_run_two_models_in_another_order_are_told_so(processes: Processes) -> None:
    for found in processes(2, run_in_another_order):
        assert found == (
            "rank 0 waits in bucket 0 (`weight`) of model 0, rank 1 in bucket 0 (`weight`) of model 1: the ranks run "
            "their models in another order"
        )

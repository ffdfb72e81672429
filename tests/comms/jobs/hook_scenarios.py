"""What every rank of one job does for test_hook.py: each scenario trains twice, with and without gradwire's hook.

Run as a script under torchrun's environment variables; NODES gives each rank's node as a letter. Writes one JSON file a
rank into the folder named on the command line.
"""

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gradwire

RANK = int(os.environ["RANK"])
NODE = os.environ["NODES"][RANK]
Scenario = Callable[[], dict[str, object]]


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))


def inputs(step: int, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + RANK)
    return torch.randn(4, width, generator=generator, device="cpu")


def train(
    model: nn.Module, steps: int = 4, loss: Callable[[nn.Module, int], Tensor] | None = None, lr: float = 0.1
) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        optimizer.zero_grad()
        (loss(model, step) if loss else model(inputs(step)).square().mean()).backward()
        optimizer.step()
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])


def compare(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], Tensor] | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    **ddp: object,
) -> dict[str, object]:
    """Largest difference to plain DDP, and a digest that must be equal on all ranks."""
    wrap = wrap or (lambda model: model)
    plain = train(wrap(DistributedDataParallel(build(), **ddp)), loss=loss)  # type: ignore[arg-type]
    model = DistributedDataParallel(build(), **ddp)  # type: ignore[arg-type]
    state = gradwire.HookState(model, hostname=NODE)
    model.register_comm_hook(state, gradwire.comm_hook)
    hooked = train(wrap(model), loss=loss)
    return {
        "difference": (plain - hooked).abs().max().item(),
        "digest": digest(hooked),
        "steps": state.steps,
        "buckets": state.report().buckets,
    }


def digest(values: Tensor) -> str:
    return " ".join(f"{value:.17g}" for value in values[:: max(1, values.numel() // 7)].tolist()) + repr(
        values.sum().item()
    )


def default() -> dict[str, object]:
    return compare(perceptron)


def many_small_buckets() -> dict[str, object]:
    return compare(perceptron, bucket_cap_mb=0.002)


def static_graph() -> dict[str, object]:
    return compare(perceptron, static_graph=True, bucket_cap_mb=0.002)


def gradient_as_bucket_view() -> dict[str, object]:
    return compare(perceptron, gradient_as_bucket_view=True)


def bucket_cap_mb_list() -> dict[str, object]:
    return compare(perceptron, bucket_cap_mb_list=[0.001, 0.01])


class Unused(nn.Module):
    """One of two layers is left out, another one on each rank, and a third one everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both = nn.Linear(32, 16)
        self.branch = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
        self.never = nn.Linear(5, 5)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.branch[RANK % 2](self.both(value))
        return result


def find_unused_parameters() -> dict[str, object]:
    return compare(Unused, find_unused_parameters=True, bucket_cap_mb=0.001)


class Mixed(nn.Module):
    """Parameters of three dtypes in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Linear(32, 32, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
        )

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value.to(next(layer.parameters()).dtype)))
        return value


def mixed_dtypes() -> dict[str, object]:
    return compare(Mixed)


def convolution_channels_last() -> dict[str, object]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub
        return model

    def loss(model: nn.Module, step: int) -> Tensor:
        image = inputs(step, 3 * 8 * 8).view(4, 3, 8, 8).to(memory_format=torch.channels_last)
        result: Tensor = model(image).square().mean()
        return result

    return compare(build, loss)


def sparse_embedding() -> dict[str, object]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 4))

    def loss(model: nn.Module, step: int) -> Tensor:
        result: Tensor = model(torch.arange(4) + 3 * RANK + step).square().mean()
        return result

    return compare(build, loss)


def no_sync() -> dict[str, object]:
    def loss(model: nn.Module, step: int) -> Tensor:
        accumulate = model.no_sync if isinstance(model, DistributedDataParallel) else nullcontext
        with accumulate():
            model(inputs(step + 50)).square().mean().backward()
        result: Tensor = model(inputs(step)).square().mean()
        return result

    return compare(perceptron, loss)


def compiled() -> dict[str, object]:
    return compare(perceptron, wrap=lambda model: torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type,return-value]


def compiled_python_reducer() -> dict[str, object]:
    """One step of one layer with the hook: what torch compiles of a backward pass takes it seconds a layer."""
    try:
        with (
            torch._dynamo.config.patch(optimize_ddp="python_reducer"),
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")),
        ):
            model = DistributedDataParallel(nn.Linear(32, 8))
            model.register_comm_hook(gradwire.HookState(model, hostname=NODE), gradwire.comm_hook)
            train(torch.compile(model, backend="aot_eager"), steps=1)  # type: ignore[arg-type]
    except (RuntimeError, TypeError) as error:
        return {"error": str(error)}
    return {}


def sub_group() -> dict[str, object]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return compare(perceptron, process_group=groups[RANK % 2])


def two_models() -> dict[str, object]:
    models = [DistributedDataParallel(perceptron()) for _ in range(2)]
    for model in models:
        model.register_comm_hook(gradwire.HookState(model, hostname=NODE), gradwire.comm_hook)

    def loss(step: int) -> Tensor:
        result: Tensor = (models[0](inputs(step)) - 2 * models[1](inputs(step + 7))).square().mean()
        return result

    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss(step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {"difference": 0.0, "digest": digest(torch.cat([each.detach().double().reshape(-1) for each in parameters]))}


def state_before_model() -> dict[str, object]:
    state = gradwire.HookState(hostname=NODE)
    model = DistributedDataParallel(perceptron())
    model.register_comm_hook(state, gradwire.comm_hook)
    hooked = train(model)
    plain = train(DistributedDataParallel(perceptron()))
    state.bind(model)
    return {"difference": (plain - hooked).abs().max().item(), "digest": digest(hooked), "steps": state.steps}


def uneven(all_count: bool = True, momentum: float = 0.0, made_from: str = "ddp", **options: Any) -> dict[str, object]:
    """Two epochs in which ranks run out of inputs one after the other, in the second all but one from the start.

    With a compressor the momentum is its own, and plain DDP's optimizer has it.
    """

    def run(hook: bool) -> Tensor:
        model = DistributedDataParallel(perceptron())
        if hook:
            given = {"ddp": model, "module": model.module, "nothing": None}[made_from]
            state = gradwire.HookState(given, hostname=NODE, **options)
            model.register_comm_hook(state, gradwire.comm_hook)
        kept = 0.0 if hook and "compressor" in options else momentum
        for steps in (3 + RANK, 4 * (RANK == 1)):
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=kept)
            with Join([model], divide_by_initial_world_size=all_count):
                for step in range(steps):
                    optimizer.zero_grad()
                    if hook and "reduction" in options:
                        state.samples = 1
                    model(inputs(step)).square().mean().backward()
                    optimizer.step()
            if momentum:
                break  # a new optimizer has no momentum, and the compressor keeps its own
        return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])

    plain, hooked = run(False), run(True)
    return {"difference": (plain - hooked).abs().max().item(), "digest": digest(hooked)}


def uneven_inputs() -> dict[str, object]:
    return uneven()


def uneven_inputs_of_which_those_present_count() -> dict[str, object]:
    return uneven(all_count=False)


def uneven_inputs_counted_without_the_model() -> dict[str, object]:
    return uneven(all_count=False, made_from="nothing")


def uneven_inputs_in_few_bits() -> dict[str, object]:
    return uneven(all_count=False, made_from="module", compressor="int8")


def uneven_inputs_by_samples() -> dict[str, object]:
    return uneven(all_count=False, reduction="samples")


def uneven_inputs_and_a_momentum() -> dict[str, object]:
    onebit = {"warmup_steps": 100, "momentum": 0.9}  # exact until then
    return uneven(momentum=0.9, compressor="onebit", compressor_options=onebit)


def counted_otherwise_in_each_epoch() -> dict[str, object]:
    """A script divides by the present ranks, then by all, then trains without `Join`."""

    def run(hook: bool) -> Tensor:
        model = DistributedDataParallel(perceptron())
        if hook:
            model.register_comm_hook(gradwire.HookState(model, hostname=NODE), gradwire.comm_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for all_count in (False, True, None):
            with nullcontext() if all_count is None else Join([model], divide_by_initial_world_size=all_count):
                for step in range(2 if all_count is None else 1 + RANK):
                    optimizer.zero_grad()
                    model(inputs(step)).square().mean().backward()
                    optimizer.step()
        return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])

    plain, hooked = run(False), run(True)
    return {"difference": (plain - hooked).abs().max().item(), "digest": digest(hooked)}


COMPRESSORS: dict[str, dict[str, object]] = {
    "fp16": {},
    "bf16": {},
    "int8": {},
    "int4": {},
    "onebit": {"warmup_steps": 1, "momentum": 0.0},
    "powersgd": {"rank": 2, "warmup_steps": 2},
    "dgc": {"density": 0.1, "momentum": 0.0, "warmup_steps": 1},
}


def compressed() -> dict[str, object]:
    """Every compressor through DDP, over the rebuild of the buckets: finite, near plain SGD, equal on all ranks."""
    plain = train(DistributedDataParallel(perceptron()), steps=8)
    start = torch.cat([parameter.detach().double().reshape(-1) for parameter in perceptron().parameters()])
    found: dict[str, object] = {}
    digests = []
    for name, settings in COMPRESSORS.items():
        model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.005)
        state = gradwire.HookState(model, hostname=NODE, compressor=name, compressor_options=settings, fusion=0.004)
        model.register_comm_hook(state, gradwire.comm_hook)
        hooked = train(model, steps=8)
        found[name] = ((hooked - plain).norm() / (plain - start).norm()).item()
        digests.append(digest(hooked))
    return {"apart": found, "digest": "; ".join(digests)}


def default_device() -> dict[str, object]:
    """A script has torch make its own tensors on another device; gradwire's stay where they were, also of a look."""
    torch.set_default_device("meta")
    rate = os.environ.pop("GRADWIRE_NIC_BYTES_PER_SECOND")  # tests have no look at links
    try:
        return default()
    finally:
        os.environ["GRADWIRE_NIC_BYTES_PER_SECOND"] = rate
        torch.set_default_device(None)


def overflow_under_a_grad_scaler() -> dict[str, object]:
    """One rank overflows once: GradScaler skips that step on all ranks, and training goes on finite and equal."""
    model = DistributedDataParallel(perceptron())
    state = gradwire.HookState(
        model, hostname=NODE, compressor="onebit", compressor_options={"warmup_steps": 0, "momentum": 0.0}
    )
    model.register_comm_hook(state, gradwire.comm_hook)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state.watch(scaler)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(inputs(step)).square().mean() * (float("inf") if step == 2 and RANK == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    values = torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])
    return {"finite": bool(values.isfinite().all()), "scale": scaler.get_scale(), "digest": digest(values)}


def registered_twice_and_copied() -> dict[str, object]:
    model = DistributedDataParallel(perceptron())
    state = gradwire.HookState(model, hostname=NODE)
    model.register_comm_hook(state, gradwire.comm_hook)
    train(model)
    again = copy.deepcopy(state)
    found = {"same": again is state, "config": again.config == state.config, "error": ""}
    try:
        model.register_comm_hook(state, gradwire.comm_hook)
    except RuntimeError as error:
        found["error"] = str(error)
    return found


SCENARIOS: list[Scenario] = [
    default_device,  # first: links are looked at once in a job
    default,
    many_small_buckets,
    static_graph,
    gradient_as_bucket_view,
    bucket_cap_mb_list,
    find_unused_parameters,
    mixed_dtypes,
    convolution_channels_last,
    sparse_embedding,
    no_sync,
    compiled,
    sub_group,
    two_models,
    state_before_model,
    uneven_inputs,
    uneven_inputs_of_which_those_present_count,
    uneven_inputs_counted_without_the_model,
    uneven_inputs_in_few_bits,
    uneven_inputs_by_samples,
    uneven_inputs_and_a_momentum,
    counted_otherwise_in_each_epoch,
    compressed,
    overflow_under_a_grad_scaler,
    registered_twice_and_copied,
    compiled_python_reducer,
]


def run_all() -> Iterator[tuple[str, dict[str, object]]]:
    for scenario in SCENARIOS:
        print(scenario.__name__, flush=True)
        try:
            yield scenario.__name__, scenario()
        except Exception as error:  # noqa: BLE001 - the test prints it
            yield scenario.__name__, {"raised": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = dict(run_all())
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()

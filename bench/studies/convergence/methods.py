"""Which compressor is trained under which optimizer, and how a user sets the pair up."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradwire
from gradwire.bench.studies.convergence.tasks import Task
from gradwire.compressors.registry import Option, options_of

PLAIN, TORCH_FP16, ONEBIT_ADAM = "plain DDP", "torch fp16 hook", "OneBitAdam"
FREEZE_SHARE = 0.2
"""Of all steps that OneBitAdam takes dense. Source: Tang et al., 1-bit Adam, ICML 2021, section 5 (15 to 20 percent)."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to average gradients."""

    name: str
    """As the tables show it; unique within an optimizer."""
    compressor: str | None = None
    """gradwire's; None for torch's own ways and for OneBitAdam."""
    options: dict[str, Option] = field(default_factory=dict)
    """Other than the defaults."""


def _gradwire(name: str, **options: Option) -> Method:
    words = "".join(f", {key} {value}" for key, value in options.items())
    return Method(f"gradwire {name}{words}", name, options)


_EVERYWHERE = (
    Method(PLAIN),
    Method(TORCH_FP16),
    *(_gradwire(name) for name in ("none", "fp16", "bf16", "int8", "int4", "powersgd")),
)
METHODS = {
    "sgd": (
        *_EVERYWHERE,
        _gradwire("onebit"),
        _gradwire("onebit", return_bits=8),
        _gradwire("dgc"),
        _gradwire("dgc", density=0.01),
    ),
    "adamw": (*_EVERYWHERE, Method(ONEBIT_ADAM)),
}
"""By optimizer; the first is what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Trainee:
    """One model in training on one rank."""

    model: nn.Module
    optimizer: Optimizer
    dense_steps: int
    """Steps at the start that travel as they would without a compressor."""

    def take_step(self, loss: Callable[[nn.Module], object]) -> None:
        """One optimizer step; all ranks together.

        Args:
            loss: Of the model, on this rank's batch: a scalar tensor.
        """
        self.optimizer.zero_grad()
        loss(self.model).backward()  # type: ignore[attr-defined]
        self.optimizer.step()


def make_trainee(
    task: Task,
    method: Method,
    *,
    steps: int,
    seed: int = 0,
    node: str | None = None,
    nic_bytes_per_second: float | None = None,
    warm: bool = False,
) -> Trainee:
    """Sets a model up as a user would; all ranks make the same ones in the same order.

    Args:
        task: Gives model and optimizer.
        method: One of `METHODS`.
        steps: Length of the run.
        seed: Of the weights.
        node: Name of this rank's node; None asks the machine.
        nic_bytes_per_second: Of the links; None leaves it to gradwire's default.
        warm: Compress from the second step on, as for timing.
    """
    model = task.model(seed)
    if method.name == ONEBIT_ADAM:
        return _onebit_adam(task, model, 1 if warm else round(FREEZE_SHARE * steps))
    optimizer = task.optimizer(model.parameters())
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if method.name == TORCH_FP16:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    if method.compressor is None:
        return Trainee(wrapped, optimizer, 0)
    options = {**options_of(method.compressor), **method.options}
    if options.get("momentum") and method.compressor != "none":
        options |= gradwire.take_momentum(optimizer)
    if method.compressor == "none":
        options = {}
    elif warm and "warmup_steps" in options:
        options["warmup_steps"] = 1
    gradwire.check_optimizer(method.compressor, optimizer, options)
    state = gradwire.HookState(
        wrapped,
        compressor=method.compressor,
        compressor_options=options,
        hostname=node,
        nic_bytes_per_second=nic_bytes_per_second,
    )
    wrapped.register_comm_hook(state, gradwire.comm_hook)
    return Trainee(wrapped, optimizer, int(options.get("warmup_steps") or 0))  # type: ignore[arg-type]


def _onebit_adam(task: Task, model: nn.Module, freeze_step: int) -> Trainee:
    """OneBitAdam with the hyper-parameters of the task's own optimizer; it communicates by itself, without DDP."""
    settings = task.optimizer(model.parameters()).defaults
    optimizer = gradwire.OneBitAdam(
        model.parameters(),
        freeze_step=freeze_step,
        lr=settings["lr"],
        betas=settings["betas"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
    )
    return Trainee(model, optimizer, freeze_step)

"""Configurations that are compared: plain DDP, torch's hooks, gradwire's plans and compressors, MPI's all_reduce."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.compat import GradBucket
from gradwire.comms.bootstrap.mpi_launch import load_mpi
from gradwire.comms.plan.codec_price import short_start
from gradwire.compressors.registry import names

PLAIN = "plain DDP (gloo)"

PROBE_TIMEOUT = timedelta(seconds=60)
"""Timeout of the process groups of torch's quantization hooks. They issue collectives from callbacks, which can
deadlock; without a timeout the trial steps would not end."""

Attach = Callable[[DistributedDataParallel, float | None], None]
"""(model, bytes per second of the links) -> registers the hook."""


@dataclass(frozen=True, slots=True)
class ConfigurationSpec:
    """A configuration before it has a model: a communication hook under a name.

    Attributes:
        name: Name of the configuration in the table.
        attach: Function that registers its hook on a DDP model, which no other configuration shares.
        one_bucket: Whether DDP must put all gradients in one bucket. torch's PowerSGD and quantization hooks issue
            collectives from callbacks; with several buckets their order differs from rank to rank, and gloo then
            exchanges data of different buckets.
    """

    name: str
    attach: Attach
    one_bucket: bool = False


def configuration_specs(with_mpi: bool) -> list[ConfigurationSpec]:
    """Returns all configurations, plain DDP first.

    Args:
        with_mpi: Whether mpirun started the ranks, so that MPI's all-reduce can be compared too.
    """
    found = [
        ConfigurationSpec(PLAIN, lambda model, rate: None),
        ConfigurationSpec(
            "torch fp16 hook", lambda model, rate: model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        ),
        ConfigurationSpec("torch PowerSGD rank 1", lambda model, rate: _power_sgd(model, 1), one_bucket=True),
        ConfigurationSpec("torch PowerSGD rank 4", lambda model, rate: _power_sgd(model, 4), one_bucket=True),
        ConfigurationSpec("torch quantization per tensor", _quantization("pertensor"), one_bucket=True),
        ConfigurationSpec("torch quantization per channel", _quantization("perchannel"), one_bucket=True),
    ]
    if with_mpi:
        found.append(
            ConfigurationSpec("MPI all_reduce", lambda model, rate: model.register_comm_hook(None, _mpi_all_reduce))
        )
        found.append(ConfigurationSpec("gradwire auto over MPI", _gradwire("auto", None, "mpi")))
    found += [
        ConfigurationSpec(f"gradwire {plan}", _gradwire(plan, None))
        for plan in ("flat", "hierarchical", "leader", "auto")
    ]
    found += [ConfigurationSpec(f"gradwire {name}", _gradwire("auto", name)) for name in compressor_names()]
    return found


def compressor_names() -> tuple[str, ...]:
    """Returns the names of all registered compressors except `none`."""
    return tuple(name for name in names() if name != "none")


def select(found: list[ConfigurationSpec], wanted: str | None) -> list[ConfigurationSpec]:
    """Returns the configurations whose name contains one of the words of `--only`, and plain DDP in any case.

    Args:
        found: All configurations.
        wanted: Words separated by commas, compared without regard to case; None for all configurations.

    Raises:
        ValueError: A word is empty, or no name contains it.
    """
    if wanted is None:
        return found
    words = [word.strip().lower() for word in wanted.split(",")]
    for word in words:
        if not word or not any(word in spec.name.lower() for spec in found):
            raise ValueError(
                f"`--only` has {word!r}, which is in no name; there are {', '.join(one.name for one in found)}"
            )
    return [one for one in found if one.name == PLAIN or any(word in one.name.lower() for word in words)]


def _gradwire(plan: str, compressor: str | None, transport: str = "auto") -> Attach:
    def attach(model: DistributedDataParallel, rate: float | None) -> None:
        gradwire.attach(
            model,
            plan=plan,
            compressor=compressor,
            transport=transport,
            compressor_options=short_start(compressor) if compressor else {},
            nic_bytes_per_second=rate,
        )

    return attach


def _power_sgd(model: DistributedDataParallel, rank: int) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _quantization(kind: str) -> Attach:
    hook = getattr(quantization_hooks, f"quantization_{kind}_hook")

    def attach(model: DistributedDataParallel, rate: float | None) -> None:
        model.register_comm_hook(dist.new_group(backend="gloo", timeout=PROBE_TIMEOUT), hook)

    return attach


def _mpi_all_reduce(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket in place by MPI's own all_reduce, as a user of mpi4py would write the hook.

    The annotations must not be strings, because DDP compares them with its own types.
    """
    mpi = load_mpi()
    flat = bucket.buffer()
    mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, [flat.view(torch.uint8).numpy(), mpi.FLOAT], mpi.SUM)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(flat.div_(mpi.COMM_WORLD.Get_size()))
    return done

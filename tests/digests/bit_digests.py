"""Digests of what gradwire computes, to show that a change of the code changes no bit.

    python tests/digests/bit_digests.py record digests.json      # on the code before the change
    python tests/digests/bit_digests.py compare digests.json     # on the code after it
    python tests/digests/bit_digests.py vary digests.json        # which of them another machine should get too

A file holds one entry a case: `output`, the SHA-256 of what all ranks got alike (of every step's averaged gradients,
say); `state`, one of what each rank holds for itself (its state dict, say); `transfers`, how many all-reduces the hook
ran. `vary` adds `portable`, and in `differs_with` the variations under which a case that is not portable comes out
otherwise. A NaN counts as any NaN; every other bit counts.

`recorded.json` beside this file holds one short digest for each portable case, as version 0.1.0 computed it;
`test_bit_digests.py` compares some of them, `python tests/digests/test_bit_digests.py` all.

Ranks are processes of this machine, nodes are logical. DDP is real, its buckets and their rebuild in the second step
too, but gradients are given: the loss is the sum of parameter times gradient, and the gradients come from integer
hashes and powers of two, so that no matrix product, library or processor has a say in them.

Not here: `fusion="auto"`, `nic_bytes_per_second="measure"`, whose choices depend on a clock; CUDA, NCCL and MPI; a
compressor together with a plan other than `auto` and `hierarchical`; torch.compile; sparse gradients.
"""

import argparse
import gc
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache, lru_cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gradwire

# --- What is not among the public names of gradwire: the first home that exists counts. ---


def _first(*homes: str) -> Any:
    """Returns the first of `module:name` that can be imported, or None."""
    for home in homes:
        module, _, name = home.partition(":")
        try:
            found = importlib.import_module(module)
            return getattr(found, name) if name else found
        except (ImportError, AttributeError):
            continue
    return None


FusionPlan: Any = _first("gradwire:FusionPlan", "gradwire.comms.fusion:FusionPlan", "gradwire.fusion:FusionPlan")
register_codec: Any = _first(
    "gradwire:register_codec", "gradwire.compressors.registry:register_codec", "gradwire.compressors:register_codec"
)
native: Any = _first("gradwire._native")
"""Its `limit_isa` holds the compiled kernels down to an instruction set; only `--isa` needs it."""

# --- End of that. ---

STEPS = 30
TIMEOUT = timedelta(seconds=120)
LAYOUTS = {"1x4": "aaaa", "2x2": "aabb", "4x1": "abcd", "3+1": "aaab", "2x2-dealt": "abab", "2x4": "aaaabbbb"}
"""Name of a job -> the node of each of its ranks, as a letter."""

NIC = {"nic_bytes_per_second": 1.25e9}
"""Given, so that the planner's choices do not depend on this machine's cards."""
SLOW_NIC = {"nic_bytes_per_second": 25e6}

Record = dict[str, Any]
"""What the file holds of a case."""


def own_state(state: gradwire.HookState) -> dict[str, object]:
    """What a rank's state holds, without what says which rank it is, how ranks sit and what parameters are called."""
    entries = [entry for key, entry in state.state_dict().items() if key.startswith("gradwire/rank")]
    names = ("gradwire/named", "gradwire/entries", "gradwire/placement")
    return {key: value for entry in entries for key, value in entry if key not in names}


class Digest:
    """SHA-256 of plain values: tensors by dtype, shape and bytes, mappings in the order of their keys."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *values: object) -> None:
        """Takes in values, one after another.

        Raises:
            TypeError: There is no plain form of a value.
        """
        for value in values:
            if isinstance(value, Tensor):
                self._tensor(value.detach())
            elif isinstance(value, Mapping):
                self._text(f"mapping of {len(value)}")
                for key in sorted(value, key=str):
                    self.add(key, value[key])
            elif isinstance(value, list | tuple):
                self._text(f"sequence of {len(value)}")
                self.add(*value)
            elif value is None or isinstance(value, bool | int | float | str):
                self._text(f"{type(value).__name__} {value!r}")
            else:
                raise TypeError(f"`values` has a {type(value).__name__}; wanted tensors and plain values")

    def text(self) -> str:
        """The digest so far, in hexadecimal."""
        return self._hash.hexdigest()

    def _tensor(self, tensor: Tensor) -> None:
        self._text(f"{tensor.dtype} {tuple(tensor.shape)}")
        flat = tensor.contiguous().view(-1)
        if flat.is_floating_point() and bool(flat.isnan().any()):
            flat = flat.masked_fill(flat.isnan(), float("nan"))
        if flat.numel():
            self._hash.update(flat.view(torch.uint8).numpy().data)

    def _text(self, text: str) -> None:
        self._hash.update(f"{text};".encode())


@dataclass
class Result:
    """What a rank found in one case."""

    output: Digest = field(default_factory=Digest)
    """Must be the same on all ranks."""
    own: Digest = field(default_factory=Digest)
    """Of this rank alone."""
    transfers: int = 0
    """All-reduces that the hook ran."""


Case = Callable[[int], Result]
"""What a rank, given by its number, does in a case."""


# --- Values: the same on every machine. ---

MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits, the leading one included."""
EXPONENTS = np.array([-6, -4, -3, -2, -2, -1, -1, -1, 0, 0, 0, 0, 1, 1, 2, 5])
"""Of a step's value, against what is usual for its element: most are alike, few are large."""

Words = npt.NDArray[np.uint64]


def mixed(words: Words) -> Words:
    """Hashes each word. Source: Steele, Lea and Flood, SplitMix, OOPSLA 2014."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _hashes(numel: int, step: int, rank: int) -> tuple[Words, Words]:
    """Returns what belongs to each element, and what belongs to it in this step on this rank."""
    usual = mixed(np.arange(numel, dtype=np.uint64))
    key = mixed(np.array([1000 * step + rank], dtype=np.uint64))
    return usual, mixed(usual + key)


@lru_cache(maxsize=256)
def values(numel: int, dtype: torch.dtype, step: int, rank: int) -> Tensor:
    """Numbers as gradients are: of any magnitude, some far from the others, some zero, all exact in `dtype`.

    Args:
        numel: How many.
        dtype: Floating.
        step: Other numbers in every step ...
        rank: ... and on every rank; but an element keeps its usual magnitude, and most often its sign.
    """
    usual, chance = _hashes(numel, step, rank)
    bits = MANTISSA[dtype]
    mantissa = 1.0 + (chance >> np.uint64(65 - bits)).astype(np.float64) / 2.0 ** (bits - 1)
    exponent = EXPONENTS[chance & np.uint64(15)] - (usual & np.uint64(7)).astype(np.int64)
    negative = ((usual >> np.uint64(3)) & np.uint64(1) == 1) ^ ((chance >> np.uint64(4)) & np.uint64(3) == 0)
    zero = ((usual >> np.uint64(4)) & np.uint64(31) == 0) | ((chance >> np.uint64(6)) & np.uint64(15) == 0)
    found = np.where(zero, 0.0, np.where(negative, -1.0, 1.0) * np.ldexp(mantissa, exponent))
    return torch.from_numpy(found).to(dtype)


def integers(numel: int, dtype: torch.dtype, step: int, rank: int) -> Tensor:
    """Small integers, whose sum over eight ranks fits into eight bits."""
    _, chance = _hashes(numel, step, rank)
    found = (chance % np.uint64(15)).astype(np.int64) - (0 if dtype == torch.uint8 else 7)
    return torch.from_numpy(found).to(dtype)


# --- Models whose gradients are given. ---

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "small": {
        "embedding.weight": (97, 64),
        "layers.0.weight": (96, 80),
        "layers.0.bias": (96,),
        "scale": (),
        "layers.1.weight": (129, 67),
        "layers.1.bias": (129,),
        "stem.weight": (24, 13, 3, 3),
        "stem.bias": (24,),
        "layers.2.weight": (101, 180),
        "layers.2.bias": (101,),
        "edge.weight": (32, 32),
        "head.weight": (33, 31),
        "one.weight": (1,),
    },
    "large": {"layer.weight": (601, 501), "layer.bias": (601,)},
}
"""Name of a model -> its parameters. `edge` is as small as a compressed matrix can be, `head` one element smaller."""
ORDER = (3, 0, 6, 1, 9, 4, 12, 2, 11, 5, 8, 10, 7)
"""In which parameters are used: not the declared order, so that DDP's rebuilt buckets are not its first."""
MIXED = (torch.float32, torch.bfloat16, torch.float64)
"""Dtypes that the parameters of a mixed model have in turn."""


class GivenGradients(nn.Module):
    """Parameters, and a loss whose gradient by them is what is passed in.

    Args:
        shapes: Of the parameters, by name.
        dtypes: That they have in turn.
        channels_last: Whether four-dimensional ones lie in memory so.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Sequence[torch.dtype], channels_last: bool
    ) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(shapes.items()):
            *path, leaf = name.split(".")
            home: nn.Module = self
            for part in path:
                if part not in home._modules:
                    home.add_module(part, nn.Module())
                home = home.get_submodule(part)
            weight = torch.zeros(shape, dtype=dtypes[number % len(dtypes)])
            if channels_last and len(shape) == 4:
                weight = weight.to(memory_format=torch.channels_last)
            home.register_parameter(leaf, nn.Parameter(weight))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum of parameter times gradient over the parameters that have one."""
        named = list(self.named_parameters())
        order = ORDER if len(named) == len(ORDER) else range(len(named))
        parts = [
            (named[place][1] * gradients[named[place][0]]).sum().double()
            for place in order
            if named[place][0] in gradients
        ]
        return torch.stack(parts).sum()


def gradients_of(model: nn.Module, step: int, rank: int, factor: float = 1.0) -> dict[str, Tensor]:
    """Returns a gradient for each parameter, in its dtype and memory format.

    Args:
        model: Holds the parameters.
        step: Other gradients in every step.
        rank: Other gradients on every rank.
        factor: A power of two, on all of them.
    """
    named = dict(model.named_parameters())
    total, at, found = sum(parameter.numel() for parameter in named.values()), 0, {}
    for name, parameter in named.items():
        flat = values(total, parameter.dtype, step, rank)[at : at + parameter.numel()]
        at += parameter.numel()
        found[name] = torch.empty_like(parameter).copy_(flat.view(parameter.shape)).mul_(factor)
    return found


# --- Training through the hook. ---

Plans = Callable[[Sequence[int]], Sequence[Any]]
"""Sizes of a step's buckets in bytes -> fusion plans, which the steps take in turns."""


def _changing(sizes: Sequence[int]) -> Sequence[Any]:
    """Plans of every kind."""
    return [
        FusionPlan(),
        FusionPlan(threshold_nbytes=1 << 30),
        FusionPlan(threshold_nbytes=40_000),
        FusionPlan(piece_nbytes=5000),
        *_cuts(sizes),
        FusionPlan(threshold_nbytes=70_000, piece_nbytes=9_999),
    ]


def _cuts(sizes: Sequence[int]) -> Sequence[Any]:
    """One plan: the first bucket alone, the next two together, the rest together."""
    return [FusionPlan(cuts=(1, min(3, len(sizes))), sizes=tuple(sizes))]


def _pieces(_: Sequence[int]) -> Sequence[Any]:
    """One plan: every bucket in pieces."""
    return [FusionPlan(piece_nbytes=20_000)]


@dataclass
class Scaler:
    """What gradwire needs of torch.amp.GradScaler."""

    scale: float

    def get_scale(self) -> float:
        """The factor on the loss of the step that begins."""
        return self.scale


@dataclass(frozen=True, kw_only=True)
class Training:
    """One case of DDP with the hook: what is set, and what happens in which step."""

    options: Mapping[str, object]
    """Fields of `gradwire.Config`."""
    model: str = "small"
    """One of `SHAPES`."""
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    bucket_mb: float = 0.04
    """DDP's buckets: the small model fills five of these in float32."""
    ddp: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of DistributedDataParallel."""
    plans: Plans | None = None
    """Fusion plans from the fourth step on."""
    flush_before: Sequence[int] = ()
    """Steps that `flush()` is called before."""
    resume_before: int | None = None
    """The step that a new model and a new state go on from, the state loaded."""
    resume_bucket_mb: float | None = None
    """DDP's buckets from then on, where they change."""
    scales: Mapping[int, float] = field(default_factory=dict)
    """Step -> the loss scale from then on."""
    watch: bool = False
    """Whether the state watches a scaler, instead of being told of the scale."""
    not_finite: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    """Step -> the rank that has this value in a gradient."""
    unused: bool = False
    """Whether a layer takes no part in every other step, and another one depends on the rank."""
    no_sync: bool = False
    """Whether two backward passes make a step."""
    pairs: bool = False
    """Whether even and odd ranks train for themselves."""
    join: bool = False
    """Whether ranks have different numbers of steps."""
    make: str = "state"
    """`state`: HookState(model); `unbound`: HookState(); `wrap`: gradwire.wrap."""
    racks: bool = False
    """Whether nodes are in racks, two in each."""
    channels_last: bool = False
    timed: bool = False
    """Whether a clock decides how many transfers there are; they are not counted then."""

    def __call__(self, rank: int) -> Result:
        """Trains, and returns the digests of gradients and state."""
        return _Trainer(self, rank).run()


class _Trainer:
    """A rank of a `Training`."""

    def __init__(self, case: Training, rank: int) -> None:
        self.case, self.rank = case, rank
        self.result = Result()
        self.group = _pair_of(rank) if case.pairs else None
        self.sizes: list[int] = []
        self.scale = 1.0
        self.scaler = Scaler(1.0)
        self._start(case.bucket_mb)

    def run(self) -> Result:
        """Trains through all steps."""
        steps = STEPS - 4 + self.rank if self.case.join else STEPS
        with Join([self.ddp], enable=True) if self.case.join else nullcontext():
            for step in range(steps):
                self._before(step)
                self._step(step)
        self._finish()
        return self.result

    def _start(self, bucket_mb: float) -> None:
        case = self.case
        options = dict(case.options)
        if case.racks:
            options["location"] = (f"rack{'abcdefgh'.index(os.environ['GRADWIRE_HOSTNAME']) // 2}",)
        module = GivenGradients(SHAPES[case.model], case.dtypes, case.channels_last)
        config = gradwire.Config.from_env(timeout=TIMEOUT, **options)
        if case.make == "wrap":
            self.ddp, self.state = gradwire.wrap(
                module, base_bucket_mb=bucket_mb, config=config, ddp_options=dict(case.ddp)
            )
        else:
            self.ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_mb, process_group=self.group, **case.ddp)  # type: ignore[arg-type]
            self.state = (
                gradwire.HookState(config=config)
                if case.make == "unbound"
                else gradwire.HookState(self.ddp, config=config)
            )
            self.ddp.register_comm_hook(self.state, self._hook)
        if case.watch:
            self.state.watch(self.scaler)

    def _hook(self, state: gradwire.HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.sizes.append(bucket.buffer().nbytes)
        return gradwire.comm_hook(state, bucket)

    def _finish(self) -> None:
        """Takes in what the state holds, and lets go of it."""
        self.result.own.add(own_state(self.state))
        report = self.state.report()
        self.result.transfers += 0 if self.case.timed else report.buckets
        self.result.own.add(report.steps)
        self.state.close()
        del self.ddp, self.state
        gc.collect()

    def _before(self, step: int) -> None:
        case = self.case
        if step == case.resume_before:
            file = io.BytesIO()
            torch.save(self.state.state_dict(), file)
            self._finish()
            self._start(case.resume_bucket_mb or case.bucket_mb)
            file.seek(0)
            self.state.load_state_dict(torch.load(file, weights_only=True))
        if case.plans and step > 2:
            plans = case.plans(self.sizes)
            if step == 3 or len(plans) > 1:
                self.state.fuse(plans[step % len(plans)])
        if step in case.flush_before:
            self.state.flush()
        if step in case.scales:
            self.scale = self.scaler.scale = case.scales[step]
            if not case.watch:
                self.state.set_loss_scale(self.scale)

    def _step(self, step: int) -> None:
        self.sizes.clear()
        self.ddp.zero_grad()
        if self.case.no_sync:
            with self.ddp.no_sync():
                self._backward(step + STEPS)
        self._backward(step)
        digest = self.result.own if self.case.join or self.case.pairs else self.result.output
        digest.add(*(parameter.grad for parameter in self.ddp.parameters()))

    def _backward(self, step: int) -> None:
        gradients = gradients_of(self.ddp.module, step, self.rank, self.scale)
        bad = self.case.not_finite.get(step)
        if bad is not None and bad[0] == self.rank:
            gradients["layers.2.weight"][5, 7] = bad[1]
        if self.case.unused:
            del gradients[f"layers.{self.rank % 2}.bias"]
            if step % 2:
                del gradients["embedding.weight"]
        self.ddp(gradients).backward()


def _pair_of(rank: int) -> dist.ProcessGroup:
    """The group of the ranks that are even, or odd, as this one is."""
    groups = [dist.new_group(list(range(parity, dist.get_world_size(), 2))) for parity in range(2)]
    group: dist.ProcessGroup = groups[rank % 2]
    return group


# --- Collectives of the backend. ---


@cache
def backend_group(plan: str, nic_bytes_per_second: float) -> dist.ProcessGroup:
    """A group of all ranks on the backend gradwire; all of them ask for the same ones in the same order."""
    config = gradwire.Config.from_env(plan=plan, nic_bytes_per_second=nic_bytes_per_second)
    group: dist.ProcessGroup = dist.new_group(backend="gradwire", pg_options=config, timeout=TIMEOUT)
    return group


Body = Callable[[dist.ProcessGroup, torch.dtype, int, Result], None]
"""Runs a collective a few times, and takes in what it gives."""
NUMELS = (1, 1000, 4099, 100_003, 300_001)
"""Elements of the tensors that a collective is tried on."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def _contribution(numel: int, dtype: torch.dtype, rank: int, round_number: int) -> Tensor:
    give = values if dtype.is_floating_point else integers
    return give(numel, dtype, round_number, rank).clone()


def _all_reduce(op: Any, group: dist.ProcessGroup, dtype: torch.dtype, rank: int, result: Result) -> None:
    for number, numel in enumerate(NUMELS):
        tensor = _contribution(numel, dtype, rank, number)
        dist.all_reduce(tensor, op, group=group)
        result.output.add(tensor)
    base = _contribution(40 * 60, dtype, rank, 99).view(40, 60)
    dist.all_reduce(base.t()[::2], op, group=group)
    result.own.add(base)


def _all_reduce_coalesced(op: Any, group: dist.ProcessGroup, dtype: torch.dtype, rank: int, result: Result) -> None:
    for number in range(3):
        tensors = [_contribution(numel, dtype, rank, number) for numel in (1, 4099, 33, 200_001)]
        dist.all_reduce_coalesced(tensors, op, group=group)
        result.output.add(*tensors)


def _broadcast(group: dist.ProcessGroup, dtype: torch.dtype, rank: int, result: Result) -> None:
    for number, numel in enumerate(NUMELS):
        tensor = _contribution(numel, dtype, rank, number)
        dist.broadcast(tensor, number % dist.get_world_size(), group=group)
        result.output.add(tensor)


def _all_gather(group: dist.ProcessGroup, dtype: torch.dtype, rank: int, result: Result) -> None:
    for number, numel in enumerate(NUMELS):
        source = _contribution(numel, dtype, rank, number)
        listed = [torch.empty_like(source) for _ in range(dist.get_world_size())]
        dist.all_gather(listed, source, group=group)
        whole = torch.empty(numel * dist.get_world_size(), dtype=dtype)
        dist.all_gather_into_tensor(whole, source, group=group)
        result.output.add(*listed, whole)


def _reduce_scatter(op: Any, group: dist.ProcessGroup, dtype: torch.dtype, rank: int, result: Result) -> None:
    for number, numel in enumerate(NUMELS):
        source = _contribution(numel * dist.get_world_size(), dtype, rank, number)
        part = torch.empty(numel, dtype=dtype)
        dist.reduce_scatter_tensor(part, source, op, group=group)
        result.own.add(part, source)


def _plain_ddp(group: dist.ProcessGroup, dtype: torch.dtype, rank: int, result: Result) -> None:
    """DDP without a hook: its reducer calls the backend from C++."""
    module = GivenGradients(SHAPES["small"], (dtype,), channels_last=False)
    model = DistributedDataParallel(module, bucket_cap_mb=0.06, process_group=group)
    for step in range(STEPS):
        model.zero_grad()
        model(gradients_of(module, step, rank)).backward()
        result.output.add(*(parameter.grad for parameter in module.parameters()))


def backend_case(plan: str, nic: float, body: Body, dtype: torch.dtype, rank: int) -> Result:
    """Runs one collective on a group of the backend gradwire."""
    result = Result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch has newer names for some of them
        body(backend_group(plan, nic), dtype, rank, result)
    return result


# --- The table of cases. ---

COMPRESSED: dict[str, tuple[str, dict[str, object]]] = {
    "none": ("none", {}),
    "none-momentum": ("none", {"momentum": 0.9}),
    "fp16": ("fp16", {}),
    "fp16-plain": ("fp16", {"plain": True}),
    "fp16-residual": ("fp16", {"residual": True, "warmup_steps": 2}),
    "bf16": ("bf16", {}),
    "bf16-plain": ("bf16", {"plain": True}),
    "bf16-residual": ("bf16", {"residual": True}),
    "int8": ("int8", {}),
    "int8-stochastic": ("int8", {"stochastic": True}),
    "int8-bare": ("int8", {"residual": False}),
    "int8-warmup": ("int8", {"warmup_steps": 1}),
    "int4": ("int4", {}),
    "int4-stochastic": ("int4", {"stochastic": True, "seed": 7}),
    "int4-bare": ("int4", {"residual": False}),
    "waterfill5": ("waterfill5", {}),
    "waterfill4": ("waterfill4", {}),
    "waterfill4-warmup": ("waterfill4", {"warmup_steps": 2}),
    "waterfill4-bare": ("waterfill4", {"residual": False}),
    "onebit": ("onebit", {}),
    "onebit-warmup-0": ("onebit", {"warmup_steps": 0}),
    "onebit-warmup-1": ("onebit", {"warmup_steps": 1}),
    "onebit-bare": ("onebit", {"warmup_steps": 10, "momentum": 0.0}),
    "onebit-return-8": ("onebit", {"warmup_steps": 5, "return_bits": 8}),
    "onebit-return-16": ("onebit", {"warmup_steps": 0, "return_bits": 16, "momentum": 0.0}),
    "dgc": ("dgc", {"density": 0.001, "mask_momentum": True}),
    "dgc-warmup-0": ("dgc", {"warmup_steps": 0, "density": 0.001, "mask_momentum": True}),
    "dgc-warmup-8": ("dgc", {"warmup_steps": 8, "density": 0.05, "mask_momentum": True}),
    "dgc-bare": ("dgc", {"warmup_steps": 0, "density": 0.02, "momentum": 0.0, "mask_momentum": True}),
    "dgc-nesterov": ("dgc", {"warmup_steps": 1, "density": 0.02, "nesterov": True, "mask_momentum": True}),
    "dgc-clipped": ("dgc", {"warmup_steps": 0, "density": 0.02, "clip_norm": 1.0, "mask_momentum": True}),
    "dgc-float16": ("dgc", {"warmup_steps": 0, "density": 0.02, "value_dtype": "float16", "mask_momentum": True}),
    "dgc-bfloat16": ("dgc", {"warmup_steps": 0, "density": 0.02, "value_dtype": "bfloat16", "mask_momentum": True}),
    "dgc-everything": ("dgc", {"warmup_steps": 0, "density": 1.0, "mask_momentum": True}),
    "powersgd": ("powersgd", {}),
    "powersgd-rank-1": ("powersgd", {"warmup_steps": 0, "rank": 1}),
    "powersgd-rank-2": ("powersgd", {"warmup_steps": 1, "rank": 2}),
    "powersgd-rank-4": ("powersgd", {"warmup_steps": 0, "min_compression_rate": 1.0, "random_seed": 3}),
    "powersgd-bare": ("powersgd", {"warmup_steps": 0, "rank": 2, "use_error_feedback": False}),
    "powersgd-cold": ("powersgd", {"warmup_steps": 0, "rank": 2, "warm_start": False}),
    "powersgd-float16": ("powersgd", {"warmup_steps": 0, "rank": 2, "factor_dtype": "float16"}),
}
"""Name -> compressor and its options: each with its defaults, and with whatever takes another way through the code."""
MAIN = ("fp16", "bf16-residual", "int8", "int4-stochastic", "onebit-warmup-1", "dgc-warmup-8", "powersgd-rank-2")
"""Those that are tried with everything else."""

_RULES = {
    "rules": (
        gradwire.Rule(pattern="embedding.*", compressor="int8"),
        {"pattern": "edge.*"},
        gradwire.Rule(pattern="layers.1.*", max_dim=1, compressor="bf16", options={"residual": True}),
        gradwire.Rule(max_numel=8000, compressor="powersgd", options={"rank": 1, "warmup_steps": 0}),
    )
}


class Ternary:
    """A user's own codec: the three methods of the protocol and no more."""

    def wire_nbytes(self, numel: int) -> int:
        """Size of the payload."""
        return 4 + numel

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        """Writes the largest magnitude, and -1, 0 or 1 for each element."""
        scale = flat.abs().max() if flat.numel() else torch.zeros(())
        payload[:4] = scale.view(1).view(torch.uint8)
        payload[4:] = (flat / scale.clamp(min=1e-30)).round().to(torch.int8).view(torch.uint8)

    def decode(self, payload: Tensor, flat: Tensor) -> None:
        """Reads them again."""
        flat.copy_(payload[4:].view(torch.int8).float() * payload[:4].clone().view(torch.float32))


def _compressed(name: str) -> Training:
    compressor, options = COMPRESSED[name]
    return Training(options={"compressor": compressor, "compressor_options": options, **NIC})


def _exact(plan: str, *, chunks: int = 0, **options: Any) -> Training:
    return Training(options={"plan": {"name": plan, "chunks": chunks}, **NIC, **options})


def _with(case: Training, **options: object) -> Training:
    """The same case with further options of the hook."""
    return replace(case, options={**case.options, **options})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def exact_cases(layout: str) -> Iterator[tuple[str, Case]]:
    """The hook without a compressor: plans, chunks, dtypes."""
    plans = ("auto", "flat", "hierarchical", "leader")
    for plan in plans:
        for chunks in (0, 1, 3):
            if layout == "2x2" or chunks != 1:
                yield f"exact/{plan}/chunks-{chunks}", _exact(plan, chunks=chunks)
        for dtype in FLOATS[1:] if layout == "2x2" or plan == "hierarchical" else FLOATS[3:] if plan == "flat" else ():
            yield f"exact/{plan}/{_name(dtype)}", replace(_exact(plan), dtypes=(dtype,))
    yield "exact/auto/slow-nic", _with(_exact("auto"), **SLOW_NIC)
    yield "exact/auto/large", replace(_with(_exact("auto"), **SLOW_NIC), model="large", bucket_mb=25)
    yield "exact/hierarchical/large", replace(_exact("hierarchical"), model="large", bucket_mb=25)
    yield "exact/auto/mixed-dtypes", replace(_with(_exact("auto"), **SLOW_NIC), dtypes=MIXED)
    if layout == "4x1":
        for plan in plans:
            yield f"racks/{plan}/fused", replace(_exact(plan, fusion=0.1, chunks=3), racks=True)
        for name in MAIN:
            yield f"racks/{name}", replace(_compressed(name), racks=True)


def fusion_cases() -> Iterator[tuple[str, Case]]:
    """Buckets that travel together and apart, exact ones."""
    for plan in ("flat", "hierarchical", "leader"):
        yield f"fusion/{plan}/some", _exact(plan, fusion=0.1)
        yield f"fusion/{plan}/all", _exact(plan, fusion=25.0, chunks=3)
        yield f"fusion/{plan}/changing", replace(_exact(plan, fusion=0.05), plans=_changing)
    yield "fusion/auto/cuts", replace(_exact("auto", fusion=0.1), plans=_cuts)
    yield "fusion/auto/pieces", replace(_exact("auto", fusion=0.1), plans=_pieces)
    yield "fusion/auto/cuts-unfused", replace(_exact("auto"), plans=_cuts)
    yield "fusion/auto/mixed-dtypes", replace(_exact("auto", fusion=25.0), dtypes=MIXED)
    yield "fusion/auto/wrap", replace(_exact("auto", fusion=0.1), make="wrap", bucket_mb=0.02)


def compressor_cases(names: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Compressors and their options, alone."""
    for name in names:
        yield f"compressor/{name}", _compressed(name)


def interplay_cases(names: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Each of some compressors with whatever else the hook does."""
    for name in names:
        case, place = _compressed(name), f"with/{name}"
        yield f"{place}/chunks-3", _with(case, plan={"chunks": 3})
        yield f"{place}/fused", _with(case, fusion=0.1)
        yield f"{place}/fusion-changing", replace(_with(case, fusion=0.05), plans=_changing)
        yield f"{place}/rules", _with(case, **_RULES)
        yield f"{place}/flush", replace(case, flush_before=(0, 9, 15, 16))
        yield f"{place}/resume", replace(case, resume_before=13)
        yield f"{place}/resume-other-buckets", replace(_with(case, **_RULES), resume_before=13, resume_bucket_mb=0.02)
        yield f"{place}/flush-and-resume", replace(case, flush_before=(12,), resume_before=13)
        yield f"{place}/loss-scale", replace(case, scales={0: 1024.0, 7: 512.0, 15: 2048.0, 16: 1.0})
        yield (
            f"{place}/not-finite",
            replace(
                case,
                not_finite={0: (0, float("inf")), 6: (1, float("inf")), 7: (2, float("nan")), 20: (3, float("-inf"))},
            ),
        )
        for dtype in FLOATS[1:]:
            yield f"{place}/{_name(dtype)}", replace(case, dtypes=(dtype,))


def scaled_cases() -> Iterator[tuple[str, Case]]:
    """A scaler that is watched, and models that are unlike the small one."""
    yield "with/dgc-warmup-8/scaler", replace(_compressed("dgc-warmup-8"), watch=True, scales={3: 64.0, 15: 32.0})
    yield (
        "with/int8/scaler",
        replace(
            _compressed("int8"),
            watch=True,
            scales={0: 256.0, 15: 128.0},
            not_finite={14: (1, float("inf"))},
            resume_before=22,
        ),
    )
    yield "with/int8/plan-hierarchical", _with(_compressed("int8"), plan="hierarchical")
    yield "with/int8/mixed-dtypes", replace(_compressed("int8"), dtypes=MIXED)
    yield (
        "with/onebit-warmup-1/large",
        replace(_with(_compressed("onebit-warmup-1"), **SLOW_NIC), model="large", bucket_mb=25),
    )


def ddp_cases() -> Iterator[tuple[str, Case]]:
    """What DDP can be told, and the ways to make a state."""
    for name, case in {"exact": _exact("hierarchical"), "int8": _compressed("int8")}.items():
        yield f"ddp/static-graph/{name}", replace(case, ddp={"static_graph": True})
        yield f"ddp/bucket-view/{name}", replace(case, ddp={"gradient_as_bucket_view": True})
        yield f"ddp/unused/{name}", replace(case, ddp={"find_unused_parameters": True}, unused=True)
        yield f"ddp/no-sync/{name}", replace(case, no_sync=True)
        yield f"ddp/sub-groups/{name}", replace(case, pairs=True)
        yield f"ddp/channels-last/{name}", replace(case, channels_last=True)
        yield f"ddp/unbound/{name}", replace(case, make="unbound")
        yield f"ddp/wrap/{name}", replace(_with(case, fusion=0.1), make="wrap", bucket_mb=0.02)
        yield f"ddp/one-bucket/{name}", replace(case, bucket_mb=25)
    yield "ddp/learned-cuts/exact", replace(_exact("hierarchical", fusion="auto:0.05", chunks=1), timed=True)
    yield "ddp/join/exact", replace(_exact("hierarchical"), join=True)
    yield "ddp/join/fused", replace(_exact("hierarchical", fusion=0.1), join=True)
    if register_codec is not None:
        _register_users_own()
        own = Training(options={"compressor": "users_own", **NIC})
        yield "user-codec/default", own
        yield "user-codec/momentum", _with(own, compressor_options={"momentum": 0.5, "warmup_steps": 2})


@cache
def _register_users_own() -> None:
    register_codec("users_own", Ternary)


def backend_cases(layout: str) -> Iterator[tuple[str, Case]]:
    """Collectives of the backend gradwire."""
    several = layout != "1x4"
    add, average = dist.ReduceOp.SUM, dist.ReduceOp.AVG
    bodies: dict[str, tuple[Body, Sequence[torch.dtype]]] = {
        "all_reduce-sum": (partial(_all_reduce, add), (*FLOATS, *INTEGERS)),
        "all_reduce-avg": (partial(_all_reduce, average), FLOATS),
        "all_reduce-max": (partial(_all_reduce, dist.ReduceOp.MAX), (torch.float32,)),
        "all_reduce_coalesced-sum": (partial(_all_reduce_coalesced, add), (torch.float32, torch.bfloat16, torch.int32)),
        "all_reduce_coalesced-avg": (partial(_all_reduce_coalesced, average), (torch.float32, torch.float16)),
        "plain-ddp": (_plain_ddp, (torch.float32, torch.bfloat16)),
    }
    nodewise: dict[str, tuple[Body, Sequence[torch.dtype]]] = {
        "broadcast": (_broadcast, (torch.float32, torch.bfloat16, torch.int64)),
        "all_gather": (_all_gather, (torch.float32, torch.float16, torch.uint8)),
        "reduce_scatter-sum": (
            partial(_reduce_scatter, add),
            (torch.float32, torch.float64, torch.bfloat16, torch.int32),
        ),
    }
    if not several:  # gloo cannot average
        nodewise["reduce_scatter-avg"] = (partial(_reduce_scatter, average), FLOATS)
    for plan in ("auto", "hierarchical", "leader") if several else ("auto",):
        nic = SLOW_NIC["nic_bytes_per_second"] if plan == "auto" else NIC["nic_bytes_per_second"]
        for name, (body, dtypes) in (bodies | (nodewise if plan == "auto" else {})).items():
            for dtype in dtypes:
                yield f"backend/{plan}/{name}/{_name(dtype)}", partial(backend_case, plan, nic, body, dtype)


def cases(layout: str) -> dict[str, Case]:
    """Returns the cases of one job by name."""
    found: list[tuple[str, Case]] = []
    if layout == "2x4":
        few = (
            "exact/auto/chunks-0",
            "exact/flat/chunks-3",
            "exact/hierarchical/chunks-3",
            "exact/hierarchical/bfloat16",
            "exact/leader/chunks-0",
        )
        found += [(name, case) for name, case in exact_cases(layout) if name in few]
        found += [
            (name, case) for name, case in fusion_cases() if name in ("fusion/flat/changing", "fusion/hierarchical/all")
        ]
        found += compressor_cases(MAIN)
    else:
        found += [*exact_cases(layout), *fusion_cases()]
        found += compressor_cases(tuple(COMPRESSED) if layout in ("2x2", "3+1") else MAIN)
    if layout == "2x2":
        found += [*interplay_cases(MAIN[1:]), *scaled_cases(), *ddp_cases()]
    if layout == "3+1":
        found += [
            (name, case)
            for name, case in interplay_cases(MAIN[2:])
            if name.endswith(("/chunks-3", "/fusion-changing", "/rules", "/resume-other-buckets", "/not-finite"))
        ]
    if layout in ("1x4", "2x2", "3+1"):
        found += backend_cases(layout)
    return {f"{layout}/{name}": case for name, case in found}


# --- Jobs: the ranks of one layout, as processes. ---


@dataclass(frozen=True)
class Settings:
    """What all jobs of a run have in common, and what of it must change no portable result."""

    only: str = ""
    """Parts of the names of the cases to run, separated by semicolons; may hold * and ?."""
    isa: str = ""
    """Instruction set to hold the compiled kernels down to; empty takes what the processor has."""
    threads: int = 1
    """Of torch, in each rank."""

    def takes(self, name: str) -> bool:
        """Whether a case is to be run."""
        return any(fnmatchcase(name, f"*{part}*") for part in self.only.split(";"))


def run_rank(
    rank: int, layout: str, names: Sequence[str], port: int, settings: Settings, answers: "Connection[Any, Any]"
) -> None:
    """A rank of a job: sends its answer to each case: (text of an error, output, own, transfers)."""
    nodes = LAYOUTS[layout]
    os.environ.update(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "GRADWIRE_HOSTNAME": nodes[rank],
            "GLOO_SOCKET_IFNAME": "lo",
        }
    )
    torch.set_num_threads(settings.threads)
    try:
        if settings.isa:
            native.limit_isa(settings.isa)
        dist.init_process_group("gloo", timeout=TIMEOUT)
        table = cases(layout)
        gc.freeze()  # each case collects its model: without all that torch has imported, a hundred times as fast
        for name in names:
            result = table[name](rank)
            answers.send(("", result.output.text(), result.own.text(), result.transfers))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        answers.send((traceback.format_exc(), "", "", 0))
    finally:
        answers.close()


def run_job(layout: str, names: Sequence[str], settings: Settings) -> dict[str, Record]:
    """Runs cases of one layout in new processes.

    Raises:
        RuntimeError: A rank failed, or the ranks got different outputs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch._dynamo",
            "torch.nn.parallel",
            "gradwire.comms.hook",
            "gradwire.comms.backend.process_group",
            "gradwire.topology.readers.detect",
        ]
    )
    pipes, ranks = [], []
    # Bound until all have come, and not listening: rank 0's store can listen there, and nobody else is given the port.
    # Older code has no name for it.
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        for rank in range(len(LAYOUTS[layout])):
            ours, theirs = context.Pipe(duplex=False)
            port = holder.getsockname()[1]
            process = context.Process(target=run_rank, args=(rank, layout, names, port, settings, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            return {name: _collect(name, pipes) for name in names}
        finally:
            for process in ranks:
                process.join(20)
                if process.is_alive():
                    process.kill()


def _collect(name: str, pipes: Sequence["Connection[Any, Any]"]) -> Record:
    """What all ranks say of a case."""
    answers = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(3 * TIMEOUT.total_seconds()):
            raise RuntimeError(f"{name}: rank {rank} was not through in time")
        try:
            problem, *answer = pipe.recv()
        except EOFError:
            problem = "died"
        if problem:
            raise RuntimeError(f"{name}: rank {rank}: {problem}")
        answers.append(answer)
    outputs, own, transfers = zip(*answers, strict=True)
    if len(set(outputs)) > 1:
        raise RuntimeError(f"{name}: the ranks have different outputs: {', '.join(outputs)}")
    return {
        "output": outputs[0],
        "state": {str(rank): each for rank, each in enumerate(own)},
        "transfers": transfers[0],
    }


def run_all(settings: Settings) -> dict[str, Record]:
    """Runs all cases, and says on stderr how far it is."""
    found: dict[str, Record] = {}
    for layout in LAYOUTS:
        names = [name for name in cases(layout) if settings.takes(name)]
        if names:
            began = time.monotonic()
            found |= run_job(layout, names, settings)
            print(f"{layout}: {len(names)} cases in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return dict(sorted(found.items()))


# --- The commands. ---

VARIATIONS: dict[str, tuple[list[str], dict[str, str]]] = {
    "plain kernels": (["--isa", "plain"], {}),
    "torch without fused multiply-add": ([], {"ATEN_CPU_CAPABILITY": "default"}),
    "avx2, two threads": (["--isa", "avx2", "--threads", "2"], {"ATEN_CPU_CAPABILITY": "avx2"}),
}
"""What stands for another machine: options of this program, for gradwire's kernels, and variables, for torch's."""


def record(file: Path, settings: Settings) -> int:
    """Writes the digests of all cases; with `only`, replaces those of some in a file that is there already."""
    before = _read(file) if settings.only and file.exists() else {}
    _write(file, before | run_all(settings))
    return 0


def compare(file: Path, settings: Settings, portable: bool) -> int:
    """Runs the cases of a file again, and prints each difference.

    Args:
        file: Written by `record`.
        settings: Which cases, and how.
        portable: Leaves out those that `vary` has not found portable.

    Returns:
        1 where there is a difference, else 0.
    """
    wanted = {
        name: entry
        for name, entry in _read(file).items()
        if settings.takes(name) and (entry.get("portable") or not portable)
    }
    found = run_all(settings)
    problems = [f"{name}: is in no file" for name in found if name not in wanted and not portable]
    for name, entry in wanted.items():
        if name not in found:
            problems.append(f"{name}: there is no such case")
        else:
            problems += [f"{name}: {part}" for part in differences(entry, found[name])]
    print("\n".join(problems) or "no difference")
    print(f"{len(wanted)} cases, {len(problems)} differences")
    return 1 if problems else 0


def differences(wanted: Record, found: Record) -> list[str]:
    """Returns what differs between two entries, a line each."""
    told = [f"{key} was {wanted[key]}, is {found[key]}" for key in ("output", "transfers") if wanted[key] != found[key]]
    other = [rank for rank in wanted["state"] if wanted["state"][rank] != found["state"].get(rank)]
    return told + ([f"state differs on rank {', '.join(other)}"] if other else [])


def vary(file: Path, settings: Settings) -> int:
    """Records everything again under each variation, and notes in the file which cases do not mind."""
    entries = _read(file)
    minds: dict[str, list[str]] = {name: [] for name in entries if settings.takes(name)}
    for variation, (options, variables) in VARIATIONS.items():
        print(variation, file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "varied.json"
            subprocess.run(
                [sys.executable, __file__, "record", str(target), "--only", settings.only, *options],
                env=os.environ | variables,
                check=True,
            )
            varied = _read(target)
        for name, found in minds.items():
            if name not in varied or differences(entries[name], varied[name]):
                found.append(variation)
    for name, found in minds.items():
        entries[name]["portable"] = not found
        entries[name].pop("differs_with", None)
        if found:
            entries[name]["differs_with"] = found
            print(f"{name}: differs with {', '.join(found)}")
    _write(file, entries)
    return 0


def _read(file: Path) -> dict[str, Record]:
    entries: dict[str, Record] = json.loads(file.read_text())
    return entries


def _write(file: Path, entries: dict[str, Record]) -> None:
    file.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line and does what it says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("command", choices=("record", "compare", "vary"))
    parser.add_argument("file", type=Path, help="JSON file of digests")
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="parts of the names of the cases, separated by semicolons; may hold * and ?",
    )
    parser.add_argument(
        "--portable", action="store_true", help="compare: only cases that are portable, for another machine"
    )
    parser.add_argument(
        "--isa", default="", choices=("", "plain", "avx2", "avx512"), help="limit of the compiled kernels"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each rank")
    chosen = parser.parse_args(argv)
    for name in [name for name in os.environ if name.startswith("GRADWIRE_")]:
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    settings = Settings(chosen.only, chosen.isa, chosen.threads)
    if chosen.command == "record":
        return record(chosen.file, settings)
    return (
        compare(chosen.file, settings, chosen.portable) if chosen.command == "compare" else vary(chosen.file, settings)
    )


if __name__ == "__main__":
    sys.exit(main())

"""Divides a model into fragments that are exchanged in turn: `cut_into_fragments` makes the `Fragment`s of a model.

A fragment keeps an *anchor*, its parameters after its last exchange, and the outer momentum. The *pseudo-gradient* is
the anchor minus the parameters now.

Source: Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512, section 2.2, algorithm 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from gradwire.compressors.base import Compressor, Layout, Slice
from gradwire.compressors.compiled import native

UNEVEN = 1.02
"""Largest size of a fragment, as a multiple of the mean, that is accepted to keep small parameters together."""

CHECKSUM_WORDS, CHECKSUM_FACTOR = 2**18, 0x9E3779B1
"""Number of 32-bit words that `checksum_of` sums at a time, which bounds its memory, and the multiplier that spreads
the factors of their places: the golden ratio. Source: Knuth, The Art of Computer Programming 3, section 6.4."""

_Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Dtype, shape and memory order of a tensor. The memory order lists its dimensions from the largest stride to the
smallest, without those of size 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """Schedule of the exchanges, and the rates of the outer SGD.

    Attributes:
        every: Steps of the optimizer between two exchanges of the same parameter.
        fragments: Number of pieces of the model, which are exchanged in turn.
        delay: Steps between the start of an exchange and the step after which its result is used.
        lr: Learning rate of the outer SGD. 1 with `momentum` 0 makes every exchange an average of parameters.
        momentum: Momentum of the outer SGD.
        nesterov: True for Nesterov's momentum, as in torch.optim.SGD.
        warmup_steps: Number of first steps in which exchanges come every `warmup_every` steps, as averages.
        warmup_every: Steps between two exchanges of the same parameter in the warm-up.

    Raises:
        TypeError: A value has a wrong type.
        ValueError: A value is out of range.
    """

    every: int = 30
    fragments: int = 4
    delay: int = 1
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    warmup_steps: int = 0
    warmup_every: int = 1

    def __post_init__(self) -> None:
        for name in ("every", "fragments", "delay", "warmup_steps", "warmup_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"`{name}` is {value!r} ({type(value).__name__}); wanted int")
        for name in ("lr", "momentum"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise TypeError(f"`{name}` is {value!r} ({type(value).__name__}); wanted float")
        if not isinstance(self.nesterov, bool):
            raise TypeError(f"`nesterov` is {self.nesterov!r} ({type(self.nesterov).__name__}); wanted bool")
        if self.every < 1:
            raise ValueError(f"`every` is {self.every}; wanted a number of steps >= 1")
        if not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"`fragments` is {self.fragments} and `every` {self.every}; wanted 1 to {self.every} fragments: one "
                "exchange a step at most"
            )
        turn = self.every // self.fragments
        if not 0 <= self.delay <= turn:
            raise ValueError(
                f"`delay` is {self.delay}, and with `every` {self.every} and `fragments` {self.fragments} the next "
                f"fragment's turn comes after {turn} steps; wanted 0 to {turn}: one exchange is in flight at a time"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"`warmup_steps` is {self.warmup_steps}; wanted a number of steps >= 0")
        if not 1 <= self.warmup_every <= self.every:
            raise ValueError(
                f"`warmup_every` is {self.warmup_every}; wanted 1 to {self.every} steps, as `every` is {self.every}"
            )
        if not 0 < self.lr < math.inf:
            raise ValueError(f"`lr` is {self.lr}; wanted a positive number")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` is {self.momentum}; wanted a number from 0 up to, but not, 1")

    def turns(self, step: int) -> int:
        """Returns how many exchanges begin after a step; 0 after most. They are spread evenly over `every` steps.

        It is more than one only in a warm-up whose `warmup_every` is less than `fragments`.

        Args:
            step: Step of the optimizer, counted from 1.
        """
        warm = step <= self.warmup_steps
        every, place = (self.warmup_every, step) if warm else (self.every, step - self.warmup_steps)
        return self._turns_within((place - 1) % every + 1, every) - self._turns_within((place - 1) % every, every)

    def delay_of(self, step: int) -> int:
        """Returns the number of steps after which the result of an exchange that begins after `step` takes effect.

        In the warm-up that is at most the number of steps until the next exchange.

        Args:
            step: Step of the optimizer, counted from 1.
        """
        return self.delay if step > self.warmup_steps else min(self.delay, self.warmup_every // self.fragments)

    def warms_up(self, exchange: int) -> bool:
        """Returns whether an exchange, counted from 1, is in the warm-up; ranks agree in exchanges, not in steps."""
        rounds, left = divmod(self.warmup_steps, self.warmup_every)
        return exchange <= rounds * self.fragments + self._turns_within(left, self.warmup_every)

    def _turns_within(self, steps: int, every: int) -> int:
        """Returns the number of exchanges in the first `steps` steps of a round of `every` steps."""
        return steps * self.fragments // every


class Fragment:
    """Some parameters of a model, with their values after the last exchange and their outer momentum.

    Whatever reads or writes the parameters raises the RuntimeError of `check` if their form has changed.

    Args:
        parameters: (Name, parameter) pairs, floating-point; of a sharded parameter only this rank's shard is used.
        momentum: Whether to keep an outer momentum.

    Attributes:
        names: Names of the parameters.
        layout: Place of each parameter in a flat tensor of all of them.
        anchor: (numel) parameters after the last exchange, with the same bits in all workers; float32, or float64 if a
            parameter is float64.
        momentum: (numel) momentum of the outer SGD in the dtype of `anchor`; None if none is kept.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], *, momentum: bool) -> None:
        self.names = tuple(name for name, _ in parameters)
        self._parameters = [parameter for _, parameter in parameters]
        self._plain = not any(isinstance(parameter, DTensor) for parameter in self._parameters)
        self._found: tuple[list[tuple[int, torch.dtype, tuple[int, ...]]], list[Tensor]] = ([], [])
        self._found_runs: list[tuple[int, int]] = []
        self._forms = [_form_of(local_of(parameter)) for parameter in self._parameters]
        slices, start = [], 0
        for name, view in zip(self.names, self._locals(), strict=True):
            if view.numel():
                slices.append(Slice(name, tuple(view.shape), 0, start, view.numel()))
            start += view.numel()
        self.layout = Layout(tuple(slices))
        self._shapes = [view.shape for view in self._locals()]
        wide = any(parameter.dtype == torch.float64 for parameter in self._parameters)
        self._dtype = torch.float64 if wide else torch.float32
        self._rounds = any(parameter.dtype != self._dtype for parameter in self._parameters)
        self._kept: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.anchor = self.keep(self.empty())
        self.gather(self.anchor)
        self.momentum = torch.zeros_like(self.anchor) if momentum else None

    @property
    def numel(self) -> int:
        """Number of elements that this rank holds."""
        return self.layout.numel

    def empty(self) -> Tensor:
        """Returns a new uninitialised (numel) tensor with the dtype and device of `anchor`."""
        return torch.empty(self.numel, dtype=self._dtype, device=local_of(self._parameters[0]).device)

    def checksum(self) -> Tensor:
        """Returns a sum over the bits of `anchor` and `momentum`, 0-dim int64: equal for the same bits."""
        return checksum_of([flat for flat in (self.anchor, self.momentum) if flat is not None])

    def parameter_checksums(self) -> dict[str, int]:
        """Returns a sum over the bits of each parameter as it is now, by name, converted to the dtype of `anchor`.

        On CUDA the host waits for them.
        """
        return {
            name: int(checksum_of([view.reshape(-1)]))
            for name, view in zip(self.names, self.views(self.gather()), strict=True)
        }

    def check(self) -> None:
        """Checks that all parameters have the dtype, shape and memory order that they had at the start.

        Raises:
            RuntimeError: One of them has changed.
        """
        self._locals()

    def gather(self, flat: Tensor | None = None) -> Tensor:
        """Copies the parameters into `flat` (numel, dtype of `anchor`; a new tensor if None), and returns it."""
        if flat is None:
            flat = self.empty()
        torch._foreach_copy_(self.views(flat), self._locals())
        return flat

    def scatter(self, flat: Tensor) -> None:
        """Writes `flat` (numel) to the parameters, rounded to their dtypes."""
        torch._foreach_copy_(self._locals(), self.views(flat))

    def progress(self, now: Tensor, flat: Tensor) -> Tensor:
        """Writes the pseudo-gradient, anchor minus `now` (numel), to `flat` (numel), and returns it.

        The anchor is first rounded to the parameters' dtypes, because rounding is no progress of the training.

        Args:
            now: (numel) parameters.
            flat: (numel) result; may be `now`.
        """
        if not self._rounds:
            return torch.sub(self.anchor, now, out=flat)
        rounded = torch.empty_like(self.anchor)
        sources = [
            view.to(parameter.dtype) for view, parameter in zip(self.views(self.anchor), self._parameters, strict=True)
        ]
        torch._foreach_copy_(self.views(rounded), sources)
        return torch.sub(rounded, now, out=flat)

    def write_pseudo_gradient(self, flat: Tensor, sent: Tensor | None) -> None:
        """Writes the pseudo-gradient to `flat` (numel), and the present parameters to `sent` (numel) if it is given."""
        runs = self._runs() if sent is not None else None
        if sent is None or runs is None:
            self.progress(self.gather(flat if sent is None else sent), flat)
        else:
            native.outer_set_out(runs, self.anchor.data_ptr(), sent.data_ptr(), flat.data_ptr())

    def apply(self, mean: Tensor, sent: Tensor | None, settings: OuterSettings | None) -> None:
        """Applies the average of an exchange to the anchor and the parameters, in one pass over memory if possible.

        Does what `update` and then `add_progress` do, with the same bits.

        Args:
            mean: (numel) average of the pseudo-gradients; may be overwritten.
            sent: (numel) parameters when the exchange began; None if there was no progress since.
            settings: Rates of the outer SGD; None makes the anchor the average of the parameters.
        """
        averages = settings is None or (settings.lr == 1.0 and self.momentum is None)
        runs = self._runs() if averages and sent is not None else None
        if sent is None or runs is None:
            self.update(mean, settings)
            self.add_progress(sent, mean)
        else:
            native.outer_take_up(runs, mean.data_ptr(), sent.data_ptr(), self.anchor.data_ptr())
            # As torch's operators do: a backward pass through the old values is refused.
            increment_version(self._locals())

    def _runs(self) -> list[tuple[int, int]] | None:
        """Returns (address, elements) of each parameter; None unless all are contiguous float32 in CPU memory."""
        views = self._locals()
        if not self.anchor.is_cpu or self._dtype != torch.float32:
            return None
        if views is not self._found[1] or not self._found_runs:
            self._found_runs = [
                (view.data_ptr(), view.numel())
                for view in views
                if view.is_cpu and view.dtype == torch.float32 and view.is_contiguous()
            ]
        return self._found_runs if len(self._found_runs) == len(views) else None

    def add_progress(self, sent: Tensor | None, work: Tensor) -> None:
        """Sets the parameters to the anchor plus their progress since they were sent.

        Args:
            sent: (numel) parameters when the exchange began; None if there was no progress.
            work: (numel) scratch memory, which may be overwritten.
        """
        if sent is None:
            self.scatter(self.anchor)
            return
        if self._rounds:
            self.scatter(self.gather(work).sub_(sent).add_(self.anchor))
            return
        parameters = self._locals()  # in place: the same bits in half of the passes
        torch._foreach_sub_(parameters, self.views(sent))
        torch._foreach_add_(parameters, self.views(self.anchor))

    def update(self, mean: Tensor, settings: OuterSettings | None) -> None:
        """Takes one step of the outer SGD on `anchor` and `momentum`, in place; the parameters stay as they are.

        Every product and every sum is a separate operation, rounded by itself. Torch's `alpha=` rounds once on some
        instruction sets and twice on others, so anchors on different processors would drift apart.

        Args:
            mean: (numel) average of the pseudo-gradients, with the same bits on all ranks.
            settings: Rates of the outer SGD; None makes the anchor the average of the parameters and leaves the
                momentum as it is.

        Source: torch.optim.SGD with dampening 0, which is OuterOpt of arXiv 2501.18512.
        """
        if settings is None:
            self.anchor.sub_(mean)
            return
        step = mean
        if self.momentum is not None:
            self.momentum.mul_(settings.momentum).add_(mean)
            step = self.momentum.mul(settings.momentum).add_(mean) if settings.nesterov else self.momentum
        self.anchor.sub_(step if settings.lr == 1.0 else step.mul(settings.lr))

    def keep(self, flat: Tensor) -> Tensor:
        """Caches the result of `views` for a (numel) tensor that is used repeatedly, and returns the tensor."""
        self._kept[id(flat)] = (flat, self._views_of(flat))
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns a view of each parameter's part of a (numel) tensor, its dimensions in the order of the memory.

        A view has the parameter's shape with the dimensions sorted by stride, largest first: that of a channels-last
        weight (O, I, H, W) is (O, H, W, I).
        """
        kept = self._kept.get(id(flat))
        return self._views_of(flat) if kept is None else kept[1]

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """Makes the views that `views` returns, without looking for those that `keep` has cached."""
        sizes = [shape.numel() for shape in self._shapes]
        return [part.view(shape) for part, shape in zip(flat.split_with_sizes(sizes), self._shapes, strict=True)]

    def nonfinite(self, flat: Tensor) -> list[str]:
        """Returns the names of the parameters of which `flat` (numel) has an infinite or NaN element, in order.

        On CUDA the host waits for the answer.
        """
        return [
            name for name, view in zip(self.names, self.views(flat), strict=True) if not bool(view.isfinite().all())
        ]

    def _locals(self) -> list[Tensor]:
        """Returns a detached view of each parameter, or of this rank's shard of it, in the shape that `views` gives it.

        So its dimensions are in the order of the memory. Views are cached, and made again once a parameter has another
        address, dtype or strides, as after `parameter.data = tensor`. Of a sharded model they are made at each call,
        because FSDP2 may replace a shard at every step.

        Raises:
            RuntimeError: A parameter has another dtype, shape or memory order than at the start.
        """
        if not self._plain:
            return self._locals_now()
        places = [(parameter.data_ptr(), parameter.dtype, parameter.stride()) for parameter in self._parameters]
        if places != self._found[0]:
            self._found, self._found_runs = (places, self._locals_now()), []
        return self._found[1]

    def _locals_now(self) -> list[Tensor]:
        """Returns what `_locals` returns, without the cache.

        Raises:
            RuntimeError: A parameter has another dtype, shape or memory order than at the start.
        """
        views = [local_of(parameter) for parameter in self._parameters]
        for name, view, before in zip(self.names, views, self._forms, strict=True):
            if (now := _form_of(view)) != before:
                raise RuntimeError(
                    f"`{name}` is {now[0]} of shape {now[1]} now, its dimensions in memory in the order {now[2]}, "
                    f"and was {before[0]}, {before[1]}, {before[2]} when Outer was made; wanted it as it was: convert "
                    "the model (dtype, memory_format) before you make Outer"
                )
        return [_in_memory_order(view) for view in views]


def checksum_of(flats: Sequence[Tensor]) -> Tensor:
    """Returns a sum over the bits of tensors, 0-dim int64: equal for the same bits, on every processor.

    Each 32-bit word is multiplied by an odd number of its place, modulo 2^32, so that small differences of opposite
    sign in two places do not cancel. Integers have the same sum in any order.

    Args:
        flats: 1-D contiguous tensors of float32 or float64, at least one, all on one device.
    """
    found = torch.zeros((), dtype=torch.int64, device=flats[0].device)
    for flat in flats:
        words = flat.view(torch.int32)
        for start in range(0, words.numel(), CHECKSUM_WORDS):
            block = words[start : start + CHECKSUM_WORDS]
            places = torch.arange(start, start + block.numel(), dtype=torch.int64, device=block.device)
            odd = ((places * CHECKSUM_FACTOR) & 0x7FFFFFFF | 1).to(torch.int32)
            found = found * 31 + (block * odd).sum(dtype=torch.int64)
    return found


def local_of(parameter: Tensor) -> Tensor:
    """Returns this rank's shard of a sharded parameter, or else the parameter, detached and sharing its memory."""
    with torch.no_grad():
        return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _form_of(tensor: Tensor) -> _Form:
    """Returns dtype, shape and memory order of a tensor."""
    dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.dtype, tuple(tensor.shape), tuple(dim for dim in dims if tensor.shape[dim] != 1)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a view with the dimensions sorted by stride, largest first, so that a dense tensor is contiguous."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def wire_nbytes_of(parameters: Sequence[tuple[str, nn.Parameter]], compressor: Compressor | None) -> list[int]:
    """Returns the bytes that each parameter, or this rank's shard of it, takes on the link between two ranks.

    Args:
        parameters: (Name, parameter) pairs.
        compressor: Compressor of the exchange; None sends float32.
    """
    found = []
    for name, parameter in parameters:
        view = _in_memory_order(local_of(parameter))
        if compressor is None or not view.numel():
            found.append(4 * view.numel())
        else:
            layout = Layout((Slice(name, tuple(view.shape), 0, 0, view.numel()),))
            found.append(compressor.wire_nbytes(layout, 2))
    return found


def cut_into_fragments(
    parameters: Sequence[tuple[str, nn.Parameter]], settings: OuterSettings, nbytes: Sequence[int] | None = None
) -> list[Fragment]:
    """Divides a model into fragments that take about the same time on the link.

    The largest parameters are placed first: each into the fullest fragment that has room for it, up to the mean size.
    If none has, it goes into the one with most parameters of those that it makes at most 2 % larger than the mean, or
    else into the smallest one (best fit; Graham, Bounds on multiprocessing timing anomalies, 1969). The last ones fill
    fragments that would otherwise stay empty. The many small parameters, which need a collective of their own if the
    compressor leaves them dense, end up in few fragments. Inside a fragment, and by the first parameters of the
    fragments, the model's order is kept.

    Args:
        parameters: (Name, parameter) pairs, in the model's order.
        settings: Number of fragments, and whether they keep a momentum.
        nbytes: Bytes of each parameter on the link; None uses the size in float32.

    Raises:
        ValueError: There are fewer parameters than fragments.
    """
    count = settings.fragments
    if len(parameters) < count:
        raise ValueError(
            f"`fragments` is {count}, and `optimizer` trains {len(parameters)} parameters; wanted at most as many "
            "fragments as parameters"
        )
    weights = wire_nbytes_of(parameters, None) if nbytes is None else nbytes
    room = sum(weights) / count
    parts: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    # Place the largest parameters first. The last ones fill fragments that would otherwise stay empty.
    for done, index in enumerate(sorted(range(len(parameters)), key=lambda each: -weights[each])):
        empty = [number for number in range(count) if not parts[number]]
        fitting = [number for number in range(count) if sizes[number] + weights[index] <= room]
        nearly = [number for number in range(count) if sizes[number] + weights[index] <= UNEVEN * room]
        if len(parameters) - done <= len(empty):
            number = empty[0]
        elif fitting:
            number = max(fitting, key=lambda each: sizes[each])
        elif nearly:
            number = max(nearly, key=lambda each: len(parts[each]))
        else:
            number = min(range(count), key=lambda each: sizes[each])
        parts[number].append(index)
        sizes[number] += weights[index]
    # Restore the model's order, inside the fragments and among them.
    ordered = sorted(sorted(part) for part in parts)
    return [Fragment([parameters[index] for index in part], momentum=settings.momentum > 0) for part in ordered]

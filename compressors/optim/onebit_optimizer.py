"""What OneBitAdam and OneBitLamb share: two stages, momentum sent with one bit an element, and state that can be saved.

Until `freeze_step` the gradients are averaged exactly and both moments follow them. From then on the second moment
stays as it is, each rank adds its own gradient to the common momentum, and only the momentum is sent, one bit an
element with residuals on both stages. The optimizer does the communication: train without DDP (start from the same
weights on all ranks), or in `no_sync()`.
Source: Tang et al., 1-bit Adam, ICML 2021, algorithm 1. Ours are the memory of the frozen variance (`MEMORY_SHARE`) and
the units that the momentum is measured in while it is sent (`FlatGroup.units`).
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gradwire.compressors.base import ALL_REDUCE, Collective, Member, Request
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.element_scale import power_of_two_
from gradwire.compressors.optim.peers import Peers, carry_out, peers_of
from gradwire.compressors.two_stage import Parts, Residuals, two_stage

Loss = TypeVar("Loss")
SAVED = ("momentum", "variance", "slow", "worker", "server", "live")
"""The tensors of a flat group that a checkpoint holds."""

MEMORY_SHARE, LONGEST_MEMORY = 0.25, 1000
"""The variance that is frozen remembers at least this share of the first stage, and no more steps than Adam's default
does (1 / (1 - 0.999)). A gradient that comes once in two hundred steps, as a rare token's does, has left a short memory
by the time of the freeze, and its next step would be hundreds of learning rates long. Measured: with betas[1] = 0.95
the training of the transformer of docs/results/convergence.md failed soon after the freeze; with this memory it ends
where Adam ends, to a few hundredths of a bit. With betas[1] = 0.999 the variance is the paper's."""


@dataclass(slots=True)
class FlatGroup:
    """The moments of one parameter group, laid out one parameter after the other."""

    momentum: Tensor
    """First moment, the same on all ranks."""
    variance: Tensor
    """Second moment, the same on all ranks; frozen in the second stage."""
    slow: Tensor
    """The variance with a longer memory; empty in the second stage, and where `betas` remember as long."""
    worker: Tensor
    """What this rank's payloads left out, of the live elements; empty in the first stage."""
    server: Tensor
    """What this rank's reduced payloads left out; empty in the first stage."""
    live: Tensor
    """int64 places of the elements that ever had a gradient: one bit cannot say zero, so the others are not sent."""
    units: Tensor
    """Of the live elements, what their momentum is measured in while it is sent: as their step sizes, so that the noise
    of one bit is alike for all of them. Residuals are kept in units too."""


def units_of(flat: FlatGroup) -> Tensor:
    """Returns the roots of the live elements' variances, rounded down to powers of two: dividing by them is exact."""
    return power_of_two_(flat.variance[flat.live].sqrt_())


class OneBitOptimizer(Optimizer):
    """Base of the two-stage optimizers; subclasses implement `apply`, which turns the moments into an update.

    Args:
        parameters: As for any torch optimizer; float32.
        group: The ranks that train together; all of them call `step` alike. None is torch's default process group.
        defaults: Hyper-parameters of the groups: lr, betas, eps, weight_decay and the subclass's own.
        freeze_step: Steps of the first stage; 15 to 20 percent of all steps is usual.
    """

    bias_corrected: ClassVar[bool] = False
    """Whether moments are divided by what a mean that begins at zero lacks, as Adam's are."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: Peers | dist.ProcessGroup | None,
        defaults: dict[str, Any],
        freeze_step: int,
    ) -> None:
        if freeze_step < 1:
            raise ValueError(f"`freeze_step` is {freeze_step}; wanted 1 or more, so that the variance is not zero")
        if not defaults["lr"] >= 0.0 or not all(0.0 <= beta < 1.0 for beta in defaults["betas"]):
            raise ValueError(
                f"`lr` is {defaults['lr']}, `betas` are {defaults['betas']}; wanted lr >= 0, 0 <= beta < 1"
            )
        super().__init__(parameters, defaults)
        self.group = peers_of(group)
        self.freeze_step = freeze_step
        self.steps = 0
        """Steps taken; skipped ones do not count."""
        self.flats = [self._flat(entry["params"]) for entry in self.param_groups]

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """Takes one step on this rank's own gradients, which must not have been reduced.

        A step in which any rank's gradient is not finite changes nothing on any rank.

        Returns:
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            carry_out(self.exchange(), self.group)
        return loss

    def exchange(self) -> Iterator[Request]:
        """Does what `step` does, and yields its collectives instead of carrying them out: for who moves them otherwise.

        Yields:
            Collectives in the order in which every rank issues them; the step is over when there are no more.
        """
        moved = []
        for entry, flat in zip(self.param_groups, self.flats, strict=True):
            moved.append((yield from self._move(entry, flat)))
        if all(bool(momentum.isfinite().all()) for momentum, _ in moved):
            frozen = self.frozen
            for entry, flat, (momentum, after) in zip(self.param_groups, self.flats, moved, strict=True):
                last, flat.momentum = flat.momentum, momentum
                flat.variance, flat.slow, flat.worker, flat.server = after
                self.apply(entry, flat, last, frozen)
            self.steps += 1
            if self.steps == self.freeze_step:
                self._freeze()

    @property
    def frozen(self) -> bool:
        """Whether the second stage has begun."""
        return self.steps >= self.freeze_step

    def apply(self, entry: dict[str, Any], flat: FlatGroup, last_momentum: Tensor, frozen: bool) -> None:
        """Changes the parameters of one group by its moments.

        Args:
            entry: The parameter group.
            flat: Its moments after this step.
            last_momentum: The momentum before this step.
            frozen: Whether the second stage has begun.
        """
        raise NotImplementedError

    def _slow_decay(self, beta2: float) -> float:
        """The decay of the variance that is frozen: `beta2`, or a slower one."""
        memory = min(MEMORY_SHARE * self.freeze_step, LONGEST_MEMORY)
        return max(beta2, 1.0 - 1.0 / max(memory, 1.0))

    def _move(
        self, entry: dict[str, Any], flat: FlatGroup
    ) -> Generator[Request, None, tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]]:
        """Yields collectives; returns the new momentum, and (variance, slow, worker, server) to store if finite."""
        beta1, beta2 = entry["betas"]
        gradient = torch.cat(
            [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in entry["params"]]
        )
        if not self.frozen:
            if self.group.size > 1:
                yield Collective(ALL_REDUCE, (gradient,))
                gradient /= self.group.size
            variance = torch.addcmul(flat.variance * beta2, gradient, gradient, value=1.0 - beta2)
            slow, decay = flat.slow, self._slow_decay(beta2)
            if decay > beta2:
                old = slow if slow.numel() else torch.zeros_like(variance)
                slow = torch.addcmul(old * decay, gradient, gradient, value=1.0 - decay)
            return flat.momentum.lerp(gradient, 1.0 - beta1), (variance, slow, flat.worker, flat.server)
        local = flat.momentum.lerp(gradient, 1.0 - beta1)[flat.live].div_(flat.units)
        total, residuals = (
            torch.empty_like(local),
            Residuals(flat.worker, torch.empty_like(flat.worker), flat.server, torch.empty_like(flat.server)),
        )
        codec = OneBitCodec()
        yield from two_stage(local, total, Member(self.group.rank, self.group.size), codec, codec, residuals)
        momentum = torch.zeros_like(flat.momentum)
        momentum[flat.live] = total.mul_(flat.units).div_(self.group.size)
        assert residuals.new_worker is not None
        assert residuals.new_server is not None
        return momentum, (flat.variance, flat.slow, residuals.new_worker, residuals.new_server)

    def _freeze(self) -> None:
        for entry, flat in zip(self.param_groups, self.flats, strict=True):
            beta2 = entry["betas"][1]
            if self.bias_corrected:
                flat.variance = flat.variance / (1.0 - beta2**self.steps)
                flat.slow = flat.slow / (1.0 - self._slow_decay(beta2) ** self.steps)
            if flat.slow.numel():  # never a longer step than Adam's own at this moment
                flat.variance, flat.slow = torch.maximum(flat.variance, flat.slow), flat.slow.new_empty(0)
            flat.live = flat.variance.nonzero().view(-1)
            flat.units = units_of(flat)
            start, stop = Parts(flat.live.numel(), self.group.size).bounds(self.group.rank)
            flat.worker = torch.zeros(flat.live.numel(), device=flat.variance.device)
            flat.server = torch.zeros(stop - start, device=flat.variance.device)

    def _flat(self, parameters: list[Tensor]) -> FlatGroup:
        for parameter in parameters:
            if parameter.dtype != torch.float32:
                raise TypeError(f"`parameters` holds {parameter.dtype}; wanted float32")
        like = parameters[0]
        zeros = torch.zeros(sum(parameter.numel() for parameter in parameters), device=like.device)
        none = torch.empty(0, device=like.device)
        return FlatGroup(zeros, zeros.clone(), none, none.clone(), none.clone(), none.long(), none.clone())

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict with an entry "onebit": steps, rank, size and the flat groups' tensors."""
        saved = [{name: getattr(flat, name).clone() for name in SAVED} for flat in self.flats]
        own = {"steps": self.steps, "rank": self.group.rank, "size": self.group.size, "groups": saved}
        return {**super().state_dict(), "onebit": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict()`'s result; at another group size the server's residual is folded into the worker's.

        Raises:
            ValueError: The state has other groups or sizes; nothing was changed.
        """
        own = state_dict.get("onebit")
        if own is None or len(own["groups"]) != len(self.flats):
            raise ValueError("`state_dict` has no entry `onebit` with as many groups as this optimizer has")
        for number, (saved, flat) in enumerate(zip(own["groups"], self.flats, strict=True)):
            if lacking := [name for name in SAVED if name not in saved]:
                raise ValueError(
                    f"`state_dict['onebit']['groups'][{number}]` has no {lacking[0]!r}: another version saved it; "
                    "train on from the weights, with a first stage anew"
                )
            if saved["momentum"].numel() != flat.momentum.numel():
                raise ValueError(
                    f"`state_dict['onebit']['groups'][{number}]` has {saved['momentum'].numel()} elements, "
                    f"the model {flat.momentum.numel()}: the state is another model's"
                )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "onebit"})
        self.steps = int(own["steps"])
        none = self.flats[0].units.new_empty(0)
        self.flats = [FlatGroup(**{name: saved[name].clone() for name in SAVED}, units=none) for saved in own["groups"]]
        for flat in self.flats:
            flat.units = units_of(flat)
        if self.frozen and (own["rank"], own["size"]) != (self.group.rank, self.group.size):
            for flat in self.flats:
                self._fold(flat, own["rank"], own["size"])

    def _fold(self, flat: FlatGroup, old_rank: int, old_size: int) -> None:
        start, stop = Parts(flat.live.numel(), old_size).bounds(old_rank)
        flat.worker[start:stop] += flat.server
        start, stop = Parts(flat.live.numel(), self.group.size).bounds(self.group.rank)
        flat.server = torch.zeros(stop - start, device=flat.worker.device)

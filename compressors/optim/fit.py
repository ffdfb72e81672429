"""Checks that a compressor fits an optimizer: refuses pairs known to fail, moves momentum before the compression."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import SGD, Optimizer

from gradwire.compressors.callers import warn
from gradwire.compressors.registry import Option, options_of

logger = logging.getLogger("gradwire")

ADAPTIVE = ("adam", "adagrad", "adadelta", "rmsprop", "lamb", "adafactor", "adamax")
"""Parts of the class names of optimizers that divide by a running second moment of the gradient."""
MOMENTUM = ("momentum", "mu")
"""Keys of the momentum in optimizers' groups: of most optimizers, and of Muon and Dion of the package `dion`."""
WITH_MOMENTUM = ("onebit", "dgc")
"""Names of compressors that apply the momentum before they compress."""

ORTHOGONALISING = ("muon", "dion")
"""Parts of the class names of optimizers that orthogonalise a matrix's momentum: its directions get equal length."""
BEHIND_UNDER_MUON = {
    "int4": 0.041,
    "waterfill4": 0.031,
    "waterfill3": 0.063,
    "waterfill2": 0.147,
    "powersgd": 0.050,
    "onebit": 0.367,
    "dgc": 0.493,
}
"""Bits a byte that a compressor ends behind an exact sum under Muon. Measured (docs/results/optimizers.md): a text task
of 0.5 M parameters, mean of seeds 0, 1 and 2, which lie 0.014 apart at most (dgc's 0.08); powersgd at `ENOUGH_RANK`,
dgc at `ENOUGH_DENSITY`. Muon makes all directions alike, and in most of them such an error outweighs the gradient."""
LOW_RANK_UNDER_MUON, LOW_DENSITY_UNDER_MUON = 0.207, 0.635
"""The same of powersgd at rank 4, seed 0, and of dgc at density 0.001, three seeds; said of all ranks below
`ENOUGH_RANK`, and of all densities below `ENOUGH_DENSITY`."""

BEHIND_UNDER_ADAPTIVE = {"waterfill2": 0.055}
"""The same under AdamW, mean of seeds 0, 1 and 2 (docs/results/convergence.md): +0.053, +0.040 and +0.073, where plain
DDP's own seeds lie 0.015 apart."""

ENOUGH_RANK = 16
"""The least rank of PowerSGD that is enough under an adaptive optimizer. Measured (docs/results/convergence.md): on
matrices of 128 to 512 under AdamW a transformer ended 0.16 bits behind at rank 4, 0.08 at rank 8, 0.02 at rank 16."""
ENOUGH_DENSITY = 0.01
"""The least density of DGC that is enough. Measured on the CNN of the same page: half a point behind at a thousandth,
within the noise of seeds at this."""


@dataclass(frozen=True, eq=False)
class CompressorUse:
    """A compressor with its options, and the rule that names it."""

    name: str
    """Name of the compressor, as in `compressor=`."""
    options: Mapping[str, Option]
    """Options that the user set; all others have their defaults."""
    pattern: str | None = None
    """Pattern of the rule that named it; None for the main compressor."""

    def __str__(self) -> str:
        rule = "" if self.pattern is None else f" of the rule with pattern {self.pattern!r}"
        return f"compressor {self.name!r}{rule}"


SPARSE = CompressorUse("none", {})
"""What becomes of sparse gradients: exact sums, without the momentum of any compressor."""


def check_optimizer(compressor_name: str, optimizer: Optimizer, options: Mapping[str, Option] | None = None) -> None:
    """Refuses a compressor and an optimizer that are known to fail together; warns of one that reaches a higher loss.

    Signs give Adam a second moment that is the same for all elements of a block, and a thousandth of the gradient
    gives it one that is zero almost everywhere. Momentum on both sides of the compression is applied twice.

    Args:
        compressor_name: Name of the compressor, as in `compressor=`.
        optimizer: Optimizer that steps on the compressed gradients.
        options: The compressor's options; None takes the defaults.

    Raises:
        ValueError: The pair is known to fail; the message says what to use instead.

    Source: Tang et al., 1-bit Adam, ICML 2021, section 3 (why Adam's second moment must not see signs); Lin et al.,
        DGC, ICLR 2018, section 3.2 (momentum correction).
    """
    check_groups(CompressorUse(compressor_name, options or {}), optimizer, optimizer.param_groups)


def check_groups(use: CompressorUse, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Does what `check_optimizer` does, for a compressor that compresses the parameters of some groups only.

    Args:
        use: The compressor.
        optimizer: Optimizer that steps on the compressed gradients.
        groups: Entries of its `param_groups` that hold parameters of the compressor.

    Raises:
        ValueError: The pair is known to fail; the message says what to use instead, and names the rule.
    """
    chosen = {**options_of(use.name), **use.options}
    kind = type(optimizer).__name__
    # Warn of a pair that is known to reach a higher loss, for compressors of any kind.
    cost = known_to_end_behind(use.name, chosen, kind)
    if cost:
        logger.warning("%s %s", use, cost)
    if use.name.partition("+")[0] not in WITH_MOMENTUM:
        return
    # Compressors that apply momentum themselves fail under adaptive optimizers.
    if any(part in kind.lower() for part in ADAPTIVE):
        raise ValueError(
            f"`optimizer` is {kind} with {use}, which is known not to converge: its second moment would see "
            "the compressed gradient. Use SGD, or one of fp16, bf16, int8, int4, waterfill4, waterfill3, powersgd"
        )
    # Momentum must be applied once, before the compression.
    outside = max((float(group.get(name) or 0.0) for group in groups for name in MOMENTUM), default=0.0)
    if outside and chosen.get("momentum"):
        remedy = "Call take_momentum(optimizer) and pass what it returns as `compressor_options`"
        if use.pattern is not None:
            remedy = "Give its parameters a group of their own with momentum 0"
        elif not isinstance(optimizer, SGD):
            remedy = f"Give {kind} momentum 0, and its own to the compressor, in `compressor_options`"
        raise ValueError(
            f"`optimizer` is {kind} with momentum {outside} and {use} has `momentum` {chosen['momentum']}: it "
            f"would be applied twice. {remedy}"
        )
    if outside:
        warn(
            f"{use} with `momentum` 0 under {kind} with momentum {outside}: momentum applied after the "
            "compression amplifies the compression error and costs accuracy; take_momentum(optimizer) moves it before"
        )
    elif not cost and not isinstance(optimizer, SGD):
        warn(f"{use} under {kind} is untested: watch the loss against a dense run")


def warn_of_lost_momentum(main: CompressorUse, use: CompressorUse, groups: Sequence[Mapping[str, Any]]) -> None:
    """Warns of parameters without a momentum: the main compressor keeps one, theirs does not, nor does the optimizer.

    Args:
        main: The main compressor.
        use: Compressor of some parameters; `SPARSE` for sparse gradients.
        groups: Entries of an optimizer's `param_groups` that hold such parameters.
    """
    kept, own = ({**options_of(each.name), **each.options}.get("momentum") for each in (main, use))
    if kept and not own and any(group.get(name) == 0.0 for group in groups for name in MOMENTUM):
        what = "sparse gradients are never compressed and have" if use is SPARSE else f"{use} keeps"
        warn(
            f"{what} no momentum, and neither does the optimizer: {main} keeps one of {kept} for all other parameters. "
            "Give these parameters a group of their own in the optimizer, with its momentum"
        )


def known_to_end_behind(name: str, options: Mapping[str, Option], kind: str) -> str:
    """Returns the known cost of a pair that works, as the end of a warning; empty if no cost is known.

    Args:
        name: Name of the compressor, as in `compressor=`.
        options: All options of the compressor, defaults included; see `options_of`.
        kind: Class name of the optimizer, or a name such as `adamw`.
    """
    rank, density = options.get("rank"), options.get("density")
    behind = BEHIND_UNDER_MUON.get(name.partition("+")[0])
    if behind is not None and any(part in kind.lower() for part in ORTHOGONALISING):
        if isinstance(rank, int) and rank < ENOUGH_RANK:
            behind = LOW_RANK_UNDER_MUON
        if isinstance(density, float) and density < ENOUGH_DENSITY:
            behind = LOW_DENSITY_UNDER_MUON
        return (
            f"under {kind} is known to reach a higher loss: a small transformer by {behind:.2f} bits a byte, because "
            "a matrix' momentum is made orthogonal, and with it the error in all small directions. Take int8 for "
            "the matrices, by a rule where other parameters may have fewer bits"
        )
    adaptive = any(part in kind.lower() for part in ADAPTIVE)
    if name in BEHIND_UNDER_ADAPTIVE and adaptive:
        return (
            f"under {kind} is known to reach a higher loss: a small transformer by {BEHIND_UNDER_ADAPTIVE[name]:.2f} "
            "bits a byte. Take waterfill3 or int4"
        )
    if name.partition("+")[0] == "powersgd" and adaptive and isinstance(rank, int) and rank < ENOUGH_RANK:
        return (
            f"with `rank` {rank} under {kind} is known to reach a higher loss: a small transformer by 0.16 bits a byte "
            f"at rank 4, by 0.02 at rank {ENOUGH_RANK}. Take a rank of an eighth of the matrices' shorter side, or int4"
        )
    if name.partition("+")[0] == "dgc" and not adaptive and isinstance(density, float) and density < ENOUGH_DENSITY:
        return (
            f"with `density` {density:g} is known to lose accuracy in short runs: a small CNN half a point after 1,900 "
            f"steps, and not at `density` {ENOUGH_DENSITY:g}. Watch the result against a dense run"
        )
    return ""


def take_momentum(optimizer: Optimizer) -> dict[str, Option]:
    """Takes the momentum out of an SGD optimizer, for a compressor that applies it before it compresses.

    The weight decay is divided by 1 - momentum, because the momentum no longer multiplies it; both are logged.

    Args:
        optimizer: torch.optim.SGD with one momentum for all groups; its groups and buffers are changed in place.

    Returns:
        `momentum` and, where it was on, `nesterov`: options for the compressor.

    Raises:
        TypeError: Not SGD.
        ValueError: There is no momentum, or there are several different ones, or dampening; nothing was changed.
    """
    if not isinstance(optimizer, SGD):
        raise TypeError(f"`optimizer` is {type(optimizer).__name__}; only torch.optim.SGD's momentum can be moved")
    settings = {
        (float(group["momentum"]), bool(group["nesterov"]), float(group["dampening"]))
        for group in optimizer.param_groups
    }
    if len(settings) != 1:
        raise ValueError("`optimizer` has groups with different momentum, nesterov or dampening; wanted one for all")
    momentum, nesterov, dampening = settings.pop()
    if not momentum or dampening:
        raise ValueError(
            f"`optimizer` has momentum {momentum} and dampening {dampening}; "
            "wanted a momentum to take, and no dampening"
        )
    for group in optimizer.param_groups:
        group["momentum"], group["nesterov"] = 0.0, False
        group["weight_decay"] = group["weight_decay"] / (1.0 - momentum)
        for parameter in group["params"]:
            optimizer.state[parameter].pop("momentum_buffer", None)
    logger.info(
        "gradwire: momentum %g moved from SGD to the compressor; weight decay divided by %g", momentum, 1.0 - momentum
    )
    return {"momentum": momentum, **({"nesterov": True} if nesterov else {})}

"""`gradwire predict --sharded`: FSDP2 and HSDP instead of DDP."""

import argparse
from collections.abc import Sequence

from rich.console import Console

from gradwire.bench.arguments import check_number
from gradwire.cli.predict_show import Answer, Gains, describe_cluster, describe_effort, table_of
from gradwire.comms.plan.advise import ANY_OPTIMIZER, SGD_ONLY, ms
from gradwire.comms.plan.codec_price import codec_price
from gradwire.comms.plan.machine_cluster import codec_bytes_per_second, library_of
from gradwire.comms.plan.overlap import FORWARD_SHARE
from gradwire.comms.plan.sharded import (
    FLAT,
    FULL,
    HIERARCHICAL,
    HYBRID,
    RESHARD,
    UNITS,
    ShardedAdvice,
    ShardedOffer,
    ShardedWorkload,
    advise_sharded,
)
from gradwire.compressors import registry
from gradwire.compressors.base import Layout
from gradwire.topology.cluster import Cluster
from gradwire.topology.graph import Machine

DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CLEARLY = 0.01
"""A row that loses more is shown only where it is faster by more than this share."""
_BOUNDS = {"activations_gb": (0, 1e6), "gpu_memory_gb": (1e-3, 1e6), "units": (1, 10**5)}
"""Option -> the least and the most that makes sense."""
OWN_OPTIONS = (
    "units", "param_dtype", "reduce_dtype", "reshard_after_forward", "gpu_memory_gb", "activations_gb"
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what only sharded training asks."""
    group = parser.add_argument_group("sharded training")
    group.add_argument(
        "--sharded",
        choices=(FULL, HYBRID),
        help="FSDP2 over all ranks (full), or inside the nodes with replicas between them (hybrid), instead of DDP",
    )
    group.add_argument("--units", type=int, metavar="N", help=f"calls of fully_shard (default {UNITS})")
    group.add_argument("--param-dtype", choices=DTYPE_NBYTES, help="of gathered weights (default float32)")
    group.add_argument("--reduce-dtype", choices=DTYPE_NBYTES, help="of reduced gradients (default float32)")
    group.add_argument(
        "--reshard-after-forward", choices=RESHARD, help="`node`: the number of ranks on a node (default yes)"
    )
    group.add_argument("--gpu-memory-gb", type=float, metavar="GB", help="what one rank has: says whether hybrid fits")
    group.add_argument("--activations-gb", type=float, metavar="GB", help="of it, activations and others (default 0)")


def check_options(options: argparse.Namespace) -> None:
    """Checks numbers and options that belong together.

    Raises:
        ValueError: An option does not fit; the message names it.
    """
    if options.sharded is None:
        given = [name for name in OWN_OPTIONS if getattr(options, name) is not None]
        if given:
            raise ValueError(
                f"`{spelled(given[0])}` is given without `--sharded`; wanted --sharded full or hybrid with it"
            )
        return
    if options.plot is not None:
        raise ValueError("`--plot` draws plans of DDP; wanted --json with --sharded")
    for name, (least, most) in _BOUNDS.items():
        check_number(spelled(name), getattr(options, name), least, most)


def spelled(name: str) -> str:
    """An option as the user writes it, of its attribute: `--ranks-per-node`."""
    return "--" + name.replace("_", "-")


def forward_seconds(options: argparse.Namespace, backward_seconds: float) -> float:
    """A forward pass, as long as half of a backward pass unless it is given.

    Args:
        options: Of the command line.
        backward_seconds: Of a backward pass.
    """
    return backward_seconds * FORWARD_SHARE if options.forward_ms is None else options.forward_ms / 1e3


def workload_of(
    options: argparse.Namespace, machine: Machine, layout: Layout, backward_seconds: float
) -> ShardedWorkload:
    """What one step moves, from checked options.

    Args:
        options: As `check_options` leaves them.
        machine: One of the nodes.
        layout: The model's parameters.
        backward_seconds: Of a backward pass, as given or as assumed of a public model; 0 is not known.
    """
    return ShardedWorkload(
        numel=layout.numel,
        forward_seconds=forward_seconds(options, backward_seconds),
        backward_seconds=backward_seconds,
        units=options.units or UNITS,
        param_nbytes=DTYPE_NBYTES[options.param_dtype or "float32"],
        reduce_nbytes=DTYPE_NBYTES[options.reduce_dtype or "float32"],
        reshard=options.reshard_after_forward or "yes",
        optimizer=options.optimizer,
        overlap=bool(machine.gpus),
        memory_nbytes=None if options.gpu_memory_gb is None else options.gpu_memory_gb * 1e9,
        activation_nbytes=(options.activations_gb or 0.0) * 1e9,
    )


def sharded_advice(
    cluster: Cluster, sharded: str, workload: ShardedWorkload, machine: Machine, layout: Layout
) -> ShardedAdvice:
    """Every choice priced on a cluster; arguments as for `advise_sharded` and `workload_of`."""
    rate = codec_bytes_per_second(machine)
    members = max(2, len(cluster.nodes))  # on one node the ranks exchange: bytes for each element are the same
    prices = [codec_price(name, layout, members, rate) for name in registry.names()]
    return advise_sharded(cluster, sharded, workload, prices, rate, library=library_of(machine))


def gains_of(nodes: int, advice: ShardedAdvice, alone: ShardedAdvice) -> Gains:
    """How many times as much several nodes train as one, which shards over its ranks and is exact.

    Args:
        nodes: How many there are.
        advice: For all of them.
        alone: For one of them.
    """

    def best(found: ShardedAdvice) -> float:
        return min(each.step_seconds for each in found.offers if each.exact and each.fits is not False)

    one = best(alone)
    return Gains(
        nodes=nodes,
        flat=nodes * one / advice.plain.step_seconds,
        exact=nodes * one / best(advice),
        recommended=nodes * one / advice.recommend.step_seconds,
        plain=f"plain FSDP2 ({advice.plain.sharded})",
        one="one that shards over its ranks",
    )


def as_json(answer: Answer[ShardedWorkload, ShardedAdvice]) -> dict[str, object]:
    """The advice as plain dictionaries.

    Args:
        answer: What was found.
    """
    workload, advice = answer.workload, answer.advice
    return answer.around(
        {
            "sharded": advice.plain.sharded,
            "parameters": workload.numel,
            "units": workload.units,
            "forward_seconds": workload.forward_seconds,
            "backward_seconds": workload.backward_seconds,
            "overlap": workload.overlap,
            "memory_nbytes": workload.memory_nbytes,
            "choices": {offer.name: _offer(offer) for offer in advice.offers},
            "recommend": {
                "name": advice.recommend.name,
                "sharded": advice.recommend.sharded,
                "form": advice.recommend.form,
                "shards": advice.recommend.shards,
                "weights": advice.recommend.weights,
                "compressor": advice.recommend.compressor,
                "why": advice.why,
            },
        }
    )


def _offer(offer: ShardedOffer) -> dict[str, object]:
    memory = offer.memory
    return {
        "sharded": offer.sharded, "form": offer.form, "shards": offer.shards, "weights": offer.weights,
        "compressor": offer.compressor, "step_seconds": offer.step_seconds, "seconds": offer.seconds,
        "exposed_seconds": offer.exposed_seconds, "hidden": offer.hidden, "bytes_by_level": offer.bytes_by_level,
        "collectives": {name: {"seconds": seconds, "bytes_by_level": nbytes}
                        for name, (seconds, nbytes) in offer.legs.items()},
        "memory": {"fsdp_nbytes": memory.own_nbytes, "extra_nbytes": memory.extra_nbytes,
                   "kept_nbytes": memory.kept_nbytes, "buffer_nbytes": memory.buffer_nbytes,
                   "residual_for_shards_nbytes": memory.residual_nbytes},
        "fits": offer.fits, "limit": offer.limit, "caution": offer.caution,
    }  # fmt: skip


def as_table(console: Console, answer: Answer[ShardedWorkload, ShardedAdvice], *, everything: bool = False) -> None:
    """Prints the advice: the recommendation, then the rows that bear on it.

    Args:
        console: Where to; one that highlights nothing.
        answer: What was found.
        everything: Every row.
    """
    cluster, workload, advice, gains = answer.cluster, answer.workload, answer.advice, answer.gains
    chosen = advice.recommend
    if gains is not None:
        console.print(f"{gains} Predicted, not measured.\n", style="bold")
    elif len(cluster.nodes) > 1:
        console.print("Whether the nodes beat one depends on the passes: say --backward-ms.\n", style="bold")
    headline = _headline(chosen)
    if gains is not None and gains.one_is_faster:
        headline = f"one node alone; of what takes all nodes: {headline}"
    console.print(f"recommended: {headline}", style="bold")
    console.print(advice.why)
    console.print(f"write: {_line_of(chosen)}\n")
    passes = (
        f", forward {ms(workload.forward_seconds)} ms, backward {ms(workload.backward_seconds)} ms"
        if workload.compute_seconds
        else ""
    )
    console.print(
        f"{describe_cluster(cluster)}; {_amount(workload.numel)} parameters in {workload.units} units{passes}",
    )
    known = workload.compute_seconds > 0
    times = ("step ms", "comm ms") if known else ("comm ms",)
    table = table_of("", "sharded", "form", "shards", "weights", "between", *times, "NIC MB", "+MB")
    shown = advice.offers if everything else rows_that_matter(advice)
    for offer in sorted(shown, key=lambda offer: (offer is not chosen, offer.step_seconds)):
        table.add_row(*_row(offer, chosen, known))
    console.print(table)
    legend = [
        "*: recommended",
        "flat: each collective over its whole group, exact as plain FSDP2",
        "shards, weights: how gradients and weights travel",
        "between: the compressor between replicas",
        "NIC: sent by a node in a step",
        "+MB: a rank's memory beyond FSDP2's own",
    ]
    if workload.compute_seconds and not workload.overlap:
        legend.append("on CPUs no collective of FSDP2 overlaps with a pass")
    legend += ["!: see the note"] if any(offer.caution for offer in shown) else []
    legend += ["x: does not fit"] if any(offer.fits is False for offer in shown) else []
    console.print("; ".join(legend))
    console.print(_memory(advice, workload))
    for caution in dict.fromkeys(offer.caution for offer in shown if offer.caution):
        console.print(f"note: {caution}")
    console.print(describe_effort(answer.planning_seconds, len(advice.offers) - len(shown)))


def rows_that_matter(advice: ShardedAdvice) -> tuple[ShardedOffer, ...]:
    """What torch does alone, and of each way of sharding the choices that nothing gentler beats."""
    kept = {id(advice.recommend): advice.recommend}
    for sharded in dict.fromkeys(offer.sharded for offer in advice.offers):
        best = float("inf")
        rest = [offer for offer in advice.offers if offer.sharded == sharded]
        for offer in sorted(rest, key=lambda offer: (offer.harm, offer.step_seconds)):
            if offer.fits is not False and offer.step_seconds < best * (1 - CLEARLY):
                best = offer.step_seconds
                kept[id(offer)] = offer
        kept |= {id(offer): offer for offer in rest if offer.form == FLAT and offer.exact}
    return tuple(kept.values())


def _headline(offer: ShardedOffer) -> str:
    if offer.exact and offer.form == FLAT:
        return f"{offer.sharded}, as torch runs it, exact"
    parts = [f"shards {offer.shards}", f"weights {offer.weights}"]
    parts += [f"compressor {offer.compressor}"] if offer.sharded == HYBRID else []
    return f"{offer.sharded} {offer.form}, " + ", ".join(parts)


def _line_of(offer: ShardedOffer) -> str:
    """What a training script writes for it."""
    if offer.exact and offer.form == FLAT:
        return "nothing: it is what torch does"
    words = ['replicas=mesh["replicate"]'] if offer.sharded == HYBRID else []
    if not offer.exact:
        words += [f'compressor="{offer.compressor}"'] if offer.sharded == HYBRID else []
        takes = offer.sharded == HYBRID and offer.compressor in SGD_ONLY
        words += ["compressor_options=gradwire.take_momentum(optimizer)"] if takes else []
        words += [f'{name}="{value}"' for name, value in (("shards", offer.shards), ("weights", offer.weights))]
    return f"gradwire.fsdp.apply({', '.join(['model', *words])})"


def _memory(advice: ShardedAdvice, workload: ShardedWorkload) -> str:
    by_sharding: dict[str, ShardedOffer] = {}
    for offer in advice.offers:
        by_sharding.setdefault(offer.sharded, offer)
    own = " and ".join(f"{offer.memory.own_nbytes / 1e9:.3g} GB {name}" for name, offer in by_sharding.items())
    counted = "" if workload.activation_nbytes else ", activations not counted"
    return f"memory of a rank: FSDP2's own {own}, with {_state(workload.optimizer)} state{counted}"


def _row(offer: ShardedOffer, chosen: ShardedOffer, known: bool) -> Sequence[str]:
    mark = "*" if offer is chosen else "!" if offer.caution else "x" if offer.fits is False else " "
    return [
        mark,
        offer.sharded,
        "hierarchy" if offer.form == HIERARCHICAL else offer.form,
        offer.shards,
        offer.weights,
        offer.compressor if offer.sharded == HYBRID else "-",
        *([_number(offer.step_seconds * 1e3)] if known else []),
        _number(offer.seconds * 1e3),
        _number(offer.bytes_by_level.get("inter_node", 0.0) / 1e6),
        _number(offer.memory.extra_nbytes / 1e6),
    ]


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def _amount(numel: int) -> str:
    return f"{numel / 1e9:.3g} billion" if numel >= 1e9 else f"{numel / 1e6:.3g} million"


def _state(optimizer: str) -> str:
    return "two moments'" if optimizer == ANY_OPTIMIZER else f"{optimizer}'s"

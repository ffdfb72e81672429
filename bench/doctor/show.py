"""Report of the doctor: findings, tables of the measurements, what was not examined, and a command to type next."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from gradwire.bench.doctor.checks.basis import BASES
from gradwire.bench.doctor.checks.machine import available_cores
from gradwire.bench.doctor.checks.network import FOREIGN_SHARE, SLOW
from gradwire.bench.doctor.checks.steps import BACKWARD, COLLECTIVE, EXCHANGE, FORWARD, step_split
from gradwire.bench.doctor.checks.transfers import LOST_SHARE, counted_loss
from gradwire.bench.doctor.facts import DEFAULT_GRADIENT_NBYTES, Diagnosis, JobFacts, to_record
from gradwire.bench.terminal import right_columns
from gradwire.comms.plan import overlap
from gradwire.topology.nccl_variables import WANTED_HERE
from gradwire.topology.presets import PRESETS, preset_with
from gradwire.topology.wording import duration, nbytes, rate

MOST_PAIRS = 15

STAND_IN = "pcie_box"
"""Preset whose GPUs are slow, for those that no preset has."""
WORTH_CHANGING = 1.5
"""Least ratio of two backends' times for which the last lines mention it."""

TYPE = "Type: "
"""Beginning of the report's last line."""

FAR_ROUND_TRIP = 1e-3
"""Least round trip, in seconds, for which the predict command gets `--rtt` and `--loss`."""


def on_two_nodes(facts: JobFacts) -> str:
    """Returns the command that examines two machines like this one, with a rank for each GPU, else each usable core.

    Args:
        facts: Facts of one machine.
    """
    first = facts.ranks[0]
    ranks = len(first.gpus) or max(1, int(available_cores([first])))
    return (
        f"torchrun --nnodes 2 --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 "
        "-m gradwire doctor   # on every node, as you start your script"
    )


def print_report(facts: JobFacts, found: Sequence[Diagnosis], console: Console, took_seconds: float) -> None:
    """Prints the report: the findings, tables of the measurements, and what to type next.

    Args:
        facts: Measurements of the job.
        found: Findings in the order in which `diagnose` returns them.
        console: Console to print to.
        took_seconds: Length of the examination in seconds.
    """
    print_line = console.print
    nodes = facts.nodes
    count = f"{len(facts.ranks)} rank{'s' if len(facts.ranks) > 1 else ''}"
    many = f" on {len(nodes)} nodes" if len(nodes) > 1 else f" on {escape(facts.names[0])}"
    print_line(f"gradwire doctor: {count}{many}, checked in {took_seconds:.0f} s", highlight=False)
    for line in headline(facts) if not facts.missing_ranks else ["Nothing was measured: ranks are missing."]:
        print_line(escape(line), highlight=False)
    print_line()
    for number, each in enumerate(found, start=1):
        _print_one(number, each, console)
    if facts.pairs:
        print_line(pair_table(facts))
    if facts.backends:
        print_line(backend_table(facts))
    for note in facts.notes:
        print_line(f"Not checked: {escape(note)}", highlight=False)
    for line in conclusion(facts, found):
        print_line(escape(line), style="bold", highlight=False, soft_wrap=line.startswith(TYPE))


def conclusion(facts: JobFacts, found: Sequence[Diagnosis]) -> list[str]:
    """Returns the two last lines of the report: a conclusion, and `Type: ` with the command to type next.

    The conclusion is about training with exact sums, as the command to type next predicts it. It names no compressor:
    that command ranks them, by `comms/plan/advise.py`.

    Args:
        facts: Measurements of the job.
        found: Findings as `diagnose` ranks them.
    """
    # With missing ranks, on one machine and without a measured link there is no rate to conclude from.
    count = len(facts.nodes)
    again = "the command that you have just typed, once more"
    if facts.missing_ranks:
        return [
            "Nothing was measured: a job whose ranks do not all come does not train.",
            f"Type: {again}, on all nodes",
        ]
    if count == 1:
        first = (
            "What is wrong is above"
            if any(not each.remark for each in found)
            else f"{_nothing(facts, found)} on this machine"
        )
        return [
            f"{first}; links, the order of ranks and the pace of other nodes were not seen.",
            f"Type: {on_two_nodes(facts)}",
        ]
    if not facts.pairs:
        return ["No link was measured: the nodes do not reach each other.", f"Type: {again}, when that is mended"]
    if facts.joined_by_nvlink:
        first = _nothing(facts, found) if all(each.remark for each in found) else "What is wrong is above"
        return [
            f"{first}: NVLink carries the gradients of all {count} nodes, and no network card does.",
            f"Type: {predict_command(facts, found)}",
        ]
    # Compare all nodes with one node alone, at the rate of the slowest link after the fixes.
    good = min(rates_after_fixes(facts, found))
    exact = facts.exchange_seconds(good)
    first = _nothing(facts, found) if all(each.remark for each in found) else "Once that is mended"
    # With a known step say how much more all nodes train; otherwise say how long a step must be for it.
    if (computed := computed_seconds(facts)) is not None:
        gain = _exact_gain(facts, found, *computed)
        line = f"{first}: {count} nodes train {gain:.2f} times as much as one with exact sums."
        if gain < 1:
            line += " One node alone trains more, unless a compressor or gradwire.Outer helps: the command says so."
    else:
        line = (
            f"{first}: {count} nodes beat one with exact sums if a step on one node alone takes more than "
            f"{duration(overlap.least_compute_seconds(count, exact))}. In a shorter step the link ({rate(good)}) is "
            "the limit: send fewer bytes, or send less often."
            + (
                ""
                if facts.expected_rate(0)
                else " What a link should give is not known here: say it with --link 25gbit."
            )
        )
    return [f"{line}{_faster_backend(facts)}{_stand_in(facts)}", f"Type: {predict_command(facts, found)}"]


def _nothing(facts: JobFacts, found: Sequence[Diagnosis]) -> str:
    """Returns the words for a faultless job: "Nothing found" only if all was examined and no packets were lost."""
    lost = counted_loss(facts)
    if lost >= LOST_SHARE:
        return f"No fault is named, but {100 * lost:.2g} % of the packets of a pair were lost"
    if facts.notes:
        return "No fault is named, and not everything was checked"
    return "Nothing found that costs a twentieth of a step" if found else "Nothing found"


def rates_after_fixes(facts: JobFacts, found: Sequence[Diagnosis]) -> list[float]:
    """Returns each node's rate after the fixes of the findings, in bytes per second.

    Args:
        facts: Measurements of the job, with at least one pair of nodes.
        found: Findings of the checks; only those that name a rate after the fix count.
    """
    good = facts.good_rate()
    rates = []
    for node, name in enumerate(facts.names):
        then = [each.fixed_bytes_per_second or 0.0 for each in found if name in each.nodes]
        reached = min(facts.reached(node) or (good, good))
        # A rate near that of the others is theirs: the rest is noise.
        rates.append(max(good if reached >= SLOW * good else reached, *then, 0.0))
    return rates


def _faster_backend(facts: JobFacts) -> str:
    """Returns a sentence if gloo was far slower than gradwire's backend; else nothing."""
    times = {each.backend: each.seconds / each.nbytes for each in facts.backends if each.seconds is not None}
    gloo, ours = times.get("gloo"), times.get("gradwire")
    if facts.has_gpus or gloo is None or ours is None or gloo < WORTH_CHANGING * ours:
        return ""
    return f' gloo took {gloo / ours:.1f} times as long as init_process_group("gradwire").'


def computed_seconds(facts: JobFacts) -> tuple[float, float] | None:
    """Returns the seconds of a step without communication: (backward pass, all else); None if they are not known.

    On CPUs with `--script` they come from the measured parts of the step. The backward pass there includes the wait for
    its exchange; its computing is taken as twice the forward pass, but as at least the part of it in which no exchange
    is in flight, and at most all of it. Otherwise the known step is divided by the model of `comms/plan/overlap.py`; a
    step that is not longer than its exchange has no known parts.

    Args:
        facts: Measurements of the job.
    """
    if facts.step_seconds is None:
        return None
    parts = {} if facts.has_gpus else step_split(facts)
    passed = parts.get(BACKWARD, 0.0)
    computing = min(passed, max(passed - parts.get(EXCHANGE, 0.0), parts.get(FORWARD, 0.0) / overlap.FORWARD_SHARE))
    if computing:
        return computing, max(0.0, facts.step_seconds - passed - parts.get(COLLECTIVE, 0.0))
    exchange = facts.plain_exchange_seconds()
    if facts.joined_by_nvlink:
        exchange = facts.all_reduce_seconds or 0.0
    if facts.step_seconds <= exchange:
        return None
    computed = overlap.compute_seconds(facts.step_seconds, exchange)
    backward = computed / (1 + overlap.FORWARD_SHARE)
    return backward, computed - backward


def _gpu_name(facts: JobFacts) -> str:
    return next((gpu.name for each in facts.ranks for gpu in each.gpus), "")


def _stand_in(facts: JobFacts) -> str:
    """Returns a sentence on the preset that `predict_command` takes for GPUs that no preset has; empty if one has."""
    if not facts.has_gpus or preset_with(name := _gpu_name(facts)) is not None:
        return ""
    return (
        f" No preset has {name or 'these GPUs'}: {STAND_IN}, with {PRESETS[STAND_IN]().gpus[0].name}, stands for them. "
        "What `gradwire topo --json` prints there has their own figures: --topology FILE in place of the preset."
    )


def _mended(facts: JobFacts, found: Sequence[Diagnosis]) -> tuple[str, list[int], list[int], float, float]:
    """Returns what `gradwire predict` needs of this cluster, with the links' rates after the findings' fixes.

    Returns:
        (Preset of a node; ranks of each node; NIC rate of each node in Mbit/s; round trip in seconds; share of lost
        packets). Round trip and loss are 0 unless the nodes are far apart and train on CPUs.
    """
    # Here, because one machine is examined without torch, which this module needs.
    from gradwire.comms.plan.machine_cluster import payload_share

    # The command wants a NIC's rate, and takes what TCP leaves of it for nodes without GPUs; payload was measured.
    share = payload_share(has_gpus=facts.has_gpus)
    rates = [max(1, round(8 * each / share / 1e6)) for each in rates_after_fixes(facts, found)]
    # Distance is the latency of an idle link: beside other traffic packets wait in queues.
    busy = any(facts.foreign_share(node) >= FOREIGN_SHARE for node in range(len(facts.nodes)))
    trip = 0.0 if busy else 2 * max(pair.latency_seconds for pair in facts.pairs)
    far = trip >= FAR_ROUND_TRIP and not facts.has_gpus
    lost = counted_loss(facts)
    return (
        preset_with(_gpu_name(facts)) or STAND_IN if facts.has_gpus else "cpu_only",
        [len(node) for node in facts.nodes],
        rates,
        trip if far else 0.0,
        lost if far and lost >= LOST_SHARE else 0.0,
    )


def _exact_gain(facts: JobFacts, found: Sequence[Diagnosis], backward_seconds: float, rest_seconds: float) -> float:
    """Returns how many times as much all nodes train as one with exact sums, as `predict_command` predicts it."""
    # Here for torch, as above.
    from gradwire.bench.prediction import cluster_of_nodes, exact_gain
    from gradwire.comms.plan.advise import Workload
    from gradwire.comms.plan.machine_cluster import library_of

    preset, ranks, rates, trip, loss = _mended(facts, found)
    machine, bits = PRESETS[preset](), [1e6 * each for each in rates]
    return exact_gain(
        lambda nodes: cluster_of_nodes(machine, nodes, ranks=ranks, rates=bits, round_trip_seconds=trip, loss=loss),
        len(ranks),
        Workload(facts.gradient_nbytes, backward_seconds, rest_seconds=rest_seconds),
        library_of(machine),
    )


def predict_command(facts: JobFacts, found: Sequence[Diagnosis] = ()) -> str:
    """Returns the `gradwire predict` command for this cluster, which recommends a plan and a compressor.

    Args:
        facts: Measurements of the job, with pairs.
        found: Findings; the command has the links' rates after their fixes.
    """
    preset, counts, rates, trip, loss = _mended(facts, found)
    ranks = counts[0] if len(set(counts)) == 1 else ",".join(map(str, counts))
    nics = [f"{each}mbit" for each in rates]
    nic = nics[0] if len(set(nics)) == 1 else ",".join(nics)
    far = f" --rtt {1e3 * trip:.3g}ms" * bool(trip) + f" --loss {100 * loss:.2g}%" * bool(loss)
    computed = computed_seconds(facts)
    step = "" if computed is None else " --backward-ms {:.4g} --forward-ms {:.4g}".format(*(1e3 * s for s in computed))
    return (
        f"gradwire predict --preset {preset} --nodes {len(counts)} --ranks-per-node {ranks} --nic {nic}{far} "
        f"--gradient-mb {facts.gradient_nbytes / 1e6:g}{step}"
    )


def headline(facts: JobFacts) -> list[str]:
    """Returns the first lines of the report: the parts of a step, the gradients' size, least time of their exchange."""
    lines = [split] if (split := _split_line(facts)) else []
    size = nbytes(facts.gradient_nbytes)
    given = "" if facts.gradient_nbytes != DEFAULT_GRADIENT_NBYTES else " (say --gradient-mb, or --script train.py)"
    step = f"; a step takes {duration(facts.step_seconds)}" if facts.step_seconds is not None else ""
    if facts.joined_by_nvlink:
        lines = [*lines, "NVLink joins these nodes (one NVLink domain): gradients on GPUs use none of the links below."]
    if facts.joined_by_nvlink or not facts.pairs:
        return [f"Costs are for {size} of gradients{given}{step}.", *lines]
    good = facts.good_rate()
    least = facts.exchange_seconds(good)
    lines = [
        *lines,
        (
            f"Costs are for {size} of gradients{given}{step}. At {rate(good)} a link, the best measured or expected, "
            f"their exchange takes at least {duration(least)} in every step."
        ),
    ]
    if facts.step_seconds is not None and least >= facts.step_seconds:
        lines.append(
            "A step that is shorter than its own exchange is none of this job: is --gradient-mb its size, and "
            "--step-seconds a step on all nodes?"
        )
    elif facts.step_seconds is not None and least > 0.5 * facts.step_seconds:
        lines.append(
            "That alone is more than half a step: faster links, larger batches, or fewer bytes are what helps."
        )
    return lines


def _split_line(facts: JobFacts) -> str:
    """Returns a sentence on the parts of a step of the user's script, on the median rank; empty without `--script`."""
    parts = step_split(facts)
    if not parts or facts.step_seconds is None:
        return ""
    said = ", ".join(f"{duration(value)} {kind}" for kind, value in parts.items())
    under = "; an exchange is under way while the main thread does other things, too" if EXCHANGE in parts else ""
    return f"Where {duration(facts.step_seconds)} of a step of your script go, on the usual rank: {said}{under}."


def _print_one(number: int, each: Diagnosis, console: Console) -> None:
    """Prints one finding: its title and cost, what was seen, what to do, and under what condition it holds."""
    cost = "stops the job" if each.stops else f"costs {duration(each.cost_seconds)} a step" if each.cost_seconds else ""
    tail = ", ".join(text for text in ("a remark" if each.remark else "", cost, f"{each.confidence:.0%} sure") if text)
    console.print(f"{number}. [bold]{escape(each.title)}[/bold]  ({tail})", highlight=False)
    seen = Table.grid(Column(no_wrap=True), Column(overflow="fold"))
    for line in each.evidence:
        seen.add_row("   seen: ", escape(line))
    console.print(seen, highlight=False)
    for line in each.fix:  # commands are to be copied: a terminal wraps them, we do not
        console.print(f"   do:   {escape(line)}", highlight=False, soft_wrap=True)
    if not any(line.startswith(WANTED_HERE) for line in each.evidence):  # that is the condition, with its source
        basis = BASES[each.key]
        when = Table.grid(Column(no_wrap=True), Column(overflow="fold"))
        when.add_row("   if:   ", escape(f"{basis.holds} [{basis.source}]"))
        console.print(when, highlight=False)
    console.print()


def pair_table(facts: JobFacts) -> Table:
    """Returns a table of the pairs of nodes, the slowest first."""
    pairs = sorted(facts.pairs, key=lambda pair: min(pair.many))
    left = len(pairs) - MOST_PAIRS
    figures = right_columns("latency", "one connection", "several", "both ways at once")
    more = f", the slowest; {left} more in --json" if left > 0 else ""
    table = Table("from", "to", *figures, title=f"links between nodes{more}")
    for pair in pairs[:MOST_PAIRS]:
        names = facts.names
        table.add_row(
            names[pair.a],
            names[pair.b],
            duration(pair.latency_seconds),
            *(rate(min(each)) for each in (pair.one, pair.many, pair.both)),
        )
    return table


def backend_table(facts: JobFacts) -> Table:
    """Returns a table of the backends' all-reduces, the fastest first."""
    figures = right_columns("time", f"so {nbytes(facts.gradient_nbytes)} take")
    table = Table("backend", *figures, title=f"all-reduce of {nbytes(facts.backends[0].nbytes)} by all ranks")
    for each in sorted(facts.backends, key=lambda one: one.seconds or float("inf")):
        if each.seconds is None:
            table.add_row(each.backend, "failed", "")
        else:
            table.add_row(
                each.backend, duration(each.seconds), duration(each.seconds * facts.gradient_nbytes / each.nbytes)
            )
    return table


def as_record(facts: JobFacts, found: Sequence[Diagnosis], status: int, took_seconds: float) -> dict[str, object]:
    """Returns the report as a JSON object.

    Args:
        facts: Measurements of the job.
        found: Findings as `diagnose` ranks them.
        status: Exit status of the command.
        took_seconds: Length of the examination.
    """
    return {
        "exit_status": status,
        "seconds": took_seconds,
        "findings": [{**to_record(each), **asdict(BASES[each.key])} for each in found],
        "nodes": [{"name": name, "ranks": [each.rank for each in node]}
                  for name, node in zip(facts.names, facts.nodes, strict=True)],
        "verdict": conclusion(facts, found),
        "good_bytes_per_second": facts.good_rate() if facts.pairs else None,
        "facts": to_record(facts),
    }  # fmt: skip

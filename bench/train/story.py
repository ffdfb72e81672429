"""What a comparison of trainings came to, in plain sentences: saved, on which link, what would save more, quality."""

from gradwire.bench.emulation.rate import format_rate
from gradwire.bench.train.train import TrainingResult
from gradwire.comms.plan.advise import LEAST_DISTORTION_FIRST, MOST_OF_IT

WORTH_NAMING = 0.05
"""Another setting is named where it is predicted to save more than this share of the fastest measured step."""


def tell(results: list[TrainingResult], bits_per_second: int) -> list[str]:
    """The story of a run; every figure is of the run itself, and what is predicted says so.

    Args:
        results: Plain DDP first, which the others are compared with.
        bits_per_second: Of each node's link.
    """
    plain, *others = results
    if not others:
        return ["Only one setting ran: there is nothing to compare it with."]
    lines = [_speed(plain, others[0], bits_per_second)]
    lines += [_against(plain, others[0], other) for other in others[1:]]
    if more := _more(plain, others):
        lines.append(more)
    return [*lines, _quality(plain, others)]


def foretell(results: list[TrainingResult], bits_per_second: int) -> list[str]:
    """The story of a run whose links could not be made slow: bytes counted, seconds predicted, none measured.

    Args:
        results: Plain DDP first, which the others are compared with.
        bits_per_second: Of each node's link, as the predictions have it.
    """
    plain, *others = results
    if not others:
        return ["Only one setting ran: there is nothing to compare it with."]
    lines = []
    for other in others:
        before, after = plain.node_nbytes_per_step, other.node_nbytes_per_step
        if before and after is not None:
            lines.append(
                f"{setting(other.hook)}: a node would send {after / 1e6:.2f} MB a step where {setting(plain.hook)} "
                f"DDP sends {before / 1e6:.2f}: {abs(1 - after / before):.0%} {'less' if after <= before else 'more'}."
            )
    seconds = predicted_seconds(results)
    if (exact := seconds.get(plain.hook)) is not None:
        told = ", ".join(
            f"{seconds[other.hook]:.3f} s with {setting(other.hook)} ({exact / seconds[other.hook]:.2f}x as fast)"
            for other in others
            if other.hook in seconds
        )
        lines.append(
            f"Behind links of {_rate(bits_per_second)} a backward pass with its communication is predicted to take "
            f"{exact:.3f} s under plain DDP, {told}: from this run's backward passes and the links' rate, not measured."
        )
    return [*lines, _quality(plain, others)]


def predicted_seconds(results: list[TrainingResult]) -> dict[str, float]:
    """The backward pass with its communication, as predicted, by hook; what nothing is predicted for is left out.

    Args:
        results: Of one run.
    """
    source = next((one for one in results if one.predicted_seconds and one.predicted_plain_seconds), None)
    if source is None or source.predicted_seconds is None or source.predicted_plain_seconds is None:
        return {}
    names = {one.hook: one.hook.partition(":")[2] or "none" for one in results if one.hook.startswith("gradwire")}
    found = {hook: source.predicted_seconds[name] for hook, name in names.items() if name in source.predicted_seconds}
    return {"plain": source.predicted_plain_seconds} | found


def setting(hook: str) -> str:
    """A hook as a user writes it: `gradwire:int8` is what `compressor="int8"` sets."""
    name, _, compressor = hook.partition(":")
    return f'{name} with compressor="{compressor}"' if compressor else name


def _speed(plain: TrainingResult, other: TrainingResult, bits_per_second: int) -> str:
    return (
        f"Behind links of {_rate(bits_per_second)}, {setting(other.hook)} {_took(plain, other)}{_sent(plain, other)}."
    )


def _against(plain: TrainingResult, first: TrainingResult, other: TrainingResult) -> str:
    saved, before = (plain.seconds_per_step - one.seconds_per_step for one in (other, first))
    verdict = "saves more" if saved > max(before, 0.0) else "saves less" if saved > 0 else "saves nothing"
    return f"{setting(other.hook)} {verdict}: it {_took(plain, other)}{_sent(plain, other)}."


def _took(plain: TrainingResult, other: TrainingResult) -> str:
    saved = plain.seconds_per_step - other.seconds_per_step
    what = f"{saved:.3f} s saved" if saved >= 0 else f"{-saved:.3f} s lost"
    return (
        f"took {other.seconds_per_step:.3f} s a step where {setting(plain.hook)} DDP took {plain.seconds_per_step:.3f} "
        f"s: {what}, {plain.seconds_per_step / other.seconds_per_step:.2f}x as fast"
    )


def _sent(plain: TrainingResult, other: TrainingResult) -> str:
    before, after = plain.nic_nbytes_per_step, other.nic_nbytes_per_step
    if not before or after is None:
        return ""
    share = abs(1 - after / before)
    return (
        f"; a node's link carried {after / 1e6:.2f} MB a step instead of {before / 1e6:.2f}, {share:.0%} "
        f"{'less' if after <= before else 'more'}"
    )


def _more(plain: TrainingResult, others: list[TrainingResult]) -> str:
    """Which setting that did not run would save more; empty where nothing was predicted."""
    predicted = next((one.predicted_seconds for one in others if one.predicted_seconds), None)
    if predicted is None:
        return ""
    fastest = min([plain, *others], key=lambda one: one.seconds_per_step)
    ran = {one.hook.partition(":")[2] or "none" for one in others if one.hook.startswith("gradwire")}
    here = predicted.get(fastest.hook.partition(":")[2] or "none", predicted["none"])
    gains = {name: here - seconds for name, seconds in predicted.items() if name not in ran}
    most = max(gains.values(), default=0.0)
    # As `advise` has it: of those that save most of that, the one that changes the gradient least.
    close = [name for name in gains if gains[name] >= MOST_OF_IT * most]
    best = min(close, key=LEAST_DISTORTION_FIRST.index, default="")
    basis = "predicted from the links' rate and this run's backward passes, not run"
    if not best or gains[best] <= WORTH_NAMING * fastest.seconds_per_step:
        return f"No other setting would save much more than {setting(fastest.hook)} ({basis})."
    return (
        f'compressor="{best}" would save another {gains[best]:.3f} s a step ({basis}); it is lossier, so check '
        "the loss of a whole training."
    )


def _quality(plain: TrainingResult, others: list[TrainingResult]) -> str:
    differences = {one.hook: one.final_loss - plain.final_loss for one in others}
    listed = ", ".join(f"{round(value, 4) + 0.0:+.4f} with {setting(hook)}" for hook, value in differences.items())
    worst = max(differences.values())
    held = worst <= plain.loss_deviation
    return (
        f"Quality {'held' if held else 'did not hold'}: the loss ended at {plain.final_loss:.4f} under plain DDP, "
        f"{listed}; {'no more' if held else 'more'} than it varies from step to step ({plain.loss_deviation:.4f}). "
        f"{plain.steps} steps show no more than that: train to the end before you rely on a lossy setting."
    )


def _rate(bits_per_second: int) -> str:
    return format_rate(bits_per_second).replace("gbit", " Gbit/s").replace("mbit", " Mbit/s").replace("kbit", " kbit/s")

"""Describes what a comparison of trainings showed, in plain sentences: what was saved, on which link, the quality."""

from gradwire.bench.train.train import TrainingResult
from gradwire.topology.wording import rate


def summarize(results: list[TrainingResult], bits_per_second: int) -> list[str]:
    """Returns sentences about a run with emulated links; every figure was measured in it.

    Args:
        results: Results by hook; the first, plain DDP, is the baseline.
        bits_per_second: Rate of each node's link.
    """
    plain, *others = results
    if not others:
        return ["Only one setting ran: there is nothing to compare it with."]
    lines = [_speed(plain, others[0], bits_per_second)]
    lines += [_against(plain, others[0], other) for other in others[1:]]
    return [*lines, _quality(plain, others)]


def summarize_prediction(results: list[TrainingResult], bits_per_second: int) -> list[str]:
    """Returns sentences about a run whose links could not be made slow: bytes are counted, seconds predicted.

    Args:
        results: Results by hook; the first, plain DDP, is the baseline.
        bits_per_second: Rate of each node's link that the predictions assume.
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
            f"Behind links of {rate(bits_per_second / 8)} a backward pass with its communication is predicted to take "
            f"{exact:.3f} s under plain DDP, {told}: from this run's backward passes and the links' rate, not measured."
        )
    return [*lines, _quality(plain, others)]


def predicted_seconds(results: list[TrainingResult]) -> dict[str, float]:
    """Returns hook -> predicted seconds of the backward pass with its communication; hooks without one are left out.

    Args:
        results: Results of one run.
    """
    source = next((one for one in results if one.predicted_seconds and one.predicted_plain_seconds), None)
    if source is None or source.predicted_seconds is None or source.predicted_plain_seconds is None:
        return {}
    names = {one.hook: one.hook.partition(":")[2] or "none" for one in results if one.hook.startswith("gradwire")}
    found = {hook: source.predicted_seconds[name] for hook, name in names.items() if name in source.predicted_seconds}
    return {"plain": source.predicted_plain_seconds} | found


def setting(hook: str) -> str:
    """Returns a hook as a user writes it: `gradwire:int8` is what `compressor="int8"` sets."""
    name, _, compressor = hook.partition(":")
    return f'{name} with compressor="{compressor}"' if compressor else name


def _speed(plain: TrainingResult, other: TrainingResult, bits_per_second: int) -> str:
    how = setting(other.hook)
    return f"Behind links of {rate(bits_per_second / 8)}, {how} {_took(plain, other)}{_sent(plain, other)}."


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

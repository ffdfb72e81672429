"""What a running job is told speaks of whole steps, once, and in lines that fit."""

import shutil
import sys
from os import terminal_size
from typing import cast

import pytest
import torch

from gradwire.comms.autotune import job_advice
from gradwire.comms.config import Config
from gradwire.comms.plan.advise import Workload, advise
from gradwire.comms.plan.codec_price import codec_price, square_layout
from gradwire.comms.plan.cost import CodecPrice
from gradwire.comms.plan.machine_cluster import cluster_of_machines, codec_bytes_per_second
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.comms.report import Report, without_repeated_sentences, wrapped
from gradwire.comms.step.stepwatch import Observed
from gradwire.compressors import registry
from gradwire.compressors.kernels import dispatch, reference
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster
from gradwire.topology.presets import strix_halo
from gradwire.topology.wording import ms

NBYTES = 100_000_000
SLOW = uniform_cluster((2, 2), (Level(LEVEL_NAMES[0], Link(4e-6, 5e9)), Level(LEVEL_NAMES[1], Link(50e-6, 125e6))))

EXACT = job_advice.Running("hierarchical", "none")


def prices(cluster: Cluster) -> list[CodecPrice]:
    return [codec_price(name, square_layout(NBYTES), len(cluster.nodes), 1e11) for name in ("int8", "waterfill4")]


def test_the_rest_of_a_step_is_in_every_offer_and_weighs_a_gain() -> None:
    short = advise(SLOW, Workload(NBYTES, 0.1), prices(SLOW))
    long = advise(SLOW, Workload(NBYTES, 0.1, rest_seconds=30.0), prices(SLOW))
    for one, other in zip(short.candidates, long.candidates, strict=True):
        assert other.step_seconds == pytest.approx(one.step_seconds + 30.0)
        assert other.exposed_seconds == one.exposed_seconds
    assert short.recommend.compressor != "none" and "shortens the step from" in short.recommend.why
    assert long.recommend.compressor == "none"  # of half a minute that is less than 5 %


def test_advice_speaks_of_whole_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_advice, "prices", lambda *of: tuple(prices(SLOW)))
    observed = Observed(step_seconds=2.0, backward_seconds=0.3, exposed_seconds=1.4, steps=50)
    found = job_advice.advise_job(SLOW, [NBYTES], observed, "sgd", "gloo", EXACT)
    text = str(found)
    exact = min(
        (e for e in found.advice.candidates if e.compressor == "none" and e.available), key=lambda e: e.step_seconds
    )
    assert exact.step_seconds == pytest.approx(observed.headroom_seconds + exact.exposed_seconds)
    assert "a whole step takes 2000 ms" in text and f"the whole step from {ms(exact.step_seconds)} to" in text
    assert " the step from" not in text


def test_a_large_last_bucket_hides_behind_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an embedding, whose gradient is complete when the backward pass ends; equal buckets hide more."""
    monkeypatch.setattr(job_advice, "prices", lambda *of: tuple(prices(SLOW)))
    observed = Observed(step_seconds=4.0, backward_seconds=3.0, exposed_seconds=0.5, steps=50)

    def exposed(sizes: list[int]) -> float:
        found = job_advice.advise_job(SLOW, sizes, observed, "sgd", "gloo", EXACT)
        return found.advice.candidate("hierarchical").exposed_seconds

    mb = 1_000_000
    assert exposed([1 * mb, 39 * mb, 60 * mb]) > 2 * exposed([25 * mb] * 4)


@pytest.mark.parametrize("running", ["none", "int8", "waterfill4"])
@pytest.mark.parametrize("share", [0.3, 0.9, 1.0, 1.5])
@pytest.mark.parametrize("backward", [0.05, 0.3, 0.6, 5.0])
def test_what_is_recommended_is_never_slower_than_what_runs(
    monkeypatch: pytest.MonkeyPatch, running: str, share: float, backward: float
) -> None:
    """Neither than its steps as observed, nor than they are predicted."""
    monkeypatch.setattr(job_advice, "prices", lambda *of: tuple(prices(SLOW)))
    exposed = next(
        each.exposed_seconds
        for each in advise(SLOW, Workload(NBYTES, backward), prices(SLOW)).candidates
        if each.available and each.compressor == running
    )
    observed = Observed(backward * 1.5 + share * exposed, backward, share * exposed, 50)
    now = job_advice.Running("hierarchical", running)
    found = job_advice.advise_job(SLOW, [NBYTES], observed, "sgd", "gloo", now)
    verdict = found.advice.recommend
    candidates = {
        (each.plan.name, each.compressor): each.step_seconds for each in found.advice.candidates if each.available
    }
    if (verdict.plan, verdict.compressor) == ("hierarchical", running):
        others = [seconds for key, seconds in candidates.items() if key[1] != running]
        assert min(candidates["hierarchical", running], observed.step_seconds) <= 1.06 * min(others)
    else:
        chosen = candidates[verdict.plan, verdict.compressor]
        assert chosen <= observed.step_seconds and chosen <= candidates["hierarchical", running]


def test_what_runs_faster_than_anything_is_predicted_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_advice, "prices", lambda *of: tuple(prices(SLOW)))
    observed = Observed(step_seconds=0.35, backward_seconds=0.3, exposed_seconds=0.0001, steps=50)
    text = str(
        job_advice.advise_job(SLOW, [NBYTES], observed, "sgd", "gloo", job_advice.Running("hierarchical", "int8"))
    )
    assert "recommended: plan hierarchical, compressor int8. Keep what runs" in text and "350 ms" in text
    assert "write: nothing: it is what runs\n" in text


def test_what_to_write_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_advice, "prices", lambda *of: tuple(prices(SLOW)))
    observed = Observed(step_seconds=3.0, backward_seconds=0.01, exposed_seconds=2.9, steps=50)
    found = job_advice.advise_job(SLOW, [NBYTES], observed, "adamw", "gloo", job_advice.Running("hierarchical", "none"))
    compressor = found.advice.recommend.compressor
    assert compressor != "none"
    assert f'write: state = gradwire.HookState(model, compressor="{compressor}")\n' in str(found)
    assert str(found).endswith("not measured")


@pytest.mark.parametrize("high", [3.1, 9.0])
def test_steps_farther_apart_than_what_is_saved_make_the_advice_unsure(
    monkeypatch: pytest.MonkeyPatch, high: float
) -> None:
    """Law: advice that the noise of the steps could turn round says so."""
    monkeypatch.setattr(job_advice, "prices", lambda *of: tuple(prices(SLOW)))
    observed = Observed(3.0, 0.01, 2.9, 50, middle_half=(2.9, high))
    text = str(
        job_advice.advise_job(SLOW, [NBYTES], observed, "adamw", "gloo", job_advice.Running("hierarchical", "none"))
    )
    assert ("not sure: the middle half of these 50 steps took 2900 to 9000 ms" in text) == (high == 9.0), text


def of_amds_cards(case: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether compressors have kernels on this made-up CUDA device: as chosen, or as far as that can be foreseen."""
    monkeypatch.delitem(dispatch.KERNELS_ON, "cuda", raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.0" if case == "rocm" else None)
    if case == "reference":
        monkeypatch.setitem(dispatch.KERNELS_ON, "cuda", cast(dispatch.Kernels, reference))
    return case == "cuda"


@pytest.mark.parametrize("case", ["cuda", "rocm", "reference"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_plans_and_advice_count_torchs_operators_where_there_are_no_kernels(
    case: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a running job and `predict` give a compressor the same price on the same cards."""
    kernels = of_amds_cards(case, monkeypatch)
    machine, layout = strix_halo(), square_layout(NBYTES)
    cluster, rate = cluster_of_machines(machine, nodes, ranks_per_node=2, intra_bits_per_second=80e9), 0.7 * 256e9
    assert codec_bytes_per_second(machine) == pytest.approx(rate)
    predicted = codec_price("int8", layout, 2, rate, kernels=kernels)
    plans = RankPlans(cluster, 0, "cuda", Config(compressor="int8"), registry.make("int8"))
    assert plans.payloads is not None
    price = plans.payloads.price(4 * layout.numel, layout, 2)
    assert price.seconds(NBYTES) == pytest.approx(predicted.seconds(NBYTES))
    plan = plans.chooser.plan(4 * layout.numel, layout)
    if nodes == 1:  # inside a node the slow links alone do not pay for a compressor that is slower still
        assert any(phase.compressor for phase in plan.phases) == kernels
        return
    observed = Observed(step_seconds=2.0, backward_seconds=0.3, exposed_seconds=1.4, steps=50)
    advice = job_advice.advise_job(cluster, [NBYTES], observed, "sgd", "nccl", EXACT).advice
    workload = Workload(NBYTES, 0.3, NBYTES, "sgd", bucket_sizes=(NBYTES,))
    wanted = advise(cluster, workload, [predicted], library="nccl")
    times = [
        min(each.plan.seconds for each in of.candidates if each.compressor == "int8" and each.available)
        for of in (advice, wanted)
    ]
    assert times[0] == pytest.approx(times[1], rel=0.01)


@pytest.mark.parametrize("columns", [60, 100])
def test_lines_are_as_long_as_the_terminal_and_whole_elsewhere(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    text = "short\n" + " ".join(f"word{number}" for number in range(60)) + "\n    0  a row of a table" + " " * 200 + "1"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert wrapped(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: terminal_size((columns, 24)))
    lines = wrapped(text).splitlines()
    assert lines[0] == "short" and lines[-1].startswith("    0")
    assert all(len(line) <= columns for line in lines[:-1]) and all(line.startswith("  ") for line in lines[2:-1])
    assert " ".join(" ".join(lines[1:-1]).split()) == text.splitlines()[1]


def test_a_sentence_that_several_plans_share_is_printed_once() -> None:
    plans = [f"hierarchical, {size} MB predicted to take 3 ms. It is faster than flat. (Chosen.)" for size in (1, 25)]
    assert without_repeated_sentences(plans) == [plans[0], "hierarchical, 25 MB predicted to take 3 ms."]
    text = Report("2 nodes", tuple(plans), (), 3).full()
    assert text.count("It is faster than flat.") == 1 and text.count("predicted to take") == 2

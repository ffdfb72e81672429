"""Laws of what the doctor's findings cost, explain and advise, on recorded jobs."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.bench.doctor import command, show
from gradwire.bench.doctor.checks import REMARK_SHARE, diagnose
from gradwire.bench.doctor.facts import (
    BackendTime,
    ForeignTraffic,
    GpuState,
    InterfaceRate,
    JobFacts,
    ScriptRun,
    UnreachedPair,
)
from gradwire.bench.terminal import STDOUT
from gradwire.cli import predict
from gradwire.topology.fabric import TCP_SHARE
from support.doctor import everywhere, healthy, recorded, slowed

MBIT = 1e6 / 8
HEALTHY = [json.loads(line) for line in Path(__file__).with_name("healthy.jsonl").read_text().splitlines()]
"""Facts of emulated clusters with nothing wrong, a line each: 2-core EPYC VM, loads of 7 to 36, 2026-11-28."""


def job(nodes: int = 2, rate: float = 190 * MBIT, own: float = 2e9, **times: float) -> JobFacts:
    """A job on CPUs whose links have one rate, with 20 MB of gradients, of which each backend took some seconds."""
    facts = everywhere(healthy(3, nodes=nodes, times=3), gpus=(), device="cpu")
    nic = replace(facts.ranks[0].interfaces[1], bits_per_second=None)
    facts = everywhere(facts, interfaces=(facts.ranks[0].interfaces[0], nic))
    rates = (rate, rate)
    return replace(
        facts,
        gradient_nbytes=20_000_000,
        step_seconds=None,
        pairs=tuple(
            replace(pair, one=rates, many=rates, both=rates, lost=(0, 0), latency_seconds=2e-5) for pair in facts.pairs
        ),
        own_bytes_per_second=dict.fromkeys(range(nodes), own),
        backends=tuple(BackendTime(backend=name, nbytes=20_000_000, seconds=took) for name, took in times.items()),
    )


def keys(facts: JobFacts) -> list[str]:
    return [each.key for each in diagnose(facts)]


def test_a_cause_of_milliseconds_explains_no_seconds() -> None:
    """A long way costs 12 ms; the all-reduce takes a second more than the links need."""
    facts = job(gloo=2.1)
    facts = replace(facts, pairs=tuple(replace(pair, latency_seconds=3e-3) for pair in facts.pairs))
    found = {each.key: each for each in diagnose(facts)}
    assert set(found) == {"far_apart", "slow_exchange"}
    assert found["far_apart"].remark and not found["slow_exchange"].remark
    assert found["far_apart"].cost_seconds + found["slow_exchange"].cost_seconds <= 2.1


def test_other_programs_traffic_is_named_and_its_queues_are_no_distance() -> None:
    facts = job(gloo=2.1)
    facts = replace(
        facts,
        pairs=tuple(replace(pair, latency_seconds=5e-3) for pair in facts.pairs),
        foreign=(ForeignTraffic(node=1, interface="eth0", sent=180 * MBIT, received=1e5),),
    )
    (found,) = diagnose(facts)
    assert found.key == "foreign_traffic" and found.nodes == ("node1",) and "180 Mbit/s" in found.evidence[0]
    assert found.cost_seconds <= 2.1 and "--rtt" not in show.conclusion(facts, [found])[1]
    quiet = replace(facts, foreign=(replace(facts.foreign[0], sent=0.01 * 190 * MBIT),))
    assert "foreign_traffic" not in keys(quiet)


def test_no_cost_exceeds_the_all_reduce_that_was_measured() -> None:
    facts = slowed(job(nodes=3, gloo=0.5), 1, 0.05)
    assert [each.cost_seconds for each in diagnose(facts) if each.key == "slow_link"] == [0.5]


@pytest.mark.parametrize("gbit", [1, 10, 30])
@pytest.mark.parametrize("times", [1.2, 3.9, 7.9])
def test_processors_that_are_the_limit_are_no_fault_of_the_links(gbit: float, times: float) -> None:
    """On links without a limit: one connection is a core, and an all-reduce sums and copies."""
    facts = job(rate=gbit * 1e9 / 8, own=min(gbit, 15.0) * 1e9 / 8, gloo=times * 20e6 / (gbit * 1e9 / 8))
    facts = replace(facts, pairs=tuple(replace(p, one=(0.3 * p.many[0],) * 2) for p in facts.pairs))
    assert diagnose(facts) == []
    assert show.conclusion(facts, [])[0].startswith("Nothing found:")


@pytest.mark.parametrize("each", HEALTHY, ids=lambda each: each["cluster"])
def test_a_healthy_cluster_as_recorded_has_nothing_found_and_status_0(each: dict[str, Any]) -> None:
    facts = recorded(each["facts"])
    assert diagnose(facts) == []
    assert show.conclusion(facts, [])[0].startswith("Nothing found:")
    options = argparse.Namespace(json=STDOUT, svg=None)
    assert command._report(facts, options, 1.0) == command.NOTHING


def test_a_slow_second_interface_is_a_remark_and_none_where_a_core_is_the_limit() -> None:
    for share, own, remarks in ((0.25, 2e9, [True]), (0.5, 2e9, [False]), (0.5, 1.9 * 1.5 * 190 * MBIT, [])):
        facts = job(own=own)
        facts = replace(facts, others=(InterfaceRate(a=0, b=1, interface="eth1", bytes_per_second=share * 190 * MBIT),))
        assert [each.remark for each in diagnose(facts) if each.key == "idle_nic"] == remarks, share


def test_what_costs_nothing_is_a_remark_unless_it_stops_the_job() -> None:
    facts = replace(job(), pairs=tuple(replace(pair, clock_seconds=30.0) for pair in job().pairs))
    (found,) = diagnose(facts)
    assert (found.key, found.remark) == ("clocks", True)
    assert command._report(facts, argparse.Namespace(json=STDOUT, svg=None), 1.0) == command.NOTHING
    unreached = replace(facts, unreached=(UnreachedPair(a=0, b=1, error="TimeoutError"),))
    assert [each.remark for each in diagnose(unreached)] == [False, True]


@pytest.mark.parametrize(("library", "status"), [("gradwire", 1), ("torch", 1), ("nccl", 1), ("python", 0)])
def test_unlike_versions_are_a_fault_although_they_cost_nothing(library: str, status: int) -> None:
    """Also of one rank among several of its node."""
    facts = everywhere(job(), versions={library: "2.1"})
    assert diagnose(facts) == [] and len(facts.nodes[1]) > 1
    last = facts.ranks[-1].rank
    ranks = tuple(replace(each, versions={library: "2.0"}) if each.rank == last else each for each in facts.ranks)
    (found,) = diagnose(replace(facts, ranks=ranks))
    assert (found.key, found.remark, found.nodes) == ("versions", not status, ("node1",))
    options = argparse.Namespace(json=STDOUT, svg=None)
    assert command._report(replace(facts, ranks=ranks), options, 1.0) == status


def test_a_backend_that_fails_is_a_fault_and_mpi_s_a_remark() -> None:
    for backend, remark in (("gradwire", False), ("mpi", True)):
        failed = BackendTime(backend=backend, nbytes=4, seconds=None, error="RuntimeError: no", rank=1)
        assert [each.remark for each in diagnose(replace(job(), backends=(failed,)))] == [remark]


def test_other_programs_traffic_comes_before_a_slow_node_whose_cost_is_assumed() -> None:
    facts = job(gloo=2.1)
    work = tuple(replace(healthy(3).work[0], rank=each.rank, again=(0.2,) * 5) for each in facts.nodes[1])
    foreign = ForeignTraffic(node=0, interface="eth0", sent=180 * MBIT, received=1e5)
    assert keys(replace(facts, foreign=(foreign,), work=work)) == ["foreign_traffic", "slow_node"]
    known = replace(facts, foreign=(foreign,), work=work, step_seconds=60.0)
    assert keys(known) == ["slow_node", "foreign_traffic"], "the step was measured"


def test_a_slow_node_and_its_late_rank_are_one_fault() -> None:
    facts = replace(job(nodes=2), step_seconds=0.14)
    facts = replace(facts, ranks=tuple(replace(node[0], rank=place) for place, node in enumerate(facts.nodes)))
    runs = tuple(
        ScriptRun(step_seconds=0.14, activity={"the backward pass": 0.1}, under_way_seconds=under)
        for under in (0.06, 0.02)
    )
    work = tuple(replace(healthy(3).work[0], rank=rank, again=(0.5,) * 5 if rank == 1 else ()) for rank in range(2))
    assert keys(replace(facts, script_runs=runs)) == ["late_rank"]
    assert keys(replace(facts, script_runs=runs, work=work)) == ["slow_node"]


@pytest.mark.parametrize(("unused", "remark"), [(10_000_000, False), (500_000, True), (0, None)])
def test_parameters_without_a_gradient_are_named_with_what_their_zeros_cost(unused: int, remark: bool | None) -> None:
    facts = replace(job(), step_seconds=2.5)
    run = ScriptRun(step_seconds=2.5, activity={"the backward pass": 2.0}, under_way_seconds=1.2, unused_nbytes=unused)
    facts = replace(facts, script_runs=(run,) * len(facts.ranks))
    found = diagnose(facts)
    assert [(each.key, each.remark) for each in found] == [("unused_parameters", remark)] * (unused > 0)
    assert all(each.cost_seconds == facts.exchange_seconds(facts.good_rate()) * unused / 20e6 for each in found)
    used = replace(facts, script_runs=(replace(run, unused_nbytes=0), *facts.script_runs[1:]))
    assert diagnose(used) == [], "one rank uses them, so all exchange their gradients"


def test_what_costs_less_than_a_twentieth_of_a_step_is_a_remark_and_leaves_the_exit_status() -> None:
    facts = slowed(job(nodes=4), 1, 0.65)
    (found,) = diagnose(facts)
    for share, remark in ((0.9 * REMARK_SHARE, True), (1.1 * REMARK_SHARE, False)):
        (each,) = diagnose(replace(facts, step_seconds=found.cost_seconds / share))
        assert each.remark is remark
        options = argparse.Namespace(json=STDOUT, svg=None)
        assert command._report(replace(facts, step_seconds=found.cost_seconds / share), options, 1.0) == (not remark)


def test_nothing_found_is_said_only_after_a_look_at_everything_and_without_loss() -> None:
    facts = job()
    lossy = replace(facts, pairs=tuple(replace(pair, sent=(1000, 1000), lost=(3, 0)) for pair in facts.pairs))
    for each in (lossy, replace(facts, notes=("the script failed",))):
        assert diagnose(each) == []
        assert "Nothing found" not in show.conclusion(each, [])[0]
        alone = replace(each, ranks=each.ranks[:1])
        assert "Nothing found" not in show.conclusion(alone, [])[0]


def test_a_fix_names_no_backend_that_was_slower() -> None:
    for gradwire, named in ((0.5, True), (2.5, False)):
        facts = job(gloo=1.0, gradwire=gradwire)
        facts = replace(facts, pairs=tuple(replace(p, one=(0.3 * p.many[0],) * 2) for p in facts.pairs))
        said = [line for each in diagnose(facts) for line in each.fix if each.key == "single_connection"]
        assert said and any("init_process_group" in line for line in said) is named


def test_of_two_nodes_both_ends_of_a_slow_link_are_named() -> None:
    facts = replace(job(rate=25 * MBIT), link_bytes_per_second=100 * MBIT)
    (found,) = diagnose(facts)
    assert found.title.startswith("The link of one of node0, node1 is") and found.title.endswith("than it should be")
    assert set(found.nodes) == {"node0", "node1"} and "on node0 and node1" in found.fix[0]
    three = replace(job(nodes=3, rate=25 * MBIT), link_bytes_per_second=100 * MBIT)
    three = replace(three, pairs=(replace(three.pairs[0], many=(24 * MBIT,) * 2), *three.pairs[1:]))
    (found,) = diagnose(slowed(three, 2, 0.9))
    assert found.title.startswith("All links are") and found.title.endswith("than they should be")
    assert "on node0, node1 and node2" in found.fix[0]


def test_the_command_at_the_end_is_of_the_mended_links_with_the_way_as_measured() -> None:
    facts = replace(job(), others=(InterfaceRate(a=0, b=1, interface="eth1", bytes_per_second=833 * MBIT),))
    found = diagnose(facts)
    assert [each.key for each in found] == ["wrong_interface"]
    line, typed = show.conclusion(facts, found)
    assert "833 Mbit/s" in line and f"--nic {round(833 / TCP_SHARE)}mbit" in typed
    far = replace(
        facts,
        others=(),
        pairs=tuple(replace(p, latency_seconds=10e-3, sent=(1000, 1000), lost=(7, 0)) for p in facts.pairs),
    )
    assert "--rtt 20ms --loss 0.7%" in show.conclusion(far, diagnose(far))[1]


def test_the_command_for_two_machines_has_a_rank_for_each_usable_core() -> None:
    alone = replace(job(), ranks=(replace(job().ranks[0], cores=2, affinity=(0, 1)),), pairs=(), backends=())
    assert "--nproc-per-node 2 " in show.conclusion(alone, [])[1]


def test_a_slow_path_explains_the_all_reduce_over_it() -> None:
    facts = job(nodes=3, gloo=7.3)
    slow = (30 * MBIT, 30 * MBIT)
    facts = replace(facts, pairs=tuple(replace(p, one=slow, many=slow, both=slow) if (p.a, p.b) == (0, 2) else p
                                       for p in facts.pairs))  # fmt: skip
    facts = replace(facts, backends=(replace(facts.backends[0], seconds=facts.exchange_seconds(30 * MBIT)),))
    assert keys(facts) == ["slow_path"]


@pytest.mark.parametrize(("late", "named"), [(0, False), (1, True)])
def test_a_slow_node_costs_no_more_than_the_script_waited_for_it(late: int, named: bool) -> None:
    facts = replace(job(nodes=3), step_seconds=0.141)
    facts = replace(facts, ranks=tuple(node[0] for node in facts.nodes))
    facts = replace(facts, ranks=tuple(replace(each, rank=rank) for rank, each in enumerate(facts.ranks)))
    runs = tuple(
        ScriptRun(step_seconds=0.141, activity={"the backward pass": 0.1},
                  under_way_seconds=0.02 if rank == late else 0.055)
        for rank in range(3)
    )  # fmt: skip
    work = tuple(replace(healthy(3).work[0], rank=rank, again=(0.5,) * 5 if rank == 1 else ()) for rank in range(3))
    found = {each.key: each for each in diagnose(replace(facts, script_runs=runs, work=work))}
    assert ("slow_node" in found) is named
    if named:
        assert found["slow_node"].cost_seconds == pytest.approx(0.035)


@pytest.mark.parametrize(
    ("count", "under_way", "named"), [(40, 1.9, True), (4, 1.9, True), (3, 1.9, False), (40, 0.846, False)]
)
def test_a_script_that_exchanges_too_often_is_named_with_its_lines(count: int, under_way: float, named: bool) -> None:
    """Law: only for what its exchanges take longer than one of the gradients, which need two buckets."""
    facts = replace(job(), step_seconds=2.5)
    facts = replace(facts, ranks=tuple(replace(node[0], rank=place) for place, node in enumerate(facts.nodes)))
    run = ScriptRun(step_seconds=2.5, activity={"the backward pass": 2.0}, under_way_seconds=under_way,
                    all_reduces={"train.py:9 in <module>": count})  # fmt: skip
    found = diagnose(replace(facts, script_runs=(run, run)))
    assert [each.key for each in found] == ["many_exchanges"] * named
    assert all(each.cost_seconds < under_way and "train.py:9" in each.evidence[1] for each in found)


@pytest.mark.parametrize(
    ("lines", "under_way", "first"),
    [
        ({"train.py:9 in <module>": 8}, 3.4, "several backward passes"),
        ({"train.py:9 in <module>": 40}, 1.2, "small buckets"),
        ({"train.py:9 in <module>": 2, "train.py:12 in <module>": 25}, 3.4, "logging"),
    ],
)
def test_the_likeliest_cause_of_too_many_exchanges_comes_first(
    lines: dict[str, float], under_way: float, first: str
) -> None:
    """Law: a second line makes its own, whole exchanges are passes, and short ones are buckets."""
    facts = replace(job(), step_seconds=5.0)
    run = ScriptRun(step_seconds=5.0, activity={"the backward pass": 2.0}, under_way_seconds=under_way,
                    all_reduces=lines)  # fmt: skip
    (found,) = diagnose(replace(facts, script_runs=(run,) * len(facts.ranks)))
    assert found.key == "many_exchanges" and found.fix[0].startswith(first) and len(found.fix) == 3


def split(facts: JobFacts, step: float, **parts: float) -> JobFacts:
    """A job whose script took so long a step, with the same parts on all ranks, in seconds."""
    activity = {f"the {name} pass": parts[name] for name in ("backward", "forward")} | {"the script itself": 6e-3}
    run = ScriptRun(step_seconds=step, activity=activity, under_way_seconds=parts["exchange"])
    return replace(facts, step_seconds=step, script_runs=(run,) * len(facts.ranks))


UNLIKE = replace(job(nodes=3), pairs=tuple(replace(pair, many=(190 * MBIT, 90 * MBIT)) for pair in job(nodes=3).pairs))


@pytest.mark.parametrize(
    "facts",
    [
        replace(job(), step_seconds=2.5),
        replace(job(gloo=1.2), step_seconds=1.5),
        replace(job(nodes=4, gloo=0.9), step_seconds=1.0),
        replace(UNLIKE, step_seconds=4.0),
        split(job(), 1.16, backward=1.13, forward=0.027, exchange=1.06),
        split(job(), 1.16, backward=1.1, forward=0.5, exchange=0.2),
        *(
            replace(facts, step_seconds=1.5 * facts.plain_exchange_seconds())
            for facts in (recorded(each["facts"]) for each in HEALTHY)
        ),
    ],
)
def test_the_doctor_says_what_the_command_that_it_prints_will_say(
    facts: JobFacts, capsys: pytest.CaptureFixture[str]
) -> None:
    line, typed = show.conclusion(facts, [])
    said = re.search(r"nodes train ([\d.]+) times as much as one with exact sums", line)
    assert predict.main([*typed.removeprefix("Type: gradwire predict ").split(), "--json"]) == 0
    gains = json.loads(capsys.readouterr().out)["against_one_node"]
    assert said is not None and float(said[1]) == pytest.approx(gains["exact"], rel=0.01, abs=0.006)


@pytest.mark.parametrize(
    ("step", "parts", "backward", "rest"),
    [
        (1.16, {"backward": 1.13, "forward": 0.027, "exchange": 1.06}, 0.07, 0.03),
        (1.16, {"backward": 1.10, "forward": 0.040, "exchange": 1.08}, 0.08, 0.06),
        (1.60, {"backward": 1.00, "forward": 0.580, "exchange": 0.70}, 1.00, 0.60),
    ],
)
def test_the_wait_at_the_end_of_a_backward_pass_is_not_computed(
    step: float, parts: dict[str, float], backward: float, rest: float
) -> None:
    assert show.computed_seconds(split(job(), step, **parts)) == pytest.approx((backward, rest))


def test_a_step_under_plain_ddp_holds_the_exchange_of_its_backend_not_the_fastest_there_is() -> None:
    facts = replace(job(gloo=1.2, gradwire=0.8), step_seconds=1.5)
    assert facts.plain_exchange_seconds() == 1.2
    assert show.computed_seconds(facts) == pytest.approx((0.6, 0.3))
    assert show.computed_seconds(replace(facts, step_seconds=1.1)) is None


def test_a_gpu_of_no_preset_is_said_to_be_another_one() -> None:
    for name, said in (("NVIDIA Strange 1", True), ("NVIDIA H100 80GB HBM3", False)):
        facts = everywhere(healthy(3, nodes=2), gpus=(GpuState(index=0, name=name),), device="cuda")
        line, typed = show.conclusion(facts, [])
        assert ("No preset has NVIDIA Strange 1: pcie_box, with NVIDIA A10, stands for them. " in line) is said
        assert f"--preset {'pcie_box' if said else 'dgx_h100'} " in typed

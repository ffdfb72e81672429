"""Laws of the doctor's checks on drawn jobs: nothing is found on a healthy one, and one fault is named first."""

import ast
import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gradwire.__main__ import COMMANDS
from gradwire.bench.compare import options as comparison
from gradwire.bench.doctor import checks, command, show
from gradwire.bench.doctor.checks import diagnose
from gradwire.bench.doctor.checks.basis import BASES
from gradwire.bench.doctor.checks.network import doubtful_pairs
from gradwire.bench.doctor.checks.steps import WASTES
from gradwire.bench.doctor.facts import (
    BackendTime,
    Diagnosis,
    GpuState,
    InterfaceRate,
    JobFacts,
    NetworkInterface,
    UnreachedPair,
)
from gradwire.bench.doctor.script import read_record
from gradwire.bench.emulation import command as emulation
from gradwire.bench.nccl_tests import options
from gradwire.bench.nccl_tests.start import OWN_LAUNCHER
from gradwire.cli import gdr_check, topo
from gradwire.cli.predict import build_parser, read_question
from gradwire.topology.nccl_variables import HARMFUL, NCCL_GUIDE, HarmfulVariable
from support.doctor import everywhere, healthy, interface, on_node, slowed

ROOT = Path(__file__).resolve().parents[3]
SEEDS = range(20)

PUBLIC = re.compile(
    r"github\.com/|user guide|documentation|Documentation/|RFC \d|\(\d\)|reference|release notes|NCCL src/"
    r"|programming guide|, 20\d\d|tuning guide|CUDA semantics"
)
"""What a public source looks like: a repository, a manual, a page of man, a paper."""


def first_pair(facts: JobFacts, **changes: object) -> JobFacts:
    pairs = (replace(facts.pairs[0], times=3, **changes), *facts.pairs[1:])  # type: ignore[arg-type]
    return replace(facts, pairs=pairs)


def all_pairs(facts: JobFacts, change: Callable[[float, float], dict[str, object]]) -> JobFacts:
    """Every pair with other rates, drawn from its own in one direction and the other."""
    pairs = tuple(replace(pair, times=3, **change(*pair.many)) for pair in facts.pairs)  # type: ignore[arg-type]
    return replace(facts, pairs=pairs)


def two_each(facts: JobFacts, round_robin: bool = False) -> JobFacts:
    """The job with two ranks on each node and without GPUs."""
    count = len(facts.nodes)
    first = [node[0] for node in facts.nodes]
    placements = [(rank % count, rank // count) if round_robin else divmod(rank, 2) for rank in range(2 * count)]
    ranks = tuple(
        replace(first[node], rank=rank, local_rank=local, device="cpu", gpus=(), threads=1)
        for rank, (node, local) in enumerate(placements)
    )
    return replace(facts, ranks=ranks, work=tuple(replace(facts.work[0], rank=rank) for rank in range(2 * count)))


def second_interface(facts: JobFacts) -> JobFacts:
    rate = 4 * facts.good_rate()
    return replace(facts, others=(InterfaceRate(a=0, b=1, interface="ib0", bytes_per_second=rate),))


def idle_nic(facts: JobFacts, **variables: str) -> JobFacts:
    """A second NIC with half of the rate of the one in use; on GPUs NCCL is told to leave it out."""
    rate = 0.5 * facts.good_rate()
    others = (InterfaceRate(a=0, b=1, interface="eth1", bytes_per_second=rate),)
    return replace(everywhere(facts, variables=variables or {"NCCL_SOCKET_IFNAME": "=eth0"}), others=others)


def busy(facts: JobFacts, threads: int, ratio: float) -> JobFacts:
    work = tuple(replace(each, threads_seconds=ratio, fair_seconds=1.0) for each in facts.work)
    return replace(everywhere(facts, threads=threads), work=work)


def again(facts: JobFacts, shares: tuple[float, ...]) -> JobFacts:
    slow = {each.rank for each in facts.nodes[1]}
    return replace(facts, work=tuple(replace(each, again=shares) if each.rank in slow else each for each in facts.work))


def lossy(facts: JobFacts, share: float) -> JobFacts:
    """A node loses what it receives, and what TCP does about that halves its rates."""
    slower = slowed(facts, 1, 0.4)
    pairs = tuple(
        replace(pair, lost=(round(4000 * share) if pair.b == 1 else 0, round(4000 * share) if pair.a == 1 else 0))
        for pair in slower.pairs
    )
    return replace(slower, pairs=pairs)


def small_windows(facts: JobFacts) -> JobFacts:
    """Connections of one node with a window of a fifth of what is under way."""
    good = facts.good_rate()
    pairs = tuple(
        replace(pair, one=(good / 5, good / 5), latency_seconds=1.5e-3, window_share=0.9, times=3)
        if 1 in (pair.a, pair.b)
        else replace(pair, latency_seconds=1.5e-3)
        for pair in facts.pairs
    )
    return on_node(replace(facts, pairs=pairs), 1, tcp_window_nbytes=int(2 * good / 5 * 3e-3))


DOCKER = NetworkInterface(name="docker0", kind="bridge", addresses=("172.17.0.1",))

FAULTS: dict[str, tuple[str, Callable[[JobFacts], JobFacts]]] = {
    "one link of four slower": ("slow_link", lambda facts: slowed(facts, 1, 0.4)),
    "all links below the user's word": (
        "slow_link",
        lambda facts: replace(
            all_pairs(facts, lambda a, b: {}),
            link_bytes_per_second=4 * facts.good_rate(),
            own_bytes_per_second={node: 100 * facts.good_rate() for node in range(len(facts.nodes))},
        ),
    ),
    "a slow path": (
        "slow_path",
        lambda facts: first_pair(facts, many=(0.3 * facts.good_rate(),) * 2, one=(0.3 * facts.good_rate(),) * 2,
                                 both=(0.3 * facts.good_rate(),) * 2),
    ),
    "one connection limited": (
        "single_connection", lambda facts: all_pairs(facts, lambda a, b: {"one": (0.3 * a, 0.3 * b)}),
    ),
    "duplex lost": ("half_duplex", lambda facts: all_pairs(facts, lambda a, b: {"both": (0.5 * a, 0.45 * b)})),
    "a link that flaps": ("flapping", lambda facts: interface(facts, 1, link_changes=9)),
    "half duplex by the NIC": ("half_duplex", lambda facts: interface(facts, 1, duplex="half")),
    "another zone": ("far_apart", lambda facts: first_pair(facts, latency_seconds=8e-3)),
    "a far node": (
        "far_apart",
        lambda facts: replace(
            facts,
            pairs=tuple(
                replace(pair, times=3, latency_seconds=8e-3) if 1 in (pair.a, pair.b) else pair for pair in facts.pairs
            ),
        ),
    ),
    "all nodes far apart": (
        "far_apart",
        lambda facts: replace(
            facts, pairs=tuple(replace(pair, times=3, latency_seconds=8e-3) for pair in facts.pairs)
        ),
    ),
    "other MTU": ("mtu", lambda facts: interface(facts, 1, mtu=1400)),
    "packets lost": ("mtu", lambda facts: first_pair(facts, packets_pass=False, packet_nbytes=9000)),
    "all packets lost": (
        "mtu",
        lambda facts: all_pairs(
            facts, lambda a, b: {"packets_pass": False, "packet_nbytes": 9000, "one": (0.0, b / 9), "both": (0.0, 0.0)}
        ),
    ),
    "wrong interface": ("wrong_interface", second_interface),
    "a second NIC idle": ("idle_nic", idle_nic),
    "no such interface": (
        "wrong_interface", lambda facts: everywhere(facts, variables={"GLOO_SOCKET_IFNAME": "ens5"}),
    ),
    "docker0": (
        "wrong_interface",
        lambda facts: replace(
            on_node(facts, 0, interfaces=(*facts.nodes[0][0].interfaces, DOCKER), gloo_interface="docker0",
                    gloo_seen=False, gloo_error="connectFullMesh failed: timed out"),
            pairs=(), backends=(),
        ),
    ),
    "a firewall": (
        "no_connection",
        lambda facts: replace(everywhere(facts, gloo_error="Connection refused", gloo_seen=False), backends=()),
    ),
    "round robin": ("rank_order", lambda facts: two_each(facts, round_robin=True)),
    "one LOCAL_RANK": ("shared_gpu", lambda facts: on_node(two_each(facts), 0, local_rank=0)),
    "small /dev/shm": ("shared_memory", lambda facts: on_node(facts, 1, shm_nbytes=64 << 20, shm_free_nbytes=64 << 20)),
    "full /dev/shm": ("shared_memory", lambda facts: on_node(facts, 1, shm_free_nbytes=1 << 20)),
    "a quota": ("oversubscribed_cores", lambda facts: on_node(facts, 1, cpu_limit=0.5)),
    "bound to one core": (
        "oversubscribed_cores", lambda facts: on_node(two_each(facts), 0, affinity=(3,)),
    ),
    "too many threads": ("oversubscribed_cores", lambda facts: busy(facts, 128, 2.0)),
    "a throttled node": ("slow_node", lambda facts: again(facts, (0.3, 0.9, 0.4, 0.5, 0.2))),
    "a hot GPU": (
        "slow_gpu",
        lambda facts: on_node(
            facts, 1, gpus=(GpuState(index=0, name="H100", sm_mhz=700, max_sm_mhz=1980, slowed_by=("too hot",)),) * 8
        ),
    ),
    "no GPUDirect": (
        "gpudirect", lambda facts: on_node(facts, 1, gdr=(("fail", "peer memory: not loaded", "modprobe"),)),
    ),
    "clocks": ("clocks", lambda facts: first_pair(facts, clock_seconds=-30.0)),
    "other torch": (
        "versions", lambda facts: on_node(facts, 1, versions={**facts.ranks[0].versions, "torch": "2.11.0"}),
    ),
    "a variable": ("variable", lambda facts: everywhere(facts, variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})),
    "a variable of NCCL": ("variable", lambda facts: everywhere(facts, variables={"NCCL_P2P_DISABLE": "1"})),
    "another variable on one node": (
        "variables_differ", lambda facts: on_node(facts, 1, variables={"NCCL_MIN_NCHANNELS": "8"}),
    ),
    "packets lost at random": ("packet_loss", lambda facts: lossy(facts, 0.02)),
    "a small window": ("tcp_buffers", lambda facts: small_windows(facts)),
    "a node that some cannot reach": (
        "unreachable",
        lambda facts: replace(
            facts,
            pairs=tuple(pair for pair in facts.pairs if 1 not in (pair.a, pair.b)),
            unreached=tuple(
                UnreachedPair(a=pair.a, b=pair.b, error="TimeoutError") for pair in facts.pairs if 1 in (pair.a, pair.b)
            ),
        ),
    ),
    "a slow all-reduce": (
        "slow_exchange",
        lambda facts: replace(facts, backends=tuple(replace(e, seconds=3.0, nbytes=1024) for e in facts.backends)),
    ),
    "four lanes under a fast port": (
        "narrow_slot",
        lambda facts: interface(
            facts, 1, bits_per_second=16 * facts.good_rate(), pcie_bits_per_second=8.1 * facts.good_rate()
        ),
    ),
    "GPUs without peers": (
        "no_peer_to_peer",
        lambda facts: on_node(
            facts,
            1,
            device="cpu",
            gpus=tuple(GpuState(index=own, name="RTX 4090", p2p=(2 * (own != 0), 2 * (own != 1))) for own in range(2)),
        ),
    ),
    "a missing rank": ("missing_ranks", lambda facts: replace(facts, missing_ranks=(3,))),
    "a failing backend": (
        "backend_fails",
        lambda facts: replace(
            facts, backends=(BackendTime(backend="nccl", nbytes=4, seconds=None, error="no", rank=1),)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("times", [1, 5])
def test_nothing_is_found_in_a_healthy_job(times: int) -> None:
    for seed in SEEDS:
        facts = healthy(seed, times=times)
        assert diagnose(facts) == [], seed
        assert doubtful_pairs(facts) == [], seed


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_named_first_and_alone(name: str) -> None:
    key, plant = FAULTS[name]
    for seed in SEEDS:
        facts = plant(healthy(seed, nodes=random.Random(seed).choice([4, 5])))
        found = diagnose(facts)
        assert [each.key for each in found][:1] == [key], (seed, found)
        assert {each.key for each in found} == {key}, (seed, found)
        for each in found:
            assert 0 < each.confidence <= 1 and each.cost_seconds >= 0 and each.evidence and each.fix, each


def test_each_finding_says_when_its_fix_holds_and_who_says_so() -> None:
    """Of every call in the checks' own source, so that none is left out, and none is explained that is never found."""
    files = [file for file in Path(checks.__file__).parent.glob("*.py") if file.stem != "basis"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    calls = [each for each in nodes if isinstance(each, ast.Call) and ast.unparse(each.func) == "Diagnosis"]
    keys = [next(each.value for each in call.keywords if each.arg == "key") for call in calls]
    written = {key.value for key in keys if isinstance(key, ast.Constant)}
    handed_on = {ast.unparse(key) for key in keys if not isinstance(key, ast.Constant)}
    assert handed_on == {"each.key"}, "of `WASTES`"
    assert written | {each.key for each in WASTES} == set(BASES)
    for basis in BASES.values():
        assert len(basis.holds.split()) > 4, basis
        assert PUBLIC.search(basis.source) or basis is BASES["variable"], basis
    for rule in HARMFUL:
        assert PUBLIC.search(rule.source) and (not rule.cures or PUBLIC.search(rule.cures)), rule.name


IN_NCCLS_GUIDE = {
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CHECK_POINTERS",
    "NCCL_DEBUG",
    "NCCL_DMABUF_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_IGNORE_CPU_AFFINITY",
    "NCCL_LAUNCH_MODE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR_READ",
    "NCCL_NET_PLUGIN",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_PXN_DISABLE",
    "NCCL_SHM_DISABLE",
}
"""Those with a section there: github.com/NVIDIA/nccl, docs/userguide/source/env.rst, read 2026-11-28."""


def test_a_variable_names_its_own_source() -> None:
    assert {rule.name for rule in HARMFUL if rule.source == NCCL_GUIDE} == IN_NCCLS_GUIDE
    with pytest.raises(TypeError, match="source"):
        HarmfulVariable("NCCL_OF_NOBODY", bool, "it has none")  # type: ignore[call-arg]


def test_the_report_says_them_under_each_fix_within_the_terminal() -> None:
    facts = FAULTS["a missing rank"][1](healthy(3, nodes=2))
    console = Console(width=72)
    with console.capture() as capture:
        show.print_report(facts, diagnose(facts), console, 20.0)
    lines = capture.get().splitlines()
    said = [line for line in lines if line.startswith("   if:   ")]
    assert len(said) == len(diagnose(facts)) and all(len(line) <= 72 for line in said)
    record = show.as_record(facts, diagnose(facts), 1, 20.0)
    assert all(each["holds"] and each["source"] for each in record["findings"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("variables", "idle_on_cpus", "idle_on_gpus"), [
    ({"GRADWIRE_HOOK": "int8"}, True, False),
    ({"GRADWIRE_HOOK": "int8", "GLOO_SOCKET_IFNAME": "eth0"}, True, False),
    ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, False, False),
    ({"NCCL_SOCKET_IFNAME": "eth"}, True, False),
    ({"NCCL_SOCKET_IFNAME": "^eth1"}, True, True),
])  # fmt: skip
def test_a_nic_that_something_sends_over_is_not_idle(
    variables: dict[str, str], idle_on_cpus: bool, idle_on_gpus: bool
) -> None:
    seen = set()
    for seed in SEEDS:
        facts = idle_nic(healthy(seed, nodes=2), **variables)
        found = [each for each in diagnose(facts) if each.key == "idle_nic"]
        assert bool(found) == (idle_on_gpus if facts.has_gpus else idle_on_cpus), seed
        assert all(
            re.match(r"eth1 stands idle: with it the nodes would have 1\.[456] times", each.title) for each in found
        )
        said = " ".join(line for each in found for line in each.fix)
        assert facts.has_gpus or bool(found) == ("bond0" in said and "mptcp endpoint" in said)
        seen.add(facts.has_gpus)
    assert seen == {True, False}


def test_rings_across_nics_of_unlike_networks_are_doubted() -> None:
    for seed in SEEDS:
        facts = everywhere(healthy(seed, nodes=2), variables={"NCCL_CROSS_NIC": "1"})
        assert diagnose(facts) == [], seed
        second = NetworkInterface(name="eth1", kind="nic", addresses=("10.1.0.1",))
        two = everywhere(facts, interfaces=(*facts.ranks[0].interfaces, second))
        assert [each.key for each in diagnose(two)] == ["variable"] * two.has_gpus, seed


@pytest.mark.parametrize("name", [
    "one link of four slower", "one connection limited", "duplex lost", "round robin", "wrong interface", "other MTU"
])  # fmt: skip
def test_twice_the_gradients_cost_twice_as_much(name: str) -> None:
    for seed in SEEDS:
        facts = FAULTS[name][1](healthy(seed, nodes=4))
        twice = replace(facts, gradient_nbytes=2 * facts.gradient_nbytes)
        assert diagnose(twice)[0].cost_seconds == pytest.approx(2 * diagnose(facts)[0].cost_seconds)
        assert diagnose(facts)[0].cost_seconds > 0


def test_what_was_seen_once_is_doubted_before_it_is_named() -> None:
    """A try that a busy machine spoiled: the pair is measured again, and the better try counts."""
    for seed in SEEDS:
        good = healthy(seed, nodes=4)
        for name in (
            "duplex lost",
            "one connection limited",
            "a slow path",
            "another zone",
            "packets lost",
            "all nodes far apart",
        ):
            bad = FAULTS[name][1](good)
            once = replace(bad, pairs=tuple(replace(pair, times=1) for pair in bad.pairs))
            assert diagnose(once) == [], (name, seed)
            assert doubtful_pairs(once), (name, seed)
            mended = tuple(
                pair.better(other) if pair != other else pair
                for pair, other in zip(once.pairs, good.pairs, strict=True)
            )
            assert doubtful_pairs(replace(once, pairs=mended)) == []


def test_findings_come_in_the_order_of_what_stops_faults_remarks_and_of_cost_times_confidence() -> None:
    draw = random.Random(7)
    for seed in SEEDS:
        facts = healthy(seed, nodes=4)
        for name in draw.sample(
            ["one link of four slower", "other MTU", "a quota", "clocks", "a variable", "a missing rank"], 3
        ):
            facts = FAULTS[name][1](facts)
        found = diagnose(facts)
        assert len(found) >= 2, seed

        def kind(each: Diagnosis, known: bool = facts.step_seconds is not None) -> tuple[bool, bool, bool]:
            return not each.stops, each.remark, not known and each.key in checks.OF_THE_COMPUTATION

        assert [kind(each) for each in found] == sorted(map(kind, found)), seed
        for _, group in itertools.groupby(found, kind):
            weights = [each.cost_seconds * each.confidence for each in group]
            assert weights == sorted(weights, reverse=True), seed


def test_a_variable_for_gpus_costs_nothing_where_there_are_none() -> None:
    for seed in SEEDS:
        facts = everywhere(healthy(seed), variables={"NCCL_IB_DISABLE": "1"})
        assert (diagnose(facts)[0].cost_seconds > 0) == facts.has_gpus


def test_a_link_is_not_blamed_for_what_this_program_cannot_move() -> None:
    """A NIC of 400 Gbit/s, and a program that moves 20 Gbit/s inside a node: nothing is known of the NIC."""
    for seed in SEEDS:
        facts = healthy(seed, nodes=3, times=3)
        rate = facts.good_rate()
        for node in range(3):
            facts = interface(facts, node, bits_per_second=100 * rate * 8)
        assert diagnose(replace(facts, own_bytes_per_second=dict.fromkeys(range(3), 1.5 * rate))) == []
        assert [each.key for each in diagnose(replace(facts, own_bytes_per_second={}))] == ["slow_link"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_P2P_LEVEL", "LOC"),
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NCCL_MAX_CTAS", "1"),
        ("NCCL_MAX_NCHANNELS", "2"),
        ("NCCL_NET", "Socket"),
        ("NCCL_NET_PLUGIN", "none"),
        ("NCCL_NET_GDR_LEVEL", "LOC"),
        ("NCCL_NET_GDR_READ", "0"),
        ("NCCL_ALGO", "Ring"),
        ("NCCL_PROTO", "Simple"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("NCCL_BUFFSIZE", "262144"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
    ],
)
def test_a_variable_that_may_be_the_cure_is_tried_before_it_is_taken_away(name: str, value: str) -> None:
    found = [each for each in diagnose(everywhere(healthy(0), variables={name: value})) if each.key == "variable"]
    assert len(found) == 1 and found[0].confidence <= 0.6
    assert not any(line.startswith("unset") for line in found[0].fix)
    assert any("short run without it" in line and f"env -u {name}" in line for line in found[0].fix)
    assert any(
        "wanted here" in line
        and any(where in line for where in ("github.com", "guide", "release notes", "documentation"))
        for line in found[0].evidence
    )


@pytest.mark.parametrize(
    ("exchanges", "said"),
    [(1.02, "One node alone trains more, unless a compressor"), (1e3, None), (None, None), (0.5, None)],
)
def test_where_no_exchange_of_gradients_pays_the_verdict_says_so(exchanges: float | None, said: str | None) -> None:
    """A step that lasts so many exchanges; one that is shorter than its own exchange says nothing."""
    facts = replace(healthy(3, nodes=2), gradient_nbytes=10**9)
    exchange = facts.plain_exchange_seconds()
    facts = replace(facts, step_seconds=None if exchanges is None else exchanges * exchange)
    line = show.conclusion(facts, [])[0]
    assert (said in line) if said is not None else ("alone trains more" not in line)


def test_what_costs_nothing_has_not_to_be_mended_first_and_commands_stay_in_one_line() -> None:
    facts = everywhere(healthy(3, nodes=2), gpus=(), device="cpu", variables={"NCCL_NVLS_ENABLE": "0"})
    found = diagnose(facts)
    assert [each.cost_seconds for each in found] == [0.0]
    assert show.conclusion(facts, found)[0].startswith("Nothing found that costs a twentieth of a step")
    console = Console(width=60)
    with console.capture() as capture:
        show.print_report(facts, found, console, 20.0)
    lines = capture.get().splitlines()
    assert any(
        line.startswith("   do:   keep it until") and line.endswith("env -u NCCL_NVLS_ENABLE ...") for line in lines
    )
    assert lines[-1].startswith("Type: gradwire predict") and "--gradient-mb" in lines[-1]
    seen = [number for number, line in enumerate(lines) if line.startswith("   seen: ")]
    between = lines[seen[0] : next(number for number, line in enumerate(lines) if line.startswith("   do: "))]
    assert all(line.startswith((" " * 9, "   seen: ")) for line in between)


def test_the_node_that_all_bad_pairs_share_is_named() -> None:
    """And of the others nothing is said: what loses packets is slow, but slow is not what is wrong with it."""
    for seed in SEEDS:
        good = healthy(seed, nodes=4, times=3)
        assert diagnose(lossy(good, 0.02))[0].nodes == ("node1",)
        assert diagnose(small_windows(good))[0].nodes == ("node1",)
        far = replace(
            good, pairs=tuple(replace(p, latency_seconds=25e-3) if 2 in (p.a, p.b) else p for p in good.pairs)
        )
        found = diagnose(far)
        assert [each.nodes for each in found] == [("node2",)] and "node2 is far" in found[0].title
        assert "25 ms" in found[0].title and "25 ms" not in found[0].evidence[0]
        halves = replace(
            good,
            pairs=tuple(
                replace(p, one=(p.one[0] / 4,) * 2, many=(p.many[0] / 4,) * 2, both=(p.both[0] / 4,) * 2)
                if (p.a, p.b) in ((0, 1), (1, 2))
                else p
                for p in good.pairs
            ),
        )
        slow = diagnose(halves)
        assert [each.key for each in slow] == ["slow_path"] and slow[0].nodes == ("node1",)
        assert "node0 and node2" in slow[0].title


def test_loss_is_named_only_where_enough_was_lost() -> None:
    for seed in SEEDS:
        good = healthy(seed, nodes=2, times=3)
        for lost, named in ((3, False), (4, True), (80, True)):
            facts = replace(good, pairs=(replace(good.pairs[0], lost=(lost, 0), sent=(4000, 4000)),))
            assert bool(diagnose(facts)) is named, (seed, lost)
        assert diagnose(replace(good, pairs=(replace(good.pairs[0], lost=(80, 0), sent=(4000, 4000), times=1),))) == []


def test_a_window_that_the_kernel_would_let_grow_is_not_blamed() -> None:
    for seed in SEEDS:
        facts = everywhere(small_windows(healthy(seed, nodes=4)), tcp_window_nbytes=1 << 30, tcp_send_nbytes=1 << 30)
        assert "tcp_buffers" not in [each.key for each in diagnose(facts)]


@pytest.mark.parametrize("launcher", ["torchrun", "srun", OWN_LAUNCHER])
def test_of_a_rank_that_is_late_it_is_said_whether_it_has_started(launcher: str) -> None:
    facts = replace(
        healthy(0), missing_ranks=(3, 5), started_ranks={5: "node7"}, launcher=launcher, waited_seconds=300.0
    )
    started, absent = sorted((e for e in diagnose(facts) if e.key == "missing_ranks"), key=lambda each: each.confidence)
    assert started.title == "Rank 5 started on node7, and did not finish importing torch" and started.nodes == (
        "node7",
    )
    assert absent.title == "Rank 3 did not come" and "300 s" in absent.evidence[0]
    said = " ".join((*absent.evidence, *absent.fix))
    assert ("no firewall" in said) is (launcher == "torchrun") and ("nc -zv" in said) is (launcher != "torchrun")


def test_threads_that_differ_are_counted_as_they_are() -> None:
    facts = busy(two_each(healthy(1, nodes=4)), 2, 2.0)
    first = facts.nodes[0][0].rank
    facts = replace(
        facts, ranks=tuple(replace(e, threads=1, affinity=(0, 1)) if e.rank == first else e for e in facts.ranks)
    )
    text = " ".join(line for each in diagnose(facts) if each.key == "oversubscribed_cores" for line in each.evidence)
    assert "2 ranks with 1 to 2 threads each are 3 threads" in text or "2 ranks with 2 threads each are 4" in text


def test_two_halves_of_one_port_are_told_from_a_narrow_slot() -> None:
    facts = interface(
        healthy(0, nodes=2), 0, bits_per_second=200e9, pcie_bits_per_second=126e9, other_half="enP2p1s0f0np0"
    )
    found = next(each for each in diagnose(facts) if each.key == "narrow_slot")
    assert "eth0 of node0 is half of its port: 126 Gbit/s of 200 Gbit/s" in found.title
    assert all("slot" not in line for line in found.fix) and "enP2p1s0f0np0" in " ".join(found.fix)


def test_peer_to_peer_that_is_switched_off_costs_nothing_where_there_is_none() -> None:
    for states, costs in (((0, 2), False), ((0, 0), True)):
        gpus = tuple(GpuState(index=i, name="RTX 4090", p2p=states if i == 0 else states[::-1]) for i in range(2))
        facts = everywhere(healthy(0), gpus=gpus, device="cuda", variables={"NCCL_P2P_DISABLE": "1"})
        found = next(each for each in diagnose(facts) if each.key == "variable")
        assert (found.cost_seconds > 0) is costs
        assert any("costs nothing" in line for line in found.evidence) is not costs


def trays(facts: JobFacts, *domains: str) -> JobFacts:
    """The job on GPUs, whose nodes are hosts of these NVLink domains."""
    for node, domain in enumerate(domains):
        gpus = tuple(GpuState(index=i, name="NVIDIA GB200", nvlink_domain=domain or None) for i in range(8))
        facts = on_node(facts, node, gpus=gpus, device="cuda")
    return facts


@pytest.mark.parametrize("name", [name for name, (key, _) in FAULTS.items() if key in checks.OF_THE_CARDS])
def test_tcp_between_trays_of_one_nvlink_domain_is_not_the_way_of_gradients(name: str) -> None:
    """NVL72: cards of a tray carry the start, data and checkpoints; what stops these is still named."""
    key, plant = FAULTS[name]
    for seed in SEEDS[:5]:
        facts = plant(healthy(seed, nodes=4))
        facts = trays(facts, *["aa/1"] * len(facts.nodes))
        found = diagnose(facts)
        assert all(each.stops for each in found if each.key == key), (seed, found)
        assert not facts.pairs or "NVLink carries the gradients of all 4 nodes" in show.conclusion(facts, found)[0]
        assert "none of the links below" in " ".join(show.headline(facts))


def test_between_nvlink_domains_the_links_count() -> None:
    facts = slowed(trays(healthy(3, nodes=4), "aa/1", "aa/1", "aa/2", "aa/2"), 1, 0.1)
    assert [each.key for each in diagnose(facts)][:1] == ["slow_link"]
    fast = healthy(3, nodes=4, times=3)
    slow = {"times": 3, "one": (1e6, 1e6), "many": (1e6, 1e6), "both": (1e6, 1e6)}
    inside = tuple(replace(pair, **slow) if pair.a // 2 == pair.b // 2 else pair for pair in fast.pairs)  # type: ignore[arg-type]
    assert diagnose(trays(replace(fast, pairs=inside), "aa/1", "aa/1", "aa/2", "aa/2")) == []
    assert [each.key for each in diagnose(trays(replace(fast, pairs=inside), "", "", "", ""))] == ["slow_path"]


@pytest.mark.parametrize(("ways", "words"), [((1, 0), "sends"), ((0, 1), "receives"), ((1, 1), "")])
def test_loss_says_how_much_and_on_which_way(ways: tuple[int, int], words: str) -> None:
    """Law: a share is a percentage, above one percent and below; the side of a NIC that loses is named."""
    facts = healthy(0, nodes=4)
    for share, title in ((0.004, "0.4 % of the packets"), (0.02, "2 % of the packets")):
        out, back = (round(4000 * share) * way for way in ways)
        pairs = tuple(
            replace(pair, lost=((out, back) if pair.a == 1 else (back, out)) if 1 in (pair.a, pair.b) else (0, 0))
            for pair in slowed(facts, 1, 0.4).pairs
        )
        found = next(each for each in diagnose(replace(facts, pairs=pairs)) if each.key == "packet_loss")
        assert found.title.startswith(title)
        assert found.evidence[-1].endswith(f"each time of what it {words}" if words else "pairs that lose packets")


@pytest.mark.parametrize(("latency_seconds", "found"), [(1e-4, True), (2e-2, False)])
def test_loss_that_would_have_held_a_connection_back_is_none_where_it_did_not(
    latency_seconds: float, found: bool
) -> None:
    """Law: a connection over a long way that is as fast as the link has lost what its own start overran."""
    facts = healthy(0, nodes=3)
    good = facts.good_rate()
    pairs = tuple(
        replace(
            pair,
            times=3,
            latency_seconds=latency_seconds,
            one=(good, good),
            many=(good, good),
            both=(good, good),
            sent=(12_000, 12_000),
            lost=(50, 0),
        )
        for pair in facts.pairs
    )
    assert ("packet_loss" in {each.key for each in diagnose(replace(facts, pairs=pairs))}) == found


@pytest.mark.parametrize(("steps", "split"), [(4, False), (5, True)])
def test_a_script_that_ends_early_has_no_split_of_other_steps(steps: int, split: bool, tmp_path: Path) -> None:
    """Law: where a step's time goes is said of the steps that its length is of."""
    record = tmp_path / "steps"
    record.write_text("".join(f"100 {number} 0\n" for number in range(steps)))
    Path(f"{record}.split").write_text(json.dumps({"activity": {"backward": 40.0}}))
    found = read_record(record, 0, False, [])
    assert (found.step_seconds, bool(found.activity)) == (1.0, split)


COMMAND = re.compile(r"\bgradwire ([a-z][a-z-]+)\b(?!=)((?: +[^\s#`;]+)*)")
PARSERS: dict[str, Callable[[list[str]], object]] = {
    "predict": lambda words: read_question(build_parser().parse_naming(words, "--topology")),
    "doctor": lambda words: command.parser().parse_args(words),
    "bench": options.parse,
    "gdr-check": lambda words: gdr_check.parser().parse_args(words),
    "topo": lambda words: topo.parser().parse_args(words),
    "emulate": lambda words: emulation.build_parser().parse_args(words),
    "compare": lambda words: comparison.build_parser().parse_args(words),
}


def typed(text: str) -> list[list[str]]:
    """The commands of gradwire in a text: the words of those with options, the first word of others."""
    found = [(match[1], match[2].split()) for match in COMMAND.finditer(text)]
    return [[name, *(words if any(word.startswith("-") for word in words) else [])] for name, words in found]


def check_typed(text: str) -> int:
    """Parses the commands of a text as they stand; returns their number."""
    found = [words for words in typed(text) if words[0] in COMMANDS]
    for name, *words in found:
        if words:
            PARSERS[name](words)
    return len(found)


def test_every_command_that_a_report_prints_is_one_that_gradwire_takes() -> None:
    """Of each kind of fault, of a job on GPUs and one without, and of one machine alone."""
    count = 0
    for seed in SEEDS[:2]:
        for _, fault in FAULTS.values():
            facts = fault(healthy(seed, nodes=4))
            found = diagnose(facts)
            text = "\n".join([*(line for each in found for line in (*each.fix, *each.evidence)),
                              *show.conclusion(facts, found)])  # fmt: skip
            count += check_typed(text)
            count += check_typed("\n".join(show.conclusion(replace(facts, ranks=facts.ranks[:1], pairs=()), [])))
    assert count > 2 * len(FAULTS)


def test_the_command_for_a_job_on_gpus_has_their_machine() -> None:
    for name, preset in (("NVIDIA H100 80GB HBM3", "dgx_h100"), ("NVIDIA A100-SXM4-40GB", "dgx_a100"),
                         ("NVIDIA GB200", "gb200_nvl72"), ("Tesla T4", "pcie_box")):  # fmt: skip
        gpus = (GpuState(index=0, name=name),)
        facts = everywhere(healthy(1, nodes=2), gpus=gpus, device="cuda")
        assert f"--preset {preset} " in show.conclusion(facts, [])[1]


ADVISING = ("bench/doctor", "bench/selftest", "bench/compare", "topology", "gradwire/cli", "comms")


def test_every_command_in_a_message_is_one_that_gradwire_takes() -> None:
    count = 0
    for file in (file for folder in ADVISING for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        # Neither docstrings nor pieces of a line that is put together.
        others = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        others |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
                try:
                    count += check_typed(node.value.replace("...", ""))
                except (SystemExit, ValueError) as error:
                    raise AssertionError(f"{file}:{node.lineno}: {node.value!r}") from error
    assert count > 30

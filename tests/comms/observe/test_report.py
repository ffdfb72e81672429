"""What the hook prints: the plan once, sizes as ranges, 80 columns, five lines, and all of it on request."""

from dataclasses import replace

import pytest

from gradwire.comms.plan.plan import describe_plans, summarise_plans
from gradwire.comms.plan.planner import plan_all_reduce
from gradwire.comms.report import COLUMNS, SLOW_LINK, Report, Straggler
from gradwire.comms.run.phase_stats import PhaseTotals
from gradwire.topology.cluster import Cluster, Link
from support.simulate import two_level_cluster

LEVEL_NAMES = ("intra_node", "inter_node")
SIZES = (700_000, 9_000_000, 26_214_400)


def cluster(presumed: bool = False) -> Cluster:
    inside, outside = (Link(alpha, rate, presumed=presumed) for alpha, rate in ((20e-6, 5e9), (100e-6, 25e6)))
    return two_level_cluster([0, 0, 1, 1], inside, outside)


def cluster_of_one() -> Cluster:
    return two_level_cluster([0], Link(20e-6, 5e9), Link(100e-6, 25e6))


def report(presumed: bool = False, **found: object) -> Report:
    where = cluster(presumed)
    plans = [plan_all_reduce(where, nbytes) for nbytes in SIZES]
    rows = (
        PhaseTotals(0, "reduce_scatter", "intra_node", 20, 40_000_000, 20e6, 0.2),
        PhaseTotals(1, "all_reduce", "inter_node", 20, 20_000_000, 20e6, 4.0),
    )
    return Report(
        where.describe(),
        describe_plans(plans, LEVEL_NAMES),
        rows,
        30,
        10,
        ("links: 40 Gbit/s intra_node (given), 200 Mbit/s inter_node (given)", "NIC by local rank: " + "mlx5_0, " * 30),
        summary=summarise_plans(plans, LEVEL_NAMES),
        ranks=4,
        node_ranks=2,
        **found,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("presumed", [False, True])
def test_buckets_of_other_sizes_are_one_paragraph(presumed: bool) -> None:
    plans = [plan_all_reduce(cluster(presumed), nbytes) for nbytes in SIZES]
    assert {plan.name for plan in plans} == {"hierarchical"}
    assert len({plan.describe(LEVEL_NAMES) for plan in plans}) == len(SIZES)
    (text,) = describe_plans(plans, LEVEL_NAMES)
    assert text.startswith("hierarchical: reduce_scatter intra_node")
    assert "0.7 to 26.2 MB predicted" in text and text.lower().count("faster than a flat ring") == 1
    assert ("its time is not known" in text) == presumed
    assert describe_plans(plans[:1], LEVEL_NAMES) == (plans[0].describe(LEVEL_NAMES),)


def test_other_plans_keep_paragraphs_of_their_own() -> None:
    flat, hierarchical = (plan_all_reduce(cluster(), SIZES[0], name=name) for name in ("flat", "hierarchical"))
    texts = describe_plans([flat, hierarchical, flat], LEVEL_NAMES)
    assert [text.partition(":")[0] for text in texts] == ["flat", "hierarchical"]
    assert "flat for 0.7 MB" in summarise_plans([flat, hierarchical], LEVEL_NAMES)[0]
    assert summarise_plans([], LEVEL_NAMES) == ()


def test_a_report_is_five_lines_and_all_of_it_on_request() -> None:
    short, full = str(report()).splitlines(), report().full().splitlines()
    assert len(short) == 5 and max(map(len, [*short, *full])) <= COLUMNS
    assert short[2].startswith("plan: hierarchical for 0.7 to 26.2 MB in ")
    assert "sent to other nodes: 2 MB a step and rank (gloo's ring 3)" in short[4] and "full()" in short[4]
    assert "reduce_scatter" in " ".join(full) and "mlx5_0" in " ".join(full)
    assert len(full) > 8


def test_one_rank_reads_that_it_exchanges_nothing() -> None:
    where = cluster_of_one()
    plans = [plan_all_reduce(where, nbytes) for nbytes in SIZES]
    texts = describe_plans(plans, LEVEL_NAMES), summarise_plans(plans, LEVEL_NAMES)
    assert texts == (
        ("flat: nothing to do. There is one rank: nothing is sent.",),
        ("plan: nothing to do", "why: There is one rank: nothing is sent."),
    )
    alone = Report(where.describe(), texts[0], (), 30, 10, summary=texts[1], one_node=True, alone=True)
    short, full = str(alone).splitlines(), alone.full().splitlines()
    assert short[0] == full[0] == "1 node x 1 rank; 30 all-reduces in 10 steps"
    assert short[-1] == full[-1] and short[-1].startswith("one rank exchanges nothing: torchrun ")
    assert "phase" not in alone.full() and max(map(len, [*short, *full])) <= COLUMNS


def test_what_is_wrong_stands_below_the_five_lines() -> None:
    late = Straggler(SLOW_LINK, (2, 3), "node-b", 0.2, 0.4, 31, phase="all_reduce inter_node")
    lines = str(report(stragglers=(late,), stall="rank 5 on node b has not reached bucket 7, 12 s late")).splitlines()
    assert max(map(len, lines)) <= COLUMNS and len(lines) > 6
    assert any(line.startswith("waited for: ranks 2, 3") or "waited for: rank 2, 3" in line for line in lines)
    assert any(line.startswith("last stall: rank 5") for line in lines)


def test_a_line_that_is_too_long_ends_with_a_sentence_and_one_node_sends_nothing_to_others() -> None:
    whole = "why: Nothing to save. (Chosen for buckets of 26.2 MB, and used for all sizes.)"
    alone = replace(report(), one_node=True, summary=(whole,))
    lines = str(alone).splitlines()
    assert len(whole) <= COLUMNS and whole in lines
    assert any("inside the node" in line for line in lines) and not any("to other nodes" in line for line in lines)
    assert "why: Nothing to save." in str(replace(alone, summary=(f"{whole} More.",))).splitlines()

"""Laws of elastic training over drawn histories: losses, joins, freezes, partitions, on the real protocol.

The membership, the ring and the survivor are those of the product, in simulated time; see `simulated.simulation`.
"""

import random
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.comms.bootstrap.liveness import FROZEN_SECONDS
from gradwire.comms.elastic.membership import SILENCE_SECONDS
from gradwire.comms.elastic.resilient_ops import MOST_REPEATS
from simulated.job import COMPUTING_SECONDS, Job
from simulated.simulation import STARTED, Simulation, simulated

STEPS = 8
END_SECONDS = 300.0
"""A history has ended by then: three leaders lost over an agreement, and each of those waits."""

SHORT = ("loss", "freeze", "partition")
SHORT_SECONDS = 3.0
"""A pause that nobody may take for an end: shorter than the silence after which a rank is given up."""


@dataclass(frozen=True)
class Event:
    """What befalls a job."""

    kind: str
    after: float
    whom: int
    seconds: float


def events(kinds: tuple[str, ...], most: int) -> st.SearchStrategy[list[Event]]:
    each = st.builds(
        Event,
        st.sampled_from(kinds),
        st.floats(0.0, 4.0, allow_nan=False),
        st.integers(0, 7),
        st.sampled_from((0.2, 1.0, SHORT_SECONDS)),
    )
    return st.lists(each, max_size=most)


def play(
    seed: int,
    hosts: str,
    joining: dict[int, list[str]],
    history: list[Event],
    failing: dict[tuple[str, int], int] | None = None,
    doomed: dict[str, int] | None = None,
) -> tuple[Job, set[str]]:
    """Plays a history to its end; the job, and the names of those that nothing has ended."""
    simulation = Simulation(random.Random(seed))
    simulation.store_host = hosts[0]
    with simulated(simulation):
        job = Job(simulation, hosts, STEPS, joining)
        job.failing.update(failing or {})
        job.doomed.update(doomed or {})
        ended: set[str] = set(doomed or {})
        for event in history:
            simulation.at(event.after, partial(befall, job, event, ended))
        simulation.play(END_SECONDS)
    return job, set(job.started) - ended


def befall(job: Job, event: Event, ended: set[str]) -> None:
    simulation = job.simulation
    alive = sorted(name for name in job.started if name not in ended and not job.diaries[name].finished)
    if not alive:
        return
    name = alive[event.whom % len(alive)]
    process = simulation.processes[name]
    if event.kind == "loss":
        if len(alive) > 1:
            ended.add(name)
            simulation.kill(process)
    elif event.kind == "dark host":
        if process.host != simulation.store_host:
            job.dark.add(process.host)
            ended.update(each for each in alive if job.hosts[each] == process.host)
            simulation.lose_host(process.host)
    elif event.kind == "freeze":
        process.frozen = True
        simulation.at(simulation.now - STARTED + event.seconds, lambda: setattr(process, "frozen", False))
    else:
        hosts = sorted({job.hosts[each] for each in alive})
        others = [host for host in hosts if host != process.host]
        for other in others:
            simulation.part(process.host, other)
            simulation.at(simulation.now - STARTED + event.seconds, partial(heal, job, process.host, other))


def heal(job: Job, host: str, other: str) -> None:
    """Joins two hosts again, unless one of them has gone dark meanwhile."""
    if not job.dark & {host, other}:
        job.simulation.heal(host, other)


def check(job: Job, living: set[str]) -> None:
    """The laws that hold whatever has happened."""
    by_generation: dict[int, set[tuple[str, ...]]] = {}
    for diary in job.diaries.values():
        for view in diary.views:
            by_generation.setdefault(view.generation, set()).add(view.members)
    assert all(len(members) == 1 for members in by_generation.values()), by_generation
    steps: dict[int, list[dict[str, int]]] = {}
    for name, diary in job.diaries.items():
        for step, counts in diary.applied.items():
            # Who was given up may have ended a step that the others, which do not know it, have made again without it.
            if diary.given_up is None or step < max(diary.applied):
                steps.setdefault(step, []).append(counts)
            first = min(diary.applied)
            assert set(counts.values()) == {1}, f"a gradient of step {step} counts twice: {counts}"
            assert name in counts or step < first, f"{name} has trained step {step}, and its gradient is lost"
    # Who has come to the end of the training leaves: a result that a lost rank was to hand on may be gone with them.
    equal = {step: counts for step, counts in steps.items() if step < STEPS - 1}
    assert all(each == counts[0] for counts in equal.values() for each in counts), f"averages differ: {steps}"
    for name in living:
        diary = job.diaries[name]
        assert diary.finished or diary.given_up is not None, name
        if diary.finished:
            assert max(diary.applied) == STEPS - 1
            assert sorted(diary.applied) == list(range(min(diary.applied), STEPS)), "a step is not averaged"


HOSTS = st.sampled_from(("aa", "aab", "aabb", "abcd", "aabbc"))
SEEDS = st.integers(0, 1 << 30)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SEEDS, HOSTS, st.dictionaries(st.integers(1, STEPS - 2), st.just(["b"]), max_size=1), events(SHORT, 4))
def test_whoever_is_lost_pauses_or_joins_nobody_else_is_given_up(
    seed: int, hosts: str, joining: dict[int, list[str]], history: list[Event]
) -> None:
    job, living = play(seed, hosts, joining, history)
    check(job, living)
    there = {f"p{rank}" for rank in range(len(hosts))}  # who joins while one is lost is told to ask again
    assert all(job.diaries[name].finished for name in living & there), job.describe()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SEEDS, st.sampled_from(("aab", "aabb", "abcd")), st.integers(0, 3), st.integers(0, STEPS - 3))
def test_a_rank_that_is_lost_at_the_end_of_a_step_keeps_nobody_behind(
    seed: int, hosts: str, whose: int, step: int
) -> None:
    """Some have ended the step, and take in a process that waits; others take its result from them."""
    job, living = play(seed, hosts, {step + 1: ["b"]}, [], doomed={f"p{whose % len(hosts)}": step})
    check(job, living)
    there = {f"p{rank}" for rank in range(len(hosts))}
    assert all(job.diaries[name].finished for name in living & there), job.describe()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SEEDS, HOSTS, events(("loss", "dark host", "partition", "freeze"), 3), st.sampled_from((1.0, 8.0, 30.0)))
def test_whatever_the_network_does_those_that_reach_the_store_go_on_together(
    seed: int, hosts: str, history: list[Event], seconds: float
) -> None:
    """Whoever is cut off, or frozen, for longer than the silence may be given up, and hears of it."""
    job, living = play(seed, hosts, {}, [replace(each, seconds=seconds) for each in history])
    check(job, living)
    reached = {name for name in living if job.hosts[name] == hosts[0]}
    frozen = any(each.kind == "freeze" for each in history)
    assert frozen or all(job.diaries[name].finished for name in reached), job.describe()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(SEEDS, HOSTS, st.integers(0, 4), st.integers(0, STEPS - 1), st.integers(1, 2 * MOST_REPEATS))
def test_a_failure_that_comes_again_is_raised_and_one_that_does_not_is_repeated(
    seed: int, hosts: str, whose: int, step: int, times: int
) -> None:
    name = f"p{whose % len(hosts)}"
    job, living = play(seed, hosts, {}, [], failing={(name, step): times})
    check(job, living)
    raised = times >= MOST_REPEATS
    assert job.diaries[name].finished != raised, job.describe()
    others = [diary for each, diary in job.diaries.items() if each != name]
    assert all(diary.finished for diary in others), job.describe()
    assert job.failing[name, step] == max(0, times - MOST_REPEATS)


@pytest.mark.parametrize("refused", [{"p0"}, {"p2"}, {"p1", "p3"}])
def test_a_rank_that_its_system_refuses_memory_leaves_and_the_others_go_on(refused: set[str]) -> None:
    simulation = Simulation(random.Random(5))
    with simulated(simulation):
        job = Job(simulation, "aabb", STEPS, {})
        job.refused |= refused
        simulation.play(END_SECONDS)
    check(job, set(job.started))
    assert {name for name, diary in job.diaries.items() if not diary.finished} == refused, job.describe()
    assert all("no shared memory" in str(job.diaries[name].given_up) for name in refused), job.describe()


@pytest.mark.parametrize("seconds", [1.0, 20.0, END_SECONDS])
def test_a_connection_that_cannot_be_made_is_an_error_at_last_and_one_that_broke_is_made_anew(seconds: float) -> None:
    """Both ends live and reach the store, so nobody is to be given up; who raises leaves, and the others may go on."""
    link = frozenset(("p0", "p2"))
    simulation = Simulation(random.Random(5))
    simulation.store_host = "a"
    with simulated(simulation):
        job = Job(simulation, "aabb", STEPS, {})
        simulation.at(0.5, lambda: job.broken_links.add(link))
        simulation.at(0.5 + seconds, lambda: job.broken_links.discard(link))
        simulation.play(END_SECONDS)  # whoever raises has done so long before
    check(job, set(job.started))
    raised = [diary for diary in job.diaries.values() if diary.given_up is not None]
    assert bool(raised) == (seconds == END_SECONDS), job.describe()


@pytest.mark.parametrize("step", range(3, STEPS - 1))
def test_who_has_joined_repeats_a_failed_step_as_all_do(step: int) -> None:
    """The results of a newcomer's step are counted as the others count theirs, whenever it came."""
    job, living = play(5, "aab", {2: ["b"]}, [], failing={("p1", step): 1})
    check(job, living)
    assert living == {"p0", "p1", "p2", "p3"}
    assert all(diary.finished and step in diary.applied for diary in job.diaries.values()), job.describe()
    assert all("p3" in diary.applied[step] for diary in job.diaries.values()), job.describe()


@pytest.mark.parametrize("seconds", [1.0, SHORT_SECONDS])
def test_a_rank_that_pauses_while_the_others_vote_stays(seconds: float) -> None:
    job, living = play(5, "aabb", {}, [Event("freeze", 0.45, 2, seconds), Event("loss", 0.5, 1, 0.0)])
    check(job, living)
    assert living == {"p0", "p2", "p3"}
    assert all(job.diaries[name].finished for name in living), job.describe()


def test_a_loss_is_over_at_once() -> None:
    """Its kernel says that the process has ended: nobody waits for a silence."""
    for seed in range(3):
        job, living = play(seed, "aabb", {}, [Event("loss", 0.5, 1, 0.0)])
        check(job, living)
        assert job.simulation.now - STARTED < STEPS * COMPUTING_SECONDS + SILENCE_SECONDS


def test_a_rank_that_computes_for_long_is_waited_for() -> None:
    """It says that it is there all the while: only a process that is stopped says nothing."""
    simulation = Simulation(random.Random(3))
    simulation.store_host = "a"
    with simulated(simulation):
        job = Job(simulation, "aab", STEPS, {})
        job.slow["p1", 3] = 10 * FROZEN_SECONDS
        simulation.play(END_SECONDS)
    check(job, set(job.started))
    assert all(diary.finished and len(diary.views) == 1 for diary in job.diaries.values()), job.describe()


def test_a_rank_that_is_stopped_is_given_up() -> None:
    simulation = Simulation(random.Random(4))
    simulation.store_host = "a"
    with simulated(simulation):
        job = Job(simulation, "aab", STEPS, {})
        simulation.at(1.0, lambda: setattr(simulation.processes["p1"], "frozen", True))
        simulation.at(1.0 + 5 * FROZEN_SECONDS, lambda: setattr(simulation.processes["p1"], "frozen", False))
        simulation.play(END_SECONDS)
    check(job, {"p0", "p2"})
    assert [job.diaries[f"p{rank}"].finished for rank in range(3)] == [True, False, True], job.describe()
    assert "was removed from the job by the other ranks" in str(job.diaries["p1"].given_up)

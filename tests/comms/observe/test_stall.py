"""What a stall warning says, and that nothing is said, or put into the store, while there is progress."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from gradwire.comms.bootstrap.compat import HashStore, PrefixStore
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.observe import observer as observer_module
from gradwire.comms.observe import stall
from gradwire.comms.observe.order import Waits
from gradwire.comms.observe.stall import StallDiagnosis, StallReport, diagnose
from support.observed import Steps, on_ranks

HOSTS = ["a", "a", "b", "b"]
RANKS = range(4)
BUCKET = "bucket 7 (`layers.3.mlp.weight`)"


def waiting(number: int, phase: str, seconds: float = 12.0) -> StallReport:
    return StallReport(number + 3, seconds, number, phase, BUCKET)


def test_the_rank_that_has_not_come_is_named_with_what_the_others_wait_in() -> None:
    reports = {rank: waiting(70, "reduce_scatter intra_node") for rank in (0, 1, 3)}
    reports[2] = StallReport(70, 12.0, where="train.py:88 in load")
    assert diagnose(reports, HOSTS, RANKS) == StallDiagnosis(
        "rank 2 on b has not reached bucket 7 (`layers.3.mlp.weight`), 12 s late; all others wait in "
        "reduce_scatter intra_node; rank 2 is at train.py:88 in load",
        (2,),
    )


def test_a_silent_rank_is_told_from_a_late_one() -> None:
    reports = {rank: waiting(70, "all_reduce inter_node") for rank in (0, 1)} | {3: StallReport(69, 11.0)}
    assert diagnose(reports, HOSTS, [10, 11, 12, 13]) == StallDiagnosis(
        f"rank 13 on b has not reached {BUCKET}, 12 s late; rank 12 on b does not respond, and has not ended {BUCKET}, "
        "12 s late; all others wait in all_reduce inter_node",
        (3, 2),
    )


def test_where_all_have_come_no_rank_is_blamed() -> None:
    reports = {rank: waiting(70, "all_reduce inter_node") for rank in RANKS}
    found = diagnose(reports, HOSTS, RANKS)
    assert found is not None and not found.late
    text = found.text
    assert text.startswith(f"all ranks have reached {BUCKET}")
    assert "no rank is late" in text


def test_the_launch_that_holds_up_the_others_counts() -> None:
    """Rank 1 waits in an earlier launch than ranks 2 and 3: rank 0, which has started neither, is late for that one."""
    reports = {0: StallReport(70, 12.0), 1: waiting(70, "reduce_scatter intra_node")}
    reports |= {rank: waiting(71, "all_reduce inter_node") for rank in (2, 3)}
    found = diagnose(reports, HOSTS, RANKS)
    assert found is not None and found.late == (0,)
    text = found.text
    assert text.startswith("rank 0 on a has not reached")
    assert "all_reduce inter_node (2 ranks) and reduce_scatter intra_node (1 rank)" in text


def test_ranks_that_are_all_idle_do_not_wait() -> None:
    assert diagnose({rank: StallReport(70, 60.0) for rank in RANKS}, HOSTS, RANKS) is None


def test_on_cuda_the_number_of_launches_decides() -> None:
    reports = {rank: StallReport(71, 12.0, bucket=BUCKET) for rank in RANKS}
    assert diagnose(reports, HOSTS, RANKS, on_cuda=True) is None
    found = diagnose(reports | {1: StallReport(70, 12.0)}, HOSTS, RANKS, on_cuda=True)
    assert found is not None and found.late == (1,)
    assert found.text.startswith(f"rank 1 on a has not reached {BUCKET}, 12 s late; all others wait for it")


def hesitate(comes: threading.Event) -> None:
    """Where the late rank stands."""
    assert comes.wait(SECONDS)


SECONDS = 90.0
"""For a watch that is held up itself: a report that came too late is in the next verdict, after twice the time."""

LATE = (
    "rank 3 on node-b has not reached bucket 0 (`head.weight`)",
    "reduce_scatter intra_node (1 rank)",
    "all_reduce inter_node (2 ranks)",
    "rank 3 is at test_stall.py:",
    "in hesitate",
)


def test_real_ranks_say_who_is_late_and_that_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gradwire")
    comes = threading.Event()

    def body(steps: Steps) -> str | None:
        steps.step()
        buckets = []
        if steps.communicator.rank == 3:
            hesitate(comes)
            steps.step()
        else:
            buckets = steps.step(wait=False)
        said = None
        if steps.communicator.rank == 0:
            until = time.monotonic() + SECONDS - 10
            while time.monotonic() < until and not (said and all(part in said for part in LATE)):
                said = steps.observer.add_to(steps.communicator.report()).stall
                time.sleep(0.01)
            comes.set()
        for bucket in buckets:
            bucket.result().wait()
        return said

    said = on_ranks("aabb", body, stall_seconds=0.1, straggler_every=0)[0]
    assert said is not None
    assert said.startswith(LATE[0])
    assert [part for part in LATE if part not in said] == []
    assert any(record.getMessage() == f"gradwire: stall: {said}" for record in caplog.records)


def test_ranks_that_run_their_models_in_another_order_are_told_so_and_none_is_blamed() -> None:
    class Executor:
        def __init__(self, number: int | None) -> None:
            self.launches = 3
            self.waits = (
                None
                if number is None
                else SimpleNamespace(number=number, phase="all_reduce", bucket=SimpleNamespace(index=0))
            )

        def oldest(self) -> SimpleNamespace | None:
            return self.waits

    job_store, watches = HashStore(), {}
    for start in ("first", "second"):
        store = PrefixStore(start, HashStore())
        for rank in (0, 1):
            waits = start == ("first", "second")[rank]
            executor = Executor(3 if waits else None)
            executor.launches += waits
            job = stall.WatchedJob(
                rank, ("a", "b"), (0, 1), {0: (4, (f"{start}.weight",))}, waits=Waits(job_store, start, rank)
            )
            watch = stall.StallWatch(store, job, executor, 1e6)  # type: ignore[arg-type]
            watches[start, rank] = watch
    for watch in watches.values():
        watch.close()  # its looks are taken here
        watch._poll()
        watch._progress.since, watch._next = time.monotonic() - 2e6, 1.0
    for _ in range(2):  # all have left their reports in the first round
        for watch in watches.values():
            watch._poll()
    for start, rank in (("first", 0), ("second", 1)):
        said = watches[start, rank].last
        assert said is not None
        assert said.startswith("rank 0 waits in bucket 0 (`first.weight`) of model ")
        assert ", rank 1 in bucket 0 (`second.weight`) of model " in said
        assert said.endswith(": the ranks run their models in another order")
    for watch in watches.values():
        watch._end_stall(0.0)
    assert job_store.num_keys() == 0


def test_training_continues_with_the_next_launch_and_not_where_the_one_waited_for_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits = SimpleNamespace(number=2, phase="all_reduce", bucket=SimpleNamespace(index=0))
    executor = SimpleNamespace(launches=3, waits=waits, carried=[])
    executor.oldest = lambda: executor.waits
    job = stall.WatchedJob(0, ("a", "b"), (0, 1), {})
    watch = stall.StallWatch(HashStore(), job, executor, 1e6)  # type: ignore[arg-type]
    watch.close()  # its looks are taken here
    watch._poll()
    watch._progress.since, watch._next = time.monotonic() - 2e6, 1.0
    for _ in range(stall.PASSES + 1):
        watch._poll()
    assert watch.last is not None and watch.last.startswith("rank 1 on b does not respond")
    executor.waits = None  # it has failed: nothing is under way
    watch._poll()
    assert not any("training continues" in record.getMessage() for record in caplog.records)
    executor.launches = 4
    watch._poll()
    assert any("training continues after a stall of" in record.getMessage() for record in caplog.records)


def test_a_rank_that_waits_for_a_third_one_in_another_model_is_late() -> None:
    """This rank has started the launch that the late one waits in: it is another rank that both wait for."""
    store = HashStore()
    this, other = Waits(store, "A", 0), Waits(store, "B", 1)
    this.publish(3, BUCKET)
    other.publish(3, BUCKET)
    watch = SimpleWatch(launches=4)
    Waits(store, "B", 0).register(watch)
    assert this.find_disorder([1]) is None
    watch.launches = 3
    assert this.find_disorder([1]) is not None


class SimpleWatch(SimpleNamespace):
    """In place of a watch; can be referred to weakly."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Counted(PollingStore):
    """Counts what is asked of it."""

    calls = 0

    def __getattribute__(self, name: str) -> object:
        if name in ("set", "get", "check", "compare_set", "delete_key", "add", "wait"):
            Counted.calls += 1
        return super().__getattribute__(name)


def test_while_there_is_progress_nothing_is_said_and_no_store_asked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer_module, "PollingStore", Counted)
    monkeypatch.setattr(stall, "POLLS", 200)  # the threads look all the time
    Counted.calls = 0

    def body(steps: Steps) -> None:
        for _ in range(20):
            steps.step(lambda index: 1e-3)

    on_ranks("aabb", body, stall_seconds=30.0)
    assert Counted.calls == 0
    assert not [record for record in caplog.records if "stall" in record.getMessage()]


def test_without_stall_seconds_there_is_no_thread() -> None:
    def body(steps: Steps) -> list[str]:
        return [thread.name for thread in threading.enumerate() if "stall watch" in thread.name]

    assert on_ranks("aa", body, stall_seconds=0.0) == [[], []]


def test_a_store_that_is_gone_ends_the_thread_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection refused")

    class Idle:
        launches = 1

        def oldest(self) -> None:
            return None

    watch = stall.StallWatch(Gone(), stall.WatchedJob(0, HOSTS, RANKS, {}), Idle(), 0.02)  # type: ignore[arg-type]
    watch._thread.join(10)
    assert not watch._thread.is_alive()
    assert not caplog.records
    watch.close()

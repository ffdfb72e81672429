"""Laws of the lanes: the order of submission holds wherever two jobs meet, whatever each of them waits for."""

import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from gradwire.comms.lanes import Lane, LaneJob, Lanes, Transition


class Sleep:
    """A Work that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self) -> None:
        time.sleep(self.seconds)


class Recorder:
    """Runs jobs and keeps who came through which lane when."""

    def __init__(self) -> None:
        self.lanes = Lanes()
        self.current = threading.local()
        self.served: set[Lane] = set()
        self.opening = threading.Lock()
        self.seen: dict[Lane, list[int]] = {}
        self.errors: list[BaseException] = []
        self.done = threading.Semaphore(0)

    def job(self, number: int, rounds: int, fails_in: Lane | None = None) -> LaneJob:
        def steps() -> Iterator[Transition]:
            lane: Lane = (0, 0)
            for target in [*((1, step) for step in range(1, rounds + 1)), (2, 0)]:
                self.visit(number, lane, fails_in)
                lane = target
                yield Transition(lane, [Sleep(0.002 * (number * 7 % 3))])
            self.visit(number, lane, fails_in)
            self.done.release()

        return LaneJob(steps(), ((0, 0), (2, 0)))

    def submit(self, job: LaneJob) -> None:
        self.lanes.submit(job)
        self.open(*job.visits)

    def open(self, *lanes: Lane) -> None:
        for lane in lanes:
            with self.opening:
                if lane not in self.served:
                    self.served.add(lane)
                    threading.Thread(target=self.serve, args=(lane,), daemon=True).start()

    def serve(self, lane: Lane) -> None:
        """What the executor does in each of its threads."""
        self.current.lane = lane
        for job in self.lanes.serve(lane):
            job.transition = None
            try:
                for work in job.works:
                    work.wait()
                job.transition = next(job.steps, None)
            except RuntimeError as error:
                self.errors.append(error)
                self.done.release()
            if job.transition is not None:
                self.open(job.transition.lane)
            del job

    def visit(self, number: int, lane: Lane, fails_in: Lane | None) -> None:
        assert self.current.lane == lane
        if lane == fails_in:
            raise RuntimeError(f"job {number} broke")
        self.seen.setdefault(lane, []).append(number)

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.done.acquire(timeout=20)
        self.lanes.close()


def test_a_job_with_fewer_rounds_does_not_overtake() -> None:
    recorder = Recorder()
    for number in range(40):
        recorder.submit(recorder.job(number, rounds=number * 5 % 4))
    recorder.wait(40)
    assert recorder.seen[0, 0] == recorder.seen[2, 0] == list(range(40))
    assert all(numbers == sorted(numbers) for numbers in recorder.seen.values())


@pytest.mark.parametrize("lane", [(0, 0), (1, 1), (2, 0)])
def test_those_behind_a_job_that_fails_still_arrive(lane: Lane) -> None:
    recorder = Recorder()
    for number in range(10):
        recorder.submit(recorder.job(number, rounds=2, fails_in=lane if number == 4 else None))
    recorder.wait(10)
    assert [str(error) for error in recorder.errors] == ["job 4 broke"]
    assert recorder.seen[2, 0] == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_a_closed_executor_takes_no_more_jobs() -> None:
    recorder = Recorder()
    recorder.lanes.close()
    with pytest.raises(RuntimeError, match="gradwire is closed"):
        recorder.submit(recorder.job(0, 1))


def test_a_lane_that_waits_keeps_no_job_alive() -> None:
    """Its buckets would live as long as the next one is waited for."""
    recorder = Recorder()
    job = recorder.job(0, rounds=1)
    ended = weakref.ref(job.steps)
    recorder.submit(job)
    assert recorder.done.acquire(timeout=20)
    del job
    deadline = time.monotonic() + 20
    while ended() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert ended() is None
    recorder.lanes.close()

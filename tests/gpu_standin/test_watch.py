"""A watch beside NCCL: it sees the collectives, and no step waits for the device or has a stream more for it."""

import json
from typing import Any

from gpu_standin.conftest import Jobs

STEPS = 60
"""Of 50 ms: some six words of each rank, and 150 looks."""


def steps_of(jobs: Jobs, watches: bool) -> list[dict[str, Any]]:
    ranks = jobs.run("watch.py", str(int(watches)), str(STEPS), ranks=2)
    assert ranks.statuses == [0, 0], ranks.errors
    return [json.loads(output.splitlines()[-1]) for output in ranks.outputs]


KINDS = ("Synchronize", "StreamCreate", "StreamWaitEvent", "EventRecord", "Memcpy", "Launch", "Malloc", "Free")
"""Calls of CUDA that make a host or a stream wait, or do work; by parts of their names. Left out: EventQuery, with
which torch's recorder asks without waiting, and EventCreate: torch takes events from a cache, to which its watchdog
returns them sooner or later."""


def test_a_watch_adds_no_wait_no_stream_and_no_work_to_steps(torch_jobs: Jobs) -> None:
    without, watched = steps_of(torch_jobs, False), steps_of(torch_jobs, True)
    assert watched[0]["groups"]["default over nccl"] > STEPS
    for plain, seen in zip(without, watched, strict=True):
        for kind in KINDS:
            calls = [{name: count for name, count in each["counts"].items() if kind in name} for each in (plain, seen)]
            assert calls[0] == calls[1], kind
        assert any("EventRecord" in name for name in plain["counts"])

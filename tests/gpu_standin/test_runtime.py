"""The stand-in's CUDA runtime keeps CUDA's promises, and its worst cases are as bad as they say."""

import json
import signal

import pytest

from gpu_standin.conftest import Jobs

KEPT = (
    "streams_run_in_order_and_beside_each_other",
    "events_order_streams",
    "an_event_stands_for_its_last_record",
    "events_tell_the_time_between_them",
    "the_default_stream_waits_for_blocking_streams_only",
    "a_destroyed_stream_ends_its_work",
    "pageable_memory_is_read_at_once_and_pinned_memory_in_stream_order",
    "freeing_waits_for_the_device",
    "allocating_waits_for_the_device_where_it_is_told_to",
    "memory_ends",
    "copies_beyond_an_allocation_are_refused",
    "fresh_memory_is_poisoned",
    "calls_are_counted",
)


@pytest.mark.parametrize("case", KEPT)
def test_the_runtime_keeps_cudas_promises(jobs: Jobs, case: str) -> None:
    ranks = jobs.run("runtime.py", case)
    assert ranks.statuses == [0], ranks.errors


def test_an_access_at_the_end_is_none_beyond_it(jobs: Jobs) -> None:
    assert jobs.run("runtime.py", "touch", "-1").statuses == [0]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (("touch", "24"), "24 bytes behind the end of an allocation of 1000 bytes of device 0"),
        (("touch_freed",), "byte 7 of an allocation of 1000 bytes that was freed"),
    ],
)
def test_guard_pages_end_a_process_that_touches_them(jobs: Jobs, case: tuple[str, ...], said: str) -> None:
    ranks = jobs.run("runtime.py", *case)
    assert ranks.statuses == [-signal.SIGSEGV]
    assert said in ranks.errors[0]


def test_a_byte_written_between_an_allocation_and_its_guard_page_is_found(jobs: Jobs) -> None:
    ranks = jobs.run("runtime.py", "write_behind")
    assert ranks.statuses == [-signal.SIGABRT]
    assert "byte 1 behind an allocation of 1000 bytes of device 0 was written" in ranks.errors[0]


def test_a_kernel_that_nobody_has_ends_the_process_with_its_name(jobs: Jobs) -> None:
    ranks = jobs.run("runtime.py", "launch_unknown")
    assert ranks.statuses == [-signal.SIGABRT]
    assert "not modelled: kernel kernel(float*)" in ranks.errors[0]


def test_an_unknown_kernel_can_be_an_error(jobs: Jobs) -> None:
    ranks = jobs.run("runtime.py", "launch_unknown", GPU_STANDIN_UNKNOWN="error")
    assert (ranks.statuses, ranks.outputs) == ([0], ["returned 98\n"])
    assert "not modelled: kernel kernel(float*)" in ranks.errors[0]


def test_a_trace_has_every_call(jobs: Jobs) -> None:
    trace = jobs.folder / "trace"
    assert jobs.run("runtime.py", "freeing_waits_for_the_device", GPU_STANDIN_TRACE=str(trace)).statuses == [0]
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["what"] for line in lines][-1] == "cudaFree"
    assert lines == sorted(lines, key=lambda line: line["seconds"])

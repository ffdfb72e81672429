"""Ranks that are forked from one warmed process are on their nodes as if they had been started there."""

import json
import os
import select
import signal
from pathlib import Path

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import ask_in_child, run_forked

JOB = """
import json, os, socket
from pathlib import Path

Path(__file__).with_suffix(".group").write_text(str(os.getpgid(0)))

def rank_main(place, arguments):
    Path(f"/dev/shm/{place.rank}").touch()
    place.connect()
    own = {"rank": place.rank, "host": socket.gethostname(), "pid": os.getpid(), "arguments": arguments}
    own |= {"shm": sorted(os.listdir("/dev/shm")), "nics": sorted(os.listdir("/sys/class/net"))}
    own |= {"folder": os.getcwd(), "gloo": os.environ["GLOO_SOCKET_IFNAME"], "threads": os.environ["OMP_NUM_THREADS"]}
    os.write(1, (json.dumps(own) + "\\n").encode())
    place.leave()
    return 7 if place.rank == 2 else 0
"""


@pytest.mark.netns
def test_a_rank_has_the_namespaces_the_variables_and_the_status_of_its_node(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    with EmulatedCluster([1, 1]) as cluster:
        result = run_forked(cluster, str(job), ["one", "a b"], nodes=[2, 1], timeout_seconds=120)
    rows = sorted(
        (json.loads(line) for text in result.output for line in text.splitlines() if line.startswith("{")),
        key=lambda row: int(row["rank"]),
    )
    assert [row["host"] for row in rows] == ["node0", "node0", "node1"], result.output
    assert all(row["pid"] < 100 and row["nics"] == ["eth0", "lo"] for row in rows), rows
    assert [set(row["shm"]) & {"0", "1", "2"} for row in rows] == [{"0", "1"}, {"0", "1"}, {"2"}]
    assert all(row["gloo"] == "eth0" and row["threads"] == "1" for row in rows)
    assert all(row["folder"] == str(Path.cwd()) and row["arguments"] == ["one", "a b"] for row in rows)
    assert result.exit_status == 7
    assert job.with_suffix(".group").read_text() != str(
        os.getpgid(0)
    )  # Ctrl-C is not for it: it would print a traceback
    assert sum(nic.tx for nic in result.nic_bytes) > 0


NOTES = """
import json, os, sys
from pathlib import Path
earlier = "earlier" in os.environ or hasattr(sys, "earlier")
own = [os.getppid(), os.environ["NOW"], earlier, "torch._dynamo" in sys.modules]
Path(__file__).with_suffix(".json").write_text(json.dumps(own))
os.environ["earlier"] = sys.earlier = "1"

def rank_main(place, arguments):
    return 0
"""


@pytest.mark.netns
def test_jobs_share_what_has_imported_torch_and_nothing_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.py"
    job.write_text(NOTES)
    warmed: list[int] = []
    with EmulatedCluster([1]) as cluster:
        for now in ("first", "second", "when the warmed process was killed"):
            monkeypatch.setenv("NOW", now)
            run_forked(cluster, str(job), [], nodes=[1], timeout_seconds=120).check()
            pid, *found = json.loads(job.with_suffix(".json").read_text())
            assert found == [now, False, True]
            if warmed and warmed[0] == pid:
                handle = os.pidfd_open(pid)
                os.kill(pid, signal.SIGKILL)
                select.select([handle], [], [])
                os.close(handle)
            warmed.append(pid)
    assert warmed[0] == warmed[1] != warmed[2]


@pytest.mark.netns
def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("raise ValueError('this job is broken')")
    with EmulatedCluster([1, 1]) as cluster:
        result = run_forked(cluster, str(job), [], nodes=[1, 1], timeout_seconds=120)
    assert result.exit_status == 1
    assert all("this job is broken" in text for text in result.output)


@pytest.mark.netns
def test_ranks_end_when_their_time_is_up(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    left = tmp_path / "left"
    job.write_text(
        "import time\nfrom pathlib import Path\n"
        f"def rank_main(place, arguments):\n    time.sleep(30)\n    Path({str(left)!r}).touch()\n    return 0\n"
    )
    with EmulatedCluster([1]) as cluster:
        result = run_forked(cluster, str(job), [], nodes=[2], timeout_seconds=5)
        assert result.timed_out and result.exit_status == 124
        assert result.seconds < 30
    assert not left.exists()


@pytest.mark.parametrize("answer", [True, False])
def test_a_question_is_asked_in_another_process(answer: bool, tmp_path: Path) -> None:
    asked = tmp_path / "asked"

    def question() -> bool:
        asked.write_text(str(os.getpid()))
        return answer

    assert ask_in_child(question) is answer
    assert int(asked.read_text()) != os.getpid()


def test_a_question_that_raises_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    def question() -> bool:
        raise OSError("the driver is gone")

    with pytest.raises(RuntimeError, match="ended with status 1"):
        ask_in_child(question)
    assert "the driver is gone" in capfd.readouterr().err

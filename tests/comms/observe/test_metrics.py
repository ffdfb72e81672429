"""The report as JSON and for Prometheus, from a file and a port."""

import dataclasses
import inspect
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import gradwire
from gradwire.comms.report import COMPUTES_LATE, Report, Straggler
from gradwire.comms.run.phase_stats import PhaseTotals
from support.observed import Steps, on_ranks

LATE = Straggler(COMPUTES_LATE, (3,), 'host "b"', 0.2, 0.43, 31, 2, ("w",))
ROW = PhaseTotals(0, "all_reduce", "inter_node", 3, 8, 4.0, 0.5)
PLAN = "plan: hierarchical, int8 inter_node", "why: it was asked for"
REPORT = Report("2 nodes", ("plan",), (ROW,), 3, 1, (), (LATE,), summary=PLAN)
SAMPLE = re.compile(r'^gradwire_[a-z_]+\{rank="\d+"(,[a-z_]+="([^"\\]|\\.)*")*\} -?[0-9.e+-]+$')


def test_a_report_is_plain_data() -> None:
    found = json.loads(json.dumps(REPORT.to_dict()))
    assert found["rows"][0]["wire_nbytes"] == 4.0
    assert found["stragglers"][0]["ranks"] == [3]
    assert set(found) == set(Report.__dataclass_fields__)


def test_prometheus_can_read_it() -> None:
    lines = REPORT.to_prometheus().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(SAMPLE.match(line) for line in samples), samples
    named = {line.split("{")[0] for line in samples}
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == named
    assert samples[0] == 'gradwire_plan_info{rank="0",plan="hierarchical, int8 inter_node"} 1'
    late = next(line for line in samples if line.startswith("gradwire_straggler_seconds"))
    assert late == (
        'gradwire_straggler_seconds{rank="0",late_rank="3",node="host \\"b\\"",cause="computes late"} '
        "0.20000000000000001"
    )


def test_the_page_on_prometheus_names_what_is_exported_and_its_files_fit_prometheus() -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml reads it; it comes with the extra `test`")
    page = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "metrics.md").read_text()
    exported = set(re.findall(r"^# TYPE (\S+) (\S+)$", REPORT.to_prometheus(), re.MULTILINE))
    named = set(re.findall(r"\bgradwire_[a-z_]+_(?:total|seconds|info)\b", page))
    assert named == {name for name, _ in exported}
    scrape, rules = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"] == ["node0:9100", "node1:9100"]
    counters = {name for name, kind in exported if kind == "counter"}
    for rule in rules["groups"][0]["rules"]:
        assert {"record", "alert"} & rule.keys()
        for over in re.findall(r"(?:rate|increase)\((\w+)", rule["expr"]):
            assert over in counters
        assert set(re.findall(r"\b(?!gradwire_rules)gradwire_\w+", rule["expr"])) <= named


def promtool(*words: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Prometheus' own checker; skips the test if it is not installed."""
    if (program := shutil.which("promtool")) is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    return subprocess.run([program, *map(str, words)], input=text, capture_output=True, text=True, check=False)


def test_promtool_accepts_the_metrics() -> None:
    done = promtool("check", "metrics", text=REPORT.to_prometheus())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_promtool_accepts_the_pages_configuration(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "metrics.md").read_text()
    files = dict(
        zip(("prometheus.yml", "gradwire_rules.yml"), re.findall(r"```yaml\n(.*?)```", page, re.DOTALL), strict=True)
    )
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0 and "4 rules found" in done.stdout, done.stdout + done.stderr


def test_files_of_several_ranks_may_lie_side_by_side() -> None:
    """node_exporter refuses families whose HELP differs between files, and samples that occur twice."""
    first, second = (dataclasses.replace(REPORT, rank=rank).to_prometheus().splitlines() for rank in (0, 1))
    assert [line for line in first if line[0] == "#"] == [line for line in second if line[0] == "#"]
    assert not {line.rpartition(" ")[0] for line in first if line[0] != "#"} & {
        line.rpartition(" ")[0] for line in second if line[0] != "#"
    }


def test_metrics_are_of_a_step_that_ended_a_second_ago_at_most() -> None:
    signature = inspect.signature(gradwire.HookState.export_metrics)
    assert signature.parameters["every_seconds"].default <= 1.0


def test_a_port_and_a_file_show_the_last_step(tmp_path: Path) -> None:
    file = tmp_path / "gradwire.prom"

    def body(steps: Steps) -> None:
        first = steps.communicator.rank == 0
        port = steps.observer.export_metrics(file, 0, "127.0.0.1", 0.0) if first else None
        for _ in range(3):
            steps.step()
        if port is not None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                assert answer.read().decode() == file.read_text()
            assert 'gradwire_steps_total{rank="0"} 3' in file.read_text()
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/else", timeout=10)

    on_ranks("ab", body, stall_seconds=0.0)
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_a_second_call_adds_to_the_first(tmp_path: Path) -> None:
    file = tmp_path / "gradwire.prom"

    def served(port: int | None) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def body(steps: Steps) -> None:
        port = steps.observer.export_metrics(None, 0, "127.0.0.1", 0.0)
        steps.step()
        assert steps.observer.export_metrics(file, None, "127.0.0.1", 0.0) == port
        steps.step()
        assert served(port) == file.read_text() and 'gradwire_steps_total{rank="0"} 2' in file.read_text()
        with pytest.raises(OSError):
            steps.observer.export_metrics(tmp_path / "nowhere" / "x.prom", None, "127.0.0.1", 0.0)
        assert steps.observer.export_metrics(None, port, "127.0.0.1", 0.0) == port
        moved = steps.observer.export_metrics(None, 0, "127.0.0.1", 0.0)
        steps.step()
        assert moved != port and served(moved) == file.read_text() and "} 3" in file.read_text()
        with pytest.raises(OSError):
            served(port)

    on_ranks("a", body)


def test_a_call_that_is_refused_changes_neither_file_nor_port(tmp_path: Path) -> None:
    file, other = tmp_path / "gradwire.prom", tmp_path / "other.prom"
    other.write_text("of another job")

    def body(steps: Steps) -> None:
        port = steps.observer.export_metrics(file, 0, "127.0.0.1", 0.0)
        steps.step()
        with socket.create_server(("127.0.0.1", 0)) as busy, pytest.raises(OSError):
            steps.observer.export_metrics(other, busy.getsockname()[1], "127.0.0.1", 0.0)
        assert other.read_text() == "of another job" and "} 1" in file.read_text()
        with pytest.raises(OSError):
            steps.observer.export_metrics(tmp_path / "nowhere" / "x.prom", 0, "127.0.0.1", 0.0)
        steps.step()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.read().decode() == file.read_text()
        assert "} 2" in file.read_text()

    on_ranks("a", body)


def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    def body(steps: Steps) -> None:
        with pytest.raises(ValueError, match="neither `file` nor `port`"):
            steps.observer.export_metrics(None, None, "127.0.0.1", 1.0)
        with pytest.raises(OSError):
            steps.observer.export_metrics(tmp_path / "nowhere" / "x.prom", None, "127.0.0.1", 1.0)
        for port in (-1, 65536, 99999999):
            with pytest.raises(ValueError, match=f"`port` is {port}; wanted"):
                steps.observer.export_metrics(None, port, "127.0.0.1", 1.0)
        for seconds in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"`every_seconds` is {seconds}; wanted"):
                steps.observer.export_metrics(tmp_path / "x.prom", None, "127.0.0.1", seconds)
        assert not (tmp_path / "x.prom").exists()

    on_ranks("a", body)

"""The report as JSON and for Prometheus, from a file and a port."""

import dataclasses
import inspect
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import gradwire
from gradwire.comms.observe.metrics import Metrics
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


@pytest.mark.parametrize(
    ("level", "counts"), [("intra_node", 0), ("inter_node", 1), ("inter_rack", 1), ("all ranks", 1)]
)
def test_bytes_between_nodes_are_those_of_every_level_outside_the_node(level: str, counts: int, tmp_path: Path) -> None:
    """A plan for one rank a node, or over racks, has no level `inter_node`, or not that alone."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "metrics.md").read_text()
    (tmp_path / "rules.yml").write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    sent = f'gradwire_phase_wire_bytes_total{{instance="node0:9100",rank="0",level="{level}"}}'
    wanted = [{"labels": 'gradwire:inter_node_bytes_per_second{instance="node0:9100"}', "value": 100}] * counts
    case = {
        "interval": "5s",
        "input_series": [{"series": sent, "values": "0+500x40"}],
        "promql_expr_test": [
            {"expr": "gradwire:inter_node_bytes_per_second", "eval_time": "2m", "exp_samples": wanted}
        ],
    }
    (tmp_path / "test.yml").write_text(
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "5s", "tests": [case]})
    )
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_the_end_exports_what_the_last_update_missed(tmp_path: Path) -> None:
    file = tmp_path / "gradwire.prom"

    def body(steps: Steps) -> dict[str, float]:
        steps.observer.export_metrics(file if steps.communicator.rank == 0 else None, 0, "127.0.0.1", 1000.0)
        for _ in range(3):
            steps.step()
        return {row.level: row.wire_nbytes for row in steps.communicator.report(3).rows}

    sent, _ = on_ranks("ab", body, stall_seconds=0.0, straggler_every=0)
    assert total(file, "steps_total", "") == 3
    assert sent and sent == {level: total(file, "phase_wire_bytes_total", f'.*level="{level}"') for level in sent}


SHORT = """
import sys, torch, torch.distributed as dist, gradwire
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(300, 300, bias=False))
    state = gradwire.HookState(model, hostname=f"node{dist.get_rank()}", straggler_every=0)
    model.register_comm_hook(state, gradwire.comm_hook)
    for step in range(12):
        model(torch.ones(4, 300)).sum().backward()
        if step == 0:
            state.export_metrics(file=f"{sys.argv[1]}/{dist.get_rank()}.prom")
    if sys.argv[2] == "destroyed":
        dist.destroy_process_group()
    sys.exit(3 if sys.argv[2] == "failed" else 0)

main()
"""


@pytest.mark.parametrize("end", ["destroyed", "failed"])
def test_a_short_jobs_file_has_all_its_steps_and_bytes(end: str, tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text(SHORT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, script, tmp_path, end], capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == (end == "failed"), done.stderr
    files = [tmp_path / f"{rank}.prom" for rank in range(2)]
    if end == "failed":  # torchrun ends the other rank by a signal, mostly before it has ended by itself
        files = [max(files, key=lambda file: total(file, "steps_total", ""))]
    for file in files:
        assert total(file, "steps_total", "") == 12
        assert total(file, "phase_wire_bytes_total", ".*") == 12 * 300 * 300 * 4  # of a ring of two


def total(file: Path, name: str, labels: str) -> float:
    """The sum of a file's samples of a name whose further labels match."""
    found = re.findall(rf'^gradwire_{name}{{rank="\d+"{labels}}} (\S+)$', file.read_text(), re.MULTILINE)
    return sum(map(float, found))


def own_ports() -> set[int]:
    """The ports at which this process, or a copy that it has of another's socket, listens."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        if each.is_symlink() and str(each.readlink()).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(each.name))) as opened:
                if opened.family == socket.AF_INET and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(opened.getsockname()[1])
    return found


def test_a_forked_child_has_neither_the_file_nor_the_port(tmp_path: Path) -> None:
    """A DataLoader's workers outlive a rank that is killed, and its port could not be opened again."""
    file = tmp_path / "gradwire.prom"
    metrics = Metrics(file, 0, "127.0.0.1", 0.0)
    metrics.step_ended(lambda: "of the parent")
    assert metrics.port in own_ports()
    child = os.fork()
    if child == 0:
        metrics.step_ended(lambda: "of the child")
        os._exit(metrics.port in own_ports())
    assert os.waitpid(child, 0)[1] == 0
    assert file.read_text() == "of the parent"
    metrics.close()


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

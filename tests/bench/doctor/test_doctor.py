"""The doctor at work: on sockets, in one process, and on emulated nodes, healthy and with faults planted."""

import json
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from xml.dom import minidom

import pytest
import torch
from rich.console import Console

import gradwire
from gradwire.bench.doctor import command, control, local, network, script, show
from gradwire.bench.doctor import examine as examine_module
from gradwire.bench.doctor.checks import diagnose, words
from gradwire.bench.doctor.facts import JobFacts, NetworkInterface, RankFacts, from_record, to_record
from gradwire.bench.doctor.picture import svg
from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked
from gradwire.bench.studies.doctor import inside, other_mtu
from gradwire.cli import predict
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.config import local_rank
from support.doctor import healthy, slowed
from support.threads import run_ranks


def test_rates_latency_and_whole_packets_are_measured_on_sockets() -> None:
    with network.Listener() as listener:
        asker = network.Asker("127.0.0.1", listener.ports)
        pair = network.measure_pair(asker, (0, 1), 0.05, 1500)
        assert asker.packets_pass(1500) is True
        assert asker.packets_pass(1 << 16) is False  # larger than any packet of IP
        asker.close()
        ports = listener.ports
    assert 0 < pair.latency_seconds < 1 and abs(pair.clock_seconds) < 1
    assert min(*pair.many) > 0 and pair.many >= pair.one
    with pytest.raises(OSError, match=r"refused"):
        network.Asker("127.0.0.1", ports)


def test_the_better_of_two_tries_counts_in_every_figure() -> None:
    first, second = healthy(1, nodes=2).pairs[0], healthy(2, nodes=2).pairs[0]
    best = first.better(second)
    assert best.times == 2 and best.latency_seconds == min(first.latency_seconds, second.latency_seconds)
    for name in ("one", "many", "both"):
        assert getattr(best, name) == tuple(map(max, getattr(first, name), getattr(second, name)))


@pytest.mark.parametrize("count", [2, 3, 5, 8, 17])
def test_every_two_nodes_meet_once_and_nobody_is_in_two_places(count: int) -> None:
    rounds = control.circle(count)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(control.spread(rounds, 4)) == min(4, len(rounds))


def test_words_of_any_length_reach_rank_0_and_come_back() -> None:
    store = HashStore()
    # Random digits do not shrink: many pieces.
    said = [{"rank": rank, "text": [int(each) for each in torch.randint(1 << 30, (2000,))]} for rank in range(3)]

    def rank_main(rank: int) -> object:
        own = control.Control(store, rank, 3)
        assert own.arrive(command_timeout) == []
        found = own.gather(said[rank], command_timeout)
        return own.tell(found, command_timeout)

    command_timeout = timedelta(seconds=20)
    assert run_ranks(3, rank_main) == [said] * 3


def test_a_rank_that_does_not_come_is_named() -> None:
    assert control.Control(HashStore(), 0, 3).arrive(timedelta(seconds=0.05)) == [1, 2]
    found = diagnose(JobFacts(ranks=(RankFacts(rank=0, host=("a", "", "")),), missing_ranks=(1, 2)))
    assert "1 and 2 did not come" in found[0].title and found[0].stops


def test_facts_survive_the_way_to_rank_0() -> None:
    for seed in range(5):
        for each in healthy(seed).ranks:
            record = json.loads(json.dumps(to_record(each)))
            assert from_record(RankFacts, record | {"of a later version": 1}) == each


def test_what_this_machine_says_of_itself() -> None:
    own = local.read_rank(0, local_rank())
    assert own.versions["torch"] == torch.__version__ and own.versions["gradwire"] == gradwire.__version__
    assert own.shm_nbytes is not None and own.shm_nbytes > 0 and own.threads >= 1
    loopback = own.interface("lo")
    assert loopback is not None and loopback.kind == "loopback" and "127.0.0.1" in loopback.addresses


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("files", "limit"), [
    ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": "max 100000", "sys/fs/cgroup/pod/cpu.max":
      "150000 100000"}, 1.5),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
    ({"proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n", "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "200000",
      "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000"}, 2.0),
    ({"proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, None),
    ({}, None),
])  # fmt: skip
def test_a_quota_of_any_group_above_holds(tmp_path: Path, files: dict[str, str], limit: float | None) -> None:
    assert local.cpu_limit(write(tmp_path, files)) == limit


CARDS = (
    NetworkInterface(name="lo", kind="loopback", addresses=("127.0.0.1",)),
    NetworkInterface(name="docker0", kind="bridge", addresses=("172.17.0.1",)),
    NetworkInterface(name="eth0", kind="card", addresses=("10.0.0.1",)),
    NetworkInterface(name="eth1", kind="card", addresses=("10.1.0.1",), up=False),
    NetworkInterface(name="ib0", kind="card", addresses=("10.2.0.1",)),
)


@pytest.mark.parametrize(("variables", "address", "gloo", "nccl"), [
    ({}, "10.0.0.1", "eth0", "ib0"),
    ({}, "127.0.1.1", "lo", "ib0"),
    ({}, "172.17.0.1", "docker0", "ib0"),
    ({"GLOO_SOCKET_IFNAME": "ib0,eth0", "NCCL_SOCKET_IFNAME": "eth"}, "10.0.0.1", "ib0", "eth0"),
    ({"NCCL_SOCKET_IFNAME": "^ib,docker,lo"}, None, "lo", "eth0"),
    ({"NCCL_SOCKET_IFNAME": "=eth1"}, None, "lo", None),
])  # fmt: skip
def test_the_interface_that_gloo_and_nccl_would_take(
    variables: dict[str, str], address: str | None, gloo: str, nccl: str | None
) -> None:
    assert local.gloo_choice(CARDS, variables, address) == gloo
    assert local.nccl_choice(CARDS, variables) == nccl


def test_the_picture_has_a_square_for_every_pair_and_the_words_are_peoples() -> None:
    facts = slowed(healthy(3, nodes=4), 2, 0.25)
    drawn = minidom.parseString(svg(facts))
    titles = [each.firstChild.nodeValue for each in drawn.getElementsByTagName("title") if each.firstChild]
    assert len(titles) == 12 and f"node0 to node2: {words.rate(facts.pairs[1].many[0])}" in titles
    assert [words.rate(25e6), words.rate(5e10), words.nbytes(64e6), words.seconds(0.045)] == [
        "200 Mbit/s", "400 Gbit/s", "64 MB", "45 ms"
    ]  # fmt: skip
    assert words.listed(["a", "b", "c"]) == "a, b and c"


def test_the_report_says_what_where_how_sure_what_it_costs_and_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    facts = slowed(healthy(3, nodes=4), 2, 0.25)
    found = diagnose(facts)
    show.print_report(facts, found, Console(width=110), 30.0)
    text = capsys.readouterr().out
    for wanted in ("1. The link of node2 is", "% sure", "costs", "seen:", "do:", "ethtool", "links between nodes"):
        assert wanted in text, text
    assert show.as_record(facts, found, 1, 30.0)["exit_status"] == 1


@pytest.mark.parametrize("step_seconds", [None, 2.0])
def test_the_last_lines_are_a_verdict_and_a_command_that_runs(
    step_seconds: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nothing is broken, and the link is simply slower than the model needs."""
    for found_any in (False, True):
        facts = replace(healthy(3, nodes=4), step_seconds=step_seconds)
        facts = slowed(facts, 2, 0.25) if found_any else facts
        lines = show.verdict(facts, diagnose(facts))
        assert lines[0].startswith("Once that is mended" if found_any else "Nothing is broken"), lines
        assert "int8" in lines[0] and ("one node alone" in lines[0] if step_seconds is None else "as one" in lines[0])
        command = lines[1].removeprefix("Type: gradwire predict ").split()
        assert predict.main(command) == 0
        printed = capsys.readouterr().out
        assert ("times as much as one" in printed) is (step_seconds is not None)
        show.print_report(facts, diagnose(facts), Console(width=500), 30.0)
        assert capsys.readouterr().out.rstrip().endswith(lines[1])
    assert show.verdict(replace(facts, pairs=()), []) == []


def test_a_script_is_measured_by_its_optimizer_steps_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = tmp_path / "train.py"
    train.write_text(
        "import sys, torch\nmodel = torch.nn.Linear(100, 10)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "frozen = torch.optim.SGD([torch.zeros(7, requires_grad=True)])\nassert sys.argv[1:] == ['--epochs', '3']\n"
        "while True:\n    model(torch.ones(5, 100)).sum().backward()\n    optimizer.step()\n    frozen.step()\n"
    )
    record = tmp_path / "steps"
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(SystemExit):
        script.main([str(record), str(train), "--epochs", "3"])
    run = script.judge(record, 0, False, [])
    assert len(record.read_text().splitlines()) == script.STEPS
    assert run.gradient_nbytes == 4 * (100 * 10 + 10) and run.step_seconds is not None and run.error is None


def test_a_script_that_makes_no_steps_says_what_it_said(tmp_path: Path) -> None:
    run = script.judge(tmp_path / "none", 1, False, ["Traceback", "KeyError: 'data'"])
    assert run.step_seconds is None and "KeyError: 'data'" in str(run.error) and "status 1" in str(run.error)
    assert "within" in str(script.judge(tmp_path / "none", -9, True, []).error)


def test_the_status_of_a_script_that_fails_is_the_doctors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, steps = tmp_path / "train.py", tmp_path / "steps"
    train.touch()
    steps.write_text("".join(f"8 {step}.0\n" for step in range(9)))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    crashed = script.judge(steps, -11, False, [])
    assert crashed.status == 139 and crashed.step_seconds == 1.0 and "failed with status -11" in str(crashed.error)
    for status, late in ((0, False), (-9, True)):  # all is well; it was ended when its time was up
        run = script.judge(steps, status, late, [])
        assert run.status == 0 and run.error is None
    run = script.judge(tmp_path / "none", 3, False, ["KeyError"])
    monkeypatch.setattr(examine_module, "run_script", lambda words, variables: run)
    assert command.main(["--run", str(train)]) == 3
    said = "the script ended with status 3 after 0 optimizer steps; it said last: KeyError"
    assert said in " ".join(capsys.readouterr().out.split())


def test_alone_it_looks_at_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "NCCL_P2P_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    status = command.main(["--json", "--gradient-mb", "3"])
    said = json.loads(capsys.readouterr().out)
    assert status == said["exit_status"] == 1 and said["facts"]["gradient_nbytes"] == 3_000_000
    assert "variable" in [each["key"] for each in said["findings"]]


@pytest.mark.parametrize("argv", [
    ["--gradient-mb", "-3"], ["--link", "fast"], ["--run"], ["--run", "no_such_file.py"], ["--what"],
    ["--seconds", "1"],
    ["--svg", "/no/such/folder/a.svg"],
])  # fmt: skip
def test_bad_use_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(argv) == 2
    assert capsys.readouterr().err


def examine(cluster: EmulatedCluster, folder: Path) -> dict[str, object]:
    result = folder / "doctor.json"
    ran = run_forked(
        cluster,
        "gradwire.bench.studies.doctor",
        ["--json", str(result), "--seconds", "6"],
        nodes=[1] * len(cluster.nodes),
        timeout_seconds=120,
    )
    assert result.exists(), ran.output
    found = json.loads(result.read_text())
    result.unlink()
    assert isinstance(found, dict)
    return found


@pytest.mark.netns
def test_a_healthy_cluster_has_nothing_and_a_broken_one_what_was_broken(tmp_path: Path) -> None:
    with EmulatedCluster([1, 1], "200mbit") as cluster:
        good = examine(cluster, tmp_path)
        assert good["findings"] == [] and good["exit_status"] == 0, good
        inside(cluster, 0, "mount", "-o", "remount,size=1m", "/dev/shm")
        with other_mtu(cluster):
            bad = examine(cluster, tmp_path)
    assert bad["exit_status"] == 1 and isinstance(bad["findings"], list)
    named = {each["key"]: each["nodes"] for each in bad["findings"]}
    assert named == {"mtu": ["node1"], "shared_memory": ["node0"]}, bad
    assert {"gloo", "gradwire"} == {each["backend"] for each in bad["facts"]["backends"]}  # type: ignore[index]


def test_a_listener_ends_with_its_threads() -> None:
    before = threading.active_count()
    with network.Listener():
        assert threading.active_count() >= before + 2
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("Thread-"):
            thread.join(timeout=2)
    assert threading.active_count() <= before

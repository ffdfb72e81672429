"""The doctor at work: on sockets, in one process, and on emulated nodes, healthy and with faults injected."""

import json
import socket
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from xml.dom import minidom

import pytest
import torch
from rich.console import Console
from torch._C._distributed_c10d import TCPStore

import gradwire
from gradwire.bench.doctor import alone, arrival, command, control, local, network, script, show
from gradwire.bench.doctor.checks import diagnose
from gradwire.bench.doctor.facts import (
    BackendTime,
    JobFacts,
    NetworkInterface,
    RankFacts,
    ScriptRun,
    from_record,
    to_record,
)
from gradwire.bench.doctor.picture import svg
from gradwire.bench.doctor.wanted import Wanted, with_script
from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked
from gradwire.bench.studies.doctor import OTHER_MTU, TINY_SHARED_MEMORY, inside
from gradwire.cli import predict
from gradwire.comms.bootstrap.compat import HashStore, PrefixStore
from gradwire.comms.environment import local_rank
from gradwire.comms.links.unit_rates import pairings
from gradwire.compressors import registry
from gradwire.topology import wording as words
from support.doctor import healthy, slowed
from support.threads import run_ranks


def test_rates_latency_and_whole_packets_are_measured_on_sockets() -> None:
    with network.Listener() as listener:
        client = network.Client("127.0.0.1", listener.ports)
        pair = network.measure_pair(client, (0, 1), 0.05, 1500)
        assert client.packets_pass(1500) is True
        assert client.packets_pass(1 << 16) is False  # larger than any packet of IP
        client.close()
        ports = listener.ports
    assert 0 < pair.latency_seconds < 1 and abs(pair.clock_seconds) < 1
    assert min(*pair.many) > 0 and pair.many >= pair.one
    with pytest.raises(OSError, match=r"refused"):
        network.Client("127.0.0.1", ports)


def test_the_better_of_two_tries_counts_in_every_figure() -> None:
    first, second = healthy(1, nodes=2).pairs[0], healthy(2, nodes=2).pairs[0]
    best = first.better(second)
    assert best.times == 2 and best.latency_seconds == min(first.latency_seconds, second.latency_seconds)
    for name in ("one", "many", "both"):
        assert getattr(best, name) == tuple(map(max, getattr(first, name), getattr(second, name)))


@pytest.mark.parametrize("count", [2, 3, 5, 8, 17])
def test_every_two_nodes_meet_once_and_nobody_is_in_two_places(count: int) -> None:
    rounds = pairings(count, count)
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
        return own.broadcast(found, command_timeout)

    command_timeout = timedelta(seconds=20)
    assert run_ranks(3, rank_main) == [said] * 3


def test_a_rank_that_does_not_come_is_named() -> None:
    assert control.Control(HashStore(), 0, 3).arrive(timedelta(seconds=0.05)) == [1, 2]
    found = diagnose(JobFacts(ranks=(RankFacts(rank=0, host=("a", "", "")),), missing_ranks=(1, 2)))
    assert "1, 2 did not come" in found[0].title and found[0].stops


def test_a_rank_says_that_it_has_started_before_torch_is_there() -> None:
    """In the words of torch's own store, which is asked by torch's own client."""
    store = TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=20), wait_for_workers=False)
    arrival.StartNotice("127.0.0.1", store.port, 2)
    own = control.Control(PrefixStore(arrival.PREFIX, store), 0, 3)
    late: list[list[int]] = []
    assert own.arrive(timedelta(seconds=2.5), lambda missing, seconds: late.append(missing)) == [1, 2]
    assert own.started([1, 2]) == {2: socket.gethostname()} and late[0] == [1, 2]


def test_a_kernel_says_what_held_a_connection_back() -> None:
    """A receiver that does not read: its window is full, and the sender's kernel says for how long."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sending = socket.create_connection(server.getsockname())
        receiving, _ = server.accept()
        sending.settimeout(0.3)
        with pytest.raises(TimeoutError):
            while True:
                sending.send(bytes(1 << 20))
        said = network.sent_segments(sending)
        sending.close()
        receiving.close()
    assert said is not None and said.sent > 0 and said.lost == 0
    assert 0 < max(said.window_share, said.buffer_share) <= 1.01


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


def test_lanes_and_the_other_half_of_a_port_are_read_from_sysfs(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for name, bus in (
        ("enp1s0f0np0", "0000:01:00.0"),
        ("enP2p1s0f0np0", "0002:01:00.0"),
        ("enp1s0f1np1", "0000:01:00.1"),
    ):
        top = f"sys/devices/pci/{bus}"
        files |= {
            f"{top}/current_link_speed": "32.0 GT/s PCIe",
            f"{top}/current_link_width": "4",
            f"{top}/infiniband/{name[:6]}x{bus[-1]}/sys_image_guid": "fc4c:ea03:00f9:4230",
            f"sys/class/net/{name}/type": "1",
        }
    write(tmp_path, files)
    for name, bus in (
        ("enp1s0f0np0", "0000:01:00.0"),
        ("enP2p1s0f0np0", "0002:01:00.0"),
        ("enp1s0f1np1", "0000:01:00.1"),
    ):
        (tmp_path / "sys/class/net" / name / "device").symlink_to(tmp_path / "sys/devices/pci" / bus)
    found = {each.name: each for each in local.read_interfaces(tmp_path)}
    assert found["enp1s0f0np0"].other_half == "enP2p1s0f0np0" and found["enp1s0f1np1"].other_half is None
    assert found["enp1s0f0np0"].pcie_bits_per_second == pytest.approx(126.03e9, rel=1e-3)


@pytest.mark.parametrize(("active", "rate"), [("eth1", 100e9), (None, None)])
def test_a_bond_has_the_rate_of_the_members_it_uses(tmp_path: Path, active: str | None, rate: float | None) -> None:
    bond = "sys/class/net/bond0"
    files = {
        f"{bond}/type": "1",
        f"{bond}/bonding/mode": "active-backup 1",
        f"{bond}/lower_eth0/x": "",
        f"{bond}/lower_eth1/x": "",
    }
    files |= {} if active is None else {f"{bond}/bonding/active_slave": active}
    for number in range(2):
        own = f"sys/class/net/eth{number}"
        files |= {f"{own}/type": "1", f"{own}/speed": "100000", f"{own}/operstate": "up"}
        files[f"sys/devices/pci0000:00/0000:0{number}:00.0/class"] = "0x020000"
    write(tmp_path, files)
    for number in range(2):
        member = tmp_path / f"sys/class/net/eth{number}"
        (member / "device").symlink_to(tmp_path / f"sys/devices/pci0000:00/0000:0{number}:00.0")
        (member / "master").symlink_to(tmp_path / bond)
    found = {each.name: each.bits_per_second for each in local.read_interfaces(tmp_path)}
    assert found == {"bond0": rate, "eth0": 100e9, "eth1": 100e9}


def test_a_bridge_over_a_nic_is_one_and_of_guests_alone_is_none(tmp_path: Path) -> None:
    below = {  # Proxmox: a bond in vmbr0, a VLAN of a NIC in br1; libvirt's and Docker's own; a team
        "vmbr0": ("bond0", "tap100i0"), "bond0": ("eth0",), "br1": ("eth1.7", "tap101i0"), "eth1.7": ("eth1",),
        "virbr0": ("vnet0",), "docker0": (), "team0": ("eth2", "eth3"), "tap100i0": (), "tap101i0": (), "vnet0": (),
        "eth0": (), "eth1": (), "eth2": (), "eth3": (),
    }  # fmt: skip
    net = "sys/class/net"
    files = {f"{net}/{name}/type": "1" for name in below}
    files |= {f"{net}/{name}/lower_{each}/x": "" for name, names in below.items() for each in names}
    files |= {f"{net}/{name}/bridge/x": "" for name in ("vmbr0", "br1", "virbr0", "docker0")}
    files |= {f"{net}/bond0/bonding/mode": "802.3ad 4"}
    files |= {f"{net}/eth{number}/speed": "10000" for number in range(4)}
    files |= {f"sys/devices/pci0000:00/0000:0{number}:00.0/class": "0x020000" for number in range(4)}
    write(tmp_path, files)
    for number, master in enumerate(("bond0", None, "team0", "team0")):
        nic = tmp_path / f"{net}/eth{number}"
        (nic / "device").symlink_to(tmp_path / f"sys/devices/pci0000:00/0000:0{number}:00.0")
        if master is not None:
            (nic / "master").symlink_to(tmp_path / net / master)
    (tmp_path / f"{net}/bond0/master").symlink_to(tmp_path / f"{net}/vmbr0")
    found = {each.name: (each.kind, each.bits_per_second) for each in local.read_interfaces(tmp_path)}
    assert {found[name] for name in ("vmbr0", "br1", "bond0", "eth1.7", "team0", "eth0")} == {("nic", 10e9)}
    assert found["virbr0"] == found["docker0"] == ("bridge", None)
    assert found["tap100i0"] == ("bridge", None)


CARDS = (
    NetworkInterface(name="lo", kind="loopback", addresses=("127.0.0.1",)),
    NetworkInterface(name="docker0", kind="bridge", addresses=("172.17.0.1",)),
    NetworkInterface(name="eth0", kind="nic", addresses=("10.0.0.1",)),
    NetworkInterface(name="eth1", kind="nic", addresses=("10.1.0.1",), up=False),
    NetworkInterface(name="ib0", kind="nic", addresses=("10.2.0.1",)),
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
    assert [words.rate(25e6), words.rate(5e10), words.nbytes(64e6), words.duration(0.045)] == [
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
        lines = show.conclusion(facts, diagnose(facts))
        assert lines[0].startswith("Once that is mended" if found_any else "Nothing found"), lines
        assert "one node alone" in lines[0] if step_seconds is None else "as one" in lines[0]
        assert not set(lines[0].split()) & set(registry.names()), "only predict ranks compressors"
        command = lines[1].removeprefix("Type: gradwire predict ").split()
        assert predict.main(command) == 0
        printed = capsys.readouterr().out
        assert ("times as much as one" in printed) is (step_seconds is not None)
        show.print_report(facts, diagnose(facts), Console(width=500), 30.0)
        assert capsys.readouterr().out.rstrip().endswith(lines[1])


@pytest.mark.parametrize(("change", "said"), [
    ({"pairs": ()}, "do not reach each other"),
    ({"missing_ranks": (1,)}, "do not all come"),
])  # fmt: skip
def test_also_a_job_that_could_not_be_measured_gets_a_verdict(change: dict[str, object], said: str) -> None:
    facts = replace(healthy(3, nodes=2), **change)  # type: ignore[arg-type]
    line, typed = show.conclusion(facts, diagnose(facts))
    assert said in line and typed.startswith("Type: ")
    alone = replace(facts, ranks=tuple(facts.nodes[0]), pairs=(), missing_ranks=())
    assert "this machine" in show.conclusion(alone, [])[0] and "torchrun" in show.conclusion(alone, [])[1]


def test_a_backend_that_is_far_slower_is_named_in_the_verdict() -> None:
    facts = replace(
        healthy(3, nodes=2), ranks=tuple(replace(e, gpus=(), device="cpu") for e in healthy(3, nodes=2).ranks)
    )
    for slow, named in ((1.2, False), (1.9, True)):
        times = {"gloo": slow, "gradwire": 1.0}
        backends = tuple(BackendTime(backend=name, nbytes=100, seconds=value) for name, value in times.items())
        assert ("gloo took 1.9 times" in show.conclusion(replace(facts, backends=backends), [])[0]) is named


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
    run = script.read_record(record, 0, False, [])
    assert len(record.read_text().splitlines()) == script.STEPS
    assert run.gradient_nbytes == 4 * (100 * 10 + 10) and run.step_seconds is not None and run.error is None
    assert run.unused_nbytes == 4 * 7


def test_a_script_that_makes_no_steps_says_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, record = tmp_path / "hangs.py", tmp_path / "steps"
    hangs.write_text(
        "import pathlib, time\nuntil = time.monotonic() + 60\n"
        f"while not pathlib.Path({str(record) + script.STANDS!r}).exists() and time.monotonic() < until:\n"
        "    time.sleep(0.01)\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(script, "STANDS_SECONDS", 0.05)
    script.main([str(record), str(hangs)])
    runs = [script.read_record(record, -9, True, []), ScriptRun(error="late", stands="hangs.py:9 in load"), ScriptRun()]
    assert runs[0].stands in ("hangs.py:3 in <module>", "hangs.py:4 in <module>")
    (note,) = with_script(healthy(1), Wanted(), [*runs, runs[1]]).notes
    assert note.endswith(
        "fewer than two optimizer steps within 60 s; it printed nothing; "
        f"rank 0 stood at {runs[0].stands}; ranks 1 and 3 stood at hangs.py:9 in load"
    )
    assert script.read_record(record, 1, False, []).stands is None


def test_the_rank_whose_script_failed_first_is_quoted() -> None:
    """The others fail because it is gone, and say no more than that."""
    gone, lost = "Connection closed by peer", "KeyError: 'lost'"
    runs = [
        ScriptRun(error=gone, status=1, seconds=9.5),
        ScriptRun(error=lost, status=7, seconds=9.0),
        ScriptRun(seconds=1.0),
    ]
    found = with_script(healthy(1), Wanted(), runs)
    assert found.notes == (f"`--script` on rank 1: {lost}",) and found.script_status == 7
    assert with_script(healthy(1), Wanted(), runs[1:2]).notes == (f"`--script`: {lost}",)


@pytest.mark.slow
def test_a_scripts_step_is_split_into_what_its_main_thread_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as the doctor runs it: a loader that takes most of each step is seen, with its line."""
    train = tmp_path / "train.py"
    train.write_text(
        "import time, torch\nfrom torch.utils.data import DataLoader, Dataset\nclass Slow(Dataset):\n"
        "    def __len__(self):\n        return 1000\n    def __getitem__(self, index):\n        time.sleep(0.05)\n"
        "        return torch.ones(4)\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "for batch in DataLoader(Slow()):\n    model(batch).sum().backward()\n    optimizer.step()\n"
    )
    monkeypatch.setattr(script, "LIMIT_SECONDS", 600.0)  # a busy machine may import torch for a minute
    run = script.run_script([str(train)], None)
    assert run.error is None and run.activity["the data loader"] > 0.03, run
    assert run.lines["the data loader"] == "train.py:7 in __getitem__" and run.under_way_seconds is None


def split_job(late: int, kind: str, seconds: float, everybody: float = 0.0) -> JobFacts:
    """Four ranks on two nodes; one is busy for longer, and the others wait in the backward pass."""
    facts = healthy(3, nodes=2)
    ranks = tuple(replace(facts.ranks[0], rank=rank, host=(f"node{rank // 2}", "", "")) for rank in range(4))
    runs = []
    for rank in range(4):
        own = seconds if rank == late else 0.0
        activity = {"the backward pass": 0.3 - own, kind: everybody + own}
        runs.append(
            ScriptRun(step_seconds=0.5, activity=activity, lines={kind: "train.py:7 in load"},
                      under_way_seconds=0.1 + seconds - own)
        )  # fmt: skip
    ranks = tuple(replace(each, device="cpu", gpus=()) for each in ranks)
    return replace(facts, ranks=ranks, step_seconds=0.5, script_runs=tuple(runs), work=())


@pytest.mark.parametrize(("kind", "word"), [("the data loader", "num_workers"), ("saving a checkpoint", "async_save")])
def test_the_rank_that_the_others_wait_for_is_named_with_what_it_does(kind: str, word: str) -> None:
    found = {each.key: each for each in diagnose(split_job(3, kind, 0.2))}
    late = found["late_rank"]
    assert late.nodes == ("node1",) and "rank 3" in late.title and late.cost_seconds == pytest.approx(0.2)
    assert "train.py:7" in late.evidence[1] and word in late.fix[0]
    assert not {"slow_loader", "checkpoints"} & set(found)
    assert not {"late_rank"} & {each.key for each in diagnose(split_job(3, kind, 0.01))}


def test_a_loader_that_all_ranks_wait_for_and_checkpoints_in_every_step_are_named() -> None:
    for kind, key in (("the data loader", "slow_loader"), ("saving a checkpoint", "checkpoints")):
        found = {each.key: each for each in diagnose(split_job(3, kind, 0.0, everybody=0.2))}
        assert key in found and found[key].cost_seconds == pytest.approx(0.2) and "late_rank" not in found


def test_the_parts_of_a_step_are_shown() -> None:
    facts = split_job(3, "the data loader", 0.2)
    line = show.headline(facts)[0]
    assert "500 ms of a step" in line and "300 ms the backward pass" in line and "200 ms waiting for late ranks" in line


def test_a_script_that_makes_no_steps_says_what_it_said(tmp_path: Path) -> None:
    run = script.read_record(tmp_path / "none", 1, False, ["Traceback", "KeyError: 'data'"])
    assert run.step_seconds is None and "KeyError: 'data'" in str(run.error) and "status 1" in str(run.error)
    assert "within" in str(script.read_record(tmp_path / "none", -9, True, []).error)


def test_the_status_of_a_script_that_fails_is_the_doctors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, steps = tmp_path / "train.py", tmp_path / "steps"
    train.touch()
    steps.write_text("".join(f"8 {step}.0 4\n" for step in range(9)))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    crashed = script.read_record(steps, -11, False, [])
    assert crashed.status == 139 and crashed.step_seconds == 1.0 and "failed with status -11" in str(crashed.error)
    for status, late in ((0, False), (-9, True)):  # all is well; it was ended when its time was up
        run = script.read_record(steps, status, late, [])
        assert run.status == 0 and run.error is None
    run = script.read_record(tmp_path / "none", 3, False, ["KeyError"])
    monkeypatch.setattr(alone, "run_script", lambda words, variables: run)
    assert command.main(["--run", str(train)]) == 3
    said = "the script ended with status 3 after 0 optimizer steps; it said last: KeyError"
    assert said in " ".join(capsys.readouterr().out.split())


def test_alone_it_looks_at_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "NCCL_P2P_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    status = command.main(["--json", "--gradient-mb", "3"])
    said = json.loads(capsys.readouterr().out)
    assert status == said["exit_status"] == 0, "the variable costs nothing that was measured: a remark"
    assert said["facts"]["gradient_nbytes"] == 3_000_000
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
        str(Path(__file__).with_name("doctor_rank.py")),
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
        inside(cluster, 0, TINY_SHARED_MEMORY)
        inside(cluster, 1, OTHER_MTU)
        bad = examine(cluster, tmp_path)
    assert bad["exit_status"] == 0, "neither cost anything that was measured: remarks"
    assert isinstance(bad["findings"], list)
    named = {each["key"]: each["nodes"] for each in bad["findings"]}
    assert named == {"mtu": ["node1"], "shared_memory": ["node0"]}, bad
    assert {"gloo", "gradwire"} == {each["backend"] for each in bad["facts"]["backends"]}  # type: ignore[index]


def test_a_listener_ends_with_its_threads() -> None:
    before = threading.active_count()
    with network.Listener():
        assert threading.active_count() >= before + 2
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("doctor"):
            thread.join(timeout=2)
    assert threading.active_count() <= before

"""The NIC of each local rank: reported as the topology has it, and used by gloo where that is asked for."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from gradwire.comms.bootstrap import placement
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.nics import describe_nics, interface_of
from gradwire.comms.bootstrap.placement import PeerInfo
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.transport import torch_group
from gradwire.topology.host_summary import Hardware
from support.threads import run_ranks

CARDS = ("nic0", "nic1")


def peer_infos(hosts: str, nics: list[str | None], *, device: str = "cuda") -> list[PeerInfo]:
    """One rank for each letter of `hosts`, each with a NIC; the machines have two."""
    own = PeerInfo.here(0, len(hosts), Config(), torch.device("cpu"))
    return [
        replace(own, rank=rank, host=(host, "boot", "1"), device=device, hardware=Hardware(None, None, nic, nic, CARDS))
        for rank, (host, nic) in enumerate(zip(hosts, nics, strict=True))
    ]


@pytest.mark.parametrize(
    ("hosts", "nics", "lines"),
    [
        ("aabb", ["nic0", "nic1"] * 2, ("NIC by local rank: nic0, nic1 on all 2 nodes",)),
        ("abab", ["nic0", "nic0", "nic1", "nic1"], ("NIC by local rank: nic0, nic1 on all 2 nodes",)),
        ("aab", ["nic0", "nic1", "nic1"], ("NIC by local rank: nic0, nic1 on node 0; nic1 on node 1",)),
        ("ab", [None, "nic0"], ("NIC by local rank: ? on node 0; nic0 on node 1",)),
        ("ab", [None, None], ()),
    ],
)
def test_nics_are_reported_by_local_rank(hosts: str, nics: list[str | None], lines: tuple[str, ...]) -> None:
    assert describe_nics(peer_infos(hosts, nics), Config()) == lines


def test_why_a_nic_is_unknown_is_said_once() -> None:
    why = "`CUDA_VISIBLE_DEVICES` is MIG-1, and nobody knows it"
    ranks = peer_infos("aabb", ["nic0", None, None, None])
    ranks = [
        replace(each, hardware=replace(each.hardware, nic_unknown="" if each.hardware.nic else why)) for each in ranks
    ]
    assert describe_nics(ranks, Config())[1] == f"NIC of ranks 1, 2, 3 unknown: {why}"
    assert describe_nics(ranks[1:2], Config()) == (f"NIC of rank 1 unknown: {why}",)
    with pytest.raises(ValueError, match=r"rank 1 \(3 of 4 ranks; `CUDA_VISIBLE_DEVICES` is MIG-1, and nobody"):
        interface_of(ranks, 0, Config(nics="per_rank"))


def test_a_shared_nic_beside_an_idle_one_is_named() -> None:
    head, line = describe_nics(peer_infos("aabb", ["nic0", "nic0", "nic0", "nic1"]), Config())
    assert head == "NIC by local rank: nic0 for all 2 on node 0; nic0, nic1 on node 1"
    assert line.startswith("node 0: ranks 0, 1 share nic0 while nic1 is idle")


def test_gloo_with_several_nics_is_lines_how_to_use_them() -> None:
    ranks = peer_infos("aab", ["nic0", "nic1", "nic0"], device="cpu")
    said = describe_nics(ranks, Config())[-1]
    assert "node 0: gloo takes the same interface" in said and "bond them" in said and "MPTCP" in said
    for content in (Config(nics="per_rank"), Config(transport="mpi")):
        assert len(describe_nics(ranks, content)) == 1


def test_an_interface_is_taken_only_where_it_is_asked_for_and_all_have_one() -> None:
    ranks = peer_infos("aa", ["nic0", "nic1"])
    assert interface_of(ranks, 1, Config()) is None
    assert interface_of(ranks, 1, Config(nics="per_rank")) == "nic1"
    with pytest.raises(ValueError, match=r"`nics` is per_rank, but no network interface is known for rank 1"):
        interface_of(peer_infos("aa", ["nic0", None]), 0, Config(nics="per_rank"))


def test_gloo_listens_where_it_is_lines() -> None:
    store = HashStore()

    def run(rank: int) -> float:
        group = torch_group.connect_gloo(store, rank, 2, timedelta(seconds=20), interface="lo")
        tensor = torch.full((4,), float(rank + 1))
        group.all_reduce(tensor).wait()
        return tensor[0].item()

    assert run_ranks(2, run) == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="nowhere7"):
        torch_group.connect_gloo(store, 0, 1, timedelta(seconds=5), interface="nowhere7")


def test_a_job_reports_its_nics_and_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "hardware", lambda local_rank, device: Hardware(None, 1e9, "lo", "lo", ("lo",)))
    store = HashStore()

    def run(rank: int) -> str:
        config = Config(hostname=f"n{rank}", nics="per_rank", timeout=timedelta(seconds=30))
        communicator = Communicator(store, rank, 2, torch.device("cpu"), config, name="nics")
        try:
            flat = torch.full((1000,), float(rank + 1))
            communicator.all_reduce(flat).wait()
            assert flat.eq(3.0).all()
            return communicator.report().full()
        finally:
            communicator.close()

    assert all("NIC by local rank: lo on all 2 nodes" in text for text in run_ranks(2, run))

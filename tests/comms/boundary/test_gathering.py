"""Records of ranks are gathered as JSON of a declared type: nothing that another rank sends is executed."""

import pickle
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from gradwire.comms.boundary import gathering
from gradwire.comms.boundary.messages import MessageError
from gradwire.topology.gdr.inputs.nccl_log import NcclLog
from gradwire.topology.gdr.inputs.nccl_warnings import KnownWarning
from gradwire.topology.gdr.job import RankResult


@dataclass
class Found:
    """A record."""

    host: str
    counts: Counter[tuple[int, str]] = field(default_factory=Counter)


class Trap:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def said_by_all(monkeypatch: pytest.MonkeyPatch, *others: bytes) -> None:
    """Lets `gather_bytes` return what this rank gave, and these bytes of further ranks."""
    monkeypatch.setattr(gathering, "gather_bytes", lambda own, group: [own, *others])


def test_a_log_of_nccl_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    log = NcclLog(lines=3, version=(2, 27, 3), networks={"IB"}, hosts_with_gdr={"a", "b"}, nearest="PIX")
    log.gdr_channels[0, "send"] += 2
    log.far_pairs[7, 4, False] += 1
    log.warnings = {"text": KnownWarning("p", "cause", "fix", "source", "gdr"), "other": None}
    said_by_all(monkeypatch)
    own = RankResult(("host", "boot"), {"nothing": None, "gpus": {"count": 2}}, log)
    assert gathering.gather_records(own) == [own]


def test_no_pickle_of_another_rank_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = tmp_path / "made"
    said_by_all(monkeypatch, pickle.dumps(Trap(made)))
    with pytest.raises(MessageError):
        gathering.gather_records(Found("here"))
    assert not made.exists()


def test_another_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said_by_all(monkeypatch, b'{"host": 3}')
    with pytest.raises(MessageError, match="host"):
        gathering.gather_records(Found("here"))


def test_no_command_calls_an_object_collective() -> None:
    """Torch's collectives of objects unpickle what other ranks send."""
    root = Path(__file__).parents[3]
    words = [name for name in dir(dist) if name.endswith(("_object", "_object_list"))]
    assert "all_gather_object" in words
    files = [
        file for folder in ("comms", "bench", "gradwire/cli", "topology") for file in (root / folder).rglob("*.py")
    ]
    assert len(files) > 200
    found = [f"{file}: {word}" for file in files for text in [file.read_text()] for word in words if word + "(" in text]
    assert not found

"""Raw NCCL without a GPU: what is missing is named, and the calls are those that nccl4py takes."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from gradwire.bench.nccl_tests.backends import nccl_raw_backend
from gradwire.bench.nccl_tests.backends.backend import Issue
from gradwire.bench.nccl_tests.backends.nccl_raw_backend import NcclRawBackend, RawCommunicator

STREAM = 7
CALLS = ("allreduce", "reduce", "reduce_scatter", "allgather", "broadcast", "send", "recv")


class Recorder:
    """A communicator that writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], object]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: object, stream: object = None) -> None:
            self.calls.append((name, arguments, stream))

        return call


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def backend(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> NcclRawBackend:
    """Rank 1 of 3 on a communicator that sends nothing."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    nccl = ModuleType("nccl.core")

    @contextmanager
    def group() -> Iterator[None]:
        recorder.calls.append(("group", (), STREAM))
        yield
        recorder.calls.append(("end", (), STREAM))

    nccl.__dict__.update(SUM="sum", MAX="max", AVG="avg", group=group)
    return NcclRawBackend(nccl, recorder, 1, 3)


def test_a_missing_binding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(RuntimeError, match=r"`--backend` is nccl-raw.*nccl4py.*pip install nccl4py"):
        nccl_raw_backend._load()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = ModuleType("nccl.core")
    nccl.__dict__["get_version"] = lambda: SimpleNamespace(libnccl=None)
    monkeypatch.setitem(sys.modules, "nccl.core", nccl)
    with pytest.raises(RuntimeError, match=r"`--backend` is nccl-raw.*libnccl\.so\.2.*install a CUDA build of torch"):
        nccl_raw_backend._load()


def test_reductions_go_out_as_they_are(backend: NcclRawBackend, recorder: Recorder) -> None:
    x, y = torch.zeros(6), torch.zeros(2)
    issues: list[Issue] = [
        backend.all_reduce(x, "sum"),
        backend.reduce(x, 2, "max"),
        backend.reduce_scatter(y, x, "avg"),
    ]
    assert not recorder.calls, "preparing issues nothing"
    for issue in issues:
        issue().wait()
    assert [(name, rest[2:], stream) for name, rest, stream in recorder.calls] == [
        ("allreduce", ("sum",), STREAM),
        ("reduce", ("max", 2), STREAM),
        ("reduce_scatter", ("avg",), STREAM),
    ]
    assert [tensor is x for tensor in recorder.calls[2][1][:2]] == [True, False]


def test_what_only_moves_goes_as_bytes(backend: NcclRawBackend, recorder: Recorder) -> None:
    x, y = torch.zeros(2, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for issue in (backend.all_gather(y, x), backend.broadcast(x, 2)):
        issue().wait()
    assert [name for name, _, _ in recorder.calls] == ["allgather", "broadcast"]
    assert recorder.calls[1][1][2] == 2
    for _, arguments, _ in recorder.calls:
        assert all(tensor.dtype == torch.uint8 for tensor in arguments if isinstance(tensor, Tensor))


def test_an_exchange_is_one_group(backend: NcclRawBackend, recorder: Recorder) -> None:
    x, y = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    backend.all_to_all(y, x)().wait()
    assert [name for name, _, _ in recorder.calls] == ["group", *["send", "recv"] * 3, "end"]
    for peer, (_, (sent, to), _) in enumerate(recorder.calls[1:-1:2]):
        assert to == peer
        assert isinstance(sent, Tensor)
        assert torch.equal(sent.view(torch.int64), x[2 * peer : 2 * peer + 2])
    recorder.calls.clear()
    backend.send_receive(y, x)().wait()
    assert [(name, rest[1:]) for name, rest, _ in recorder.calls[1:-1]] == [("send", (2,)), ("recv", (0,))]


@pytest.mark.parametrize(
    ("collective", "element", "operation", "reason"),
    [
        ("barrier", "float", "sum", "no barrier"),
        ("all_reduce", "float", "bxor", "bxor"),
        ("reduce", "float", "bor", "bor"),
        ("all_reduce", "bfloat16", "avg", None),
        ("all_gather", "float", "none", None),
    ],
)
def test_what_nccl_lacks_is_refused(
    backend: NcclRawBackend, collective: str, element: str, operation: str, reason: str | None
) -> None:
    said = backend.refusal(collective, element, operation)
    assert said is None if reason is None else said is not None and reason in said


@pytest.mark.parametrize("name", CALLS)
def test_nccl4py_takes_these_calls(name: str) -> None:
    """The real binding, where it is installed: it needs no GPU to be looked at."""
    if importlib.util.find_spec("nccl") is None:
        pytest.skip("no nccl4py: `pip install nccl4py cuda-bindings` brings it")
    nccl = importlib.import_module("nccl.core")
    ours = inspect.signature(getattr(RawCommunicator, name)).parameters
    inspect.signature(getattr(nccl.Communicator, name)).bind(*[None] * (len(ours) - 1), stream=STREAM)
    theirs = list(inspect.signature(getattr(nccl.Communicator, name)).parameters)
    assert theirs[: len(ours) - 1] == list(ours)[:-1], "the same names in the same places"
    missing = [each for each in ("SUM", "PROD", "MAX", "MIN", "AVG", "group", "get_version") if not hasattr(nccl, each)]
    assert not missing
    assert len(bytes(nccl.UniqueId.from_bytes(bytes(128)))) == 128

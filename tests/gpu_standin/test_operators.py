"""Torch's operators on CUDA tensors over the stand-in: the CPU's bits, the device's order.

What is asynchronous is shown by a gate, not by time: a stream stands still until the test lets it go.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as trees

from gpu_standin.calls import LIBRARIES, Cuda
from gpu_standin.conftest import Jobs

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
SAMPLES = 5
"""Of each operator and dtype: torch has up to hundreds."""

RANDOM = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal.in_place"),
    *("normal.number_mean", "rand_like", "randint", "randint_like", "randn", "randn_like", "uniform", "svd_lowrank"),
    *("pca_lowrank", "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d"),
    *("nn.functional.dropout3d", "nn.functional.feature_alpha_dropout.with_train", "nn.functional.rrelu"),
    *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"),
}
"""Their numbers are CUDA's generator's, or the CPU takes a kernel of its own where CUDA takes products."""

WITHOUT_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Memory as it is found."""

NOT_ON_CUDA = {
    *("histogram", "histogramdd", "sparse.mm.reduce", "sparse.sampled_addmm", "tensor_split", "to_sparse"),
    *("nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none"),
    *("nn.functional.ctc_loss", "cholesky", "linalg.lstsq", "linalg.lstsq.grad_oriented", "chalf", "complex"),
    *("view_as_complex", "nn.functional.embedding", "as_strided.partial_views"),
}
"""Operators that torch's CUDA build does not have, does by another method, or with arguments on the CPU; and samples
that are wrong on purpose or that this comparison has no words for (float16 complex numbers, sparse results)."""


def moved(values: object, device: str) -> Any:
    """Copies of all tensors in nested lists and dictionaries, on a device; that device in the place of one named."""

    def move(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().to(device)
        return torch.device(device) if isinstance(leaf, torch.device) else leaf

    return trees.tree_map(move, values)


def difference(want: object, have: object) -> str | None:
    """How two results differ, in words; None where they are the same bits (NaN is NaN)."""
    wanted, found = trees.tree_leaves(want), trees.tree_leaves(have)
    if len(wanted) != len(found):
        return f"{len(found)} values instead of {len(wanted)}"
    for one, other in zip(wanted, found, strict=True):
        if not isinstance(one, Tensor):
            if one != other and not (isinstance(one, float) and math.isnan(one) and str(other) == "nan"):
                return f"{other} instead of {one}"
            continue
        if one.is_floating_point() and other.dtype == one.dtype:
            one, other = one.nan_to_num(12345.0), other.cpu().nan_to_num(12345.0)
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{other.dtype} {tuple(other.shape)} instead of {one.dtype} {tuple(one.shape)}"
        if not torch.equal(one.resolve_conj().resolve_neg(), other.cpu().resolve_conj().resolve_neg()):
            return "other values"
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(operator: Any, dtype: torch.dtype) -> tuple[int, str | None]:
    """How many samples were compared, and how the first one differs that does."""
    compared = 0
    for number, sample in enumerate(operator.sample_inputs("cpu", dtype)):
        if number == SAMPLES:
            break
        arguments = (sample.input, sample.args, sample.kwargs)
        try:
            first, rest, named = moved(arguments, "cpu")
            want = operator(first, *rest, **named)
        except (RuntimeError, NotImplementedError):
            continue  # the CPU does not have it
        first, rest, named = moved(arguments, "cuda")
        if "device" in named:
            named["device"] = "cuda"
        try:
            found = difference(want, operator(first, *rest, **named))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a difference, and the others follow
            found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if found is not None:
            return compared, f"sample {number}: {found}"
        compared += 1
    return compared, None


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.filterwarnings("ignore")
def test_every_operator_returns_the_cpus_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # Torch searches the whole stack, with source lines, for a unittest of its own, at each sample: there is none, and
    # it takes seven eighths of the time.
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)
    dtype = getattr(torch, name)
    differing, operators, samples = {}, 0, 0
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in op_db:
            full = operator.name + (f".{operator.variant_test_name}" if operator.variant_test_name else "")
            if full in RANDOM | WITHOUT_VALUES | NOT_ON_CUDA or not operator.supports_dtype(dtype, "cpu"):
                continue
            compared, found = compare(operator, dtype)
            samples, operators = samples + compared, operators + (compared > 0)
            if found is not None:
                differing[full] = found
    assert differing == {}
    assert operators > 200 and samples > 1000


class Gate:
    """A stream that stands still until it is opened."""

    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self._open = threading.Event()
        self._cuda = Cuda()
        self._cuda.submit(stream._as_parameter_, self._open.wait)

    def __enter__(self) -> Self:
        return self

    def open(self) -> None:
        self._open.set()

    def __exit__(self, *_: object) -> None:
        self._open.set()
        torch.cuda.synchronize()


@pytest.fixture
def side() -> "torch.cuda.Stream":
    assert LIBRARIES is not None
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def test_an_operator_returns_before_it_runs(side: "torch.cuda.Stream") -> None:
    values = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with Gate(side) as gate:
        with torch.cuda.stream(side):
            values.add_(1)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        assert not done.query()  # type: ignore[no-untyped-call]
        assert values.sum().item() == 0, "the default stream does not wait for another"
        gate.open()
        torch.cuda.current_stream().wait_event(done)
        assert values.sum().item() == 1000


def test_a_missing_wait_shows_as_wrong_numbers(side: "torch.cuda.Stream") -> None:
    def total(wait: bool) -> float:
        values = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with Gate(side) as gate:
            with torch.cuda.stream(side):
                values.copy_(torch.ones(1000, device="cuda", dtype=torch.float64))
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
            if wait:
                torch.cuda.current_stream().wait_event(done)
            doubled = values * 2
            if not wait:
                torch.cuda.current_stream().synchronize()
            gate.open()
            return doubled.sum().item()

    assert total(wait=True) == 2000
    assert total(wait=False) == 0


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_is_handed_out_too_early_shows(side: "torch.cuda.Stream", recorded: bool) -> None:
    """As on the device: what a launched operator reads belongs to whoever has been given the memory by then."""
    results = torch.empty(4096, device="cuda")
    values = torch.ones(4096, device="cuda")
    torch.cuda.synchronize()
    with Gate(side) as gate:
        with torch.cuda.stream(side):
            results.copy_(values.expand(4096) * 1)
            torch.mul(values, 3, out=results)
        if recorded:
            values.record_stream(side)
        address = values.data_ptr()
        del values
        others = torch.full((4096,), 7.0, device="cuda")
        assert (others.data_ptr() != address) == recorded
        torch.cuda.current_stream().synchronize()
        gate.open()
    assert results[0].item() == (3 if recorded else 21)


def test_the_default_generators_numbers_come_again() -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.randn(50, device="cuda"), nn.functional.dropout(torch.ones(50, device="cuda"))
    second = torch.randn(50, device="cuda")
    torch.cuda.set_rng_state(state)
    again = torch.randn(50, device="cuda"), nn.functional.dropout(torch.ones(50, device="cuda"))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[0], second)
    kept = nn.functional.dropout(torch.ones(10_000, device="cuda"), 0.25)
    assert set(kept.unique().tolist()) == {0.0, kept.max().item()}  # type: ignore[no-untyped-call]
    assert abs((kept == 0).float().mean().item() - 0.25) < 0.02


def test_wrong_arguments_raise_at_the_call() -> None:
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        torch.zeros(4, device="cuda").add_(torch.zeros(5, device="cuda"))
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, cuda:0 and cpu"):
        torch.zeros(4, device="cuda") + torch.zeros(4)
    with pytest.raises(RuntimeError, match="same device, but found at least two devices"):
        torch.zeros(4, device="cuda:0") + torch.zeros(4, device="cuda:1")


def test_what_no_cpu_kernel_does_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="has no aten::_thnn_fused_lstm_cell"):
        nn.LSTMCell(4, 4).cuda()(torch.zeros(2, 4, device="cuda"))


def test_sparse_gradients_are_the_cpus_bits() -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        bag, table = (
            nn.EmbeddingBag(50, 8, sparse=True, mode="sum").to(device),
            nn.Embedding(50, 8, sparse=True).to(device),
        )
        optimizers = [torch.optim.SparseAdam(bag.parameters()), torch.optim.SGD(table.parameters(), lr=0.1)]
        for step in range(3):
            rows = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(step)).to(device)
            loss = bag(rows).square().mean() + table(rows).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [bag.weight.detach().cpu(), table.weight.detach().cpu()]

    with one_thread():
        assert all(torch.equal(one, other) for one, other in zip(trained("cpu"), trained("cuda"), strict=True))


def convolutions(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs, labels = torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs.to(device)), labels.to(device)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [each.detach().cpu() for each in network.parameters()]


def transformer(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    table, block = nn.Embedding(30, 16).to(device), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0).to(device)
    weights = [*table.parameters(), *block.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for step in range(3):
        words = torch.randint(0, 30, (7, 4), generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        block(table(words)).square().mean().backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return [each.detach().cpu() for each in weights]


@pytest.mark.parametrize(("train", "tolerance"), [(convolutions, 0.0), (transformer, 1e-6)])
def test_a_training_ends_with_the_cpus_weights(train: Callable[[str], list[Tensor]], tolerance: float) -> None:
    """Bit for bit; but for attention, for which the CPU has a kernel that adds in another order."""
    cuda = Cuda()
    cuda.set("JITTER_US", "300")
    try:
        with one_thread():
            wanted, found = train("cpu"), train("cuda")
    finally:
        cuda.set("JITTER_US", "0")
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)


def test_an_index_out_of_range_is_a_device_side_assertion(torch_jobs: Jobs) -> None:
    ranks = torch_jobs.run("assertion.py")
    assert ranks.statuses == [0], ranks.errors
    assert "device-side assertion in aten::index_select: index out of range" in ranks.errors[0]

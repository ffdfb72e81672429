"""Every call of torch.distributed that a backend may refuse: collectives, dtypes, reduce ops, shapes and splits.

`outcomes` makes all of them in one process group, one after the other, and says how each ended.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.backend.strided import tensors_in

Made = tuple[Callable[..., object], list[Tensor]]
"""Issues a call with `async_op=True`, and the tensors that it writes to."""

Call = Callable[[torch.dtype, str, object, int], Made]
"""A collective, from a dtype, a layout, an op (any, where it does not add) and this rank."""

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
OPS = {
    **{name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")},
    "PREMUL_SUM": dist._make_nccl_premul_sum(2.0),  # type: ignore[attr-defined]
}
LARGE = 40_000
"""Elements: a plan is taken for them between two nodes."""

LARGE_DTYPES = (torch.float32, torch.float16, torch.bool, torch.int16, torch.int64, torch.complex64)
LAYOUTS = (
    *("plain", "empty", "0-dim", "0-dim view", "large", "gaps", "transposed", "permuted", "conjugate", "negative"),
    "expanded",
)
PACKED = ", packed"
"""Behind a layout: the same values in a contiguous tensor."""

AS_IT_LIES = ("gaps", "transposed", "permuted", "conjugate", "negative")
"""Layouts of which torch 2.13's gloo takes the memory as it lies; it is given contiguous tensors of the same values."""

SIZE = 2


def has(dtype: torch.dtype, layout: str) -> bool:
    """Whether tensors of a dtype have a layout, and it is worth a call."""
    match layout:
        case "large":
            return dtype in LARGE_DTYPES
        case "conjugate":
            return dtype.is_complex
        case "negative":
            return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    return True


def tensor(dtype: torch.dtype, layout: str, seed: int, times: int = 1) -> Tensor:
    """A tensor of small powers of two, which all dtypes have: `times` as long in its first dimension."""
    if layout.endswith(PACKED):
        return tensor(dtype, layout.removesuffix(PACKED), seed, times).resolve_conj().resolve_neg().contiguous()
    shape = {"empty": (0, 3), "large": (times * LARGE,), "permuted": (times * 4, 2, 3)}.get(layout, (times * 4, 2))
    if layout.startswith("0-dim"):
        shape = () if times == 1 else (times,)
    numel = torch.Size(shape).numel()
    values = (2.0 ** ((torch.arange(numel) + seed) % 2)).view(shape).to(dtype)
    match layout:
        case "gaps":
            return values.repeat_interleave(2, dim=-1)[..., ::2]
        case "transposed":
            return values.t().contiguous().t()
        case "permuted":
            return values.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        case "expanded":
            return values[:1].expand(shape)
        case "0-dim view":
            around = torch.ones(times + 2).to(dtype)
            around[1:-1] = values
            return around[1] if times == 1 else around[1:-1]
        case "conjugate" | "negative":
            if dtype.is_complex:  # no zeros, whose sign torch does not always keep
                values = (values.to(torch.complex64) * (1 - 2j)).to(dtype)
            return values.conj() if layout == "conjugate" else torch._neg_view(values)
    return values


def all_reduce(dtype: torch.dtype, layout: str, op: object, rank: int) -> Made:
    own = tensor(dtype, layout, rank)
    return partial(dist.all_reduce, own, op=op, async_op=True), [own]


def coalesced(dtype: torch.dtype, layout: str, op: object, rank: int) -> Made:
    own = [tensor(dtype, layout, rank), tensor(dtype, layout, rank + 1)]
    return partial(dist.all_reduce_coalesced, own, op=op, async_op=True), own


def reduce(dtype: torch.dtype, layout: str, op: object, rank: int) -> Made:
    own = tensor(dtype, layout, rank)
    return partial(dist.reduce, own, 1, op=op, async_op=True), [own] if rank == 1 else []


def reduce_scatter(dtype: torch.dtype, layout: str, op: object, rank: int) -> Made:
    own = tensor(dtype, layout, 0)
    sources = [tensor(dtype, layout, rank + each) for each in range(SIZE)]
    return partial(dist.reduce_scatter, own, sources, op=op, async_op=True), [own]


def reduce_scatter_single(dtype: torch.dtype, layout: str, op: object, rank: int) -> Made:
    own, source = tensor(dtype, layout, 0), tensor(dtype, layout, rank, SIZE)
    return partial(dist.reduce_scatter_single, own, source, op=op, async_op=True), [own]


def broadcast(dtype: torch.dtype, layout: str, _: object, rank: int) -> Made:
    own = tensor(dtype, layout, rank)
    return partial(dist.broadcast, own, 1, async_op=True), [own]


def all_gather(dtype: torch.dtype, layout: str, _: object, rank: int) -> Made:
    outputs = [tensor(dtype, layout, 0) for _ in range(SIZE)]
    return partial(dist.all_gather, outputs, tensor(dtype, layout, rank), async_op=True), outputs


def all_gather_single(dtype: torch.dtype, layout: str, _: object, rank: int) -> Made:
    output = tensor(dtype, layout, 0, SIZE)
    return partial(dist.all_gather_single, output, tensor(dtype, layout, rank), async_op=True), [output]


def gather(dtype: torch.dtype, layout: str, _: object, rank: int) -> Made:
    given = "plain" if layout == "expanded" else layout  # the root alone would refuse it, and the others wait
    outputs = [tensor(dtype, given, 0) for _ in range(SIZE)] if rank == 1 else []
    return partial(dist.gather, tensor(dtype, layout, rank), outputs or None, dst=1, async_op=True), outputs


def scatter(dtype: torch.dtype, layout: str, _: object, rank: int) -> Made:
    own, sources = tensor(dtype, layout, 0), [tensor(dtype, layout, each) for each in range(SIZE)]
    return partial(dist.scatter, own, sources if rank == 1 else None, src=1, async_op=True), [own]


def all_to_all(dtype: torch.dtype, layout: str, _: object, rank: int) -> Made:
    outputs = [tensor(dtype, layout, 0) for _ in range(SIZE)]
    sources = [tensor(dtype, layout, rank + each) for each in range(SIZE)]
    return partial(dist.all_to_all, outputs, sources, async_op=True), outputs


def all_to_all_single(dtype: torch.dtype, layout: str, _: object, rank: int) -> Made:
    output = tensor(dtype, layout, 0)
    return partial(dist.all_to_all_single, output, tensor(dtype, layout, rank), async_op=True), [output]


def message(dtype: torch.dtype, layout: str, _: object, rank: int) -> Made:
    own = tensor(dtype, layout, rank)
    return partial(dist.isend, own, 1) if rank == 0 else partial(dist.irecv, own, 0), [own]


REDUCING = (all_reduce, coalesced, reduce, reduce_scatter, reduce_scatter_single)
MOVING = (broadcast, all_gather, all_gather_single, gather, scatter, all_to_all, all_to_all_single, message)


def misfits(rank: int, dtype: torch.dtype) -> Iterator[tuple[str, Made]]:
    """Calls whose shapes, splits, dtypes or lists do not fit."""
    other = torch.float64

    def full(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.ones(shape, dtype=torch.float32).to(dtype)

    def made(name: str, call: Callable[..., object], *arguments: object, **named: object) -> tuple[str, Made]:
        written = tensors_in(arguments[0])
        return name, (partial(call, *arguments, **named, async_op=True), written)

    for name, output in (
        ("another shape", full(2, 8)),
        ("too large", full(9, 2)),
        ("too small", full(7, 2)),
        ("another dtype", full(8, 2, dtype=other)),
    ):
        yield made(f"all_gather_single {name}", dist.all_gather_single, output, full(4, 2))
    for name, source in (
        ("another shape", full(2, 8)),
        ("too large", full(9, 2)),
        ("too small", full(7, 2)),
        ("another dtype", full(8, 2, dtype=other)),
    ):
        yield made(f"reduce_scatter_single {name}", dist.reduce_scatter_single, full(4, 2), source)
    for name, parts in (
        ("another shape", [full(4, 2), full(2, 4)]),
        ("another size", [full(4, 2), full(4, 3)]),
        ("another dtype", [full(4, 2), full(4, 2, dtype=other)]),
        ("all of another dtype", [full(4, 2, dtype=other), full(4, 2, dtype=other)]),
        ("too few", [full(4, 2)]),
        ("too many", [full(4, 2), full(4, 2), full(4, 2)]),
        ("none", []),
    ):
        if parts:
            yield made(f"all_gather {name}", dist.all_gather, parts, full(4, 2))
        yield made(f"reduce_scatter {name}", dist.reduce_scatter, full(4, 2), parts)
        yield made(f"all_to_all outputs {name}", dist.all_to_all, parts or [full(0)], [full(4, 2), full(4, 2)])
        yield made(f"all_to_all sources {name}", dist.all_to_all, [full(4, 2), full(4, 2)], parts)
    for name, output, source, splits in (
        ("another size", full(4, 2), full(6, 2), (None, None)),
        ("another dtype", full(4, 2), full(4, 2, dtype=other), (None, None)),
        ("an odd number", full(5, 2), full(5, 2), (None, None)),
        ("splits", full(2 + 4 * rank, 2), full(4, 2), ([1 + 2 * rank] * 2, [1, 3])),
        ("splits too large", full(4, 2), full(4, 2), ([2, 3], [2, 3])),
        ("splits too small", full(4, 2), full(4, 2), ([1, 1], [1, 1])),
        ("splits too few", full(4, 2), full(4, 2), ([4], [4])),
        ("splits too many", full(4, 2), full(4, 2), ([1, 1, 2], [1, 1, 2])),
        ("splits negative", full(4, 2), full(4, 2), ([5, -1], [5, -1])),
    ):
        yield made(f"all_to_all_single {name}", dist.all_to_all_single, output, source, *splits)
    yield made("coalesced another dtype", dist.all_reduce_coalesced, [full(4), full(4, dtype=other)])
    yield made("coalesced none", dist.all_reduce_coalesced, [])


def overlapping(rank: int, dtype: torch.dtype) -> Iterator[tuple[str, Made]]:
    """Sums that are written into the input: in this rank's part, in another's, or across two."""
    for name, start in (("own part", rank * LARGE), ("first part", 0), ("last part", LARGE), ("two parts", 1)):
        whole = tensor(dtype, "large", rank, SIZE)
        issue = partial(dist.reduce_scatter_single, whole[start : start + LARGE], whole, async_op=True)
        yield f"reduce_scatter_single into {name}", (issue, [whole])


def lists(rank: int, dtype: torch.dtype) -> Iterator[tuple[str, Made]]:
    """Calls with lists that are nested, empty, or of unlike tensors."""

    def made(name: str, call: Callable[..., object], *arguments: object) -> tuple[str, Made]:
        return f"list {name}", (partial(call, *arguments, async_op=True), tensors_in(arguments[0]))

    def few(seed: int = rank) -> list[Tensor]:
        return [tensor(dtype, layout, seed) for layout in ("0-dim", "empty", "plain", "0-dim view")]

    one, two = tensor(dtype, "plain", rank), [tensor(dtype, "plain", rank) for _ in range(2)]
    yield made("coalesced of unlike shapes", dist.all_reduce_coalesced, few())
    yield made("coalesced of 0-dim views", dist.all_reduce_coalesced, [tensor(dtype, "0-dim view", rank)] * 1)
    yield made("coalesced nested", dist.all_reduce_coalesced, [two, two])
    yield made("all_gather nested", dist.all_gather, [[two[0]], [two[1]]], one)
    yield made("all_gather empty inside", dist.all_gather, [[], []], one)
    yield made("reduce_scatter nested", dist.reduce_scatter, one, [[two[0]], [two[1]]])
    yield made("all_to_all nested", dist.all_to_all, [[two[0]], [two[1]]], two)
    for name, outputs, sources in (
        ("lists", [few(0), few(0)], few()),
        ("lists too short", [few(0)[:2], few(0)[:2]], few()),
        ("too few lists", [few(0)], few()),
        ("no lists", [], few()),
        ("empty lists", [[], []], []),
        ("no tensors", [few(0), few(0)], []),
        ("flat", few(0), few()),
    ):
        yield made(f"all_gather_coalesced {name}", dist.all_gather_coalesced, outputs, sources)
    rows = [tensor(dtype, "plain", 0)[: 1 + 2 * each] for each in (rank, rank)]
    sent = [tensor(dtype, "plain", rank)[: 1 + 2 * each] for each in range(SIZE)]
    yield made("all_to_all of unlike sizes", dist.all_to_all, rows, sent)
    yield made("all_to_all of nothing", dist.all_to_all, [each[:0] for each in rows], [each[:0] for each in sent])


def cases(rank: int, *, packed: bool) -> Iterator[tuple[str, Made]]:
    """All calls, by name: collective, dtype, op and layout.

    Args:
        rank: This one of two.
        packed: Whether the tensors of the layouts in `AS_IT_LIES` are contiguous ones of the same values.
    """

    def given(layout: str) -> str:
        return layout + PACKED if packed and layout in AS_IT_LIES else layout

    for call in REDUCING:
        for dtype in DTYPES:
            for name, op in OPS.items():
                yield f"{call.__name__} {dtype} {name} plain", call(dtype, "plain", op, rank)
            for layout in LAYOUTS[1:]:
                if has(dtype, layout):
                    yield f"{call.__name__} {dtype} SUM {layout}", call(dtype, given(layout), OPS["SUM"], rank)
        for name, op in OPS.items():
            for dtype in (torch.float32, torch.int64):
                yield f"{call.__name__} {dtype} {name} large", call(dtype, "large", op, rank)
    for move in MOVING:
        for dtype in DTYPES:
            for layout in LAYOUTS:
                if has(dtype, layout):
                    yield f"{move.__name__} {dtype} {layout}", move(dtype, given(layout), None, rank)
    for both in (*REDUCING, *MOVING[:-1]):  # torch refuses conjugates on their rank, and gloo strided messages
        for dtype in (torch.float32, torch.int64, torch.complex64):
            for layout in ("gaps", "transposed", "permuted", "negative"):
                if has(dtype, layout):
                    lies = given(layout) if rank == 0 else layout + PACKED
                    yield f"{both.__name__} {dtype} {layout} on one rank", both(dtype, lies, OPS["SUM"], rank)
    for dtype in (torch.float32, torch.int16):
        for name, made in (*misfits(rank, dtype), *overlapping(rank, dtype), *lists(rank, dtype)):
            yield f"{name} {dtype}", made


def in_turn(rank: int, *, packed: bool) -> Iterator[tuple[str, Made]]:
    """Those of `cases` with two dtypes that wait inside of the call."""
    for name, (issue, written) in cases(rank, packed=packed):
        if ("float32" in name or " torch.int16" in name) and not name.startswith("message"):
            yield f"{name}, at once", (partial(issue, async_op=False), written)


def kills_gloo(name: str) -> bool:
    """Whether torch 2.13's gloo ends the process (SIGABRT, SIGSEGV)."""
    return (
        "expanded" in name  # takes memory as it lies, and beyond it
        or (name.startswith("reduce_scatter_single") and "0-dim" in name)  # looks at the size of dimension 0
        or name.startswith(("reduce_scatter another shape", "reduce_scatter another size"))  # ranks send other sizes
        or "splits negative" in name  # writes before the tensor
    )


@dataclass(frozen=True)
class Outcome:
    """How a call ended.

    Attributes:
        stage: `call` or `wait`, which raised; `done`.
        said: The error; or of each tensor that was written dtype, shape and a digest of its values.
    """

    stage: str
    said: object


def attempt(made: Made) -> Outcome:
    """Makes one call and waits for it."""
    issue, written = made
    try:
        work = issue()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return Outcome("call", f"{type(error).__name__}: {error}")
    try:
        if isinstance(work, dist.Work | torch._C.Future):  # the latter is what a coalesced sum returns
            work.wait()
    except Exception as error:  # noqa: BLE001 - as above
        return Outcome("wait", f"{type(error).__name__}: {error}")
    return Outcome("done", [_digest(each) for each in written])


def _digest(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if values.dtype == torch.bool:
        values = values.logical_or(values)  # gloo's sum of two True is a byte of 2
    raw = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()


def outcomes(rank: int, *, gloo: bool) -> dict[str, Outcome]:
    """Makes every call, and checks after every eighth refusal that the group goes on, as what ends it ends it for good.

    Args:
        rank: This one of two.
        gloo: The group is gloo's own: calls that it does not survive are left out, and so is the barrier, in which it
            raises once more what a work has raised that is still held.
    """
    found: dict[str, Outcome] = {}
    refused = 0
    for name, made in chain(cases(rank, packed=gloo), in_turn(rank, packed=gloo)):
        if gloo and kills_gloo(name):
            continue
        found[name] = attempt(made)
        if found[name].stage == "done":
            continue
        refused += 1
        if refused % 8 == 0:
            total = torch.full((3,), float(rank))
            dist.all_reduce(total)
            assert total.tolist() == [1.0] * 3, f"the sum after {name} is wrong"
            if not gloo:
                dist.barrier()
    large = torch.full((LARGE,), float(rank))
    dist.all_reduce(large)
    assert torch.equal(large, torch.ones(LARGE))
    return found

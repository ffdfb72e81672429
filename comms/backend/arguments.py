"""What the backend takes on CPU tensors, all of it in one place: what torch's gloo takes, and a little more.

Gloo refuses an argument inside a thread of its own, when the call has been issued. Here the same call raises on the
caller before anything is issued: no other rank is needed for that, and the group goes on. It makes no difference
whether the ranks share a node.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.backend.strided import tensors_in
from gradwire.comms.bootstrap.compat import GLOO_DTYPES
from gradwire.comms.errors import ArgumentError

FLOATING = frozenset(dtype for dtype in GLOO_DTYPES if dtype.is_floating_point)
COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))

_ARITHMETIC = GLOO_DTYPES
_BITWISE = GLOO_DTYPES - FLOATING

DTYPES_OF: dict[dist.ReduceOp.RedOpType, frozenset[torch.dtype]] = {
    dist.ReduceOp.SUM: _ARITHMETIC | COMPLEX,
    dist.ReduceOp.AVG: FLOATING | COMPLEX - {torch.complex32},
    dist.ReduceOp.PRODUCT: _ARITHMETIC,
    dist.ReduceOp.MIN: _ARITHMETIC,
    dist.ReduceOp.MAX: _ARITHMETIC,
    dist.ReduceOp.BAND: _BITWISE,
    dist.ReduceOp.BOR: _BITWISE,
    dist.ReduceOp.BXOR: _BITWISE,
    dist.ReduceOp.PREMUL_SUM: FLOATING,  # gradwire's own: gloo has none
}
"""Reduce op -> the dtypes of CPU tensors that it takes. Source: measured on torch 2.13's gloo; a test compares them."""

IN_PLACE = ("allreduce", "allreduce_coalesced", "reduce", "broadcast")
"""Collectives that read the tensors that they write to."""

REDUCING = ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter")
"""Beginnings of the names of collectives that add; all others move any dtype."""

WHOLE_AND_PART = ("_allgather_base", "allgather_into_tensor", "_reduce_scatter_base", "reduce_scatter_tensor")
"""Beginnings of the names of collectives of a tensor that holds a part for each rank, end to end."""

PUBLIC_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
"""Method of `dist.ProcessGroup` -> the function of torch.distributed that calls it, where the names differ."""


def reduces(name: str) -> bool:
    """Whether a method of torch's process groups is a collective that adds."""
    return name.startswith((*REDUCING, "_reduce_scatter"))


def written_and_read(arguments: Sequence[object], named: Mapping[str, object]) -> tuple[list[object], list[object]]:
    """Sorts the arguments of a collective: the first one is written to, as is what is given by name but `input...`."""
    written = [*arguments[:1], *(value for key, value in named.items() if not key.startswith("input"))]
    return written, [*arguments[1:], *(value for key, value in named.items() if key.startswith("input"))]


def check(name: str, size: int, arguments: Sequence[object], named: Mapping[str, object]) -> None:
    """Refuses what gloo would refuse only after it has been issued, or what it would die of.

    Tensors elsewhere than on the CPU and sparse ones are left to torch.

    Args:
        name: Of the method of `dist.ProcessGroup`.
        size: Number of ranks.
        arguments: Of the call.
        named: Likewise.

    Raises:
        ArgumentError: With what was found and what was wanted.
    """
    written, read = (tensors_in(each) for each in written_and_read(arguments, named))
    tensors = [*written, *read]
    if not tensors or any(each.device.type != "cpu" or each.layout != torch.strided for each in tensors):
        return
    title = PUBLIC_NAMES.get(name, name)
    if reduces(name):
        _check_op(title, _op_in([*arguments, *named.values()]), tensors, premultiplies=name != "reduce" and size > 1)
    elif {each.dtype for each in tensors} - GLOO_DTYPES:  # travel as bytes, so gloo cannot compare them
        _check_one_dtype(title, tensors)
    for tensor in () if name in IN_PLACE else written:
        if any(stride == 0 and numel > 1 for numel, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ArgumentError(
                f"{title}: an output of shape {tuple(tensor.shape)} was made by expand(), so several of its elements "
                "share their memory; wanted memory for each: pass a tensor made by torch.empty"
            )
    if name.startswith(WHOLE_AND_PART):
        for whole, part in zip(*((read, written) if reduces(name) else (written, read)), strict=False):
            _check_one_dtype(title, (whole, part))
            if whole.numel() != size * part.numel():
                raise ArgumentError(
                    f"{title}: a tensor of {whole.numel()} elements for {size} parts of {part.numel()}; wanted "
                    f"{size * part.numel()}: one part for each of the {size} ranks"
                )
    elif name == "reduce_scatter":
        _check_parts(title, size, written, read)
    elif name == "alltoall_base" and len(tensors) == 2:
        _check_splits(title, size, tensors, arguments[2:4])


def _op_in(arguments: Sequence[object]) -> object:
    for each in arguments:
        if isinstance(each, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return each
        if (op := getattr(each, "reduceOp", None)) is not None:
            return op
    return dist.ReduceOp.SUM


def _check_op(title: str, op: object, tensors: Sequence[Tensor], *, premultiplies: bool) -> None:
    kind = next((each for each in DTYPES_OF if op == each), None)
    wanted = DTYPES_OF.get(kind, frozenset()) if kind is not None else frozenset()
    if kind == dist.ReduceOp.PREMUL_SUM and not premultiplies:
        wanted = frozenset()
    for tensor in tensors:
        if tensor.dtype not in wanted:
            word = "" if kind is None else kind.name
            dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in wanted)) or "another op"
            raise ArgumentError(
                f"{title}: `op` is {word or op} and a tensor has dtype {tensor.dtype}; on the CPU wanted {dtypes}: "
                "convert the tensor first, tensor.to(dtype)"
            )


def _check_one_dtype(title: str, tensors: Sequence[Tensor]) -> None:
    if len(found := {each.dtype for each in tensors}) > 1:
        raise ArgumentError(
            f"{title}: tensors have dtypes {', '.join(sorted(map(str, found)))}; wanted one of them all"
        )


def _check_parts(title: str, size: int, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Refuses sources of reduce_scatter that are not one of the output's shape for each rank: gloo ends the process."""
    _check_one_dtype(title, (*outputs, *sources))
    shapes = {tuple(each.shape) for each in chain(outputs, sources)}
    if len(sources) != size * len(outputs) or len(shapes) > 1:
        raise ArgumentError(
            f"{title}: {len(sources)} sources, and shapes {', '.join(map(str, sorted(shapes)))}; wanted {size} of the "
            "output's shape, one for each rank"
        )


def _check_splits(title: str, size: int, tensors: Sequence[Tensor], splits: Sequence[object]) -> None:
    """Refuses what alltoall_base would read or write beyond a tensor for."""
    output, source = tensors
    given = [each for each in splits if isinstance(each, list | tuple) and each]
    if not given and output.numel() != source.numel():
        raise ArgumentError(
            f"{title}: the output has {output.numel()} elements and the input {source.numel()}; without splits wanted "
            "as many"
        )
    for tensor, each in zip(tensors, splits, strict=False):
        if not isinstance(each, list | tuple) or not each:
            continue
        rows = tensor.shape[0] if tensor.dim() else 0
        if len(each) != size or min(each) < 0 or sum(each) != rows:
            raise ArgumentError(
                f"{title}: splits {list(each)} of a tensor with {rows} rows; wanted {size} numbers, none negative, "
                f"that add up to {rows}"
            )

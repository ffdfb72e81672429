"""Checks the arguments of the backend's collectives of CPU tensors: torch's gloo's rules, and a little more.

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
"""Floating-point dtypes that gloo knows."""
COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
"""Complex dtypes, of which gloo sums all and averages all but complex32; other reduce ops take none."""

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
"""Reduce op -> dtypes of the CPU tensors that it takes. Source: measured on torch 2.13's gloo; a test compares them."""

IN_PLACE = ("allreduce", "allreduce_coalesced", "reduce", "broadcast")
"""Methods of `dist.ProcessGroup` whose collectives read the tensors that they write to."""

REDUCING = ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter")
"""Beginnings of the names of methods that reduce tensors by an op; all others move them, whatever their dtype."""

WHOLE_AND_PART = ("_allgather_base", "allgather_into_tensor", "_reduce_scatter_base", "reduce_scatter_tensor")
"""Beginnings of the names of methods that take one large tensor with a part for each rank, and one such part."""

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
    """Returns whether a collective combines the ranks' tensors by a reduce op: a sum, an average, a minimum or another.

    All other collectives move tensors unchanged, whatever their dtype.

    Args:
        name: Name of a method of `dist.ProcessGroup`, such as `allreduce`.
    """
    return name.startswith((*REDUCING, "_reduce_scatter"))


def written_and_read(arguments: Sequence[object], named: Mapping[str, object]) -> tuple[list[object], list[object]]:
    """Returns (arguments that a collective writes to, arguments that it reads only).

    The first positional argument is written to, and every keyword argument whose name does not begin with `input`.

    Args:
        arguments: Positional arguments of the call.
        named: Keyword arguments of the call.
    """
    written = [*arguments[:1], *(value for key, value in named.items() if not key.startswith("input"))]
    return written, [*arguments[1:], *(value for key, value in named.items() if key.startswith("input"))]


def check(name: str, size: int, arguments: Sequence[object], named: Mapping[str, object]) -> None:
    """Refuses a call of a collective that gloo would fail on only after it was issued, or that would end the process.

    Calls without tensors, with sparse tensors, or with tensors that are not on the CPU are not checked: torch does it.

    Args:
        name: Name of the called method of `dist.ProcessGroup`.
        size: Number of ranks of the group.
        arguments: Positional arguments of the call.
        named: Keyword arguments of the call.

    Raises:
        ArgumentError: A dtype does not fit the reduce op, dtypes differ, an output's elements share their memory, or
            sizes do not fit the number of ranks. The message says what was found and what was wanted.
    """
    # Leave to torch what is not dense on the CPU.
    written, read = (tensors_in(each) for each in written_and_read(arguments, named))
    tensors = [*written, *read]
    if not tensors or any(each.device.type != "cpu" or each.layout != torch.strided for each in tensors):
        return
    title = PUBLIC_NAMES.get(name, name)
    # Check dtypes: by the reduce op, or that they are equal where gloo cannot see them.
    if reduces(name):
        _check_op(title, _op_in([*arguments, *named.values()]), tensors, premultiplies=name != "reduce" and size > 1)
    elif {each.dtype for each in tensors} - GLOO_DTYPES:  # sent as bytes, so gloo cannot compare them
        _check_one_dtype(title, tensors)
    # Check the memory of the outputs, then the sizes.
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


def check_message(name: str, size: int, arguments: Sequence[object], named: Mapping[str, object]) -> None:
    """Refuses a send or a receive with which gloo would wait in vain, end the process, or send other values.

    Args:
        name: `send`, `recv` or `recv_anysource`.
        size: Number of ranks of the group.
        arguments: Positional arguments of the call.
        named: Keyword arguments of the call.

    Raises:
        ArgumentError: There is no such rank, or a tensor is a lazy conjugate or negative of its memory.
    """
    ranks = [*(arguments[1:2] if name != "recv_anysource" else ()), named.get("dstRank", 0), named.get("srcRank", 0)]
    if wrong := [rank for rank in ranks if isinstance(rank, int) and not 0 <= rank < size]:
        raise ArgumentError(f"{name}: the other rank is {wrong[0]}; wanted one of this group, 0 to {size - 1}")
    if any(each.is_conj() or each.is_neg() for each in tensors_in([*arguments, *named.values()])):
        raise ArgumentError(
            f"{name}: a tensor is a lazy conjugate or negative of its memory, which would be sent as it lies; wanted "
            "its values: pass tensor.resolve_conj().resolve_neg()"
        )


def _op_in(arguments: Sequence[object]) -> object:
    """Returns the reduce op among the arguments of a call, directly or in its options; SUM if there is none."""
    for each in arguments:
        if isinstance(each, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return each
        if (op := getattr(each, "reduceOp", None)) is not None:
            return op
    return dist.ReduceOp.SUM


def _check_op(title: str, op: object, tensors: Sequence[Tensor], *, premultiplies: bool) -> None:
    """Refuses tensors with a dtype that the reduce op cannot reduce on the CPU, see `DTYPES_OF`.

    Args:
        title: Public name of the collective, for the message.
        op: Reduce op.
        tensors: All tensors of the call.
        premultiplies: Whether this collective can run PREMUL_SUM; if not, the op is refused for every dtype.

    Raises:
        ArgumentError: A dtype is refused; the message lists those that `op` takes.
    """
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
    """Refuses tensors of different dtypes by an ArgumentError; `title` names the collective in it."""
    if len(found := {each.dtype for each in tensors}) > 1:
        raise ArgumentError(
            f"{title}: tensors have dtypes {', '.join(sorted(map(str, found)))}; wanted one of them all"
        )


def _check_parts(title: str, size: int, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Refuses a reduce_scatter unless each output has one input for each rank, all of one shape and dtype.

    Gloo would crash.

    Args:
        title: Public name of the collective, for the message.
        size: Number of ranks.
        outputs: Output tensors, usually one.
        sources: Input tensors, `size` for each output.

    Raises:
        ArgumentError: The number of inputs, a shape or a dtype does not fit.
    """
    _check_one_dtype(title, (*outputs, *sources))
    shapes = {tuple(each.shape) for each in chain(outputs, sources)}
    if len(sources) != size * len(outputs) or len(shapes) > 1:
        raise ArgumentError(
            f"{title}: {len(sources)} sources, and shapes {', '.join(map(str, sorted(shapes)))}; wanted {size} of the "
            "output's shape, one for each rank"
        )


def _check_splits(title: str, size: int, tensors: Sequence[Tensor], splits: Sequence[object]) -> None:
    """Refuses splits with which alltoall_base would read or write beyond the end of a tensor.

    Args:
        title: Public name of the collective, for the message.
        size: Number of ranks.
        tensors: (output, input) of the call.
        splits: (rows of the output that come from each rank, rows of the input that go to each rank), each a list of
            `size` numbers; None or empty splits evenly.

    Raises:
        ArgumentError: A list does not fit its tensor, or without splits the tensors differ in size.
    """
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

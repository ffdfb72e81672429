"""A fake ProcessGroupNCCL: exchanges values between ranks that are threads, and compares what they issue.

Every communicator has a stream of its own on each rank. A collective makes that stream wait for the current one, notes
what it reads and writes there, and returns a work; `work.wait()` makes the current stream wait for it. The values are
exchanged at issue: a rank goes on when all members have issued the collective with the same number. Operation, sizes,
dtypes, reduction and root must agree; otherwise, and where all ranks wait for each other, every rank gets an
`OrderError` with the sequences of all members.

Source, as read in torch's ProcessGroupNCCL.cpp (2.7 to 2.13): `collective()` lets the communicator's stream wait for
the current one, keeps references to inputs and outputs in the work (a shelf, instead of `record_stream`) and records
the end event; `synchronizeStream()` blocks the current stream and empties the shelf; works that nobody waited for hand
their shelf to the group once the watchdog has seen them done. With `asyncOp` false everything runs on the current
stream and there is no work. Inside `_start_coalescing`/`_end_coalescing` the works of the single calls have no event;
the one that `_end_coalescing` returns has. Its future carries an empty list, and so orders nothing.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fake_cuda.clocks import Timeline, runs
from fake_cuda.machine import device_index, machine
from fake_cuda.streams import FakeEvent, FakeFuture, FakeStream, FakeStreamContext, blocks_of, current_stream
from fake_cuda.tensor import FakeTensor, plain, view_of

PATIENCE_SECONDS = 300.0
"""How long a rank waits for the others of a collective; more than any test needs on a machine with much other work, and
the last resort against a hang: where all ranks wait for each other it is seen at once."""
SHOWN = 12
"""Collectives of each member in an error."""

_numbers = itertools.count()

Signature = tuple[object, ...]


class OrderError(RuntimeError):
    """Members of a communicator have issued different collectives, or wait for each other for ever."""


@dataclass(eq=False)
class Slot:
    """One collective of a communicator: what its members have brought."""

    signature: Signature
    inputs: dict[int, list[list[Tensor]]] = field(default_factory=dict)
    splits: dict[int, list[tuple[list[int], list[int]]]] = field(default_factory=dict)
    waiting: int = 0


@dataclass(eq=False)
class Clique:
    """A communicator, as all its members share it.

    Attributes:
        number: For people, and for `Entry.communicator`.
        size: Number of members.
        devices: Index of each member's device, as far as they are connected.
        issued: What each member has issued, in order.
        slots: Collectives that not all members have left.
        reason: Why it was aborted.
    """

    number: int
    size: int
    devices: dict[int, int] = field(default_factory=dict)
    issued: list[list[Signature]] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    reason: str | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks: indices of their devices, in the order of the communicator."""
        return tuple(self.devices.get(rank, -1) for rank in range(self.size))

    def __str__(self) -> str:
        lines = [f"communicator {self.number} of the ranks {self.members}:"]
        for rank, sequence in enumerate(self.issued):
            first = max(0, len(sequence) - SHOWN)
            each = ", ".join(f"#{number} {_spell(sequence[number])}" for number in range(first, len(sequence)))
            lines.append(f"  rank {self.devices.get(rank, '?')}: {'... ' if first else ''}{each or 'nothing'}")
        return "\n".join(lines)


class Baton:
    """Held by the one rank thread that runs; passed on wherever a rank waits for others.

    Threads that run side by side would wait for Python's interpreter lock after every operation of torch, which lets go
    of it: up to five milliseconds each time. It is also what makes runs repeatable. A rank that does not get the baton
    within `SECONDS`, because its holder waits somewhere in C++, goes on without it.
    """

    SECONDS = 1.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()

    def take(self) -> None:
        """Waits for it."""
        self._here.holds = self._lock.acquire(timeout=self.SECONDS)

    @property
    def held(self) -> bool:
        """By this thread."""
        return getattr(self._here, "holds", False)

    def pass_on(self) -> bool:
        """Gives it up; whether this thread held it."""
        holds = getattr(self._here, "holds", False)
        if holds:
            self._here.holds = False
            self._lock.release()
        return holds


class Exchange:
    """Where the ranks of one machine meet."""

    def __init__(self) -> None:
        self.baton = Baton()
        self.ranks: set[threading.Thread] = set()
        self.changed = threading.Condition()
        self.cliques: dict[str, Clique] = {}
        self.running = 0
        """Rank threads that have not ended."""
        self.waiting = 0
        self.failure: OrderError | None = None
        self.sent: dict[tuple[int, int], int] = {}
        """Bytes that one rank has sent to another in exchanges of parts, all of them together."""
        self.coalescing = threading.local()

    def clique(self, key: str, size: int) -> Clique:
        """The communicator of this key; the same for all members."""
        with self.changed:
            if key not in self.cliques:
                self.cliques[key] = Clique(len(self.cliques), size, issued=[[] for _ in range(size)])
            return self.cliques[key]

    def ended(self) -> None:
        """A rank thread has ended: nobody will hear of it again."""
        with self.changed:
            self.running -= 1
            self._look_for_a_deadlock()

    def fail(self, error: OrderError) -> None:
        """Ends everybody's waiting."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def meet(
        self,
        clique: Clique,
        rank: int,
        signature: Signature,
        inputs: list[list[Tensor]],
        splits: list[tuple[list[int], list[int]]],
    ) -> tuple[Slot, int]:
        """Brings this rank's part of its next collective; returns when everybody's is there.

        Returns:
            What all have brought, and the collective's number.

        Raises:
            OrderError: The ranks do not agree, here or elsewhere.
        """
        try:
            return self._meet(clique, rank, signature, inputs, splits)
        finally:
            if not self.baton.held and threading.current_thread() in self.ranks:
                self.baton.take()

    def _meet(
        self,
        clique: Clique,
        rank: int,
        signature: Signature,
        inputs: list[list[Tensor]],
        splits: list[tuple[list[int], list[int]]],
    ) -> tuple[Slot, int]:
        with self.changed:
            self._raise(clique)
            sequence = clique.issued[rank]
            number = len(sequence)
            sequence.append(signature)
            slot = clique.slots.setdefault(number, Slot(signature))
            if slot.signature != signature:
                self.fail(
                    OrderError(
                        f"rank {clique.devices.get(rank)} issues {_spell(signature)} as collective {number} where "
                        f"another member has issued {_spell(slot.signature)}: a GPU would hang, or mix the data up\n"
                        f"{clique}"
                    )
                )
                self._raise(clique)
            slot.inputs[rank], slot.splits[rank] = inputs, splits
            if len(slot.inputs) == clique.size:
                self.waiting -= slot.waiting
                slot.waiting = 0
                del clique.slots[number]
                self.changed.notify_all()
                return slot, number
            slot.waiting += 1
            self.waiting += 1
            self.baton.pass_on()
            self._look_for_a_deadlock()
            complete = self.changed.wait_for(
                lambda: len(slot.inputs) == clique.size or self.failure or clique.reason, PATIENCE_SECONDS
            )
            if len(slot.inputs) < clique.size:
                if slot.waiting:
                    slot.waiting -= 1
                    self.waiting -= 1
                if not complete:
                    self.fail(
                        OrderError(
                            f"not all members have issued {_spell(signature)}, collective {number}, within "
                            f"{PATIENCE_SECONDS:g} s\n{clique}"
                        )
                    )
                self._raise(clique)
            return slot, number

    def _look_for_a_deadlock(self) -> None:
        if self.running and self.waiting >= self.running and self.failure is None:
            open_ones = "\n".join(str(clique) for clique in self.cliques.values() if clique.slots)
            self.fail(OrderError(f"every rank waits for a collective that the others have not issued\n{open_ones}"))

    def _raise(self, clique: Clique) -> None:
        if self.failure is not None:
            raise OrderError(str(self.failure))
        if clique.reason is not None:
            raise RuntimeError(f"NCCL communicator was aborted: {clique.reason}")


def _spell(signature: Signature) -> str:
    return f"{signature[0]}({', '.join(str(each).removeprefix('torch.') for each in signature[1:])})"


def exchange() -> Exchange:
    """The one of the running machine."""
    running = machine()
    found: Exchange | None = getattr(running, "exchange", None)
    if found is None:
        with running.lock:
            found = getattr(running, "exchange", None) or Exchange()
            running.exchange = found  # type: ignore[attr-defined]
    return found


class FakeWork:
    """What a collective returns."""

    def __init__(
        self,
        event: FakeEvent | None,
        tensors: list[FakeTensor],
        outputs: list[FakeTensor],
        device: int,
        done: tuple[int, int] | None,
    ) -> None:
        self._event = event
        self._shelf = tensors
        self._outputs = outputs
        self._device = device
        self._operation = done
        self.future: FakeFuture | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait; with a time-out the host waits too."""
        if self._event is None:
            return True
        self._event.wait(current_stream(self._device))
        self._shelf = []
        if timeout:
            self._event.synchronize()
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same, but the tensors stay with the work."""
        if self._event is not None:
            self._event.wait(current_stream(self._device))

    def is_completed(self) -> bool:
        """Whether the GPU is through with it."""
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        """Whether it is done, and well."""
        return self.is_completed()

    def exception(self) -> None:
        """There never is one."""

    def result(self) -> list[FakeTensor]:
        """The outputs."""
        return self._outputs

    def get_future(self) -> FakeFuture:
        """Completed at once, with the outputs, behind the communicator's stream."""
        if self.future is None:
            raise RuntimeError("a collective inside a coalescing block has no future")
        return self.future

    def __del__(self) -> None:
        # Nobody has waited: the watchdog sees it done and lets the tensors go.
        if self._operation is not None:
            for tensor in self._shelf:
                tensor.block.covered.add(self._operation)


@dataclass(eq=False)
class _Call:
    """A collective before it is issued."""

    op: str
    signature: Signature
    inputs: list[Tensor]
    outputs: list[Tensor]
    apply: Callable[[int, list[list[Tensor]]], None]
    """Writes this rank's outputs: gets its rank and everybody's inputs."""
    splits: tuple[list[int], list[int]] = ((), ())  # type: ignore[assignment]


class FakeNcclOptions:
    """In the place of ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(
            blocking=None, cga_cluster_size=None, min_ctas=None, max_ctas=None, net_name=None, split_share=None
        )
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.group_desc = ""
        self.split_from: object = None
        self.split_color = 0


class FakeNccl:
    """In the place of torch.distributed.ProcessGroupNCCL; see the module.

    Args:
        store: What the members share; a prefix of its own names the communicator.
        rank: Of this member.
        size: Number of members.
        options: Or a time-out, as torch takes both.
    """

    Options = FakeNcclOptions

    def __init__(self, store: Any, rank: int, size: int, options: object = None, **named: object) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.options = options if isinstance(options, FakeNcclOptions) else FakeNcclOptions()
        self._clique: Clique | None = None
        self._stream: FakeStream | None = None
        self._group: list[_Call] | None = None
        self._group_is_async = True
        self.bound_device_id: object = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return True

    def eager_connect_single_device(self, device: object = None) -> None:
        """Makes the communicator now; all members do so at the same point."""
        self._connect(device_index(device))

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def _connect(self, index: int) -> tuple[Clique, FakeStream]:
        if self._clique is None or self._stream is None:
            name = f"fake-{next(_numbers)}"
            key = self._store.compare_set("fake_nccl_communicator", "", name)
            self._clique = exchange().clique(key.decode(), self._size)
            self._clique.devices[self._rank] = index
            with FakeStreamContext(None):
                own = machine().devices[index]
                timeline = own.timeline(f"nccl {self._clique.number}")
                self._stream = FakeStream(index, timeline=timeline)
            exchange().meet(self._clique, self._rank, ("connect", self._size), [], [])
        return self._clique, self._stream

    # The collectives, under their names in torch 2.11 to 2.15.

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        (tensor,) = _listed(tensors)
        combine, name = _reduction(options)

        def apply(rank: int, everybody: list[list[Tensor]]) -> None:
            view_of(tensor).copy_(combine([each[0] for each in everybody]))

        return self._issue(
            _Call("all_reduce", (tensor.numel(), tensor.dtype, name), [tensor], [tensor], apply), options
        )

    def allreduce_coalesced(self, tensors: Any, options: Any = None) -> Any:
        return self._together([lambda each=each: self.allreduce([each], options) for each in tensors], options)

    def reduce(self, tensors: Any, options: Any = None) -> Any:
        (tensor,) = _listed(tensors)
        combine, name = _reduction(options)
        root = options.rootRank if options is not None else 0

        def apply(rank: int, everybody: list[list[Tensor]]) -> None:
            if rank == root:
                view_of(tensor).copy_(combine([each[0] for each in everybody]))

        written = [tensor] if self._rank == root else []
        return self._issue(
            _Call("reduce", (tensor.numel(), tensor.dtype, name, f"root {root}"), [tensor], written, apply), options
        )

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        (tensor,) = _listed(tensors)
        root = options.rootRank if options is not None else 0

        def apply(rank: int, everybody: list[list[Tensor]]) -> None:
            if rank != root:
                view_of(tensor).copy_(everybody[root][0].view_as(tensor))

        written = [] if self._rank == root else [tensor]
        read = [tensor] if self._rank == root else []
        brought = [tensor]
        call = _Call("broadcast", (tensor.numel(), tensor.dtype, f"root {root}"), brought, written, apply)
        return self._issue(call, options, read)

    def _allgather_base(self, output: Any, source: Any, options: Any = None) -> Any:
        _fits(output.numel() == source.numel() * self._size, "all_gather", output, source)

        def apply(rank: int, everybody: list[list[Tensor]]) -> None:
            view_of(output).copy_(torch.cat([each[0].reshape(-1) for each in everybody]).view_as(output))

        return self._issue(_Call("all_gather", (source.numel(), source.dtype), [source], [output], apply), options)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, sources: Any, options: Any = None) -> Any:
        calls = [
            lambda output=output, source=source: self._allgather_base(output, source, options)
            for output, source in zip(outputs, sources, strict=True)
        ]
        return self._together(calls, options)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outputs: Any, sources: Any, options: Any = None) -> Any:
        (targets,), (source,) = outputs, sources

        def apply(rank: int, everybody: list[list[Tensor]]) -> None:
            for target, each in zip(targets, everybody, strict=True):
                view_of(target).copy_(each[0].view_as(target))

        return self._issue(_Call("all_gather", (source.numel(), source.dtype), [source], list(targets), apply), options)

    def _reduce_scatter_base(self, output: Any, source: Any, options: Any = None) -> Any:
        _fits(source.numel() == output.numel() * self._size, "reduce_scatter", source, output)
        combine, name = _reduction(options)

        def apply(rank: int, everybody: list[list[Tensor]]) -> None:
            numel = output.numel()
            own = [each[0].reshape(-1)[rank * numel : (rank + 1) * numel] for each in everybody]
            view_of(output).copy_(combine(own).view_as(output))

        return self._issue(
            _Call("reduce_scatter", (output.numel(), output.dtype, name), [source], [output], apply), options
        )

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, sources: Any, options: Any = None) -> Any:
        calls = [
            lambda output=output, source=source: self._reduce_scatter_base(output, source, options)
            for output, source in zip(outputs, sources, strict=True)
        ]
        return self._together(calls, options)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs: Any, sources: Any, options: Any = None) -> Any:
        (output,), (parts,) = outputs, sources
        combine, name = _reduction(options)

        def apply(rank: int, everybody: list[list[Tensor]]) -> None:
            view_of(output).copy_(combine([each[rank] for each in everybody]).view_as(output))

        return self._issue(
            _Call("reduce_scatter", (output.numel(), output.dtype, name), list(parts), [output], apply), options
        )

    def alltoall_base(
        self, output: Any, source: Any, output_splits: Sequence[int], source_splits: Sequence[int], options: Any = None
    ) -> Any:
        equal = not output_splits and not source_splits
        taken = list(output_splits) or [output.numel() // self._size] * self._size
        given = list(source_splits) or [source.numel() // self._size] * self._size
        _fits(sum(taken) == output.numel() and sum(given) == source.numel(), "all_to_all", output, source)

        def apply(rank: int, everybody: list[list[Tensor]]) -> None:
            target, at = view_of(output).view(-1), 0
            for other, each in enumerate(everybody):
                sizes = slot_splits[other][1]
                start = sum(sizes[:rank])
                target[at : at + taken[other]] = each[0].reshape(-1)[start : start + taken[other]]
                at += taken[other]

        slot_splits: dict[int, tuple[list[int], list[int]]] = {}
        signature = (output.numel(), output.dtype) if equal else ("unequal parts", output.dtype)
        call = _Call("all_to_all", signature, [source], [output], apply, (taken, given))
        call.all_splits = slot_splits  # type: ignore[attr-defined]
        return self._issue(call, options)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, sources: Any, options: Any = None) -> Any:
        taken, given = ([each.numel() for each in tensors] for tensors in (outputs, sources))
        _fits(len(taken) == len(given) == self._size, "alltoall", outputs[0], sources[0])

        def apply(rank: int, everybody: list[list[Tensor]]) -> None:
            for target, each in zip(outputs, everybody, strict=True):
                view_of(target).copy_(each[rank].view_as(target))

        signature = ("unequal parts", outputs[0].dtype)
        call = _Call("alltoall", signature, list(sources), list(outputs), apply, (taken, given))
        call.all_splits = {}  # type: ignore[attr-defined]
        return self._issue(call, options)

    def barrier(self, options: Any = None) -> "FakeWork":
        clique, stream = self._connect(machine().here.device)
        exchange().meet(clique, self._rank, ("barrier",), [], [])
        machine().host_wait("barrier", stream.device_index, stream.timeline)
        return FakeWork(None, [], [], stream.device_index, None)

    def _start_coalescing(self, device: object = None) -> None:
        """From here on collectives are collected, and issued as one group by `_end_coalescing`."""
        self._group = []

    def _end_coalescing(self, device: object = None) -> Any:
        calls, self._group = self._group or [], None
        if not calls:
            return None
        return self._launch("group", calls, self._group_is_async)

    def _together(self, calls: "Sequence[Callable[..., Any]]", options: Any) -> Any:
        if self._group is not None:
            for call in calls:
                call()
            return None
        self._start_coalescing()
        for call in calls:
            call()
        return self._end_coalescing()

    def abort(self) -> None:
        """Ends everybody's waiting in this communicator."""
        if self._clique is not None:
            with exchange().changed:
                self._clique.reason = self._clique.reason or f"by rank {self._clique.devices.get(self._rank)}"
                for slot in self._clique.slots.values():
                    exchange().waiting -= slot.waiting
                    slot.waiting = 0
                exchange().changed.notify_all()

    def shutdown(self) -> None:
        """Ends this member; nothing here has threads to end."""

    def _issue(self, call: _Call, options: Any, read: list[Tensor] | None = None) -> Any:
        call.read = call.inputs if read is None else read  # type: ignore[attr-defined]
        for tensor in (*call.inputs, *call.outputs):
            if not isinstance(tensor, FakeTensor) or tensor.pinned:
                raise ValueError(f"NCCL takes CUDA tensors; {call.op} got one on {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"NCCL takes contiguous tensors; {call.op} got strides {tensor.stride()}")
        asynchronous = bool(getattr(options, "asyncOp", True))
        if self._group is not None:
            self._connect(call.inputs[0].device.index)
            self._behind_current()
            self._group.append(call)
            self._group_is_async = asynchronous
            return FakeWork(None, [], [], call.inputs[0].device.index, None)
        return self._launch(call.op, [call], asynchronous)

    def _behind_current(self) -> None:
        assert self._stream is not None
        current_stream(self._stream.device_index).record_event().wait(self._stream)

    def _launch(self, op: str, calls: list[_Call], asynchronous: bool) -> Any:
        index = calls[0].inputs[0].device.index
        clique, own_stream = self._connect(index)
        stream = own_stream if asynchronous else current_stream(index)
        if asynchronous:
            self._behind_current()
        _check_overlap(calls)
        signatures: list[Signature] = [(call.op, *call.signature) for call in calls]
        signature = signatures[0] if op != "group" else ("group", *map(_spell, signatures))
        inputs = [[plain(each) for each in call.inputs] for call in calls]
        slot, number = exchange().meet(clique, self._rank, signature, inputs, [call.splits for call in calls])
        tick = self._note(op, calls, stream.timeline, clique, number)
        for place, call in enumerate(calls):
            if hasattr(call, "all_splits"):
                splits = {rank: slot.splits[rank][place] for rank in range(self._size)}
                for other in range(self._size):
                    if splits[other][1][self._rank] != splits[self._rank][0][other]:
                        error = OrderError(
                            f"rank {clique.devices[other]} sends {splits[other][1][self._rank]} elements to rank "
                            f"{clique.devices[self._rank]}, which expects {splits[self._rank][0][other]}\n{clique}"
                        )
                        exchange().fail(error)
                        raise error
                call.all_splits.update(splits)
                own, width = clique.devices[self._rank], call.inputs[0].element_size()
                for other, numel in enumerate(splits[self._rank][1]):
                    pair = own, clique.devices[other]
                    exchange().sent[pair] = exchange().sent.get(pair, 0) + numel * width
            call.apply(self._rank, [slot.inputs[rank][place] for rank in range(self._size)])
        if not asynchronous:
            return None
        outputs = [tensor for call in calls for tensor in call.outputs]
        shelf = [tensor for call in calls for tensor in (*call.inputs, *call.outputs)]
        work = FakeWork(stream.record_event(), shelf, outputs, index, (stream.timeline.number, tick))  # type: ignore[arg-type]
        with FakeStreamContext(stream):
            work.future = FakeFuture(devices=[torch.device("cuda", index)])
            work.future.set_result([] if op == "group" else outputs)
        return work

    def _note(self, op: str, calls: list[_Call], stream: Timeline, clique: Clique, number: int) -> int:
        reads = [(each.block, each) for call in calls for each in call.read]  # type: ignore[attr-defined]
        writes = [(each.block, each) for call in calls for each in call.outputs]  # type: ignore[attr-defined]
        name = op if op != "group" else "group of " + ", ".join(call.op for call in calls)
        return machine().access(
            stream,
            name,
            reads,
            writes,
            "collective",
            communicator=clique.number,
            members=clique.members,
            sequence=number,
        )


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _fits(whether: bool, op: str, whole: Tensor, part: Tensor) -> None:
    if not whether:
        raise ValueError(f"{op}: sizes do not fit: {whole.numel()} and {part.numel()} elements")


def _check_overlap(calls: list[_Call]) -> None:
    """Refuses a group in which one call writes what another uses: NCCL runs them side by side."""
    used = [
        (place, write, tensor)
        for place, call in enumerate(calls)
        for write, tensors in ((False, call.read), (True, call.outputs))  # type: ignore[attr-defined]
        for tensor in tensors
    ]
    for place, write, tensor in used:
        for other_place, _, other in used:
            apart = not write or place == other_place or blocks_of(tensor) != blocks_of(other)
            if not apart and any(a < d and c < b for a, b in runs(tensor) for c, d in runs(other)):
                raise OrderError(
                    f"in one group call, {calls[place].op} writes what {calls[other_place].op} uses: NCCL gives them "
                    "no order"
                )


def _reduction(options: Any) -> tuple[Callable[[list[Tensor]], Tensor], str]:
    """How contributions are combined, in rank order, narrow types in float32 and rounded once; and its name."""
    op = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")
    name = next((each for each in names if op == getattr(dist.ReduceOp, each)), str(op))
    state: Any = op.__getstate__() if hasattr(op, "__getstate__") else None
    factor = state[1] if name == "PREMUL_SUM" else None

    def combine(each: list[Tensor]) -> Tensor:
        dtype = each[0].dtype
        if factor is not None:
            each = [one * factor for one in each]
        if name == "AVG":
            each = [one / len(each) if dtype.is_floating_point else one for one in each]
        wide = [one.float() if dtype in (torch.float16, torch.bfloat16) else one for one in each]
        total = wide[0].clone()
        for one in wide[1:]:
            if name in ("SUM", "AVG", "PREMUL_SUM"):
                total += one
            elif name == "PRODUCT":
                total *= one
            else:
                total = torch.minimum(total, one) if name == "MIN" else torch.maximum(total, one)
        if name == "AVG" and not dtype.is_floating_point:
            total //= len(each)
        return total.to(dtype)

    return combine, name if factor is None else f"{name} {factor:g}"

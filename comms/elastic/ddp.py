"""Elastic training of a DDP model: keeps copies of a step's gradients until all ranks have averaged them.

If a rank fails before, the survivors repeat the step from the copies. `membership.py` and `resilient_ops.py` detect the
failure and agree on the survivors; `joining.py` and `transfer.py` let a process join.
"""

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.bootstrap.compat import PrefixStore, Store, swap_process_group
from gradwire.comms.bootstrap.nics import interface_of
from gradwire.comms.bootstrap.placement import PeerInfo, cluster_of
from gradwire.comms.bootstrap.store import unprefixed
from gradwire.comms.communicator import Communicator, FailurePolicy
from gradwire.comms.config import Config
from gradwire.comms.elastic.completed_steps import CompletedSteps
from gradwire.comms.elastic.gradient_backup import GradientBackup, equalize_decoders
from gradwire.comms.elastic.group import ElasticGroup
from gradwire.comms.elastic.joining import JoiningProcess, Requests, described, find_job, job_key, request_admission
from gradwire.comms.elastic.membership import Membership, View
from gradwire.comms.elastic.peer_info import packed, peer_infos
from gradwire.comms.elastic.residual_notes import ResidualNotes, norm_in_words
from gradwire.comms.elastic.resilient_ops import (
    ResilientOps,
    failure_policy_of,
    first_failure_policy,
    first_membership,
    unheld,
)
from gradwire.comms.elastic.transfer import Carried, ReceivedState, StateTransfer, check_state, load_module, rehearse
from gradwire.comms.names import ParameterNames
from gradwire.comms.resume import COLUMNS, encode_all_reduces
from gradwire.comms.run.all_reduces import Bucket, FutureTensor
from gradwire.comms.session import GradientSession, SessionRanks
from gradwire.comms.step.backward_tracker import BackwardTracker
from gradwire.comms.step.listeners import COMPRESSED_STEPS, MEMBERSHIP, RESIDUAL_NOTES, EndedStep, StepListener
from gradwire.compressors.base import traits_of

log = logging.getLogger("gradwire")

MOST_ATTEMPTS = 5
"""Largest number of attempts of a process to join a running job: each attempt changes the ranks of the others twice,
when the process comes and when it fails."""

OnMembershipChange = Callable[[View, View], None]
"""Called with the ranks as they were and as they are; see `HookState`."""


class Averaging(Protocol):
    """The part of a `HookState` that elastic training uses: it averages one model's gradients over the ranks.

    Attributes:
        config: Options of the state, among them the time-out of every wait for other ranks.
        names: Names of the model's parameters.
        steps: Number of averaged backward passes that have ended.
    """

    config: Config
    names: ParameterNames
    steps: int
    _session: GradientSession | None
    """The session over which gradients are averaged; None before the ranks have connected."""
    _backward: BackwardTracker

    def send_again(self, buckets: list[Bucket], rows: Tensor | None) -> None:
        """Starts the all-reduces of a step again, after the ranks have changed.

        Args:
            buckets: The buckets of the step, with their gradients restored.
            rows: All-reduces that the step has to use, in the encoding of `Resume`; None if it is free.
        """

    def send_rest(self, session: GradientSession) -> None:
        """Starts the all-reduces that fusion has deferred until the last bucket of the step arrived."""


class CarriedState:
    """Collects what a joining process needs to go on with training, and loads it on that process.

    That is the number of the step, the model, the objects in `extra_state`, and the compressor's counters.

    Args:
        state: Hook state that averages the model's gradients.
        extra_state: Objects with a `state_dict`, such as the optimizer; see `HookState`.
    """

    def __init__(self, state: Averaging, extra_state: Sequence[Carried]) -> None:
        self.extra_state = tuple(extra_state)
        self._state = state

    def given(self, model: DistributedDataParallel) -> dict[str, object]:
        """Returns the state that rank 0 sends to joining processes; `take` loads it there.

        Args:
            model: The DDP model that is trained.

        Returns:
            Mapping with the keys `steps`, `model`, `carried` (the state of each object in `extra_state`) and
            `compression` (the compressor's counters; empty without a compressor).
        """
        compression = self._session().compression
        return {
            "steps": self._state.steps,
            "model": model.module.state_dict(),
            "carried": [each.state_dict() for each in self.extra_state],
            "compression": {} if compression is None else compression.progress(),
        }

    def take(self, model: DistributedDataParallel, found: Mapping[str, Any]) -> None:
        """Loads the state that rank 0 has sent into this joining process's model and objects, in place.

        Args:
            model: The DDP model of this process.
            found: Result of `given` on rank 0.

        Raises:
            ValueError: The model differs from rank 0's, `extra_state` has another number of objects, or one of them
                does not load its state.
        """
        load_module(model.module, found["model"])
        if len(found["carried"]) != len(self.extra_state):
            raise ValueError(
                f"`extra_state` has {len(self.extra_state)} entries here and {len(found['carried'])} in the running "
                "job; wanted the same objects in the same order"
            )
        for number, (each, state) in enumerate(zip(self.extra_state, found["carried"], strict=True)):
            try:
                each.load_state_dict(state)
            except Exception as error:
                raise ValueError(
                    f"`extra_state` has a {type(each).__name__} as number {number} here, which does not take the state "
                    f"that the running job has there: {error}"
                ) from error
        self._state.steps = found["steps"]
        compression = self._session().compression
        if compression is not None:
            compression.take_progress(found["compression"])

    def _session(self) -> GradientSession:
        assert self._state._session is not None
        return self._state._session


class ElasticTraining(StepListener):
    """Keeps one DDP model training on this rank while other ranks fail or join.

    It copies the gradients of each step until all ranks have the averages, repeats the step among the remaining ranks
    after a rank failure, and admits waiting processes before a forward pass.

    Args:
        state: Hook state that averages the model's gradients; it is not kept alive.
        extra_state: Objects whose state a joining process receives, such as the optimizer; empty: no process can join.
        on_membership_change: Called with the ranks before and after, once for each change: at the end of the step in
            which ranks have failed, or before the forward pass in which others join. A process that joins does not call
            it for its own joining. None: nothing is called.

    Attributes:
        resilient_ops: Repeats operations after a rank failure; None before the ranks have connected.
        has_just_joined: Whether this process has joined a running job and has not completed a step since.
    """

    def __init__(
        self, state: Averaging, extra_state: Sequence[Carried], on_membership_change: OnMembershipChange | None
    ) -> None:
        self.resilient_ops: ResilientOps | None = None
        self._state: Averaging = weakref.proxy(state)
        self._own = CarriedState(self._state, extra_state)
        self._on_membership_change = on_membership_change
        self._kept: GradientBackup | None = None
        self._announced: View | None = None
        """The ranks at the last call of `on_membership_change`, or at the start; None before the ranks connect."""
        self._requests: Requests | None = None
        self._listed = 0
        """Number of the list, in the job's store, of the processes that join before the next step; 0 for none."""
        self._last_rows: list[list[int]] = []
        """All-reduces of the last step in the encoding of `Resume`, which rank 0 sends to all ranks when some join."""
        self._next_rows: Tensor | None = None
        """All-reduces that the next step has to use after ranks have joined, as received from rank 0; else None."""
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self.has_just_joined = False
        """See above."""

    def bind(self, model: DistributedDataParallel) -> None:
        """Records the model whose process group will change with the ranks; called before the ranks connect."""
        self._model = weakref.ref(model)

    def take_over_group(self) -> dist.ProcessGroup:
        """Gives the model a group that changes with the ranks, and adds a hook that admits joining processes.

        The hook runs before each forward pass, and admits them if the model is in training mode and gradients are
        enabled.

        Returns:
            The group.
        """
        assert self.resilient_ops is not None
        model, group = self._bound(), ElasticGroup(self.resilient_ops)
        swap_process_group(model, group)
        model.register_forward_pre_hook(AdmitJoining(weakref.ref(self)), prepend=True)
        return group

    def connect(self, group: dist.ProcessGroup, device: torch.device) -> GradientSession:
        """Connects the ranks that start together, or joins a running job if `join` is set; returns the session.

        A process that joins also loads rank 0's state: the model, the number of the step, the objects in `extra_state`
        and the compressor's counters.

        Args:
            group: Process group of the ranks that start together; a joining process only names its state by it.
            device: Device of the gradients.

        Raises:
            ValueError: `join` is set without `extra_state`, or the job cannot send its state.
            EvictedError: The running job refuses this process.
            RuntimeError: The ranks could not connect, or there is no job to join.
        """
        if self._state.config.join is not None:
            self._join(self._state.config.join, group, device)
        else:
            self._connect_first(group, device)
        return self._session()

    @property
    def ran_last_itself(self) -> bool:
        """Whether this rank ran the last operation, such as the averaging of a step, to its end itself.

        False if after a rank failure it took the result from ranks that had completed the operation before. It then
        sends no numbers about the step (straggler detection, trace): those ranks send none in the present generation.
        """
        return self.resilient_ops is None or self.resilient_ops.by_itself

    def begin_step(self, communicator: Communicator, rows: Tensor | None) -> Tensor | None:
        """Starts to copy the gradients of the step that begins, and returns the all-reduces that the step has to use.

        Args:
            communicator: Communicator with which the step begins.
            rows: All-reduces that a loaded state prescribes, int64 (all-reduces, columns) in the encoding of
                `Resume`; None if the step is free.

        Returns:
            In the first step after processes have joined, on every rank, the all-reduces of rank 0's last step if there
            are any; otherwise `rows`, which may be None.
        """
        if self._next_rows is not None:
            rows, self._next_rows = self._next_rows, None
        self._kept = GradientBackup(communicator, rows)
        return rows

    def add(self, bucket: Bucket, start: Callable[[], None]) -> FutureTensor:
        """Copies a bucket's gradients and starts its all-reduce.

        Args:
            bucket: The bucket; averaged in place.
            start: Starts the all-reduce.

        Returns:
            A future of the bucket's buffer, completed when all remaining ranks have the averages of the whole step.
        """
        assert self._kept is not None
        return self._kept.add(bucket, start)

    def step_ended(self, step: EndedStep) -> None:
        """Drops the copied gradients, records the step's all-reduces, and reports a change of ranks to the user."""
        self._kept, self.has_just_joined = None, False
        if self._requests is not None:
            self._last_rows = encode_all_reduces(step.reduced_layouts).tolist()
        self.notify_change()

    def close(self) -> None:
        """Ends elastic training on this rank: closes the queue of requests to join, then `resilient_ops`.

        That closes the communicator and leaves the membership, so that the other ranks do not wait for this one.
        """
        if self._requests is not None:
            self._requests.close()
        if self.resilient_ops is not None:
            self.resilient_ops.close()

    def _session(self) -> GradientSession:
        session = self._state._session
        assert session is not None
        return session

    def _connect_first(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Connects the ranks that start together, and makes what repeats their operations after a rank failure.

        With `extra_state`, each rank also makes the queue of requests to join, and rank 0 publishes where other
        processes can join: the prefix of the membership's keys, under `job_key` in the store without any prefix.
        Without `extra_state` nothing is published, and no process can join.

        Args:
            group: Process group of these ranks.
            device: Device of the gradients.

        Raises:
            RuntimeError: The ranks could not connect.
        """
        first = first_failure_policy(group.rank(), group.size(), self._state.config.timeout)
        peers = SessionRanks.of(group, "hook", failure_policy=first)
        name = peers.name
        session = GradientSession(peers, device, self._state.config, self._state.names)
        self._state._session = session
        communicator = session.communicator
        prefix = f"gradwire/elastic/{name}/{communicator.peer_infos.generation}"
        membership = first_membership(communicator, prefix, self._state.config.timeout, first)
        if self._own.extra_state:
            outside = unprefixed(communicator.plain_store)
            self._requests = self._make_requests(PrefixStore(prefix, outside), device)
            if group.rank() == 0:
                outside.set(job_key(name), prefix)
        self._make_resilient(membership, communicator, joins=False)

    def _make_requests(self, store: Store, device: torch.device) -> Requests:
        """Makes the queue in which this rank, as rank 0, finds the processes that ask in the store to join the job.

        Every rank makes one, as rank 0 may change. It ends with `close`, or when this object is garbage-collected.

        Args:
            store: Store of the membership.
            device: Device of the gradients; a joining process must have one of the same type.
        """
        made = Requests(store, self._state.config.timeout, self._shared(device), described(self._bound().module))
        weakref.finalize(self, made.close)
        return made

    def _bound(self) -> DistributedDataParallel:
        """Returns the DDP model, which `bind` was given and the user keeps alive."""
        model = self._model() if self._model else None
        assert model is not None
        return model

    def _check_joining(self, process: JoiningProcess) -> None:
        """Checks, on rank 0 alone, that the job could go on with one more process.

        Raises:
            ValueError: The process does not fit: its placement, its network interface, or a state that cannot be sent.
        """
        assert self.resilient_ops is not None
        _, name, packed_info = process
        membership = self.resilient_ops.membership
        known = peer_infos([*membership.view.members, name], {**membership.packed_infos, name: packed_info})
        cluster_of(known, self._state.config)
        interface_of(known, 0, self._state.config)
        check_state(lambda: self._own.given(self._bound()))

    def _shared(self, device: torch.device) -> dict[str, str]:
        """Returns the options, and their values in words, that a joining process must have in common with the job."""
        return {**self._state.config.shared(), "device": device.type}

    def _join(self, address: str, group: dist.ProcessGroup, device: torch.device) -> None:
        """Joins a running job: waits until the job admits this process, and receives its state.

        Tries up to `MOST_ATTEMPTS` times if a rank fails meanwhile or the connection breaks.

        Args:
            address: HOST:PORT of the store with which the job's ranks were started.
            group: Process group of this process, in which the hook state has its name.
            device: Device of the gradients.

        Raises:
            ValueError: `extra_state` is empty, or the state of the job could not be sent or does not fit here.
            EvictedError: The job refuses this process, or has not answered within the time-out.
            RuntimeError: There is no job to join, or the ranks could not connect in the last attempt.
            OSError: The system refused what the last attempt needed.
        """
        if not self._own.extra_state:
            raise ValueError(
                "`join` is set and `extra_state` is empty; wanted the optimizer in it, as in the running job"
            )
        name = SessionRanks.name_in(group, "hook")
        store = find_job(address, name, self._state.config.timeout)
        self._requests = self._make_requests(store, device)
        peer_info, own = packed(PeerInfo.here(0, 1, self._state.config, device)), described(self._bound().module)
        rehearse()
        for attempt in range(MOST_ATTEMPTS):
            view, infos = request_admission(store, self._shared(device), self._state.config.timeout, peer_info, own)
            membership = Membership(store, view, self._state.config.timeout, infos)
            try:
                policy = failure_policy_of(view, membership, self._state.config.timeout)
                peers = SessionRanks(membership.store, "hook", view.rank, view.size, None, policy)
                session = GradientSession(peers, device, self._state.config, self._state.names, joined=True)
                self._state._session = session
                self._make_resilient(membership, session.communicator, joins=True)
                self._exchange_state(view.joined)
                self.has_just_joined = True
                return
            except BaseException as error:
                membership.close(orderly=False)
                if self._state._session is not None:
                    self._state._session.communicator.close()
                self._state._session = None
                self.resilient_ops = None
                if not isinstance(error, RuntimeError | OSError) or attempt == MOST_ATTEMPTS - 1:
                    raise
                log.warning("joining the running job failed, trying again: %s", error)

    def _make_resilient(self, membership: Membership, communicator: Communicator, *, joins: bool) -> None:
        """Makes the object that repeats operations after a rank failure, and adds the listeners to the session.

        Args:
            membership: Agrees with the other ranks on the members of each generation.
            communicator: Communicator of the present generation.
            joins: Whether this rank joins a running job with this generation.
        """
        rebuild = unheld(self._rebuild)
        resilient_ops = ResilientOps(membership, communicator, rebuild, self._state.config.timeout, joins=joins)
        weakref.finalize(self, resilient_ops.close)
        self.resilient_ops, self._announced = resilient_ops, resilient_ops.view
        self._add_listeners(self._session())

    def _add_listeners(self, session: GradientSession) -> None:
        """Adds this object to the session's listeners, and those that a compressor needs in elastic training."""
        session.listeners.add(MEMBERSHIP, self)
        if self.resilient_ops is not None and session.compression is not None:
            steps = CompletedSteps(session, session.communicator, session.compression)
            session.listeners.add(COMPRESSED_STEPS, steps)
            session.communicator.executor.checking = False
            membership = self.resilient_ops.membership
            notes = ResidualNotes(membership, session.communicator, session.compression)
            session.listeners.add(RESIDUAL_NOTES, notes)

    def _rebuild(self, view: View, store: Store, failure_policy: FailurePolicy) -> Communicator:
        """Makes the session of a new generation's ranks from the previous one, and returns its communicator.

        Args:
            view: Ranks of the new generation, seen from this one.
            store: Store of the new generation.
            failure_policy: Failure policy of the new communicator.
        """
        previous = self._session()
        peers = SessionRanks(store, "hook", view.rank, view.size, None, failure_policy)
        made = GradientSession(
            peers,
            previous.communicator.device,
            self._state.config,
            self._state.names,
            previous,
            joined=bool(view.joined),
        )
        self._state._session = made
        self._add_listeners(made)
        return made.communicator

    def equalize_decoders(self, session: GradientSession) -> None:
        """Makes all ranks decode payloads identically, before the first all-reduce of a generation.

        All ranks call it. Only the first call with a session does anything, and only if its compressor has state that
        all ranks decode with.
        """
        if self.resilient_ops is None or session.agrees:
            return
        compressor = session.compression.compressor if session.compression is not None else None
        if compressor is not None and (stores := traits_of(compressor).shared()):
            equalize_decoders(stores, self._state.names.numels(), session.communicator, self.resilient_ops.wait)
        session.agrees = True

    def complete_step(self) -> None:
        """Waits until the step's gradients are averaged on all remaining ranks, and completes DDP's futures.

        Repeats the step after a rank failure. Also records which processes join before the next step. Does nothing if
        the step is complete already.

        Raises:
            EvictedError: The other ranks go on without this one, or no rank is left to go on with.
            RuntimeError: The step failed several times in a row among the same ranks.
        """
        kept, resilient_ops = self._kept, self.resilient_ops
        if kept is not None and resilient_ops is not None and not kept.resolved:
            like = torch.zeros(1, dtype=torch.int64, device=resilient_ops.communicator.device)
            listed = resilient_ops.complete(lambda: self._attempt(kept, resilient_ops), like)
            kept.resolve_futures()
            self._listed = int(like.copy_(listed).item()) if listed is not None else 0

    def _attempt(self, kept: GradientBackup, resilient_ops: ResilientOps) -> Tensor:
        """Averages the step's gradients once, from their copies if the ranks have changed since they were sent.

        Rank 0 also looks for processes that wait to join, and sends all ranks the number of their list.

        Args:
            kept: Copies of the step's gradients.
            resilient_ops: Waits for all-reduces.

        Returns:
            Number of the list of processes that join before the next step, 0 for none; int64, one element.

        Raises:
            RuntimeError: A rank failed.
        """
        session = self._session()
        communicator = session.communicator
        if kept.belongs_to(communicator):
            kept.check()
        else:
            if session.compression is not None:
                with communicator.exclusive():
                    session.compression.compressor.end_step(False)
            self._state.send_again(kept.restore(communicator), kept.rows)
        self._state.send_rest(session)
        kept.wait()
        communicator.sync_current_stream()
        polls = self._requests is not None and communicator.rank == 0
        found = self._requests.poll(self._check_joining) if polls and self._requests else 0
        listed = torch.tensor([found], device=communicator.device)
        return resilient_ops.wait(communicator.all_reduce(listed))

    def admit_joining(self) -> None:
        """Admits the processes that wait to join, sends them the state, and calls `on_membership_change`.

        Called before each forward pass. It does nothing, and sends nothing, unless the last step has found such
        processes, which it has then on all ranks.

        Raises:
            EvictedError: The other ranks go on without this one.
        """
        if not self._listed or self._state._backward.in_step or self.resilient_ops is None or self._requests is None:
            return
        listed, self._listed = self._listed, 0
        joining = self._requests.listed(listed)
        self.resilient_ops.admit(joining, self._requests)
        began = time.perf_counter()
        self._exchange_state([name for _, name, _ in joining])
        self.resilient_ops.changes[-1].seconds["transfer"] = time.perf_counter() - began
        self.notify_change()

    def _exchange_state(self, names: Sequence[str]) -> None:
        """Sends rank 0's state to the processes that have joined; all ranks call it.

        Args:
            names: Names of the joining processes among the members.

        Raises:
            ValueError: On a joining process: rank 0 could not give its state, or it does not fit here.
            EvictedError: The other ranks go on without this one.
        """
        resilient_ops, model = self.resilient_ops, self._model() if self._model else None
        assert resilient_ops is not None and model is not None
        joins = resilient_ops.view.members[resilient_ops.view.rank] in names
        received: list[ReceivedState] = []

        def attempt() -> Tensor:
            received.clear()
            if set(names) & set(resilient_ops.view.members):
                transfer = StateTransfer(resilient_ops.communicator, resilient_ops.wait)
                received.append(transfer.run(lambda: self._own.given(model), self._last_rows, wanted=joins))
            return resilient_ops.wait(resilient_ops.communicator.all_reduce(torch.zeros_like(like)))

        like = torch.zeros(1, dtype=torch.int64, device=resilient_ops.communicator.device)
        resilient_ops.complete(attempt, like)
        if not received:
            return
        found = received[0]
        self._next_rows = (
            torch.tensor(found.shared, dtype=torch.int64, device="cpu").view(-1, COLUMNS) if found.shared else None
        )
        if not joins:
            swap_process_group(model, model.process_group)
        elif found.state is None:
            raise ValueError(f"the running job cannot admit this process: {found.refused}")
        else:
            self._own.take(model, found.state)

    def notify_change(self) -> None:
        """Calls `on_membership_change` if the ranks have changed since its last call, and logs lost residuals."""
        if (
            self.resilient_ops is None
            or self._announced is None
            or self.resilient_ops.view.generation == self._announced.generation
        ):
            return
        old, now = self._announced, self.resilient_ops.view
        lost = tuple(name for name in old.members if name not in now.members)
        joined = tuple(name for name in now.members if name not in old.members)
        new = self._announced = replace(now, lost=lost, joined=joined)
        if lost and self._session().compression is not None and now.rank == 0:
            for name in lost:
                note = self.resilient_ops.membership.note_of(name)
                log.warning("the residuals of the compressor on %s are lost; %s", name, norm_in_words(note))
        if self._on_membership_change is not None:
            self._on_membership_change(old, new)


class AdmitJoining:
    """Admits waiting processes before each forward pass in training: a forward pre-hook of an elastic model.

    In evaluation mode, or without gradients, it does nothing, because not all ranks may take part in such a pass.

    Args:
        training: Elastic training of the model; not kept alive.
    """

    def __init__(self, training: "weakref.ref[ElasticTraining]") -> None:
        self._training = training

    def __call__(self, model: nn.Module, inputs: object) -> None:
        """Admits the processes that wait to join, before a forward pass in training; does nothing in an evaluation."""
        training = self._training()
        if training is not None and model.training and torch.is_grad_enabled():
            training.admit_joining()

    def __reduce__(self) -> tuple[object, ...]:
        """Makes a copied or unpickled model carry a pre-hook without elastic training, which does nothing."""
        return AdmitJoining, (_no_training,)


def _no_training() -> None:
    """Returns None, like a dead weak reference: a copied model has no elastic training."""

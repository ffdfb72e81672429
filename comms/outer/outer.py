"""Trains a model in workers that exchange parameters every few steps: `gradwire.Outer`.

`Outer` is the API and the set-up: it checks options, connects the ranks, and reacts to the optimizer's steps. Exchanges
are in exchange.py (when, and what becomes of the result) and averaging.py (over which ranks), the choice of settings is
in schedule_selection.py.
"""

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.comms.attach import attach
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import PrefixStore, Store, timeout_of
from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from gradwire.comms.checkpoint import JOB, OUTER, Checkpoint, normalize, refuse_other_owner, unpack
from gradwire.comms.communicator import Communicator, FailurePolicy, exchange_addresses
from gradwire.comms.config import ASSUME, ENVIRONMENT_PREFIX, NVTX, Config, PlanChoice
from gradwire.comms.elastic.membership import View
from gradwire.comms.elastic.resilient_ops import ResilientOps, first_failure_policy, first_membership, unheld
from gradwire.comms.hook import HookState
from gradwire.comms.outer.averaging import agreement_of
from gradwire.comms.outer.exchange import OuterExchange
from gradwire.comms.outer.fragments import OuterSettings, cut_into_fragments, local_of, wire_nbytes_of
from gradwire.comms.outer.options import (
    EXACT,
    INSIDE,
    INSIDE_ONLY,
    NONE,
    OF_EXCHANGES,
    config_of,
    idle_in,
    provisional,
    refuse_idle,
    refuse_unfit,
)
from gradwire.comms.outer.report import OuterReport
from gradwire.comms.outer.schedule_selection import ALONE_EVERY, CHOSEN, OuterLink, ScheduleSelection
from gradwire.comms.outer.start import copy_from_rank_0, facts_of
from gradwire.comms.outer.steps import OptimizerSteps, optimizers_from, untrained
from gradwire.comms.outer.workers import model_inside, peers_of, trained_parameters, workers_given, workers_in
from gradwire.comms.session import AveragingSession, SessionRanks, TrainingState, refused
from gradwire.comms.transport.launch_order import devices
from gradwire.compressors.base import StateDict
from gradwire.compressors.rules import warn_of_idle
from gradwire.topology.cluster import LEVEL_NAMES

log = logging.getLogger("gradwire")

AGREEMENT = "outer_agreement"
"""Prefix of the store's keys for agreements of all ranks."""

ELASTIC = "outer_elastic"
"""Prefix of the store's keys for elastic training."""


class Outer(TrainingState[AveragingSession]):
    """Trains a model in workers that exchange their parameters every few steps: DiLoCo and local SGD for slow links.

    A worker is a node by default (see `inside`). It averages its gradients at every step and exchanges its parameters'
    progress (the pseudo-gradient) with the others after `every` steps, a fragment of the model at a time, during
    training. The optimizer's own `step()` drives the exchanges; train `outer.model` with the usual loop::

        outer = gradwire.Outer(model, optimizer)
        for batch in data:
            optimizer.zero_grad()
            loss(outer.model(batch)).backward()
            optimizer.step()
        outer.synchronize()

    All ranks make an `Outer`, with the same arguments. It gives them rank 0's parameters and buffers (of a sharded
    model, each trained shard of the lowest rank that holds it), so load the state of an earlier run afterwards.

    Thread safety: use it from the thread that trains.

    Args:
        model: A plain module; or one that averages its gradients inside the worker itself: a DistributedDataParallel
            over the worker's own process group, or one that FSDP2's `fully_shard` shards over the worker's ranks.
        optimizer: Optimizer of torch for parameters of `model`; or a list of several for different parameters, such as
            Muon for matrices and AdamW for the rest, each of which steps once after every backward pass. Only the
            parameters that they train are exchanged.
        every: Steps of the optimizer between two exchanges of the same parameter. None chooses it after eight steps
            from the link and the duration of a step, the same on all ranks; so do `fragments` and `delay`. Nothing is
            exchanged before the choice. With the option `elastic` all three must be given.
        fragments: Number of pieces of the model that are exchanged in turn, `every / fragments` steps apart, so that
            the link is never full.
        delay: Steps of training between the start of an exchange and the use of its result, at most
            `every // fragments`. The progress of those steps is kept. 0 waits for the result. A long delay costs
            quality: raise `fragments` first if an exchange takes longer than a step.
        lr: Learning rate of the outer SGD. `lr=1, momentum=0` makes an exchange an average of parameters (local SGD).
        momentum: Momentum of the outer SGD; DiLoCo's settings are `lr=0.7, momentum=0.9`.
        nesterov: True for Nesterov's momentum in the outer SGD.
        warmup_steps: Number of first steps in which exchanges come every `warmup_every` steps, without outer momentum:
            separate training costs most while the learning rate is high.
        warmup_every: Steps between two exchanges of the same parameter in the warm-up. If it is less than `fragments`,
            several exchanges follow each other after a step, which waits for all of them, without `delay`.
        inside: Ranks of a worker: "exact" for the ranks of a node, "none" for each rank by itself, or the level at
            which gradients are averaged at every step: "intra_node", "inter_node" (the nodes of a rack), "inter_rack".
        config: Configuration; None takes it from the environment.
        **options: Fields of `Config` by name, such as `compressor` (for data between nodes), `compressor_options`,
            `rules` and `timeout`; they override the environment. The default compressor is `waterfill2`;
            `compressor=None` is exact.

    Attributes:
        model: Model to train: `model`, or a DistributedDataParallel around it.
        hook: State of gradwire's hook inside the worker; None if Outer averages no gradients there.

    Raises:
        TypeError: An option has an unknown name, or a value has a wrong type.
        ValueError: A value is out of range, or differs between the ranks, or would change nothing; `inside` contradicts
            `model`, or names a level that the cluster does not have; the optimizer trains no parameter of `model`, or
            others; `model` averages over all ranks already, or only a part of it is in DDP or sharded; or `elastic` is
            set and a worker has several ranks, or a setting of the schedule is missing.
        RuntimeError: torch.distributed is not initialised, or a rank did not join.

    Source: Douillard et al., DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512. The warm-up: Lin et al.,
    Don't use large mini-batches, use local SGD, arXiv 1808.07217 (post-local SGD).
    """

    OPTIONS = tuple(dict.fromkeys((*OF_EXCHANGES, *INSIDE_ONLY)))
    MARK = OUTER
    NOT_CONNECTED = "Outer has not connected its ranks: {call} is not available yet"

    samples = refused("samples", "exchanges weigh all ranks equally; give them equal shares of the data")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int | None = None,
        fragments: int | None = None,
        delay: int | None = None,
        lr: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = True,
        warmup_steps: int = 0,
        warmup_every: int = 1,
        inside: str = EXACT,
        config: Config | None = None,
        **options: object,
    ) -> None:
        # Check everything that this rank can check by itself, before it waits for others.
        schedule = {"every": every, "fragments": fragments, "delay": delay}
        given = {name: value for name, value in schedule.items() if value is not None}
        settings = provisional(
            given, lr=lr, momentum=momentum, nesterov=nesterov, warmup_steps=warmup_steps, warmup_every=warmup_every
        )
        if inside not in INSIDE:
            raise ValueError(f"`inside` is {inside!r}; wanted one of {', '.join(INSIDE)}")
        chosen = options if config is None else {each.name: getattr(config, each.name) for each in fields(Config)}
        config = config_of(config, options)
        refuse_unfit(config)
        if config.elastic and len(given) < len(CHOSEN):
            missing = ", ".join(f"`{name}`" for name in CHOSEN if name not in given)
            raise ValueError(
                f"`elastic` is set and {missing} not given: with elastic=True, pass every, fragments and delay, "
                "because their automatic choice needs all ranks"
            )
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` is a {type(model).__name__}; wanted a torch.nn.Module")
        optimizers = optimizers_from(optimizer)
        inner = model_inside(model)
        trained = trained_parameters(inner, optimizers)
        if others := untrained(inner, optimizers):
            log.warning(
                "%d parameters that want a gradient (%s%s) are in no `optimizer` of Outer, so they are not exchanged: "
                "if another optimizer trains them, give Outer all optimizers, as a list",
                len(others),
                ", ".join(others[:3]),
                ", ..." if len(others) > 3 else "",
            )
        if not dist.is_initialized() or dist.group.WORLD is None:
            raise RuntimeError("torch.distributed is not initialised: call dist.init_process_group() first")
        world = dist.group.WORLD
        config = config.with_timeout_of(timeout_of(world, local_of(trained[0][1]).device))
        auto = config.plan_name == "auto"
        super().__init__(replace(config, plan=PlanChoice("hierarchical", config.chunks)) if auto else config)
        # Compare the arguments of all ranks, and find this rank's worker and the ranks that it exchanges with.
        ranks = exchange_addresses(world, config)
        store = PrefixStore(SessionRanks.name_in(world, AGREEMENT), ranks.plain_store)
        agreement = agreement_of(store, ranks.rank, ranks.size, config.timeout, ranks.peer_wait().exited_among)
        facts = facts_of(settings, inside, model, trained) | {name: repr(value) for name, value in schedule.items()}
        agreement.compare(facts, "make the same model and optimizer everywhere, and give Outer the same arguments")
        group, own_worker = peers_of(model, trained, inside, agreement)
        if own_worker is not None or inside == NONE:
            refuse_idle(chosen, "no gradients are averaged by Outer here")
            for name in idle_in(config, without=chosen):
                log.warning(
                    "`%s` is set, and no gradients are averaged by Outer here: it changes nothing",
                    ENVIRONMENT_PREFIX + name.upper(),
                )
        # Connect the ranks that exchange, and measure their links.
        self.hook: HookState | None = None
        session, first = self._connect(group, trained)
        self._session, communicator = session, session.communicator
        if not config.elastic and config.nic_bytes_per_second != ASSUME:
            from gradwire.comms.links.quick_probe import quick_probe  # imported only if links are measured

            quick_probe(communicator)
        self._workers = (
            workers_in(communicator.cluster, inside)
            if own_worker is None
            else workers_given(group, own_worker, agreement)
        )
        if config.elastic and (own_worker is not None or any(len(worker) > 1 for worker in self._workers)):
            self._leave()
            raise ValueError(
                "`elastic` is set, and a worker has several ranks, of which one alone may fail; wanted workers of "
                'one rank: nodes of one rank, or inside="none"'
            )
        # Cut the model into fragments, by a provisional schedule if some settings are still to be chosen.
        compressor = session.compression.compressor if session.compression else None
        nbytes = wire_nbytes_of(trained, compressor)
        if len(self._workers) == 1:
            log.warning("Outer has one worker of %d ranks: nothing is exchanged", communicator.size)
            settings = replace(settings, every=given.get("every", max(ALONE_EVERY, settings.every)))
        self.exchange = OuterExchange(
            session,
            cut_into_fragments(trained, settings, nbytes),
            settings,
            agreement=agreement,
            alone=len(self._workers) == 1,
        )
        if first is not None:
            self._survive(first)
        self._inner = inner
        self._sharded = group.size() < world.size()
        self._choice: ScheduleSelection | None = None
        if len(given) < len(CHOSEN) and len(self._workers) > 1:
            shards = world.size() // group.size()
            self._choice = ScheduleSelection(
                self.exchange,
                given,
                lambda: OuterLink.of(communicator.rank_plans.links.priced, shards * sum(nbytes)),
                lambda settings: cut_into_fragments(trained, settings, nbytes),
            )
        # Give all ranks rank 0's values: trained parameters by the exchange, all others by a broadcast.
        self.exchange.copy_from_first_rank([local_of(each) for _, each in trained])
        wanted = {id(each) for _, each in trained}
        frozen = [each for each in inner.parameters() if id(each) not in wanted]
        whole = [each for each in [*frozen, *inner.buffers()] if not isinstance(each, DTensor)]
        copy_from_rank_0([each.detach() for each in whole], communicator.device, agreement)
        # From here on the optimizer's steps drive the exchanges.
        self.model = model
        if own_worker is None and inside != NONE:
            self.model = self._average_inside(model, config)
        self._began = 0.0
        self._optimizer_steps = OptimizerSteps(optimizers, self._step_ended, self.exchange.check_parameters)

    def _connect(
        self, group: dist.ProcessGroup, trained: list[tuple[str, nn.Parameter]]
    ) -> tuple[AveragingSession, FailurePolicy | None]:
        """Connects the ranks that exchange with this one, and warns of compressor rules that match no parameter.

        Args:
            group: Ranks that hold the same parameters or shards as this one.
            trained: (Name, parameter) pairs that are exchanged.

        Returns:
            The session of these ranks; and, in elastic training, the failure policy of its communicator, else None.
        """
        self._group = group
        self._exchanged = replace(
            self.config.only(OF_EXCHANGES),
            straggler_every=0,
            trace=NVTX if self.config.marks_nvtx else None,
        )
        self._resilient_ops: ResilientOps | None = None
        timeout, numels = self.config.timeout, {name: local_of(each).numel() for name, each in trained}
        first = first_failure_policy(group.rank(), group.size(), timeout) if self.config.elastic else None
        ranks = SessionRanks.of(group, "outer", failure_policy=first)
        device, held = local_of(trained[0][1]).device, {name: numel for name, numel in numels.items() if numel}
        session = AveragingSession(ranks, device, self._exchanged, held)
        if session.compression is not None:
            warn_of_idle(self.config.rules, numels, "Patterns are shell-style, of the whole name.")
        session.watch_steps()
        session.observer.phase = "exchange"
        return session, first

    def _survive(self, first: FailurePolicy) -> None:
        """Makes this rank's exchanges continue without ranks that fail from now on.

        Args:
            first: Failure policy of the first communicator, which `_connect` returned.
        """
        communicator = self._connected("elastic").communicator
        prefix = f"gradwire/{ELASTIC}/{communicator.peer_infos.generation}"
        membership = first_membership(communicator, prefix, self.config.timeout, first)
        self._resilient_ops = ResilientOps(membership, communicator, unheld(self._rebuild), self.config.timeout)
        weakref.finalize(self, self._resilient_ops.close)
        self.exchange.survive(self._resilient_ops)
        self.exchange.averaging.agreement = self._agreement_of(communicator, first)

    def _rebuild(self, view: View, store: Store, failure_policy: FailurePolicy) -> Communicator:
        """Connects the ranks that survive a failure, and makes the exchanges continue among them; see `Rebuild`.

        Args:
            view: The surviving ranks, renumbered, and this rank's number among them.
            store: Store of these ranks, with keys of their own.
            failure_policy: How the new communicator reports the next failed rank.

        Returns:
            The new communicator.
        """
        previous = self._connected("elastic")
        ranks = SessionRanks(store, ELASTIC, view.rank, view.size, None, failure_policy)
        session = AveragingSession(ranks, previous.communicator.device, self._exchanged, {}, previous=previous)
        session.watch_steps(previous)
        session.observer.phase = "exchange"
        self._session, communicator = session, session.communicator
        self.exchange.reconnect(session, self._agreement_of(communicator, failure_policy))
        self._workers = workers_in(communicator.cluster, NONE)
        return communicator

    def _agreement_of(self, communicator: Communicator, failure_policy: FailurePolicy) -> Agreement:
        """Makes an agreement of a communicator's ranks that does not wait for ranks that have failed.

        Args:
            communicator: Communicator of these ranks.
            failure_policy: Failure policy of the communicator, which ends waits for failed ranks.
        """
        store = failure_policy.polling(PrefixStore(AGREEMENT, communicator.plain_store))
        return agreement_of(store, communicator.rank, communicator.size, self.config.timeout)

    def _average_inside(self, model: nn.Module, config: Config) -> nn.Module:
        """Wraps the model in DDP over this rank's worker, with gradwire's exact hook on it; returns the DDP model.

        A worker of one rank gets its model back as it is. All ranks make all workers' groups, in the same order. A
        failure in the worker then aborts the exchanges, and the other way round.
        """
        communicator = self.exchange.averaging.communicator
        own, device, rank = model, communicator.device, communicator.rank
        plain = replace(config, compressor=None, compressor_options={}, rules=())
        for worker in self._workers:
            if len(worker) == 1:
                continue
            group = dist.new_group(list(worker), timeout=config.timeout)
            if rank in worker:
                own = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
                self.hook = attach(own, config=plain)
                _fail_together(communicator, self.hook._connected("Outer").communicator)
                if device.type == "cuda":  # DDP broadcasts buffers before a forward pass; an exchange may be in flight
                    own.register_forward_pre_hook(partial(_wait_in_turn, device))
        return own

    def _step_ended(self) -> None:
        """Counts a step of the optimizer, applies the exchange that is due, and starts those that are next.

        While settings are still to be chosen by measurement, there are no exchanges: it measures how long steps take,
        and after the last of these steps all ranks choose the settings together.
        """
        self._began = self._began or time.perf_counter()
        if self._choice is None or self._choice.is_made:
            self.exchange.step_ended()
        else:
            self._choice.step_ended()
        self.steps = self.exchange.steps

    def synchronize(self) -> None:
        """Averages the workers' parameters now, in full precision; afterwards all ranks hold the same ones.

        Call it at the end of training, or before the model is exported or evaluated. It includes the compressor's
        residuals, leaves out the outer momentum, and averages floating-point buffers (running means), which are each
        worker's own otherwise. All ranks call it; ranks that have begun fewer exchanges catch up.

        Raises:
            RuntimeError: A rank did not arrive within the time-out, or an exchange failed; or, on all ranks, a
                parameter is not finite: then every rank keeps its own parameters.
        """
        self._finish_step()
        buffers = [each for each in self._inner.buffers() if each.is_floating_point() and not isinstance(each, DTensor)]
        self.exchange.synchronize([] if self._sharded else buffers)
        self.steps = self.exchange.steps
        for buffer in buffers if self._sharded else []:  # the ranks of a sharded worker hold different buffers
            wide = buffer.detach().to(
                self.exchange.averaging.communicator.device, torch.promote_types(buffer.dtype, torch.float32)
            )
            wide = wide.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(wide)
            buffer.detach().copy_(wide / dist.get_world_size())

    def _finish_step(self) -> None:
        """Ends a step in which only some optimizers have stepped, before a call that needs the step to have ended.

        If the settings are still to be chosen, it takes part in that choice: ranks that have taken more steps wait in
        it.

        Raises:
            RuntimeError: A rank did not join the choice within the time-out, the model does not have the parameters
                that were saved with a state that was loaded just before, or an exchange failed.
        """
        self._optimizer_steps.finish()
        self.exchange.check_parameters()
        if self._choice is not None and not self._choice.is_made:  # ranks that have taken more steps wait for it
            self._choice.make()

    @property
    def settings(self) -> OuterSettings:
        """Schedule of the exchanges and rates of the outer SGD; provisional until missing ones are chosen."""
        return self.exchange.settings

    def report(self) -> OuterReport:
        """Returns what this rank has exchanged so far, with its traffic and the time that this rank has waited."""
        exchange, averaging = self.exchange, self.exchange.averaging
        found = self._connected("report()").report(exchange.steps)
        inside = LEVEL_NAMES[0] if len(averaging.communicator.cluster.nodes) > 1 else ""
        return OuterReport(
            workers=tuple(self._workers),
            steps=exchange.steps,
            exchanges=exchange.done,
            skipped=exchange.skipped,
            numel=exchange.numel,
            sent_nbytes=sum(row.wire_nbytes for row in found.rows if row.level != inside),
            nic_nbytes=averaging.nic_bytes.exchanged + averaging.nic_bytes.synchronized,
            synchronized_nbytes=averaging.nic_bytes.synchronized,
            seconds=time.perf_counter() - self._began if self._began else 0.0,
            waited_seconds=averaging.waited_seconds,
            exchange=found,
            inside=None if self.hook is None or not self.hook.steps else self.hook.report(),
            sharded=self._sharded,
            settings=self.settings,
            chosen="" if self._choice is None else self._choice.reason,
        )

    def trace(self, file: str | Path, steps: int = 20) -> None:
        """Writes a timeline of all ranks' next exchanges into one JSON file in Chrome's trace format.

        Every rank calls it between the same two steps. The file is written when the last of the exchanges has ended.

        Args:
            file: JSON file, written by rank 0.
            steps: Number of exchanges.

        Raises:
            ValueError: `steps` is less than one; or `elastic` is set.
            OSError: Rank 0 cannot write the file; raised on all ranks.
            RuntimeError: There is only one worker, or a trace is already being made.
        """
        if self._resilient_ops is not None:
            raise ValueError("`elastic` is set, and a rank failure would end a timeline: leave one of the two out")
        if self.exchange.averaging.alone:
            raise RuntimeError("Outer has one worker: there are no exchanges to trace; see `outer.hook.trace()`")
        super().trace(file, steps)

    def gathered_state_dict(self, *, on_all_ranks: bool = False) -> Checkpoint:
        """Gathers the states of all ranks into one, which can be saved in a single file; all ranks call it.

        Args:
            on_all_ranks: True returns it on every rank. False returns it on rank 0, and on the others their own part.

        Raises:
            ValueError: `model` is sharded, or ranks have failed.
        """
        if self._sharded or self._connected("gathered_state_dict()").group is None:
            why = "`model` is sharded" if self._sharded else "ranks have failed"
            raise ValueError(f"{why}: each rank saves its own state_dict(), beside its part of the model")
        return super().gathered_state_dict(on_all_ranks=on_all_ranks)

    @property
    def _keeps(self) -> bool:
        return True

    @property
    def dirty(self) -> bool:
        """Whether a saved state fits only the ranks that saved it: always True, as workers differ between exchanges."""
        return True

    def _place(self) -> tuple[int, int]:
        if self._sharded:  # each rank of a worker holds other shards, under its own keys of one checkpoint
            return dist.get_rank(), dist.get_world_size()
        communicator = self._connected("state_dict()").communicator
        return communicator.rank, communicator.size

    def _own_state(self) -> StateDict:
        found = self.exchange.state_dict()
        self.steps = self.exchange.steps
        settings: StateDict = {"chosen": int(self._choice is None or self._choice.is_made)}
        settings |= {name: getattr(self.settings, name) for name in CHOSEN}
        return {OUTER + key: value for key, value in (found | settings).items()}

    def state_dict(self) -> Checkpoint:
        """Returns this rank's state of the exchanges, to resume bit for bit; all ranks call it, and each saves its own.

        It holds the parameters at the last exchange, the outer momentum and the compressor's residuals. An exchange in
        flight is finished first and takes effect: call this **before** `model.state_dict()`. Ranks that
        have taken different numbers of steps (a GradScaler skips some) catch up with each other as in `synchronize()`.
        Plain tuples of CPU tensors, numbers and strings: safe with `torch.load(weights_only=True)`. Workers hold
        different parameters between exchanges, so every worker saves its own model and optimizer, too.

        Raises:
            RuntimeError: A rank did not arrive within the time-out; or the exchange in flight failed.
        """
        self._finish_step()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores a state that `state_dict` returned on this rank; the caller restores model and optimizer.

        All ranks call it, with states that all ranks saved in one call. `fragments`, `warmup_steps` and `warmup_every`
        must be those of the run that saved; the other settings may differ. The next step of an optimizer compares the
        model's parameters with those that were saved with the state, and raises a RuntimeError if they differ: load the
        model before it.

        Raises:
            ValueError: The state of this rank or of another one is of another model, other settings, another rank or
                number of ranks, or is damaged, or the ranks' states do not fit each other; nothing was changed.
            RuntimeError: A rank did not join within the time-out; or the exchange in flight has failed. If
                it fails after the ranks have agreed, steps and saves are refused until a state has been loaded.
        """
        # Check this rank's state. An error is raised by the exchange, once all ranks know of it.
        found: StateDict | Exception
        try:
            saved, (rank, size) = normalize(state), self._place()
            refuse_other_owner(saved, self.MARK)
            if (before := dict(saved[JOB])["size"]) != size:
                raise ValueError(
                    f"`state` is of {before} ranks, there are {size}; wanted as many: call synchronize() before you "
                    "save, load the model alone, and make Outer of that"
                )
            own = unpack(saved, rank, size)
            if not own:
                raise ValueError("`state` has no entries of gradwire's Outer: wanted what Outer.state_dict() returned")
            found = {key.removeprefix(OUTER): value for key, value in own.items()}
        except Exception as error:  # noqa: BLE001 - raised by `exchange.load_state_dict`, once the others know of it
            found = error
        # Restore the choice of the schedule, then the exchange. If the exchange refuses, the choice is undone.
        choice, refused = self._choice, False
        if choice is not None:
            found = choice.load(found)
        try:
            self.exchange.load_state_dict(found)
        except ValueError:  # the exchange has changed nothing
            refused = True
            raise
        finally:
            if choice is not None:
                choice.loaded(refused=refused)
            self.steps = self.exchange.steps
        self._optimizer_steps.forget()  # states are saved at the end of a step

    def close(self) -> None:
        """Ends the exchanges; later steps of the optimizer start none. `model` can still be evaluated and saved.

        The result of an exchange in flight is lost: call `synchronize()` before. gradwire's hook inside the worker is
        closed, too.
        """
        self._optimizer_steps.close()
        self._leave()
        if self.hook is not None:
            self.hook.close()

    def _leave(self) -> None:
        """Closes the connections to the other ranks, and the threads that use them."""
        session = self._connected("close()")
        session.observer.close()
        if self._resilient_ops is not None:
            self._resilient_ops.close()
        else:
            session.communicator.close()


def _fail_together(workers: Communicator, inside: Communicator) -> None:
    """Makes a failure in one of this rank's two communicators abort the other one, with the reason.

    Args:
        workers: Communicator of all workers.
        inside: Communicator of this rank's worker.
    """
    for failing, where, left in ((inside, "inside its worker", workers), (workers, "in an exchange", inside)):
        failing.executor.failure_handler.on_failure = partial(_abort_with, weakref.ref(left), where)


def _abort_with(other: "weakref.ref[Communicator]", where: str, error: CollectiveError) -> None:
    """Aborts the other communicator of this rank, unless it was collected.

    Args:
        other: The communicator to abort.
        where: Place of the failure for the message: `inside its worker` or `in an exchange`.
        error: The failure.
    """
    if (communicator := other()) is not None:
        communicator.abort(f"rank {communicator.rank} has aborted {where}: {error}")


def _wait_in_turn(device: torch.device, *unused: object) -> None:
    """Makes the current CUDA stream wait for gradwire's last collective before a forward pass of the model.

    It is needed if communicators of a device run one after the other, because DDP's forward pass may issue collectives
    on a group of torch's (buffers); else it does nothing. It is a function of the module, so that the model can be
    pickled.

    Args:
        device: CUDA device with an index.
        unused: Arguments of torch's forward pre-hook.
    """
    devices.wait_for_last(device)

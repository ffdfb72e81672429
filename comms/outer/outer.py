"""`gradwire.Outer`: units train by themselves and exchange what they have learned now and then, beside training."""

import hashlib
import json
import logging
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.comms.attach import attach, look_inside
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import COMPILED_INSIDE, PrefixStore, Store, timeout_of
from gradwire.comms.bootstrap.failure import CollectiveError
from gradwire.comms.checkpoint import JOB, OUTER, Checkpoint, normalize, refuse_other_owner, unpack
from gradwire.comms.communicator import Communicator, Oversight, meet
from gradwire.comms.config import (
    COMPRESSION,
    ENVIRONMENT_PREFIX,
    NVTX,
    PLANNING,
    Config,
    asks,
)
from gradwire.comms.elastic.membership import View
from gradwire.comms.elastic.survive import Survivor, first_membership, first_oversight, unheld
from gradwire.comms.hook import HookState
from gradwire.comms.outer.averaging import agreement_of
from gradwire.comms.outer.choose import ALONE_EVERY, CHOSEN, OuterChoice, OuterLink, in_words
from gradwire.comms.outer.exchange import OuterExchange
from gradwire.comms.outer.fragments import OuterSettings, cut_into_fragments, local_of, wire_nbytes_of
from gradwire.comms.outer.steps import OptimizerSteps, left_alone, optimizers_from
from gradwire.comms.report import Report, in_columns
from gradwire.comms.session import AveragingSession, SessionRanks, TrainingState, refused
from gradwire.comms.transport.launch_order import devices
from gradwire.compressors.base import StateDict
from gradwire.compressors.rules import warn_of_idle
from gradwire.topology.cluster import LEVEL_NAMES, Cluster

log = logging.getLogger("gradwire")

EXACT, NONE = "exact", "none"
COUNCIL = "outer_council"
ELASTIC = "outer_elastic"
INSIDE = (EXACT, NONE, *LEVEL_NAMES[:-1])
"""What `inside` may be; the levels are those that have one above."""

PACKED_NBYTES = 2**25
"""Most bytes sent at a time of what is made alike at the start and is not trained."""

INSIDE_ONLY = ("fusion", "tune", "probe", "trace", "reduction", "straggler_every")
"""Options of the hook that averages gradients inside a unit; exchanges between units have no use for them."""

OF_EXCHANGES = (*PLANNING, *COMPRESSION, "elastic", "stall_seconds")
"""Options of exchanges between units; the others are of the gradients inside one."""

DEFAULT_COMPRESSOR = "waterfill2"
"""The compressor between units: it ends where int4 ends, with half of its bytes, and nothing sparser came within 0.06
bits of exact averages (docs/results/outer.md). What holds of gradients at every step under AdamW, where it ends behind,
does not hold here: what is averaged goes through no AdamW."""


@dataclass(frozen=True, slots=True)
class OuterReport:
    """What `Outer.report()` gives; `print` it, or read its fields.

    Attributes:
        units: Ranks of each unit, in the order of their lowest rank; of a sharded model, of the ranks that hold the
            same shards.
        steps: Of the optimizer.
        exchanges: That have taken effect, of single fragments.
        skipped: Exchanges that were not finite and changed nothing.
        numel: Elements that this rank holds of the parameters.
        sent_nbytes: Bytes that this rank has sent to other nodes, counted, headers not; on one node to other ranks.
        card_nbytes: Bytes that have left the busiest node for others, as the plans say; as many have arrived. Of a
            sharded model, for the shards that this rank holds: the node's other ranks have sent theirs besides.
        synchronized_nbytes: Of those, what `synchronize()` has sent, which averages in full precision.
        seconds: Since the first step ended.
        waited_seconds: Of those, how long this rank has done nothing but wait for a result.
        exchange: Phases, plans and links of the exchanges.
        inside: Of the gradients inside this unit; None where nothing is averaged there, or others do it.
        sharded: Whether this rank holds shards, which are all that `numel` and the bytes are about.
        settings: When units exchange.
        chosen: Why so, where that was chosen; empty where it was given, or is not chosen yet.
    """

    units: tuple[tuple[int, ...], ...]
    steps: int
    exchanges: int
    skipped: int
    numel: int
    sent_nbytes: float
    card_nbytes: float
    synchronized_nbytes: float
    seconds: float
    waited_seconds: float
    exchange: Report
    inside: Report | None = None
    sharded: bool = False
    settings: OuterSettings | None = None
    chosen: str = ""

    @property
    def bits_per_parameter_and_step(self) -> float:
        """What exchanges have sent from the busiest node, without `synchronize()`: in bits, a parameter and step."""
        return 8 * (self.card_nbytes - self.synchronized_nbytes) / max(self.numel * self.steps, 1)

    @property
    def wait_share(self) -> float:
        """Part of the time in which this rank has done nothing but wait for a result."""
        return self.waited_seconds / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, object]:
        """All of it as dicts, lists, numbers, strings and None, as JSON holds them; keys are the attributes' names."""
        reports = {"exchange": self.exchange.to_dict(), "inside": self.inside and self.inside.to_dict()}
        units = [list(unit) for unit in self.units]
        derived = {"wait_share": self.wait_share, "bits_per_parameter_and_step": self.bits_per_parameter_and_step}
        return {**asdict(self), **reports, "units": units, **derived}

    def __str__(self) -> str:
        """Five lines or fewer, and one for each finding. `full()` has the rest."""
        settings = [f"exchange: {in_words(self.settings)}; full() says more"] if self.settings else []
        return "\n".join([*map(in_columns, [self._head(), *settings, self._traffic()]), self.exchange.beside_others()])

    def full(self) -> str:
        """All of it: why these settings were chosen, and what `Report.full()` says of the exchanges."""
        why = f": {self.chosen}" if self.chosen else ""
        settings = [f"{in_words(self.settings)}{why}"] if self.settings else []
        return "\n".join([*map(in_columns, [self._head(), *settings, self._traffic()]), self.exchange.full()])

    def _head(self) -> str:
        skipped = f", {self.skipped} not finite and skipped" if self.skipped else ""
        sizes = ", ".join(str(len(unit)) for unit in self.units)
        counts = f"{self.steps} steps, {self.exchanges} exchanges{skipped}"
        return f"{len(self.units)} units of {sizes} ranks; {counts}, {self.wait_share:.1%} of the time waited for"

    def _traffic(self) -> str:
        exchanged, extra = (self.card_nbytes - self.synchronized_nbytes) / 1e6, self.synchronized_nbytes / 1e6
        shards = " for the shards of this rank" if self.sharded else ""
        traffic = f"a node sent {self.bits_per_parameter_and_step:.3g} bits a parameter and step{shards}: "
        return f"{traffic}{exchanged:.3g} MB" + (f"; {extra:.3g} MB in synchronize()" if extra else "")


class Outer(TrainingState[AveragingSession]):
    """Trains a model in units that exchange what they have learned now and then: for links that are slow.

    A unit averages its gradients at every step and exchanges its parameters' progress (the pseudo-gradient) with the
    others after `every` steps, a fragment of the model at a time, beside training. The optimizer's own `step()` drives
    it all; train `outer.model` as ever::

        outer = gradwire.Outer(model, optimizer)
        for batch in data:
            optimizer.zero_grad()
            loss(outer.model(batch)).backward()
            optimizer.step()
        outer.synchronize()

    All ranks make it, with the same arguments. They begin with rank 0's parameters and floating-point buffers; so load
    the state of an earlier run afterwards.

    Args:
        model: A plain module; or one that averages its gradients inside the unit itself: a DistributedDataParallel over
            the unit's own process group, or one that FSDP2's `fully_shard` shards over the unit's ranks.
        optimizer: Any of torch's, of the model's parameters; or a list of several for different parameters, such as
            Muon for matrices and AdamW for the rest, each of which steps once after every backward pass. Only what they
            train is exchanged.
        every: Steps of the optimizer between two exchanges of the same parameter. None of this and the next two: chosen
            after eight steps from the link and the length of a step, alike on all ranks; what is given wins.
        fragments: Pieces of the model that take turns, `every / fragments` steps apart, so that the link is never full.
        delay: Steps after which a result is taken up, while the exchange is under way; at most `every // fragments`.
            What the unit learns meanwhile is kept whole. 0 waits for the result. More costs quality: raise `fragments`
            first where an exchange takes longer than a step. It is also how many steps a rank may have skipped before a
            state is saved without `synchronize()`; see `load_state_dict`.
        lr: Of the outer SGD. `lr=1, momentum=0` makes an exchange an average of parameters (local SGD).
        momentum: Of the outer SGD; DiLoCo's settings are `lr=0.7, momentum=0.9`.
        nesterov: Whether the outer SGD looks ahead, where it has momentum.
        warmup_steps: Steps at the start in which exchanges come every `warmup_every` steps instead, without outer
            momentum: what units learn apart costs most while the learning rate is high.
        warmup_every: Steps between two exchanges of the same parameter there. With fewer than `fragments` several
            follow each other after a step, and it waits for all of them: there is no `delay` then, so that ranks of
            different numbers of steps cannot resume (see `load_state_dict`).
        inside: What a unit is: "exact" the ranks of a node, "none" every rank by itself, or the level at which
            gradients are averaged at every step: "intra_node", "inter_node" (the nodes of a rack), "inter_rack".
        config: The configuration; by default what the environment gives.
        **options: Fields of `Config` by name: `compressor` (of what crosses between nodes), `compressor_options`,
            `rules`, `timeout`, ...; they win over the environment. Where neither names a compressor it is `waterfill2`;
            `compressor=None` is exact.

    Attributes:
        model: What to train.
        hook: The state of gradwire's hook inside the unit; None where nothing is averaged there, or others do it.
        settings: When units exchange, and what becomes of it; those that are chosen are there from the choice on.

    Raises:
        TypeError: An option has an unknown name, or a value is of another type.
        ValueError: A value does not fit, or differs between the ranks; the optimizer trains nothing of the model, or
            something else; or the model averages over all ranks already.
        RuntimeError: torch.distributed is not initialised, or a rank did not join.

    Source: Douillard et al., DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512. The warm-up: Lin et al.,
    Don't use large mini-batches, use local SGD, arXiv 1808.07217 (post-local SGD).
    """

    OPTIONS = (*OF_EXCHANGES, *INSIDE_ONLY)
    MARK = OUTER
    NOT_CONNECTED = "Outer has not connected its ranks: {call} has nothing to say yet"

    samples = refused("samples", "exchanges weigh all ranks alike; deal them equal shares of the data")

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
        said = {"every": every, "fragments": fragments, "delay": delay}
        given = {name: value for name, value in said.items() if value is not None}
        self.settings = provisional(
            given,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            warmup_steps=warmup_steps,
            warmup_every=warmup_every,
        )
        if inside not in INSIDE:
            raise ValueError(f"`inside` is {inside!r}; wanted one of {', '.join(INSIDE)}")
        chosen = options if config is None else {each.name: getattr(config, each.name) for each in fields(Config)}
        config = config_of(config, options)
        refuse_unfit(config)
        if config.elastic and len(given) < len(CHOSEN):
            missing = ", ".join(f"`{name}`" for name in CHOSEN if name not in given)
            raise ValueError(
                f"`elastic` is set and {missing} not given: what is chosen after some steps is agreed by all ranks, of "
                "which one may be lost by then; wanted every, fragments and delay"
            )
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` is a {type(model).__name__}; wanted a torch.nn.Module")
        optimizers = optimizers_from(optimizer)
        inner = model_inside(model)
        trained = _trained(inner, optimizers)
        if others := left_alone(inner, optimizers):
            log.warning(
                "%d parameters that want a gradient (%s%s) are in no `optimizer` of Outer, so they are not exchanged: "
                "where another optimizer trains them, give Outer all of them, as a list",
                len(others),
                ", ".join(others[:3]),
                ", ..." if len(others) > 3 else "",
            )
        if not dist.is_initialized() or dist.group.WORLD is None:
            raise RuntimeError("torch.distributed is not initialised: call dist.init_process_group() first")
        world = dist.group.WORLD
        config = config.with_timeout_of(timeout_of(world, local_of(trained[0][1]).device))
        super().__init__(replace(config, plan="hierarchical") if config.plan == "auto" else config)
        ranks = meet(world, config)
        store = PrefixStore(SessionRanks.name_in(world, COUNCIL), ranks.plain_store)
        agreement = agreement_of(store, ranks.rank, ranks.size, config.timeout, ranks.awaited().among)
        facts = facts_of(self.settings, inside, model, trained) | {name: repr(value) for name, value in said.items()}
        agreement.compare(
            facts,
            "make the same model and optimizer everywhere, and give Outer the same arguments",
        )
        group, own_unit = _peers(model, trained, inside, agreement)
        if own_unit is not None or inside == NONE:
            refuse_idle(chosen, "no gradients are averaged by Outer here")
            for name in idle_in(config, without=chosen):
                log.warning(
                    "`%s` is set, and no gradients are averaged by Outer here: it changes nothing",
                    ENVIRONMENT_PREFIX + name.upper(),
                )
        self.hook: HookState | None = None
        connection, first = self._connect(group, trained)
        self._connection, communicator = connection, connection.communicator
        if not config.elastic and config.probe is not False:
            from gradwire.comms.links.quick_probe import quick_probe  # here: with rates that were given nobody asks

            quick_probe(communicator)
        self._units = (
            _units(communicator.cluster, inside) if own_unit is None else _units_of(group, own_unit, agreement)
        )
        if config.elastic and (own_unit is not None or any(len(unit) > 1 for unit in self._units)):
            self._leave()
            raise ValueError(
                "`elastic` is set, and a unit has several ranks, of which one alone may be lost; wanted units of one "
                'rank: nodes of one rank, or inside="none"'
            )
        compressor = connection.compression.compressor if connection.compression else None
        nbytes = wire_nbytes_of(trained, compressor)
        if len(self._units) == 1:
            log.warning("Outer has one unit of %d ranks: nothing is exchanged", communicator.size)
            self.settings = replace(self.settings, every=given.get("every", max(ALONE_EVERY, self.settings.every)))
        self.exchange = OuterExchange(
            communicator,
            connection.compression,
            cut_into_fragments(trained, self.settings, nbytes),
            self.settings,
            connection,
            agreement=agreement,
            alone=len(self._units) == 1,
        )
        if first is not None:
            self._survive(first)
        self._inner = inner
        self._sharded = group.size() < world.size()
        self._choice: OuterChoice | None = None
        if len(given) < len(CHOSEN) and len(self._units) > 1:
            shards = world.size() // group.size()
            self._choice = OuterChoice(
                self.exchange,
                connection,
                given,
                lambda: OuterLink.of(communicator.routes.links.priced, shards * sum(nbytes)),
                lambda settings: cut_into_fragments(trained, settings, nbytes),
            )
        self.exchange.start_alike([local_of(each) for _, each in trained])
        wanted = {id(each) for _, each in trained}
        frozen = [each for each in inner.parameters() if id(each) not in wanted]
        whole = [each for each in [*frozen, *inner.buffers()] if not isinstance(each, DTensor)]
        _copy_from_rank_0([each.detach() for each in whole], communicator.device, agreement)
        self.model = model
        if own_unit is None and inside != NONE:
            self.model = self._average_inside(model, config)
        self._began = 0.0
        self._optimizer_steps = OptimizerSteps(optimizers, self._step_ended)

    def _connect(
        self, group: dist.ProcessGroup, trained: list[tuple[str, nn.Parameter]]
    ) -> tuple[AveragingSession, Oversight | None]:
        self._group = group
        self._exchanged = replace(
            self.config.only(OF_EXCHANGES),
            probe=False,
            straggler_every=0,
            trace=NVTX if self.config.marks_nvtx else None,
        )
        self._survivor: Survivor | None = None
        timeout, numels = self.config.timeout, {name: local_of(each).numel() for name, each in trained}
        first = first_oversight(group.rank(), group.size(), timeout) if self.config.elastic else None
        ranks = SessionRanks.of(group, "outer", oversight=first)
        device, held = local_of(trained[0][1]).device, {name: numel for name, numel in numels.items() if numel}
        connection = AveragingSession(ranks, device, self._exchanged, held)
        if connection.compression is not None:
            warn_of_idle(self.config.rules, numels, "Patterns are shell-style, of the whole name.")
        connection.watch_steps()
        connection.observer.phase = "exchange"
        return connection, first

    def _survive(self, first: Oversight) -> None:
        """Has this rank's exchanges go on where others are lost."""
        communicator = self._connected("elastic").communicator
        prefix = f"gradwire/{ELASTIC}/{communicator.presences.start}"
        membership = first_membership(communicator, prefix, self.config.timeout, first)
        self._survivor = Survivor(membership, communicator, unheld(self._rebuild), self.config.timeout)
        weakref.finalize(self, self._survivor.close)
        self.exchange.survive(self._survivor)
        self.exchange.averaging.agreement = self._council(communicator, first)

    def _rebuild(self, view: View, store: Store, oversight: Oversight) -> Communicator:
        """Connects the ranks that are left."""
        previous = self._connected("elastic")
        ranks = SessionRanks(store, ELASTIC, view.rank, view.size, None, oversight)
        connection = AveragingSession(ranks, previous.communicator.device, self._exchanged, {}, previous=previous)
        connection.watch_steps(previous)
        connection.observer.phase = "exchange"
        self._connection, communicator = connection, connection.communicator
        self.exchange.be_watched(connection)
        self.exchange.reconnect(communicator, self._council(communicator, oversight))
        self._units = _units(communicator.cluster, NONE)
        return communicator

    def _council(self, communicator: Communicator, oversight: Oversight) -> Agreement:
        """The agreement of the ranks of one epoch: nobody waits in it for one that is lost."""
        store = oversight.polling(PrefixStore(COUNCIL, communicator.plain_store))
        return agreement_of(store, communicator.rank, communicator.size, self.config.timeout)

    def _average_inside(self, model: nn.Module, config: Config) -> nn.Module:
        """Wraps the model in DDP over this rank's unit; all ranks make all units' groups, in the same order."""
        communicator = self.exchange.averaging.communicator
        own, device, rank = model, communicator.device, communicator.rank
        plain = replace(config, compressor=None, compressor_options={}, rules=())
        for unit in self._units:
            if len(unit) == 1:
                continue
            group = dist.new_group(list(unit), timeout=config.timeout)
            if rank in unit:
                own = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
                self.hook = attach(own, config=plain)
                _fail_together(communicator, self.hook._connected("Outer").communicator)
                if device.type == "cuda":  # DDP broadcasts buffers in it, while an exchange may be under way
                    own.register_forward_pre_hook(partial(_wait_in_turn, device))
        return own

    def _step_ended(self) -> None:
        self._began = self._began or time.perf_counter()
        if self._choice is None or self._choice.is_made:
            self.exchange.step_ended()
        else:
            self._choice.step_ended()
            self.settings = self.exchange.settings
        self.steps = self.exchange.steps

    def synchronize(self) -> None:
        """Averages the units' parameters now, in full precision: afterwards all ranks hold the same ones.

        For the end of training, or before a model is saved or judged. With what the compressor holds back, without
        outer momentum, and with the average of floating-point buffers (running means), which are each unit's own
        otherwise. All ranks call it, whatever numbers of steps they have taken: who is behind in exchanges catches up.

        Raises:
            RuntimeError: A rank did not come within the time-out; or, on all ranks, a parameter is not finite.
        """
        self._finish_step()
        buffers = [each for each in self._inner.buffers() if each.is_floating_point() and not isinstance(each, DTensor)]
        self.exchange.synchronize([] if self._sharded else buffers)
        self.steps = self.exchange.steps
        for buffer in buffers if self._sharded else []:  # every rank of a sharded unit has buffers of its own
            wide = buffer.detach().to(
                self.exchange.averaging.communicator.device, torch.promote_types(buffer.dtype, torch.float32)
            )
            wide = wide.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(wide)
            buffer.detach().copy_(wide / dist.get_world_size())

    def _finish_step(self) -> None:
        """Ends a step in which only some optimizers have stepped, and makes a choice that is due on other ranks."""
        self._optimizer_steps.finish()
        if self._choice is not None and not self._choice.is_made:  # ranks that have taken more steps may wait in it
            self._choice.make()
            self.settings = self.exchange.settings

    def report(self) -> OuterReport:
        """What has been exchanged so far, how many bits that took, and how long this rank has waited."""
        exchange, averaging = self.exchange, self.exchange.averaging
        found = self._connected("report()").report(exchange.steps)
        inside = LEVEL_NAMES[0] if len(averaging.communicator.cluster.nodes) > 1 else ""
        return OuterReport(
            units=tuple(self._units),
            steps=exchange.steps,
            exchanges=exchange.done,
            skipped=exchange.skipped,
            numel=exchange.numel,
            sent_nbytes=sum(row.wire_nbytes for row in found.rows if row.level != inside),
            card_nbytes=averaging.card.exchanged + averaging.card.synchronized,
            synchronized_nbytes=averaging.card.synchronized,
            seconds=time.perf_counter() - self._began if self._began else 0.0,
            waited_seconds=averaging.waited_seconds,
            exchange=found,
            inside=None if self.hook is None or not self.hook.steps else self.hook.report(),
            sharded=self._sharded,
            settings=self.settings,
            chosen="" if self._choice is None else self._choice.reason,
        )

    def trace(self, file: str | Path, steps: int = 20) -> None:
        """Writes a timeline of all ranks' next exchanges into one file; see `HookState.trace`.

        Args:
            file: JSON; rank 0 writes it.
            steps: How many exchanges.

        Raises:
            ValueError: `steps` is less than one; or `elastic` is set.
            OSError: Rank 0 cannot write the file; raised on all ranks.
            RuntimeError: There is one unit alone, or a trace is being made already.
        """
        if self._survivor is not None:
            raise ValueError("`elastic` is set, and ranks that are lost would end a timeline: leave one of the two out")
        if self.exchange.averaging.alone:
            raise RuntimeError("Outer has one unit: there are no exchanges to trace; see `outer.hook.trace()`")
        super().trace(file, steps)

    def gathered_state_dict(self, *, on_all_ranks: bool = False) -> Checkpoint:
        """The states of all ranks in one; see `HookState.gathered_state_dict`.

        Args:
            on_all_ranks: Whether every rank shall have all of it; else rank 0 alone.

        Raises:
            ValueError: `model` is sharded, or ranks were lost.
        """
        if self._sharded or self._connected("gathered_state_dict()").group is None:
            why = "`model` is sharded" if self._sharded else "ranks were lost"
            raise ValueError(f"{why}: each rank saves its own state_dict(), beside its part of the model")
        return super().gathered_state_dict(on_all_ranks=on_all_ranks)

    @property
    def _keeps(self) -> bool:
        return True

    @property
    def dirty(self) -> bool:
        """Units differ between exchanges, so a state is always of these ranks alone."""
        return True

    def _place(self) -> tuple[int, int]:
        if self._sharded:  # ranks of a unit hold other shards each, under keys of their own in one checkpoint
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
        """Returns this rank's part of the exchanges, to resume bit for bit; all ranks call it, and each saves its own.

        It holds the parameters at the last exchange, the outer momentum and what the compressor has not sent yet. An
        exchange in flight is finished first and takes effect: call this **before** `model.state_dict()`. Ranks that
        have taken different numbers of steps (a GradScaler skips some) catch up with each other as in `synchronize()`.
        Plain tuples of CPU tensors, numbers and strings: safe with `torch.load(weights_only=True)`. Workers hold
        different parameters between exchanges, so every worker saves its own model and optimizer, too.

        Raises:
            RuntimeError: A rank did not come within the time-out; or the exchange in flight failed.
        """
        self._finish_step()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores what `state_dict` returned on this rank; model and optimizer are the caller's to restore.

        All ranks call it, with states that all ranks saved in one call. `fragments`, `warmup_steps` and `warmup_every`
        must be those of the run that saved; the other settings may differ.

        Raises:
            ValueError: The state of this rank or of another one is of another model, other settings, another rank or
                number of ranks, or is damaged, or the ranks' states do not fit each other; nothing was changed.
            RuntimeError: A rank has not come within the time-out; or the exchange that is under way has failed. Where
                it fails after the ranks have agreed, steps and saves are refused until a state has been loaded.
        """
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
        except Exception as error:  # noqa: BLE001 - raised where the others are told
            found = error
        choice, refused = self._choice, False
        if choice is not None:
            found = choice.load(found)
        try:
            self.exchange.load_state_dict(found)
        except ValueError:  # nothing was changed
            refused = True
            raise
        finally:
            if choice is not None:
                choice.loaded(refused=refused)
            self.settings, self.steps = self.exchange.settings, self.exchange.steps
        self._optimizer_steps.forget()  # what was saved is of the end of a step

    def close(self) -> None:
        """Ends the exchanges: the optimizer's steps drive nothing any more. `model` is for judging and saving then."""
        self._optimizer_steps.close()
        self._leave()
        if self.hook is not None:
            self.hook.close()

    def _leave(self) -> None:
        """Leaves the other ranks."""
        connection = self._connected("close()")
        connection.observer.close()
        if self._survivor is not None:
            self._survivor.close()
        else:
            connection.communicator.close()


def provisional(given: Mapping[str, int], **others: float) -> OuterSettings:
    """Settings that fit what the user has said, until the rest is chosen; no exchange goes by them.

    Args:
        given: Of `CHOSEN`, by name.
        others: All that is not chosen, by name.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value does not fit.
    """
    numbers = {name: value for name, value in {**others, **given}.items() if type(value) is int}
    turns = numbers.get("fragments", 1) * max(numbers.get("delay", 0), 1)
    least = max(turns, numbers.get("warmup_every", 1), 1)
    return OuterSettings(**{"every": least, "fragments": 1, "delay": 0, **others, **given})  # type: ignore[arg-type]  # checked there


def config_of(config: Config | None, options: Mapping[str, object]) -> Config:
    """The configuration that Outer is made with; where neither options nor the environment name a compressor, its own.

    Raises:
        TypeError: Both are given, or an option has an unknown name.
        ValueError: A value does not fit.
    """
    found = Config.given(config, options)
    if config is None and "compressor" not in options and found.compressor is None:
        found = replace(found, compressor=DEFAULT_COMPRESSOR)
    return found


def refuse_unfit(config: Config) -> None:
    """Refuses what an exchange of parameters cannot do.

    Raises:
        ValueError: Such an option is set.
    """
    if config.join is not None:
        raise ValueError(
            f"`elastic` is {config.join!r}, and nobody can join Outer's exchanges while they run: leave it out"
        )
    if not config.sums.average or config.sums.kind != "sum":
        raise ValueError(f"`reduction` is {config.reduction!r}, and Outer averages parameters: leave it out")


def idle_in(config: Config, without: Collection[str] = ()) -> list[str]:
    """Options of the hook inside a unit that have another value than their default, in order.

    Args:
        config: Where they are.
        without: Names that do not count.
    """
    asked = config.asked_for([name for name in INSIDE_ONLY if name not in without])
    return [name for name in asked if not _is_of_exchanges(name, getattr(config, name))]


def _is_of_exchanges(name: str, value: object) -> bool:
    """Whether a value of one of `INSIDE_ONLY` is one that exchanges heed, too: they are marked for Nsight Systems."""
    return name == "trace" and value == NVTX


def refuse_idle(options: Mapping[str, object], why: str) -> None:
    """Refuses options of the hook inside a unit where there is none.

    Raises:
        ValueError: One was given, with another value than its default.
    """
    for name in INSIDE_ONLY:
        if name in options and asks(name, options[name]) and not _is_of_exchanges(name, options[name]):
            raise ValueError(f"`{name}` is {options[name]!r}, and {why}: it would change nothing, so leave it out")


def model_inside(model: nn.Module) -> nn.Module:
    """The module whose parameters are trained: what a DDP model holds, looked for inside of wrappers.

    Raises:
        ValueError: A DDP model is somewhere else in it.
    """
    found = look_inside(model)
    inner = found.module if isinstance(found, DistributedDataParallel) else model
    path = next((path for path, each in inner.named_modules() if isinstance(each, DistributedDataParallel)), None)
    if path is not None:
        raise ValueError(
            f"`model` is a {type(model).__name__} that holds a DistributedDataParallel as `{path}`; wanted the plain "
            "module, or one DistributedDataParallel around all of it"
        )
    return inner


def facts_of(
    settings: OuterSettings, inside: str, model: nn.Module, trained: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, str]:
    """What must be the same on all ranks, by name: settings, how the model averages, and all its tensors."""
    inner = model_inside(model)
    wanted = {id(each) for _, each in trained}
    facts = {name: repr(value) for name, value in asdict(settings).items()}
    facts["inside"] = repr(inside)
    facts["model"] = "in DDP" if isinstance(look_inside(model), DistributedDataParallel) else "a module"
    for name, each in inner.named_parameters():
        how = "trained" if id(each) in wanted else "not trained"
        sharded = ", sharded" if isinstance(each, DTensor) else ""
        facts[name.replace(COMPILED_INSIDE + ".", "")] = f"{tuple(each.shape)} {each.dtype} {how}{sharded}"
    for name, buffer in inner.named_buffers():
        facts[name.replace(COMPILED_INSIDE + ".", "")] = f"{tuple(buffer.shape)} {buffer.dtype}, a buffer"
    return facts


def _copy_from_rank_0(tensors: Sequence[Tensor], device: torch.device, agreement: Agreement) -> None:
    """Gives all ranks rank 0's values of what is not trained, in place; what is the same already does not travel."""
    if agreement.size == 1 or not tensors:
        return
    digests = [hashlib.sha256(_bytes_of(each).cpu().numpy().tobytes()).hexdigest()[:16] for each in tensors]
    if len(set(agreement.gather(hashlib.sha256(repr(digests).encode()).hexdigest()))) == 1:
        return
    said = [json.loads(word) for word in agreement.gather(json.dumps(digests))]
    differ = [each for number, each in enumerate(tensors) if len({word[number] for word in said}) > 1]
    packs: list[list[Tensor]] = [[]]
    for each in differ:
        if packs[-1] and sum(other.nbytes for other in packs[-1]) + each.nbytes > PACKED_NBYTES:
            packs.append([])
        packs[-1].append(each)
    for pack_ in packs:
        flat = torch.cat([_bytes_of(each).to(device) for each in pack_])
        dist.broadcast(flat, 0)
        for each, part in zip(pack_, flat.split_with_sizes([each.nbytes for each in pack_]), strict=True):
            each.copy_(part.clone().view(each.dtype).view(each.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _trained(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the optimizers train, with their names, in the order of the model.

    Raises:
        ValueError: They train none, or others; or one is no floating-point number.
    """
    wanted = {id(each) for optimizer in optimizers for part in optimizer.param_groups for each in part["params"]}
    trained = [
        (name.replace(COMPILED_INSIDE + ".", ""), each) for name, each in model.named_parameters() if id(each) in wanted
    ]
    if not trained:
        raise ValueError("`optimizer` trains no parameter of `model`: make it of model.parameters()")
    if len(trained) < len(wanted):
        raise ValueError(
            f"`optimizer` trains {len(wanted) - len(trained)} parameters that `model` does not have: give Outer the "
            "module that all of them are in"
        )
    for name, each in trained:
        if not each.is_floating_point():
            raise ValueError(f"`{name}` has dtype {each.dtype}; wanted floating-point parameters")
    return trained


def _peers(
    model: nn.Module, trained: list[tuple[str, nn.Parameter]], inside: str, agreement: Agreement
) -> tuple[dist.ProcessGroup, frozenset[int] | None]:
    """The ranks that hold the same parameters (or shards) as this one, and this rank's unit where the model says it.

    Raises:
        ValueError: The model averages over all ranks already, or `inside` says something else than the model.
    """
    world = dist.group.WORLD
    assert world is not None
    sharded = [each for _, each in trained if isinstance(each, DTensor)]
    wrapped = look_inside(model)
    if isinstance(wrapped, DistributedDataParallel):
        unit = frozenset(dist.get_process_group_ranks(wrapped.process_group))
        what = "a DistributedDataParallel over all ranks: give the plain module, or a process_group of the unit's ranks"
    elif sharded:
        unit = frozenset(rank for each in sharded for rank in each.device_mesh.mesh.flatten().tolist())
        what = "sharded over all ranks: shard it over the ranks of each unit, fully_shard(module, mesh=mesh['shard'])"
    else:
        return world, None
    if inside != EXACT:
        raise ValueError(f"`inside` is {inside!r}, and `model` averages its gradients itself; wanted {EXACT!r}")
    if len(unit) == world.size() > 1:
        raise ValueError(f"`model` is {what}")
    if not sharded:
        return world, unit
    if len(sharded) < len(trained):
        raise ValueError(
            "`model` has parameters that are sharded and others that are not: call fully_shard on all of it"
        )
    said = [json.loads(word) for word in agreement.gather(json.dumps([_shard_key(sharded), sorted(unit)]))]
    groups = shard_groups([(key, tuple(ranks)) for key, ranks in said])
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        made = dist.new_group(ranks)
        own = made if dist.get_rank() in ranks else own
    assert own is not None
    return own, unit


def shard_groups(said: Sequence[tuple[str, tuple[int, ...]]]) -> list[list[int]]:
    """The ranks that hold the same shards, group by group.

    Args:
        said: What each rank has said: which shards it holds, and the ranks of its unit.

    Raises:
        ValueError: A group has no rank of some unit: units are of unequal size, or sharded in other ways.
    """
    groups = {key: [rank for rank, (each, _) in enumerate(said) if each == key] for key, _ in dict.fromkeys(said)}
    units = {unit for _, unit in said}
    for ranks in groups.values():
        if {said[rank][1] for rank in ranks} != units:
            sizes = ", ".join(str(len(unit)) for unit in sorted(units))
            raise ValueError(
                f"`model` is sharded over units of {sizes} ranks, and no rank of some unit holds the shards of rank "
                f"{ranks[0]}; wanted units of one size, each sharded in the same way"
            )
    return list(groups.values())


def _shard_key(sharded: Sequence[DTensor]) -> str:
    """Which shards this rank holds: equal on ranks that hold the same ones."""
    found = []
    for each in sharded:
        place: Sequence[int] = each.device_mesh.get_coordinate() or ()
        at = [
            (place[dim], each.device_mesh.size(dim))
            for dim, how in enumerate(each.placements)
            if isinstance(how, Shard)
        ]
        found.append((tuple(each.shape), at))
    return repr(found)


def _units(cluster: Cluster, inside: str) -> list[tuple[int, ...]]:
    """The ranks of each unit.

    Raises:
        ValueError: The cluster has no such level.
    """
    if inside == NONE:
        return [(rank,) for rank in range(cluster.size)]
    level = LEVEL_NAMES.index(LEVEL_NAMES[0] if inside == EXACT else inside)
    if level >= cluster.depth:
        raise ValueError(
            f"`inside` is {inside!r}, and this cluster has {', '.join(cluster.level_names)}: give `location` its racks "
            "and regions, or name one of these"
        )
    return [cluster.ranks(unit) for unit in cluster.units(level)]


def _units_of(group: dist.ProcessGroup, own: frozenset[int], agreement: Agreement) -> list[tuple[int, ...]]:
    """The ranks of each unit in a group, where each rank knows its own; all ranks of the job say theirs."""
    said = agreement.gather(sorted(own))
    units: dict[str, list[int]] = {}
    for rank in dist.get_process_group_ranks(group):
        units.setdefault(repr(said[rank]), []).append(rank)
    return [tuple(unit) for unit in units.values()]


def _fail_together(units: Communicator, inside: Communicator) -> None:
    """Has what fails in one of a rank's communicators end the other one: who waits for it there hears why it has left.

    Args:
        units: Of all units.
        inside: Of this rank's.
    """
    for failing, where, left in ((inside, "inside its unit", units), (units, "in an exchange", inside)):
        failing.executor.failures.tell = partial(_give_up, weakref.ref(left), where)


def _give_up(left: "weakref.ref[Communicator]", where: str, error: CollectiveError) -> None:
    if (communicator := left()) is not None:
        communicator.abort(f"rank {communicator.rank} has given up {where}: {error}")


def _wait_in_turn(device: torch.device, *unused: object) -> None:
    """Runs before a forward pass on CUDA; a function of the module, so that the model can be pickled."""
    devices.wait_for_last(device)

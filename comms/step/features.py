"""Attaches the optional features of a model's steps: each function imports and adds those that the options ask for.

A `GradientSession` (DDP) calls all of them, the session of FSDP2 `watch_steps`, `compare_loaded` and `count_passes`,
that of `Outer` `watch_steps` alone.

All ranks have the same options, so they create the same listeners in the same order; some exchange messages with the
other ranks while they are created.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, cast

import torch

from gradwire.comms.communicator import Communicator
from gradwire.comms.config import COMPRESSION, ELASTIC, FUSION, PLANNING, SAMPLES, SUMMING, WATCHING, Config
from gradwire.comms.observe.observer import Observer
from gradwire.comms.step import listeners as order
from gradwire.comms.step.listeners import CUTS, FIRST_STEPS, OBSERVER, STEP_WATCH, UNIT_RATES, Listeners
from gradwire.comms.step.model_group import divides_by_present
from gradwire.comms.step.stepwatch import StepWatch
from gradwire.compressors.base import keeps_momentum

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.comms.bootstrap.agree import Agreement
    from gradwire.comms.compression import Compression
    from gradwire.comms.elastic.membership import View
    from gradwire.comms.elastic.resilient_ops import Change
    from gradwire.comms.elastic.transfer import Carried
    from gradwire.comms.fusion import Fusion
    from gradwire.comms.names import ParameterNames
    from gradwire.comms.step.compressed_steps import GroupsBuckets
    from gradwire.comms.step.loaded import Loaded
    from gradwire.comms.step.samples import SampleWeights

MakesAgreement = Callable[[str, timedelta], "Agreement"]
"""Function (name, longest wait for the other ranks) -> agreement of the communicator's ranks over the store."""


HOOK_OPTIONS = (*PLANNING, *COMPRESSION, *SUMMING, *FUSION, *WATCHING, *ELASTIC)
"""Names of the fields of `Config` that a `HookState` takes."""

StateOwner: TypeAlias = "Carried"
"""An object with a `state_dict`, such as an optimizer."""

OnMembershipChange: TypeAlias = "Callable[[View, View], None]"
"""Called with the ranks before and after a change of membership."""

S = TypeVar("S")


class WeighsRanks(Protocol):
    """Protocol of sessions that weigh the gradients of their ranks.

    Attributes:
        weights: Listener that holds this rank's weight; None if all ranks weigh the same.
    """

    weights: "SampleWeights | None"

    def weigh_ranks(self) -> None:
        """Sets `weights` to a new listener, from the next step on; every rank calls it before the same step."""


def state_class(plain: type[S], config: Config) -> type[S]:
    """Returns the class of a hook state: `plain`, or `ElasticHookState`, a subclass of `HookState`, with `elastic`."""
    if not config.elastic:
        return plain
    # By name: the subclass is built on the class that asks for it here.
    module = importlib.import_module("gradwire.comms.elastic.state")
    return cast("type[S]", module.ElasticHookState)


def refuse_without_option(**given: object) -> None:
    """Refuses arguments that only elastic training uses; called in training that is not elastic.

    Args:
        given: Values of the arguments, by name; false ones (None, empty) are not set.

    Raises:
        ValueError: One of them is set; the message names it.
    """
    for name, value in given.items():
        if value:
            raise ValueError(f"`{name}` is given but `elastic` is not set: pass elastic=True, too")


class OptionalMembers:
    """Members of `HookState` that belong to an option.

    Without `reduction="samples"`, `samples` is None and cannot be assigned (ValueError). Without `elastic`, `view` and
    `changes` raise RuntimeError, and `admit_joining` does nothing.
    """

    config: Config
    _samples: int | None = None

    @property
    def samples(self) -> int | None:
        """Number of samples in this rank's next gradients, which are their mean; None if it was not set.

        With `reduction="samples"` each rank sets it before its backward pass, and whenever it changes; gradients are
        then averaged over samples, exactly: n_i / N scales each rank's gradient before the sum. If gradients are
        accumulated, it is the number of samples of all micro-batches, which must have equal weights in the loss. A rank
        with 0 takes part and adds nothing, as do those that have run out of inputs in `Join`.

        Raises:
            ValueError: On assignment: `reduction` is not "samples", or the number is negative.
            TypeError: On assignment: the number is no int.
        """
        return self._samples

    @samples.setter
    def samples(self, count: int) -> None:
        if self.config.sums.kind != SAMPLES:
            raise ValueError(
                f"`samples` is given, and `reduction` is {self.config.reduction!r}, which weighs all ranks alike; "
                'wanted reduction="samples"'
            )
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"`samples` is {count!r} ({type(count).__name__}); wanted int, such as len(batch)")
        if count < 0:
            raise ValueError(f"`samples` is {count}; wanted a number of samples >= 0")
        self._samples = count

    @property
    def view(self) -> "View":
        """The present ranks and this rank's number among them, in elastic training.

        Raises:
            RuntimeError: Always here, without `elastic`; in elastic training as long as the ranks have not connected.
        """
        raise RuntimeError("there is no view: `elastic` is not set, or no model is bound yet")

    @property
    def changes(self) -> "tuple[Change, ...]":
        """The last 1000 losses and joins of ranks in elastic training, oldest first, with the seconds of their parts.

        Raises:
            RuntimeError: Always here, without `elastic`; in elastic training as long as the ranks have not connected.
        """
        raise RuntimeError("there are no changes: `elastic` is not set, or no model is bound yet")

    def admit_joining(self) -> None:
        """Admits processes that wait to join an elastic job, before a forward pass; does nothing without `elastic`."""

    def _step_options(self, session: WeighsRanks, model: "DistributedDataParallel | None", *, has_inputs: bool) -> None:
        """Sets how much this rank's gradients weigh in the step that begins, if the ranks do not all weigh the same.

        They weigh by samples with `reduction="samples"`. In `Join(..., divide_by_initial_world_size=False)` the ranks
        that have inputs weigh the same, and the others nothing.

        Args:
            session: Session of the connected ranks; its weights are made at the first step that needs them.
            model: The DDP model; None if it is not known.
            has_inputs: Whether the gradients are of a backward pass, not the zeros that `Join` sends for a rank that
                has no inputs left.
        """
        by_present = divides_by_present(model)
        if by_present and session.weights is None and self.config.sums.average:
            session.weigh_ranks()
        if session.weights is not None and self.config.sums.kind == SAMPLES:
            session.weights.count = self._samples if has_inputs else 0
        elif session.weights is not None:
            session.weights.count = int(has_inputs or not by_present)


def compress_steps(
    listeners: Listeners, session: "GroupsBuckets", communicator: Communicator, compression: "Compression"
) -> None:
    """Adds the listener `CompressedSteps`, which prepares the compressor for each step, and commits or drops changes.

    Args:
        listeners: Listeners of the new session.
        session: The session, whose grouping of buckets may be replaced for a resumed step.
        communicator: Communicator of the session.
        compression: The compressor.
    """
    from gradwire.comms.step.compressed_steps import CompressedSteps

    listeners.add(order.COMPRESSED_STEPS, CompressedSteps(session, communicator, compression))


def follow_backward(
    listeners: Listeners,
    names: "ParameterNames",
    device: torch.device,
    compression: "Compression | None",
    previous: Listeners | None,
) -> None:
    """Adds the listeners that follow what DDP does with the averages: those that it ignores or accumulates into.

    `UsedMap`, which tells a compressor of which parameters DDP has ignored the averages, is added on CUDA, and with a
    compressor if DDP searches for unused parameters or the model is not known to be a DDP model. If the compressor
    keeps the optimizer's momentum, `ReturnedGradients` and `PassesPerStep` are added, else `DiscardedPasses`. After a
    change of the ranks nothing is made: the previous listeners of these kinds are added again.

    Args:
        listeners: Listeners of the new session.
        names: Parameter names, with the model if it is known.
        device: Device of the gradients.
        compression: The compressor; None if gradients are exact.
        previous: Listeners of the session before a change of the ranks, whose state is kept; None for a first session.
    """
    if previous is not None:
        for name in (order.USED_MAP, order.RETURNED, order.PASSES, order.DISCARDED):
            if (listener := previous.get(name)) is not None:
                listeners.add(name, listener)
        return
    model = names.model()
    if device.type == "cuda" or (compression is not None and getattr(model, "find_unused_parameters", True)):
        from gradwire.comms.step.used_map import UsedMap

        def unused(parameters: Sequence[torch.Tensor]) -> None:
            if compression is not None:
                compression.unused = names.known(parameters)

        listeners.add(order.USED_MAP, UsedMap(model, device, None if compression is None else unused))
    if compression is not None and count_passes(listeners, compression, model.parameters() if model else ()):
        from gradwire.comms.step.returned import ReturnedGradients

        listeners.add(order.RETURNED, ReturnedGradients(compression))
    elif compression is not None:
        from gradwire.comms.step.discarded import DiscardedPasses

        listeners.add(order.DISCARDED, DiscardedPasses(compression, names))


def count_passes(listeners: Listeners, compression: "Compression", parameters: Iterable[torch.Tensor]) -> bool:
    """Adds the listener `PassesPerStep` if the compressor keeps the optimizer's momentum.

    Args:
        listeners: Listeners of the new session.
        compression: The compressor.
        parameters: The model's parameters; empty if they are not known yet.

    Returns:
        Whether it was added.
    """
    if keeps := keeps_momentum(compression.compressor):
        from gradwire.comms.step.passes_per_step import PassesPerStep

        listeners.add(order.PASSES, PassesPerStep(compression, parameters))
    return keeps


def measure_links(listeners: Listeners, communicator: Communicator, config: Config, consensus: MakesAgreement) -> None:
    """Measures the links between ranks as `config` asks, and adds listeners that measure on during the first steps.

    All ranks call it: measurements are collective, and block.

    Called before `RankPlans.fix_plan` chooses a plan; not for the sessions after a change of the ranks in elastic
    training, where the rates come from the ranks that have measured them.

    Args:
        listeners: Listeners of the new session.
        communicator: Communicator of the ranks; its link rates are changed in place.
        config: Options: `nic_bytes_per_second`, `fusion` and `elastic` count.
        consensus: Makes the object by which all ranks agree on values, through the store.
    """
    if config.learns_cuts or config.measures_links:
        from gradwire.comms.links.probe import probe
        from gradwire.comms.links.unit_rates import UnitRates, measure_units

        probe(communicator, consensus("probe", config.timeout))
        if config.elastic:  # later measurements would meet ranks that come and go
            measure_units(communicator, consensus("units", config.timeout))
        else:
            listeners.add(UNIT_RATES, UnitRates(communicator, consensus("units", config.timeout)))
    elif not config.elastic and communicator.size > 1:
        if config.probes_links and len(communicator.cluster.nodes) > 1:
            from gradwire.comms.links.quick_probe import quick_probe

            quick_probe(communicator)
        from gradwire.comms.links.first_steps import FirstSteps

        listeners.add(FIRST_STEPS, FirstSteps(communicator, consensus("first_steps", config.timeout)))


def compare_loaded(
    listeners: Listeners,
    communicator: Communicator,
    source: "Loaded",
    consensus: MakesAgreement,
    *,
    changed: bool = False,
    kept: str = "",
) -> None:
    """Adds the listener that checks that all ranks have loaded the same state; nothing to do for a single rank.

    With `kept` it waits until all ranks have called it.

    Args:
        listeners: Listeners of the new session.
        communicator: Communicator of the ranks.
        source: Object whose `loaded`, the facts about the state that it has loaded, is compared.
        consensus: Makes the object by which all ranks compare values, through the store.
        changed: Whether the ranks have changed in elastic training: processes that join have loaded nothing, so only
            states loaded from now on are compared.
        kept: Text about the state that this rank keeps, such as how the ranks are placed: only ranks with the same
            text are compared with each other. Empty, on all ranks alike, compares all.
    """
    if communicator.size > 1:
        from gradwire.comms.step.loaded import LoadConsistencyCheck

        different = consensus("load_state_dict()", communicator.config.timeout)
        texts = different.gather(kept) if kept else []
        like = [texts.index(each) for each in texts] or None
        compared = source.loaded if changed else None
        listeners.add(order.LOADED, LoadConsistencyCheck(communicator, source, different, like, compared))


def weigh_ranks(listeners: Listeners, communicator: Communicator) -> "SampleWeights":
    """Adds the listener that scales each rank's gradients by its share of the samples in each step, and returns it."""
    from gradwire.comms.step.samples import SampleWeights

    weights = SampleWeights(communicator)
    listeners.add(order.SAMPLES, weights)
    return weights


def watch_steps(
    listeners: Listeners, communicator: Communicator, config: Config, group: "dist.ProcessGroup | None"
) -> tuple[StepWatch, Observer]:
    """Adds the listeners that time steps for `advise()`, and that observe ranks (stragglers, hangs, traces, metrics).

    Args:
        listeners: Listeners of the new session.
        communicator: Communicator of the ranks.
        config: Options that say what is observed.
        group: Process group of the model; None if it is not known.

    Returns:
        Both listeners.
    """
    watch, observer = StepWatch(communicator.clock), Observer(communicator, config, group)
    listeners.add(STEP_WATCH, watch)
    listeners.add(OBSERVER, observer)
    return watch, observer


def learn_cuts(listeners: Listeners, communicator: Communicator, fusion: "Fusion", name: str, model: object) -> None:
    """Adds the listener that learns in the first steps where to cut the gradients into all-reduces.

    Does nothing unless the option `fusion` is "auto" or the name of a file for the cuts.

    Args:
        listeners: Listeners of the new session.
        communicator: Communicator of the ranks.
        fusion: Grouping of buckets into all-reduces; its plan, which holds the cuts, is changed in place.
        name: Name of the hook state in the store.
        model: Shapes of the model's parameters, which identify the model in the file.
    """
    if communicator.config.learns_cuts:
        from gradwire.comms.autotune.cuts import LearnsCuts
        from gradwire.comms.autotune.profile import fingerprint

        store, clock = communicator.plain_store, communicator.clock
        listeners.add(CUTS, LearnsCuts(communicator, fusion, store, name, fingerprint(model), clock=clock))

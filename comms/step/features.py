"""Which listeners the steps of a DDP model have: those that its options ask for, each imported only then.

All ranks have the same options, so they make the same listeners in the same order; some talk to each other as they are
made.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from gradwire.comms.communicator import Communicator
from gradwire.comms.config import SAMPLES, Config
from gradwire.comms.observe.observer import Observer
from gradwire.comms.step import listeners as order
from gradwire.comms.step.listeners import CUTS, FIRST_STEPS, OBSERVER, STEP_WATCH, UNIT_RATES, Listeners
from gradwire.comms.step.stepwatch import StepWatch

if TYPE_CHECKING:
    import torch.distributed as dist

    from gradwire.comms.bootstrap.agree import Agreement
    from gradwire.comms.fusion import Fusion
    from gradwire.comms.step.loaded import Loaded
    from gradwire.comms.step.samples import SampleWeights

MakesAgreement = Callable[[str, timedelta], "Agreement"]
"""(name, how long a rank waits for the others) -> what the communicator's ranks decide by."""


def measure_links(listeners: Listeners, communicator: Communicator, config: Config, consensus: MakesAgreement) -> None:
    """Measures links as far as `config` says, and has listeners go on with it; before plans are settled.

    Not for ranks that go on in elastic training: those that have learned the links have said what they give.
    """
    if config.learns_cuts or config.probe:
        from gradwire.comms.links.probe import probe
        from gradwire.comms.links.unit_rates import UnitRates, measure_units

        probe(communicator, consensus("probe", config.timeout))
        if config.elastic:  # later measurements would meet ranks that come and go
            measure_units(communicator, consensus("units", config.timeout))
        else:
            listeners.add(UNIT_RATES, UnitRates(communicator, consensus("units", config.timeout)))
    elif not config.elastic and communicator.size > 1:
        if config.probe is None and len(communicator.cluster.nodes) > 1:
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
    """Has the ranks compare what they have loaded.

    Args:
        listeners: Of the communicator.
        communicator: Of the ranks.
        source: What is loaded into.
        consensus: Makes what they decide by.
        changed: Other ranks were there before: those that join have loaded nothing, so only what is loaded from now on
            is compared.
        kept: What this rank keeps, in a word: ranks are compared with those alone that keep the same.
    """
    if communicator.size > 1:
        from gradwire.comms.step.loaded import LoadConsistencyCheck

        different = consensus("load_state_dict()", communicator.config.timeout)
        said = different.gather(kept) if kept else []
        like = [said.index(each) for each in said] or None
        compared = source.loaded if changed else None
        listeners.add(order.LOADED, LoadConsistencyCheck(communicator, source, different, like, compared))


def weigh_by_samples(listeners: Listeners, communicator: Communicator, config: Config) -> "SampleWeights | None":
    """What tells each step's weights with `reduction="samples"`; else None."""
    if config.sums.kind != SAMPLES:
        return None
    from gradwire.comms.step.samples import SampleWeights

    weights = SampleWeights(communicator)
    listeners.add(order.SAMPLES, weights)
    return weights


def watch_steps(
    listeners: Listeners, communicator: Communicator, config: Config, group: "dist.ProcessGroup | None"
) -> tuple[StepWatch, Observer]:
    """Notes how long steps take, for `advise()`; and who is late, what hangs, a timeline, metrics, where asked for."""
    watch, observer = StepWatch(communicator.clock), Observer(communicator, config, group)
    listeners.add(STEP_WATCH, watch)
    listeners.add(OBSERVER, observer)
    return watch, observer


def learn_cuts(listeners: Listeners, communicator: Communicator, fusion: "Fusion", name: str, model: object) -> None:
    """Learns in the first steps what should travel together (with `fusion="auto"` or a file).

    Args:
        listeners: Of the communicator.
        communicator: Of the ranks.
        fusion: Whose cuts are changed.
        name: Of the state in the store.
        model: What a file of cuts is kept by: the shapes of the parameters.
    """
    if communicator.config.learns_cuts:
        from gradwire.comms.autotune.cuts import LearnsCuts
        from gradwire.comms.autotune.profile import fingerprint

        store, clock = communicator.plain_store, communicator.clock
        listeners.add(CUTS, LearnsCuts(communicator, fusion, store, name, fingerprint(model), clock=clock))

"""Listeners hear of every step in one order, whichever of them there are and whenever they came."""

from typing import Any, cast

import pytest

from gradwire.comms.step.listeners import (
    COMPRESSED_STEPS,
    CUTS,
    DISCARDED,
    FIRST_STEPS,
    LOADED,
    MEMBERSHIP,
    OBSERVER,
    ORDER,
    PASSES,
    RESIDUAL_NOTES,
    RETURNED,
    SAMPLES,
    STEP_WATCH,
    UNIT_RATES,
    USED_MAP,
    EndedStep,
    Listeners,
    StepListener,
)


class Noting(StepListener):
    """Notes what it hears."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self._name = name
        self._heard = heard

    def step_began(self, steps: int) -> None:
        self._heard.append(f"{self._name} began after {steps}")

    def step_ended(self, step: EndedStep) -> None:
        self._heard.append(f"{self._name} ended {step.number}")


def test_the_order_is_declared_and_kept() -> None:
    """Several start collectives, so all ranks must call them alike; reasons stand at `ORDER`."""
    assert ORDER == (
        USED_MAP,  # waits for a sum of DDP, before any collective of ours
        RETURNED,  # refuses gradients before they are used
        PASSES,  # refuses a pass before it is used
        DISCARDED,  # warns alone, and may be anywhere
        COMPRESSED_STEPS,  # commits state that others read
        LOADED,  # what is sent at all goes by what was loaded
        UNIT_RATES,  # measures links, with nothing in flight
        FIRST_STEPS,  # changes the rates that all that follows plans by
        STEP_WATCH,  # notes the step's length, without what the others exchange
        RESIDUAL_NOTES,  # reads residuals, before anything is in flight again
        OBSERVER,  # its exchange travels by the plan of the step that has ended
        CUTS,  # changes the plan of the next one
        SAMPLES,  # starts an exchange at a begin, when no other measures links
        MEMBERSHIP,  # calls the user, after a finished step
    )
    heard: list[str] = []
    listeners = Listeners()
    for name in reversed(ORDER):
        listeners.add(name, Noting(name, heard))
    step = EndedStep(8, (), (), cast(Any, None))
    listeners.step_began(7)
    listeners.step_ended(step)
    assert heard == [*(f"{name} began after 7" for name in ORDER), *(f"{name} ended 8" for name in ORDER)]


def test_who_is_not_asked_for_is_not_called() -> None:
    heard: list[str] = []
    listeners = Listeners()
    listeners.add(CUTS, Noting(CUTS, heard))
    listeners.add(STEP_WATCH, Noting(STEP_WATCH, heard))
    assert listeners.names == (STEP_WATCH, CUTS)
    assert listeners.get(OBSERVER) is None
    listeners.step_began(0)
    assert heard == [f"{STEP_WATCH} began after 0", f"{CUTS} began after 0"]


def test_a_listener_has_a_place_in_the_order() -> None:
    with pytest.raises(ValueError, match=r"`name` is 'mine'; wanted one of used_map.*say there when it is called"):
        Listeners().add("mine", StepListener())


def test_times_are_taken_where_one_wants_them() -> None:
    class Arrivals(StepListener):
        wants_arrivals = True

    class Timed(StepListener):
        @property
        def wants_times(self) -> bool:
            return True

    listeners = Listeners()
    assert not listeners.wants_arrivals and not listeners.wants_times
    listeners.add(CUTS, Arrivals())
    assert listeners.wants_arrivals and not listeners.wants_times
    listeners.add(OBSERVER, Timed())
    assert listeners.wants_times

"""Tracks the loss scale of the gradients, and rescales residuals, which carry the scale of the step they come from."""

import logging
import math
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from gradwire.comms.bootstrap.compat import device_scale_of

UNKNOWN_SCALE = (
    "the average of a gradient is infinite or NaN, and gradwire knows of no loss scale. If a GradScaler scales the "
    "loss, it now lowers its scale, and what the compressor has held back of earlier gradients keeps the old one: call "
    "state.watch(scaler) once, before the first step. A script that scales the loss itself calls "
    "state.set_loss_scale(scale) before each backward pass"
)

log = logging.getLogger("gradwire")


class LossScaler(Protocol):
    """Protocol of loss scalers: the part of torch.amp.GradScaler that gradwire uses."""

    def get_scale(self) -> float:
        """Returns the factor on the loss of the step that begins."""


class LossScale:
    """Keeps the loss scale of the next gradients, and rescales the residuals when it changes.

    Args:
        rescale: Multiplies the residuals by a factor, a float or a tensor of one element.

    Attributes:
        value: Loss scale, a float or a tensor on the device of the GradScaler; 0.0 if none is known.
    """

    def __init__(self, rescale: Callable[[float | Tensor], None]) -> None:
        self.value: float | Tensor = 0.0
        self._rescale = rescale
        self._scaler: LossScaler | None = None
        self._is_told = False
        """Whether the script has named its scale, or was warned that it has not."""

    def watch(self, scaler: LossScaler) -> None:
        """Makes `follow` take the scale of a scaler from now on; changes no residual yet.

        Args:
            scaler: The GradScaler that scales the loss; it replaces one that was set before.
        """
        self._scaler, self._is_told = scaler, True

    @property
    def follows_scaler(self) -> bool:
        """Whether a scaler is watched."""
        return self._scaler is not None

    def follow(self) -> None:
        """Takes the scale of the watched scaler, if there is one, and rescales the residuals if it has changed.

        Called before the first gradient of a step. A scale on a device stays there, so that the host does not wait; the
        residuals are then multiplied on the device in each step, by 1 if it has not changed.
        """
        if self._scaler is None:
            return
        scale = device_scale_of(self._scaler)
        if scale is None:
            self.set(self._scaler.get_scale())
            return
        if isinstance(self.value, Tensor) or self.value:
            self._rescale(scale / self.value)
        self.value = scale.clone()  # the scaler changes it in place

    def set(self, scale: float) -> None:
        """Sets the loss scale, and rescales the residuals if it changes; waits for the device if the old one is there.

        Args:
            scale: Factor on the loss of the next step, positive and finite.

        Raises:
            ValueError: `scale` is not positive, or not finite.
            TypeError: `scale` is no number.
        """
        try:
            fits = 0 < scale < math.inf
        except TypeError:
            raise TypeError(f"`scale` is {scale!r} ({type(scale).__name__}); wanted a positive number") from None
        if not fits:
            raise ValueError(f"`scale` is {scale}; wanted a positive number")
        self._is_told = True
        before = float(self.value)
        if before and scale != before:
            self._rescale(scale / before)
        self.value = scale

    def warn_if_unknown(self) -> None:
        """Warns, once, if the script has named no loss scale; called after a step with gradients that were not finite.

        Such a step is usual where a GradScaler searches its scale, and a divergence without one.
        """
        if not self._is_told:
            self._is_told = True
            log.warning(UNKNOWN_SCALE)


def refuse_odd_scale(scale: float) -> None:
    """Refuses a saved loss scale that is negative, infinite or NaN.

    Args:
        scale: Loss scale in a saved state; 0, for a state without one, is accepted.

    Raises:
        ValueError: The scale is refused.
    """
    if not 0 <= scale < math.inf:
        raise ValueError(f"`state` has a loss scale of {scale}; wanted a positive number, or 0 where there is none")

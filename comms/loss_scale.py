"""The loss scale of the gradients. Residuals carry the scale of the step that they come from."""

import math
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from gradwire.comms.bootstrap.compat import device_scale_of


class LossScaler(Protocol):
    """What gradwire needs of torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """The factor on the loss of the step that begins."""


class LossScale:
    """Loss scale of the next gradients; rescales the residuals when it changes.

    Args:
        rescale: Multiplies the residuals by a factor.

    Attributes:
        value: The factor; 0.0 where none is known.
    """

    def __init__(self, rescale: Callable[[float | Tensor], None]) -> None:
        self.value: float | Tensor = 0.0
        self._rescale = rescale
        self._scaler: LossScaler | None = None

    def watch(self, scaler: LossScaler) -> None:
        """Follows `scaler` from now on."""
        self._scaler = scaler

    @property
    def follows_scaler(self) -> bool:
        """Whether `follow` has anything to do."""
        return self._scaler is not None

    def follow(self) -> None:
        """Runs before the first gradient of a step. The host waits for no device: its scale stays there."""
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
        """Set the loss scale, and rescale the residuals if it changes.

        Raises:
            ValueError: `scale` is not a positive number.
            TypeError: It is no number.
        """
        try:
            fits = 0 < scale < math.inf
        except TypeError:
            raise TypeError(f"`scale` is {scale!r} ({type(scale).__name__}); wanted a positive number") from None
        if not fits:
            raise ValueError(f"`scale` is {scale}; wanted a positive number")
        before = float(self.value)
        if before and scale != before:
            self._rescale(scale / before)
        self.value = scale


def refuse_odd_scale(scale: float) -> None:
    """Refuses a saved loss scale that is not a positive number.

    Raises:
        ValueError: It is neither positive nor 0, which stands for none.
    """
    if not 0 <= scale < math.inf:
        raise ValueError(f"`state` has a loss scale of {scale}; wanted a positive number, or 0 where there is none")

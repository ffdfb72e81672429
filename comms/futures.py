"""Futures that carry their error as a value: raised only in a `.then`, its message survives DDP's reducer."""

import torch
from torch import Tensor


def unwrap(done: "torch.futures.Future[Tensor | BaseException]") -> Tensor:
    """The value of a finished future; for `done.then(unwrap)`.

    Raises:
        BaseException: The value, where it is an error.
    """
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value

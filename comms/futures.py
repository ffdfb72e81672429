"""Futures that carry their error as a value: raised only in a `.then`, its message survives DDP's reducer."""

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor

FutureTensor = torch.futures.Future[Tensor]
Open = torch.futures.Future[Tensor | BaseException]
"""To be completed with a tensor, or with the error that took its place."""


def open_future(like: Tensor) -> Open:
    """A future for work on the device of `like`."""
    return torch.futures.Future(devices=[like.device]) if like.device.type == "cuda" else torch.futures.Future()


def unwrap(done: Open) -> Tensor:
    """The value of a finished future; for `done.then(unwrap)`.

    Raises:
        BaseException: The value, where it is an error.
    """
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value


def outcome(done: FutureTensor) -> BaseException | None:
    """The error of a finished future; None where it has a value."""
    try:
        done.wait()  # on CUDA the current stream waits, which `value` does not see to
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is handed to those who wait
        return error
    return None


def after_all(futures: Sequence[FutureTensor], callback: Callable[[], None]) -> None:
    """Calls `callback` once, when the last of some futures is done.

    On CUDA a callback runs on a stream of its own that waits for its future; one of `collect_all` would run on
    backward's stream, which waits for none.
    """
    pending = count(len(futures) - 1, -1)

    def one_is_done(_: FutureTensor) -> None:
        if next(pending) == 0:
            callback()

    for future in futures:
        future.add_done_callback(one_is_done)

"""All-reduces that must fail, on ranks that are threads."""

from datetime import timedelta

import pytest
import torch

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from support.threads import run_ranks


def all_reduce_errors(timeout: timedelta = timedelta(0)) -> list[str]:
    """What an all-reduce on each of two nodes raises where it must fail, as the next one has to."""
    store = HashStore()

    def body(rank: int) -> str:
        config = Config(hostname="ab"[rank], timeout=timeout)
        communicator = Communicator(store, rank, 2, torch.device("cpu"), config, name="lanes")
        with pytest.raises(RuntimeError) as found:
            communicator.all_reduce(torch.ones(4)).wait()
        with pytest.raises(RuntimeError):
            communicator.all_reduce(torch.ones(4)).wait()
        communicator.close()
        return str(found.value)

    return run_ranks(2, body)

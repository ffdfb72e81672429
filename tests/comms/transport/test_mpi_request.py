"""What MPI may still write to is not let go of."""

import gc
import weakref

import numpy
import pytest

from gradwire.comms.errors import PeerError
from gradwire.comms.transport import mpi


class Never:
    """A request of MPI that does not end."""

    def Test(self) -> bool:
        return False


def test_the_buffers_of_a_request_that_takes_too_long_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_POLL_SECONDS", (0.0,))
    monkeypatch.setattr(mpi, "_given_up", [])
    buffer = numpy.zeros(4)
    kept = weakref.ref(buffer)
    request = mpi._Request(Never(), (buffer,), "all_reduce", 0.0)
    del buffer
    with pytest.raises(PeerError, match="MPI all_reduce took longer than 0 s"):
        request.wait()
    del request
    gc.collect()
    assert kept() is not None

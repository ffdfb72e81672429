"""Errors of collectives and of the start-up: which of the group, a peer or the caller is at fault."""


class PeerError(RuntimeError):
    """Raised if a peer exited, did not join within the timeout, or aborted. The group cannot be used afterwards.

    Args:
        message: Text of the error.
        missing: Ranks of the group that are known to have failed: they never joined, or have exited since. Empty if it
            is not known which rank failed, as after an abort or a failed operation. A transport of `Groups` names the
            communicator's ranks, whichever of them it joins.

    Attributes:
        missing: Ranks of the group that are known to have failed; empty if that is not known.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[type["PeerError"], tuple[str, tuple[int, ...]]]:
        """Pickles the error with `missing`, so that a worker process can pass it to its parent."""
        return type(self), (str(self), self.missing)


class PeerSystemError(OSError):
    """Raised on this rank if another rank has reported that its system gave it no memory, open file or the like."""


class DidNotJoinError(RuntimeError):
    """Raised if a rank did not join within the timeout, when ranks connect."""


class OverdueError(PeerError):
    """Raised if there has been no progress for too long, though no rank is known to have failed."""


class MismatchError(ValueError):
    """Raised if the ranks of a group called different collectives, or the same one with other arguments."""


class ArgumentError(RuntimeError):
    """Raised if an argument of a collective is refused. Nothing was issued, and the group can be used as before."""


class UnfinishedError(RuntimeError):
    """Raised if a collective is not done within its caller's timeout; it goes on, and can be waited for again."""

"""What a collective raises when the group, and not this rank's call, is at fault."""


class PeerError(RuntimeError):
    """A peer died, stayed away past the time-out, or gave the group up. The group cannot be used any more."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        """Takes the message and the ranks, within the group, that did not come (empty after an abort)."""
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[type["PeerError"], tuple[str, tuple[int, ...]]]:
        """Pickles with `missing`, so that a worker process can hand the error to its parent."""
        return type(self), (str(self), self.missing)


class PeerSystemError(OSError):
    """The system has refused a peer something, and that peer has told this rank: memory, or an open file."""


class DidNotJoinError(RuntimeError):
    """A rank did not come to the start-up within the time-out."""


class OverdueError(PeerError):
    """Nobody is known to be lost, but there has been no progress for too long."""


class MismatchError(ValueError):
    """The ranks of a group called different collectives, or the same one with other arguments."""


class ArgumentError(RuntimeError):
    """An argument of a collective is not taken. Nothing was issued, and the group can be used as before."""


class UnfinishedError(RuntimeError):
    """A collective is not done within the time that its caller gave it; it goes on, and can be waited for again."""

"""Overlap of FSDP2's collectives with the computation on CPUs.

FSDP2 issues one collective after another and waits for each. On CUDA a stream makes that harmless. On a CPU, gradwire's
own collectives run in the lanes of a communicator: an all-gather returns a work that torch waits for when it needs the
weights, so weights that are prefetched (in the backward pass, or by the user) cost no time. A reduce-scatter returns at
once if torch only makes views of its result before the backward pass ends, and is waited for at that end.

Collectives over torch's own group are not moved: users may issue collectives on that group too, and the order would
then differ between ranks.
"""

import torch.distributed as dist

MOST_REDUCING = 1
"""Maximum number of reduce-scatters in flight when the gradients of the next parameter group arrive. Each keeps whole
gradients in memory. torch's default on CUDA (set_reduce_scatter_max_input_buffers)."""


class Overlap:
    """Keeps and waits for the reduce-scatters in flight of one model on a CPU.

    Thread safety: none; the thread of the backward pass calls it.
    """

    def __init__(self) -> None:
        self._reducing: list[dist.Work] = []

    def add(self, work: dist.Work, *, later: bool) -> None:
        """Takes a reduce-scatter that was started, and waits for all but the last `MOST_REDUCING`.

        Args:
            work: The reduce-scatter.
            later: Whether it may be in flight until `wait_all`; else this waits for it and all before it.
        """
        self._reducing.append(work)
        if not later:
            self.wait_all()
        while len(self._reducing) > MOST_REDUCING:
            self._reducing.pop(0).wait()

    def wait_all(self) -> None:
        """Waits for all reduce-scatters in flight, then raises the error of the first one that failed."""
        reducing, self._reducing = self._reducing, []
        failed: BaseException | None = None
        for work in reducing:
            try:
                work.wait()
            except BaseException as error:  # noqa: BLE001 - raised below, when no thread writes to gradients any more
                failed = failed or error
        if failed is not None:
            raise failed

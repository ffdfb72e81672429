"""Collectives between the ranks that share parameters, on CPUs: in a thread of their own while the model computes.

FSDP2 calls them one after another and waits for each; on CUDA a stream makes that harmless. Here all-gathers return at
once, and torch waits for them where it needs the weights: so those that it asks for ahead of time, in the backward pass
and where users prefetch, cost no time. Reduce-scatters return at once where torch makes nothing but views of the
result, and are waited for at the end of the backward pass. What goes over torch's own group is left where it is: users
may have collectives on it too, whose order would then be another one on each rank.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.sharded.collectives import AllGather, Allocating, Job, ReduceScatter
from gradwire.comms.sharded.param_groups import ShardedParamGroup

MOST_REDUCING = 1
"""Reduce-scatters that are under way when the next parameter group's gradients come, as torch allows by default on CUDA
(set_reduce_scatter_max_input_buffers)."""


class Submitted(dist.Work):
    """A job in the queue."""

    def __init__(self, jobs: "_Jobs", job: Job) -> None:
        super().__init__()
        self._jobs = jobs
        self._job: Job | None = job
        self._inference = torch.is_inference_mode_enabled()
        self._error: BaseException | None = None
        self.ended = False

    def run(self) -> None:
        """Runs it, in whichever thread it is its turn."""
        try:
            assert self._job is not None
            with torch.inference_mode(self._inference), torch.no_grad():
                self._job()
        except BaseException as error:  # noqa: BLE001 - whatever it is, whoever waits gets it
            self._error = error
        finally:
            self._job = None
            self.ended = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when it is done; its collectives have time-outs of their own. Raises what it raised."""
        self._jobs.run_until(self)
        if self._error is not None:
            raise self._error
        return True


class _Jobs:
    """Jobs in their order, one at a time. Whoever waits for one carries it out, if the thread has not come to it.

    A hand-over to another thread takes longer than a small collective where ranks share a core.
    """

    def __init__(self) -> None:
        self._todo: deque[Submitted] = deque()
        self._turn = threading.Lock()
        self._there = threading.Semaphore(0)
        self._closed = False

    def add(self, job: Job) -> Submitted:
        submitted = Submitted(self, job)
        self._todo.append(submitted)
        self._there.release()
        return submitted

    def run_until(self, wanted: Submitted) -> None:
        while not wanted.ended:
            with self._turn:
                if not wanted.ended:
                    self._run_first()

    def serve(self) -> None:
        while self._there.acquire() and not self._closed:
            with self._turn:
                if self._todo:
                    self._run_first()

    def _run_first(self) -> None:
        """Carries out the first job that has not ended, with `_turn` held.

        It leaves the queue behind that: an exception that comes in between (of a signal's handler, say) loses none.
        """
        if not self._todo[0].ended:
            self._todo[0].run()
        self._todo.popleft()

    def close(self) -> None:
        self._closed = True
        self._there.release()


class Overlap:
    """The queue of one model: all ranks put the same jobs into it, in the same order.

    Args:
        param_groups: Of the model, on a CPU.
    """

    def __init__(self, param_groups: Sequence[ShardedParamGroup]) -> None:
        self._jobs = _Jobs()
        self._thread: threading.Thread | None = None
        self._reducing: list[Submitted] = []
        for param_group in param_groups:
            if isinstance(param_group.all_gather, AllGather):
                param_group.set_all_gather(_AllGather(self, param_group.all_gather))
            if isinstance(param_group.reduce_scatter, ReduceScatter):
                param_group.set_reduce_scatter(_ReduceScatter(self, param_group, param_group.reduce_scatter))
        weakref.finalize(self, self._jobs.close)

    def submit(self, job: Job) -> Submitted:
        """Has a job carried out behind all before it."""
        if self._thread is None:
            self._thread = BackgroundThread(
                "gradwire shards",
                self._jobs.serve,
                without="collectives of a sharded model run when they are waited for, and overlap no more",
                on_failure=lambda error: None,  # whoever waits for a job carries it out
                end=self._jobs.close,
            )
            self._thread.start()
        return self._jobs.add(job)

    def reduce(self, job: Job, *, later: bool) -> None:
        """Carries out a reduce-scatter.

        Args:
            job: It.
            later: Wait for it in `settle`, or before the one after the next: until then whole gradients are held.
        """
        submitted = self.submit(job)
        self._reducing.append(submitted)
        if not later:
            self.settle()
        while len(self._reducing) > MOST_REDUCING:
            self._reducing.pop(0).wait()

    def settle(self) -> None:
        """Waits for all reduce-scatters, and raises what the first failed one raised."""
        reducing, self._reducing = self._reducing, []
        failed: BaseException | None = None
        for submitted in reducing:
            try:
                submitted.wait()
            except BaseException as error:  # noqa: BLE001 - raised below, when nothing writes to gradients any more
                failed = failed or error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Ends the thread behind the job that it is at."""
        self._jobs.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)


class _AllGather(Allocating):
    """An all-gather that returns at once."""

    def __init__(self, overlap: Overlap, inner: AllGather) -> None:
        self._overlap = overlap
        self._inner = inner

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> object:
        job = self._inner.job(output_tensor, input_tensor, group)
        if job is None:
            return self._inner(output_tensor, input_tensor, group, async_op)
        return self._overlap.submit(job)


class _ReduceScatter(Allocating):
    """A reduce-scatter that returns at once where nobody reads what it makes before the backward pass ends."""

    def __init__(self, overlap: Overlap, param_group: ShardedParamGroup, inner: ReduceScatter) -> None:
        self._overlap = overlap
        self._param_group = param_group
        self._inner = inner

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        job = self._inner.job(output_tensor, input_tensor, group, op)
        if job is None:
            self._inner(output_tensor, input_tensor, group, op, async_op)
            return
        param_group = self._param_group
        self._overlap.reduce(
            job, later=not param_group.hooked and param_group.keeps(param_group.present, output_tensor.dtype)
        )

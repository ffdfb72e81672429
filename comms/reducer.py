"""What one model's buckets meet on this rank, from DDP's hands and back: fusion, compression, the communicator, the tuner."""

import weakref
from dataclasses import asdict
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.autotune.consensus import Consensus
from gradwire.comms.autotune.probe import probe
from gradwire.comms.autotune.profile import fingerprint
from gradwire.comms.autotune.stepwatch import StepWatch
from gradwire.comms.autotune.tuning import Tuning
from gradwire.comms.bootstrap.compat import GradBucket, Store, queue_end_of_backward, store_of
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.config import Config
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.futures import FutureTensor
from gradwire.comms.names import ParameterNames
from gradwire.comms.plan.advise import BUCKET_NBYTES
from gradwire.comms.resume import Resume
from gradwire.compressors.base import Layout

FUSION_TIMEOUT = timedelta(seconds=30)
"""How long `fuse()` waits for the other ranks to ask for the same."""

_numbers: "dict[str, count[int]]" = {}


class Reducer:
    """Averages the buckets of one model over a process group, step after step.

    Args:
        group: The ranks; all of them make their reducers in the same order.
        device: Where the gradients are.
        config: What the user set.
        names: Which parameter is which.

    Raises:
        RuntimeError: A rank did not come within the time-out.
        ValueError: A rank came with another world size or configuration.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, config: Config, names: ParameterNames) -> None:
        self.config = config
        self.steps = 0
        self.watch = StepWatch()
        self.compression = _compression(config, names, group)
        self._group = group
        self._names = names
        self._resume: Resume | None = None
        self._in_step = False
        store, name = store_of(group), f"hook{next(_numbers.setdefault(group.group_name, count()))}"
        self.communicator = Communicator(
            store,
            group.rank(),
            group.size(),
            device,
            config,
            name=name,
            compressor=self.compression.compressor if self.compression else None,
        )
        weakref.finalize(self, self.communicator.close)
        threshold_nbytes = round(config.fusion_mb * 2**20)
        self.fusion = Fusion(self._launch, FusionPlan(threshold_nbytes=threshold_nbytes))
        self._plans = self._consensus(store, f"fusion/{name}", FUSION_TIMEOUT)
        if config.learns_cuts or config.probe:
            probe(self.communicator, self._consensus(store, f"probe/{name}", config.timeout))
        self.communicator.routes.settle(threshold_nbytes or BUCKET_NBYTES)
        self._tuning = (
            Tuning(self.communicator, self.fusion, store, name, fingerprint(names.shapes))
            if config.learns_cuts
            else None
        )

    def reduce(self, bucket: GradBucket) -> FutureTensor:
        """Averages one bucket over all ranks; the future's value is the bucket's own buffer."""
        flat = bucket.buffer()
        if not self._in_step:
            self._begin_step()
        if flat.layout != torch.strided:
            return self._reduce_sparse(flat)
        if self._tuning is not None:
            self._tuning.bucket_came()
        self.watch.bucket_came()
        layout = self._names.layout(bucket) if self.compression else None
        future = self._resume.add(flat, layout) if self._resume and layout else self.fusion.add(flat, layout)
        self.watch.watch(future)
        if not self._in_step and bucket.is_last():
            self._end_step()
        return future

    def fuse(self, plan: FusionPlan) -> None:
        """Changes which buckets travel together, from the next step on; see `HookState.fuse`."""
        self._plans.agree(asdict(plan))
        self.fusion.change(plan)

    def _begin_step(self) -> None:
        self._in_step = queue_end_of_backward(self._end_step)
        if self.compression:
            self.compression.begin_step()
            saved = self.compression.take_saved_transfers()
            self._resume = None if saved is None else Resume(self._launch, saved)

    def _end_step(self) -> None:
        """Runs once at the end of each backward pass, on all ranks at the same point of the sequence of buckets."""
        self._in_step = False
        self.steps += 1
        self.fusion.end_step()
        if self._resume is not None:
            self._resume.end_step()
        if self.compression is not None:
            self.compression.end_step()
        self.watch.step_ended()
        if self._tuning is not None:
            self._tuning.step_ended()

    def _launch(self, flat: Tensor, layout: Layout | None) -> FutureTensor:
        """Averages one transfer: a bucket, several joined ones, or a piece of one."""
        scale = 1.0 / self.communicator.size
        if self.compression is None or layout is None:
            return self.communicator.all_reduce(flat, scale=scale)
        future = self.communicator.all_reduce(flat, scale=scale, layout=layout, flush=self.compression.flushing)
        self.compression.add(future, layout)
        return future

    def _reduce_sparse(self, sparse: Tensor) -> FutureTensor:
        """Sparse gradients (nn.Embedding(sparse=True)) travel as they would without a hook."""
        work = dist.all_reduce(sparse, group=self._group, async_op=True)
        assert work is not None

        def average(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            return done.value()[0].div_(self.communicator.size)

        future: FutureTensor = work.get_future().then(average)
        return future

    def _consensus(self, store: Store, name: str, timeout: timedelta) -> Consensus:
        return Consensus(
            PollingStore(store, self.config.timeout), self.communicator.rank, self.communicator.size, name, timeout
        )


def _compression(config: Config, names: ParameterNames, group: dist.ProcessGroup) -> Compression | None:
    if config.compressor in (None, "none"):
        return None
    compression = Compression(config.compressor, config.compressor_options, config.rules, group.rank(), group.size())
    compression.compressor.bind_model(names.numels())
    return compression

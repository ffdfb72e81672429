"""The DDP comm hook: `model.register_comm_hook(gradwire.HookState(model), gradwire.comm_hook)`.

DDP hands over buckets of gradients during backward; each goes to the communicator at once and DDP gets a future. The
gradients arrive undivided, so the division by the world size happens here, before anything is narrowed.
"""

import logging
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comms.advise import BUCKET_NBYTES
from gradwire.comms.communicator import Communicator
from gradwire.comms.compat import GradBucket, Store, queue_end_of_backward, store_of
from gradwire.comms.compression import Compression, LossScaler
from gradwire.comms.config import Config
from gradwire.comms.consensus import Consensus
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.job_advice import JobAdvice, advise_job
from gradwire.comms.names import ParameterNames
from gradwire.comms.probe import probe
from gradwire.comms.report import Report
from gradwire.comms.stepwatch import StepWatch
from gradwire.comms.store import PollingStore
from gradwire.comms.tune_profile import fingerprint
from gradwire.comms.tuning import Tuning
from gradwire.compressors.base import Layout, StateDict, StateValue
from gradwire.compressors.first_step import check_at_first_step

log = logging.getLogger("gradwire")

PYTHON_REDUCER = ("torch.compile with optimize_ddp=\"python_reducer\" calls the hook once a parameter from inside a compiled "
                  "graph, which gradwire does not support: leave torch._dynamo.config.optimize_ddp at its default, "
                  "with which compiled models work")

FUSION_TIMEOUT = timedelta(seconds=30)
"""How long `fuse()` waits for the other ranks to ask for the same."""

_state_numbers: "dict[str, count[int]]" = {}


class HookState:
    """What the hook keeps between steps. One for each model.

    Args:
        model_or_group: The DDP model, or any module (its parameter names are used), or a process group; None binds to
            the default group at the first bucket, for frameworks that want the state before the model exists.
        config: The configuration; by default what the environment gives.
        **options: Fields of `Config` by name; they win over the environment.

    Raises:
        TypeError: An option has an unknown name, or `model_or_group` is neither.
        ValueError: A value does not fit, or differs between the ranks.
        RuntimeError: torch.distributed is not initialised, or a rank did not come.
    """

    def __init__(self, model_or_group: nn.Module | dist.ProcessGroup | None = None, *, config: Config | None = None,
                 **options: object) -> None:
        if config is not None and options:
            raise TypeError(f"`config` and {', '.join(f'`{name}`' for name in options)} are both given: put the options "
                            "into the Config")
        self.config = config or Config.from_env(**options)
        self.names = ParameterNames()
        self.steps = 0
        self._compression: Compression | None = None
        self._group: dist.ProcessGroup | None = None
        self._communicator: Communicator | None = None
        self._fusion: Fusion | None = None
        self._tuning: Tuning | None = None
        self._watch = StepWatch()
        self._in_step = False
        if isinstance(model_or_group, nn.Module):
            self.bind(model_or_group)
        elif isinstance(model_or_group, dist.ProcessGroup):
            self._group = model_or_group
        elif model_or_group is not None:
            raise TypeError(f"`model_or_group` is a {type(model_or_group).__name__}; wanted a torch.nn.Module, a process "
                            "group, or None")

    def bind(self, model: nn.Module) -> None:
        """Takes parameter names from `model`, and its process group where it is a DDP model; connects the ranks."""
        self.names.bind(model)
        if self.config.compressor is not None:
            check_at_first_step(model, self.config.compressor, self.config.compressor_options)
        self._group = getattr(model, "process_group", None) or self._group
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("`model` has no parameters: there is nothing to reduce")
        self._connect(parameter.device)

    def report(self) -> Report:
        """Calls, bytes and seconds of every phase so far, and the plans in use with their reasons.

        Raises:
            RuntimeError: No bucket has come yet.
        """
        if self._communicator is None:
            raise RuntimeError("this state has not seen a bucket yet: call report() after the first backward pass")
        return self._communicator.report(self.steps)

    def watch(self, scaler: LossScaler) -> None:
        """Follows a torch.amp.GradScaler: residuals are rescaled when it changes its scale.

        Raises:
            ValueError: There is no compressor, or no model yet.
        """
        self._compressed().watch(scaler)

    def set_loss_scale(self, scale: float) -> None:
        """Tells the factor that the coming gradients carry, where no GradScaler does; call it before backward."""
        self._compressed().set_loss_scale(scale)

    def flush(self) -> None:
        """Sends the next step's gradients dense, with every residual added: afterwards nothing is held back.

        To be called on all ranks before the same step.
        """
        self._compressed().flushing = True

    def state_dict(self) -> StateDict:
        """This rank's residuals, momenta and factors, as plain tensors and numbers; every rank saves its own.

        Safe with `torch.load(weights_only=True)` and torch.distributed.checkpoint. Empty without a compressor.
        """
        return self._compression.state_dict() if self._compression else {}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Restores what `state_dict` returned on this rank; training goes on bit for bit.

        At another world size a state is taken only if it was flushed before it was saved (`flush()`, one step, save);
        momenta and warm-start factors then build up again.

        Raises:
            ValueError: The state is of another model, compressor, rank or world size; nothing was changed.
        """
        if state or self._compression:
            self._compressed().load_state_dict(state)

    def close(self) -> None:
        """Ends the threads and releases shared memory; happens by itself when the state is collected or at exit."""
        if self._communicator is not None:
            self._communicator.close()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Averages one bucket over all ranks; the future's value is the bucket's own buffer."""
        flat = bucket.buffer()
        self._connect(flat.device)
        assert self._fusion is not None
        if not self._in_step:
            self._in_step = queue_end_of_backward(self._end_step)
            if self._compression:
                self._compression.begin_step()
        if flat.layout != torch.strided:
            return _all_reduce_sparse(flat, self._group)
        if self._tuning is not None:
            self._tuning.bucket_came()
        self._watch.bucket_came()
        future = self._fusion.add(flat, self.names.layout(bucket) if self._compression else None)
        self._watch.watch(future)
        if not self._in_step and bucket.is_last():
            self._end_step()
        return future

    def _end_step(self) -> None:
        """Runs once at the end of each backward pass, on all ranks at the same point of the sequence of buckets."""
        self._in_step = False
        self.steps += 1
        if self._fusion is not None:
            self._fusion.end_step()
        if self._compression is not None:
            self._compression.end_step()
        self._watch.step_ended()
        if self._tuning is not None:
            self._tuning.step_ended()

    def _launch(self, flat: Tensor, layout: Layout | None) -> torch.futures.Future[Tensor]:
        """Averages one transfer: a bucket, several joined ones, or a piece of one."""
        communicator, compression = self._communicator, self._compression
        assert communicator is not None
        scale = 1.0 / communicator.size
        if compression is None or layout is None:
            return communicator.all_reduce(flat, scale=scale)
        future = communicator.all_reduce(flat, scale=scale, layout=layout, flush=compression.flushing)
        compression.add(future)
        return future

    def _compressed(self) -> Compression:
        if self._compression is None:
            raise ValueError("`compressor` is not set, or no model is bound yet: there is no state to keep")
        return self._compression

    def _connect(self, device: torch.device) -> Communicator:
        if self._communicator is None:
            if not dist.is_initialized():
                raise RuntimeError("torch.distributed is not initialised: call dist.init_process_group() before the hook "
                                   "is used")
            group = self._group or dist.group.WORLD
            assert group is not None
            if self.config.compressor not in (None, "none"):
                self._compression = Compression(self.config.compressor, self.config.compressor_options, self.config.rules,
                                                group.rank(), group.size())
                self._compression.compressor.bind_model(self.names.numels())
            number = next(_state_numbers.setdefault(group.group_name, count()))
            self._communicator = Communicator(
                store_of(group), group.rank(), group.size(), device, self.config, name=f"hook{number}",
                compressor=self._compression.compressor if self._compression else None)
            weakref.finalize(self, self._communicator.close)
            self._fuse(self._communicator, store_of(group), f"hook{number}")
        return self._communicator

    def _fuse(self, communicator: Communicator, store: Store, name: str) -> None:
        threshold_nbytes = round(self.config.fusion_mb * 2**20)
        self._fusion = Fusion(self._launch, FusionPlan(threshold_nbytes=threshold_nbytes))
        self._plans = Consensus(PollingStore(store, self.config.timeout), communicator.rank, communicator.size, f"fusion/{name}", FUSION_TIMEOUT)
        if self.config.tune or self.config.probe:
            probe(communicator, Consensus(PollingStore(store, self.config.timeout), communicator.rank, communicator.size, f"probe/{name}",
                                          self.config.timeout))
        communicator.settle(threshold_nbytes or BUCKET_NBYTES)
        if self.config.tune:
            self._tuning = Tuning(communicator, self._fusion, store, name, fingerprint(self.names.shapes))

    def advise(self, optimizer: str = "sgd") -> JobAdvice:
        """Says from what this rank has measured which plan to use, whether to compress, and what could be gained at most.

        Args:
            optimizer: `sgd`, `adam`, ...: some compressors presume one.

        Raises:
            RuntimeError: Fewer than three steps have been seen.
        """
        observed = self._watch.observed()
        if self._communicator is None or self._fusion is None or observed is None:
            raise RuntimeError("this state has seen fewer than three steps: call advise() later")
        return advise_job(self._communicator.cluster, self._fusion.last_sizes, observed, optimizer,
                          self._communicator.library)

    def fuse(self, plan: FusionPlan) -> None:
        """Changes which buckets travel together, from the next step on; every rank calls it between the same two steps.

        Raises:
            RuntimeError: No bucket has come yet.
            ValueError: Not all ranks ask for the same plan: refused on all of them.
        """
        if self._fusion is None:
            raise RuntimeError("this state has not seen a bucket yet: call fuse() after the first backward pass")
        self._plans.agree(asdict(plan))
        self._fusion.change(plan)

    def __deepcopy__(self, memo: dict[int, object]) -> "HookState":
        """A copy of a DDP model loses its hook; its state starts anew, unbound, and says so."""
        log.warning("a DDP model with gradwire's hook was copied: torch drops the hook in copies; call "
                    "register_comm_hook on the copy if it is to be trained")
        return HookState(config=self.config)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the configuration alone: threads and connections stay with the process."""
        return _restore, (self.config,)


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook to register: averages a bucket over all ranks of `state`.

    Args:
        state: Made for this model.
        bucket: What DDP hands over.

    Returns:
        A future of the averaged buffer. Its error, if any, comes out of `loss.backward()`.

    Raises:
        TypeError: Called by the compiled-autograd reducer, which hands over single gradients.
    """
    if isinstance(bucket, tuple):
        raise TypeError(PYTHON_REDUCER)
    return state.reduce(bucket)


def _restore(config: Config) -> HookState:
    return HookState(config=config)


def _all_reduce_sparse(sparse: Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Sparse gradients (nn.Embedding(sparse=True)) travel as they would without a hook."""
    size = dist.get_world_size(group)
    work = dist.all_reduce(sparse, group=group, async_op=True)
    assert work is not None

    def average(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return done.value()[0].div_(size)

    future: torch.futures.Future[Tensor] = work.get_future().then(average)
    return future

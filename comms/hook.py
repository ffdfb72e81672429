"""The DDP comm hook: `model.register_comm_hook(gradwire.HookState(model), gradwire.comm_hook)`.

DDP hands over buckets of gradients during backward; each goes to the communicator at once and DDP gets a future. The
gradients arrive undivided, so the division by the world size happens here, before anything is narrowed.
"""

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from gradwire.comms.bootstrap.compat import GradBucket
from gradwire.comms.compression import Compression, LossScaler
from gradwire.comms.config import Config
from gradwire.comms.fusion import FusionPlan
from gradwire.comms.names import ParameterNames
from gradwire.comms.plan.job_advice import JobAdvice, advise_job
from gradwire.comms.reducer import Reducer
from gradwire.comms.report import Report
from gradwire.compressors.base import StateDict, StateValue
from gradwire.compressors.optim.first_step import check_at_first_step

log = logging.getLogger("gradwire")

PYTHON_REDUCER = (
    'torch.compile with optimize_ddp="python_reducer" calls the hook once a parameter from inside a compiled '
    "graph, which gradwire does not support: leave torch._dynamo.config.optimize_ddp at its default, "
    "with which compiled models work"
)


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

    def __init__(
        self,
        model_or_group: nn.Module | dist.ProcessGroup | None = None,
        *,
        config: Config | None = None,
        **options: object,
    ) -> None:
        if config is not None and options:
            raise TypeError(
                f"`config` and {', '.join(f'`{name}`' for name in options)} are both given: put the options "
                "into the Config"
            )
        self.config = config or Config.from_env(**options)
        self.names = ParameterNames()
        self._group: dist.ProcessGroup | None = None
        self._reducer: Reducer | None = None
        if isinstance(model_or_group, nn.Module):
            self.bind(model_or_group)
        elif isinstance(model_or_group, dist.ProcessGroup):
            self._group = model_or_group
        elif model_or_group is not None:
            raise TypeError(
                f"`model_or_group` is a {type(model_or_group).__name__}; wanted a torch.nn.Module, a process "
                "group, or None"
            )

    def bind(self, model: nn.Module) -> None:
        """Takes parameter names from `model`, and its process group where it is a DDP model; connects the ranks."""
        self.names.bind(model)
        if self.config.compressor is not None:
            check_at_first_step(model, self.config.compressor, self.config.compressor_options, self.config.rules)
        self._group = getattr(model, "process_group", None) or self._group
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("`model` has no parameters: there is nothing to reduce")
        self._connect(parameter.device)

    @property
    def steps(self) -> int:
        """Backward passes so far."""
        return self._reducer.steps if self._reducer else 0

    def report(self) -> Report:
        """Calls, bytes and seconds of every phase so far, and the plans in use with their reasons.

        Raises:
            RuntimeError: No bucket has come yet.
        """
        reducer = self._connected("report()")
        return reducer.communicator.report(reducer.steps)

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
        return self._compressed().state_dict() if self._compresses else {}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Restores what `state_dict` returned on this rank; training goes on bit for bit.

        At another world size a state is taken only if it was flushed before it was saved (`flush()`, one step, save);
        momenta and warm-start factors then build up again.

        Raises:
            ValueError: The state is of another model, compressor, rank or world size; nothing was changed.
        """
        if state or self._compresses:
            self._compressed().load_state_dict(state)

    def close(self) -> None:
        """Ends the threads and releases shared memory; happens by itself when the state is collected or at exit."""
        if self._reducer is not None:
            self._reducer.communicator.close()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages one bucket over all ranks; the future's value is the bucket's own buffer."""
        return self._connect(bucket.buffer().device).reduce(bucket)

    def advise(self, optimizer: str = "sgd") -> JobAdvice:
        """Says from what this rank has measured which plan to use, whether to compress, and what could be gained at most.

        Args:
            optimizer: `sgd`, `adam`, ...: some compressors presume one.

        Raises:
            RuntimeError: Fewer than three steps have been seen.
        """
        observed = self._reducer.watch.observed() if self._reducer else None
        if self._reducer is None or observed is None:
            raise RuntimeError("this state has seen fewer than three steps: call advise() later")
        routes = self._reducer.communicator.routes
        return advise_job(routes.cluster, self._reducer.fusion.last_sizes, observed, optimizer, routes.library)

    def fuse(self, plan: FusionPlan) -> None:
        """Changes which buckets travel together, from the next step on; every rank calls it between the same two steps.

        Raises:
            RuntimeError: No bucket has come yet.
            ValueError: Not all ranks ask for the same plan: refused on all of them.
        """
        self._connected("fuse()").fuse(plan)

    def _connected(self, call: str) -> Reducer:
        if self._reducer is None:
            raise RuntimeError(f"this state has not seen a bucket yet: call {call} after the first backward pass")
        return self._reducer

    @property
    def _compresses(self) -> bool:
        return self._reducer is not None and self._reducer.compression is not None

    def _compressed(self) -> Compression:
        if self._reducer is None or self._reducer.compression is None:
            raise ValueError("`compressor` is not set, or no model is bound yet: there is no state to keep")
        return self._reducer.compression

    def _connect(self, device: torch.device) -> Reducer:
        if self._reducer is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "torch.distributed is not initialised: call dist.init_process_group() before the hook is used"
                )
            group = self._group or dist.group.WORLD
            assert group is not None
            self._reducer = Reducer(group, device, self.config, self.names)
        return self._reducer

    def __deepcopy__(self, memo: dict[int, object]) -> "HookState":
        """A copy of a DDP model loses its hook; its state starts anew, unbound, and says so."""
        log.warning(
            "a DDP model with gradwire's hook was copied: torch drops the hook in copies; call "
            "register_comm_hook on the copy if it is to be trained"
        )
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

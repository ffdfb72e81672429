"""Torch's private objects behind `fully_shard` and `replicate()` (FSDP2), as gradwire uses them.

Written for torch 2.13 to 2.15. Each call of `fully_shard` or `replicate()` makes one FSDPParamGroup, a parameter
group: its parameters are gathered and their gradients are reduced together. A parameter group of `fully_shard` over
one dimension reduce-scatters its gradients; a parameter group of `replicate()` all-reduces them; one of `fully_shard`
over two dimensions (native HSDP) does both.

With comms/bootstrap/compat.py this is the only place with private names of torch.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state

_FSDP = "torch/distributed/fsdp/_fully_shard"
RELIED_ON = {
    f"{_FSDP}/_fsdp_param_group.py": (
        "FSDPParamGroup.__init__",
        "FSDPParamGroup._init_mp_dtypes",
        "FSDPParamGroup._init_reduce_scatter_param_order",
        "FSDPParamGroup._take_unsharded_grads_to_reduce",
        "FSDPParamGroup._get_unsharded_grad_to_reduce",
        "FSDPParamGroup._to_sharded",
        "FSDPParamGroup.lazy_init",
        "FSDPParamGroup.unshard",
        "FSDPParamGroup.wait_for_unshard",
        "FSDPParamGroup.pre_backward",
        "FSDPParamGroup.post_backward",
        "FSDPParamGroup.finalize_backward",
    ),
    f"{_FSDP}/_fsdp_state.py": (
        "FSDPStateContext",
        "FSDPState.__init__",
        "FSDPState.init",
        "FSDPState._lazy_init",
        "FSDPState._init_shared_state",
        "FSDPState._pre_backward",
        "FSDPState._register_root_post_backward_final_callback",
        "FSDPState._root_post_backward_final_callback",
        "FSDPState.finalize_backward",
        "FSDPState.wait_for_gradient_reduction",
        "FSDPState._end_backward_iteration",
        "FSDPState._reset_iter_state",
    ),
    f"{_FSDP}/_fsdp_param.py": (
        "FSDPParam.__init__",
        "FSDPParam._init_sharded_param",
        "FSDPParam.init_dtype_attrs",
        "FSDPParam.init_unsharded_param",
        "FSDPParam.to_sharded",
        "FSDPParam.unsharded_accumulated_grad",
        "FSDPParam.accumulate_unsharded_grad_if_needed",
    ),
    f"{_FSDP}/_fsdp_collectives.py": (
        "DefaultAllGather",
        "DefaultReduceScatter",
        "foreach_all_gather",
        "foreach_all_gather_copy_out",
        "foreach_reduce",
        "_cast_and_view_sharded_grads",
        "_get_gradient_divide_factors",
        "_div_if_needed",
    ),
    f"{_FSDP}/_fsdp_common.py": (
        "DataParallelMeshInfo",
        "FSDPMeshInfo",
        "DDPMeshInfo",
        "HSDPMeshInfo",
        "TrainingState",
    ),
    f"{_FSDP}/_fully_shard.py": (
        "FSDPModule._get_fsdp_state",
        "FSDPModule.set_requires_gradient_sync",
        "FSDPModule.set_requires_all_reduce",
        "FSDPModule.set_is_last_backward",
        "FSDPModule.set_manual_backward_finalization",
        "FSDPModule.finalize_backward",
        "FSDPModule.set_all_reduce_hook",
        "FSDPModule.set_custom_all_gather",
        "FSDPModule.set_custom_reduce_scatter",
        "FSDPModule.set_gradient_divide_factor",
    ),
    "torch/distributed/_composable_state.py": ("_State", "_module_state_mapping", "_insert_module_state"),
    "torch/distributed/_composable/replicate_with_fsdp.py": ("_ReplicateState", "replicate", "ReplicateModule"),
    "torch/distributed/pipelining/stage.py": (
        "_PipelineStageBase.backward_maybe_with_nosync",
        "_PipelineStageBase.perform_reduce_grad",
    ),
    "torch/_tensor.py": ("Tensor.register_post_accumulate_grad_hook",),
}
"""File of torch's wheel -> names in it that this module relies on: what `make torch-diff` compares between releases.

What of a class changes with every release, and matters nowhere here, is left out.
"""


class ShardedParameter:
    """Reads torch's private FSDPParam: one parameter of FSDP2 on this rank.

    Attributes:
        param: The FSDPParam.
    """

    def __init__(self, param: object) -> None:
        self.param: Any = param

    @property
    def sharded(self) -> Tensor:
        """The parameter as the optimizer sees it, a DTensor."""
        return cast(Tensor, self.param.sharded_param)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter (with tensor parallelism: of this rank's part of it)."""
        return tuple(self.param._orig_size)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard, without padding."""
        return tuple(self.param.sharded_size)

    @property
    def padded_numel(self) -> int:
        """Elements of a shard with its padding: the same on all ranks."""
        return int(self.param.padded_sharded_param_size.numel())

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The dtype of its gradient as the optimizer sees it; None if it is the dtype in which gradients are reduced.

        Torch 2.15 lets a parameter have a `grad_dtype` of its own.
        """
        if hasattr(self.param, "sharded_grad_dtype"):
            return cast("torch.dtype | None", self.param.sharded_grad_dtype)
        return self.sharded.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which it is gathered and used, if no tensor subclass brings an all-gather of its own."""
        own = self.sharded.dtype
        return cast(torch.dtype, self.param.mp_policy.param_dtype or own) if own.is_floating_point else own

    @property
    def trained(self) -> bool:
        """True if the parameter requires a gradient."""
        return bool(self.param.sharded_param.requires_grad)

    @property
    def followed(self) -> bool:
        """True if the user has set a hook that reads its gradient as soon as it is accumulated."""
        return bool(getattr(self.param.sharded_param, "_post_accumulate_grad_hooks", None))

    @property
    def gathers_itself(self) -> bool:
        """True if its tensor subclass replaces the all-gather by one of its own, as float8 weights do."""
        return hasattr(self.param._sharded_local_tensor, "fsdp_pre_all_gather")

    def has_gradient(self, unused_too: bool) -> bool:
        """Returns whether the next reduction of its parameter group includes its gradient; for torch up to 2.14.

        Args:
            unused_too: Whether the reduction includes parameters without a gradient, as zeros.
        """
        if not hasattr(self.param, "_unsharded_param"):
            return False
        unsharded = self.param._unsharded_param
        if self.param.unsharded_accumulated_grad is not None or unsharded.grad is not None:
            return True
        return unused_too and bool(unsharded.requires_grad)


class ShardedParamGroup:
    """Reads and changes torch's private FSDPParamGroup: the parameters that FSDP2 gathers and reduces together.

    Args:
        module: The module on which `fully_shard` or `replicate()` was called.
        group: Torch's FSDPParamGroup.
        state: Torch's FSDPState of `module`.

    Attributes:
        module: The module on which `fully_shard` or `replicate()` was called.
        parameters: Parameters of the group, in the order of their shards in a gathered flat shard.
        present: Parameters whose gradients the current reduction includes, in their order in the flat shard; see
            `note_present`.
    """

    def __init__(self, module: nn.Module, group: Any, state: Any) -> None:
        self.module = module
        self._group = group
        self._state = state
        self.parameters = [ShardedParameter(param) for param in group.fsdp_params]
        self.present: list[ShardedParameter] = []

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that share its parameters; None if they are not sharded."""
        return cast("dist.ProcessGroup | None", getattr(self._group.mesh_info, "shard_process_group", None))

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks over which torch all-reduces its gradients, with `replicate()` and native HSDP; None otherwise."""
        return cast("dist.ProcessGroup | None", getattr(self._group.mesh_info, "replicate_process_group", None))

    @property
    def device(self) -> torch.device:
        """The device on which its parameters are gathered and used."""
        return cast(torch.device, self._group.device)

    @property
    def offloads(self) -> bool:
        """True if its parameters and gradients are kept on the CPU between steps (CPUOffloadPolicy)."""
        return type(self._group.offload_policy).__name__ == "CPUOffloadPolicy"

    @property
    def divide_factor(self) -> float | None:
        """The factor that the user has set with `set_gradient_divide_factor`; None without one."""
        return cast("float | None", self._group.gradient_divide_factor)

    @property
    def finalized_by_hand(self) -> bool:
        """True if the user ends backward passes with `finalize_backward()`; see `set_manual_backward_finalization`."""
        return _finalized_by_hand(self._state)

    @property
    def accumulates(self) -> bool:
        """True if this micro-batch is not the last one of the step, so that its gradients are not averaged yet.

        The user says so by `set_requires_all_reduce(False)`, or by `set_is_last_backward(False)`, which is ignored if
        backward is finalized by hand.
        """
        last = self._state._state_ctx.is_last_backward or self.finalized_by_hand
        return not self._group.all_reduce_grads or not last

    @property
    def gathers_again(self) -> bool:
        """True if the all-gather in flight is the backward pass's, of the same weights as in the forward pass."""
        return cast(str, self._group._training_state.name) == "PRE_BACKWARD"

    @property
    def hooked(self) -> bool:
        """True if a hook is set that runs after the reduce-scatter."""
        return self._group._all_reduce_hook is not None

    @property
    def comm_names(self) -> tuple[str, str]:
        """Names of the classes of its all-gather object and its reduce-scatter object."""
        return type(self._group._all_gather_comm).__name__, type(self._group._reduce_scatter_comm).__name__

    def set_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Makes torch call `hook` after each reduce-scatter; its own method refuses modules with several such groups.

        Args:
            hook: Function of this rank's flat shard (of the whole flat gradient with `replicate()`), 1-D, which it may
                change in place.
        """
        self._group._all_reduce_hook = hook

    @property
    def all_gather(self) -> Callable[..., object]:
        """The object that FSDP2 calls for its all-gathers."""
        return cast(Callable[..., object], self._group._all_gather_comm)

    @property
    def reduce_scatter(self) -> Callable[..., object]:
        """The object that FSDP2 calls for its reduce-scatters."""
        return cast(Callable[..., object], self._group._reduce_scatter_comm)

    def set_all_gather(self, comm: object) -> None:
        """Makes FSDP2 call an object of gradwire's, or its own again, for its all-gathers.

        Args:
            comm: Object with `allocate` and `__call__`, as in torch's `set_custom_all_gather`.
        """
        self._group._all_gather_comm = comm

    def set_reduce_scatter(self, comm: object) -> None:
        """Makes FSDP2 call an object of gradwire's, or its own again, for its reduce-scatters.

        Args:
            comm: Object with `allocate` and `__call__`, as in torch's `set_custom_reduce_scatter`.
        """
        self._group._reduce_scatter_comm = comm

    def remember_collectives(self) -> Callable[[], None]:
        """Returns a function that restores the all-gather and reduce-scatter objects of now."""
        all_gather, reduce_scatter = self.all_gather, self.reduce_scatter

        def undo() -> None:
            self.set_all_gather(all_gather)
            self.set_reduce_scatter(reduce_scatter)

        return undo

    def leave_out_all_reduce(self) -> Callable[[], None]:
        """Switches off torch's all-reduce over `replica_group`: the hook of `set_hook` averages instead.

        Torch all-reduces a parameter group whose mesh info is a DDPMeshInfo; an HSDPMeshInfo is one, too. So this
        replaces it by one of the class that describes the same mesh and the same shards without that group.

        Returns:
            A function that switches torch's all-reduce on again, and removes the hook.
        """
        group, info = self._group, self._group.mesh_info
        common = _loaded("torch.distributed.fsdp._fully_shard._fsdp_common")
        kind = common.DataParallelMeshInfo if self.shard_group is None else common.FSDPMeshInfo
        without = kind(**{each.name: getattr(info, each.name) for each in fields(kind) if each.init})
        if getattr(info, "reduce_scatter_process_group", None) is not None:
            without.reduce_scatter_process_group = info.reduce_scatter_process_group
        # Torch compares the two infos, to find out whether the backward pass gathers over the same ranks.
        gathers_over_the_same = group.post_forward_mesh_info is info
        group.mesh_info = without
        if gathers_over_the_same:
            group.post_forward_mesh_info = without

        def undo() -> None:
            group.mesh_info, group._all_reduce_hook = info, None
            if group.post_forward_mesh_info is without:
                group.post_forward_mesh_info = info

        return undo

    def keeps(self, reduced: Sequence[ShardedParameter], dtype: torch.dtype) -> bool:
        """Returns whether torch reads no element of a reduced flat shard before the backward pass ends.

        Then it only makes views of it. Torch reads the flat shard to add it to existing gradients, to cast or divide
        it, to copy it to the host, and for the user's hooks on gradients.

        Args:
            reduced: Parameters whose gradients are in the flat shard.
            dtype: Dtype of the flat shard.
        """
        group = self._group
        divided = dtype not in (torch.float32, torch.bfloat16) or getattr(group, "force_sum_reduction_for_comms", False)
        if divided or self.offloads:
            return False
        return all(
            one.gradient_dtype in (None, dtype) and one.sharded.grad is None and not one.followed for one in reduced
        )

    def reshard(self) -> None:
        """Replaces gathered parameters by their shards again."""
        self._group._to_sharded()

    def note_present(self) -> None:
        """Wraps a method of torch's, so that `present` is up to date in each reduction from now on.

        Torch passes a flat shard to its hooks without saying whose gradients it holds.
        """
        taken = getattr(self._group, "_take_unsharded_grads_to_reduce", None)
        if taken is not None:
            self._note_taken(taken)
            return
        # Up to torch 2.14: the parameters with a gradient, in their own order.
        post_backward = self._group.post_backward

        def noting(*unused: object) -> None:
            unused_too = getattr(self._group, "reduce_scatter_unused_params", False)
            self.present = [one for one in self.parameters if one.has_gradient(unused_too)]
            post_backward(*unused)

        self._group.post_backward = noting

    def _note_taken(self, take: Callable[[], tuple[list[Any], list[Tensor]]]) -> None:
        """Wraps the method by which torch 2.15 takes the gradients to reduce, and sets `present` from its result.

        Args:
            take: Torch's method; returns FSDPParams and their gradients in the order of the flat shard, which is by
                dtype.
        """
        known = {id(one.param): one for one in self.parameters}

        def taking() -> tuple[list[Any], list[Tensor]]:
            params, gradients = take()
            self.present = [known[id(param)] for param in params]
            return params, gradients

        self._group._take_unsharded_grads_to_reduce = taking


DEFAULT_SHARDED_COMMS = ("DefaultAllGather", "DefaultReduceScatter")
"""Class names of torch's own all-gather and reduce-scatter objects: `comm_names` before anybody sets others."""


def sharded_param_groups(model: nn.Module) -> list[ShardedParamGroup]:
    """Returns the parameter groups of a model, in the order of its modules.

    The list is empty if neither `fully_shard` nor `replicate()` of FSDP2 was called on it.
    """
    param_groups: dict[int, ShardedParamGroup] = {}
    for module in _sharded_modules(model):
        state = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            param_groups.setdefault(id(group), ShardedParamGroup(module, group, state))
    return list(param_groups.values())


def _sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the modules inside `model` on which `fully_shard` or `replicate()` was called.

    Also those without a parameter group of their own.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def root_sharded_modules() -> list[nn.Module]:
    """Returns FSDP2's outermost modules of this process that have begun a forward pass; any thread may call it."""
    return [each for each in _all_sharded_modules() if each._get_fsdp_state()._is_root is True]


def _all_sharded_modules() -> list[Any]:
    """Returns this process's modules on which `fully_shard` or `replicate()` was called; any thread may call it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    modules = [each() for each in _composable_state._module_state_mapping.keyrefs()]
    return [each for each in modules if isinstance(each, fsdp.FSDPModule)]


def sharded_roots(model: nn.Module) -> int:
    """Returns the number of FSDP2's modules in `model` that are inside no other module of FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return 0
    if isinstance(model, fsdp.FSDPModule):
        return 1
    return sum(sharded_roots(child) for child in model.children())


def at_end_of_sharded_backward(
    model: nn.Module, callback: Callable[[], None], reset: Callable[[], None] = lambda: None
) -> None:
    """Calls `callback()` each time that FSDP2 has finished a backward pass, also one of a pipeline schedule.

    A backward pass finishes at the module whose output it reaches first: mostly the outermost one, also if it has no
    parameters. If the user finalizes backward by hand (torch 2.15), it finishes with `finalize_backward()`, or with
    `wait()` of the work that `finalize_backward(async_op=True)` returns.

    Args:
        model: The outermost module of FSDP2, or one inside it.
        callback: Called after torch's own end of the backward pass.
        reset: Called after `reset_iter_state()`, by which a script drops an iteration that has failed.
    """
    around = [each for each in _all_sharded_modules() if any(inner is model for inner in each.modules())]
    states = [module._get_fsdp_state() for module in (*_sharded_modules(model), *around)]
    for state in {id(each): each for each in states}.values():
        _call_behind(state, "_root_post_backward_final_callback", False, callback)
        if hasattr(state, "wait_for_gradient_reduction"):
            _call_behind(state, "wait_for_gradient_reduction", True, callback)
        _call_behind(state, "_reset_iter_state", None, reset)


def at_first_sharded_backward(callback: Callable[[nn.Module], None]) -> None:
    """Calls `callback(model)` when the first backward pass of each outermost module of FSDP2 begins.

    A backward pass is run by all ranks of a model, while one rank may run a forward pass alone.

    Importing FSDP2 takes two seconds. So if the script has not imported it, the class is changed when it does: through
    its base class, torch's `_State`, which imports fast.
    """
    base = _composable_state._State
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if fsdp is not None:
        _call_before_first(fsdp.FSDPState, callback)
        return

    def made(kind: Any, /, **options: object) -> None:
        super(base, kind).__init_subclass__(**options)
        if _BEGINS in vars(kind):  # FSDPState, whose own subclass for replicate() has none
            _call_before_first(kind, callback)

    base.__init_subclass__ = classmethod(made)  # type: ignore[assignment]


_BEGINS = "_register_root_post_backward_final_callback"
"""Method of FSDPState that runs first in each backward pass."""


def _call_before_first(kind: Any, callback: Callable[[nn.Module], None]) -> None:
    """Wraps the method of class `kind` that begins a backward pass: calls `callback(model)` once for each model."""
    method = getattr(kind, _BEGINS)
    begun: WeakSet[Any] = WeakSet()

    def begin(state: Any) -> None:
        context = state._state_ctx
        if context not in begun:
            begun.add(context)
            callback(context.all_states[0]._modules[0])
        method(state)

    setattr(kind, _BEGINS, begin)


def is_replicated(model: nn.Module) -> bool:
    """Returns whether torch averages all parameter groups of a model over replicas; False if it has none.

    That is so after `replicate()`, and after `fully_shard` over a mesh of two dimensions (native HSDP).
    """
    param_groups = sharded_param_groups(model)
    return bool(param_groups) and all(param_group.replica_group is not None for param_group in param_groups)


def _call_behind(state: Any, name: str, by_hand: bool | None, callback: Callable[[], None]) -> None:
    """Wraps a method of a module's FSDPState: calls `callback()` after it, in one or both modes of finalization.

    Args:
        state: The FSDPState, changed in place.
        name: Name of the method.
        by_hand: True calls `callback` only if the user finalizes the backward pass by hand, False only if torch
            finalizes it, None in any case. The mode is that at the time the method is called.
        callback: Called without arguments; not after a method that has raised.
    """
    method = getattr(state, name)

    def call(*arguments: object) -> None:
        wanted = by_hand in (None, _finalized_by_hand(state))  # before the method: it ends the step that the mode is of
        method(*arguments)
        if wanted:
            callback()

    setattr(state, name, call)


def _finalized_by_hand(state: Any) -> bool:
    """Returns whether the user ends the current backward pass by `finalize_backward()`, instead of torch at its end.

    The user chooses that with `set_manual_backward_finalization(True)`, which torch has since 2.15: always False
    before.

    Args:
        state: Torch's FSDPState of a module of FSDP2.
    """
    context = state._state_ctx
    begun = getattr(context, "manual_backward_finalization_active", None)
    return bool(getattr(context, "manual_backward_finalization", False) if begun is None else begun)


def _loaded(module: str) -> Any:
    return sys.modules[module]

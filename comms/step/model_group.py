"""Finds the process group of the model whose gradients a state averages, whatever the state was made from.

DDP hands the hook a bucket and says nothing of its group. The group is that of the DistributedDataParallel that holds
the bucket's parameters; it is looked up among the living ones, once for each state.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.bootstrap.compat import ddp_models, is_known

MADE_FROM_DDP = "make the state from the wrapped model, gradwire.HookState(ddp_model)"

SEVERAL_GROUPS = (
    "`model` is wrapped in {count} DistributedDataParallel models with different process groups ({groups}), so it does "
    "not say whose gradients are averaged: " + MADE_FROM_DDP
)

OTHER_GROUP = (
    "this HookState averages over {own}, and the DistributedDataParallel model whose gradients it was given averages "
    "over {wanted}: " + MADE_FROM_DDP + ", or give both the same process group"
)

NOT_ALL_JOINED = (
    "This state was made without a process group, so it waited for all ranks of the default group. Ranks that do not "
    "train this model never come: " + MADE_FROM_DDP + ", whose process group then counts"
)


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Returns the process group that averages a model's gradients: a DDP model's own, or that of the DDP around it.

    Args:
        model: A DDP model, or a module.

    Returns:
        The group; None for a module if no parameter requires a gradient, or no DDP model holds the first one that does.

    Raises:
        ValueError: Several DDP models with different groups hold that parameter.
    """
    # DDP and what wraps it (torch.compile) have it as an attribute.
    own: dist.ProcessGroup | None = getattr(model, "process_group", None)
    if own is not None:
        return own
    parameter = next((each for each in model.parameters() if each.requires_grad), None)
    return None if parameter is None else _only_group(_owners(parameter))


def owners_of(state: object, parameter: Tensor, bound: nn.Module | None) -> list[DistributedDataParallel]:
    """Returns the DDP models that may have called a state with its first bucket: one, if it can be told.

    Args:
        state: The hook's state.
        parameter: One of the bucket's parameters.
        bound: The model that the state was made from; None if it was made without one.
    """
    if isinstance(bound, DistributedDataParallel) and any(each is parameter for each in bound._module_parameters):
        return [bound]
    owners = _owners(parameter)
    registered = [each for each in owners if any(each_state is state for _, each_state in each._comm_hooks)]
    return registered or owners


def checked_group(owners: Sequence[DistributedDataParallel], own: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the group that a state averages over, found when its first bucket has arrived.

    Args:
        owners: DDP models whose gradients they may be; see `owners_of`.
        own: The group that the state was made with, or has connected in; None if there is none yet.

    Returns:
        `own`, or without it the group of the DDP models; None if there are none.

    Raises:
        ValueError: `own` has other ranks than the group of the DDP models.
    """
    wanted = _only_group(owners)
    if own is None or wanted is None:
        return own or wanted
    if _ranks(own) != _ranks(wanted):
        raise ValueError(OTHER_GROUP.format(own=_words(own), wanted=_words(wanted)))
    return own


def divides_by_present(model: DistributedDataParallel | None) -> bool:
    """Returns whether a model is in `Join(..., divide_by_initial_world_size=False)`: ranks without inputs do not count.

    Args:
        model: The DDP model; None if it is not known, or freed.
    """
    return model is not None and model._join_config.enable and not model._divide_by_initial_world_size


def _owners(parameter: Tensor) -> list[DistributedDataParallel]:
    """Returns the living DDP models that average a parameter's gradient."""
    return [
        model
        for model in ddp_models()
        if any(each is parameter for each in getattr(model, "_module_parameters", ()))
        and getattr(model, "logger", None) is not None  # else another thread is just making it
    ]


def _only_group(owners: Sequence[DistributedDataParallel]) -> dist.ProcessGroup | None:
    groups = {_ranks(owner.process_group): owner.process_group for owner in owners}
    if len(groups) > 1:
        named = ", ".join(map(_words, groups.values()))
        raise ValueError(SEVERAL_GROUPS.format(count=len(owners), groups=named))
    return next(iter(groups.values()), None)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...] | int:
    """Returns the ranks of a group in the default group, ascending; the `id` of a group that torch has not made."""
    return tuple(sorted(dist.get_process_group_ranks(group))) if is_known(group) else id(group)


def _words(group: dist.ProcessGroup) -> str:
    ranks = _ranks(group)
    if isinstance(ranks, int):
        return f"a {type(group).__name__} of its own"
    if len(ranks) == dist.get_world_size():
        return f"all {len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}" + (", ..." if len(ranks) > 8 else "")

"""Finds the worker of each rank, the ranks that exchange with each other, and the trained parameters.

A worker is a set of ranks that average gradients at every step: the ranks of a node, the process group of a DDP model,
the mesh of a sharded one, or one rank. Ranks that hold the same parameters (of a sharded model: the same shards)
exchange them between the workers.
"""

import json
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.comms.attach import unwrap
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.boundary.messages import MessageType, Rank
from gradwire.comms.outer.options import EXACT, NONE
from gradwire.compressors.base import plain_name
from gradwire.topology.cluster import LEVEL_NAMES, Cluster

_SHARDS: MessageType[tuple[str, tuple[int, ...]]] = MessageType(tuple[str, tuple[Rank, ...]], most_nbytes=1 << 26)
"""Message with a key for the shards that a rank holds, and the ranks of its worker."""


def model_inside(model: nn.Module) -> nn.Module:
    """Returns the module that is trained: the one inside a DDP model, also if that is wrapped; else `model` itself.

    Raises:
        ValueError: A DDP model is only a part of `model`.
    """
    found = unwrap(model)
    inner = found.module if isinstance(found, DistributedDataParallel) else model
    path = next((path for path, each in inner.named_modules() if isinstance(each, DistributedDataParallel)), None)
    if path is not None:
        raise ValueError(
            f"`model` is a {type(model).__name__} that holds a DistributedDataParallel as `{path}`; wanted the plain "
            "module, or one DistributedDataParallel around all of it"
        )
    return inner


def trained_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter) of all parameters that the optimizers train, in the model's order.

    Raises:
        ValueError: The optimizers train no parameter of the model, or a parameter that it does not have; or a trained
            parameter is not floating-point.
    """
    wanted = {id(each) for optimizer in optimizers for part in optimizer.param_groups for each in part["params"]}
    trained = [(plain_name(name), each) for name, each in model.named_parameters() if id(each) in wanted]
    if not trained:
        raise ValueError("`optimizer` trains no parameter of `model`: make it of model.parameters()")
    if len(trained) < len(wanted):
        raise ValueError(
            f"`optimizer` trains {len(wanted) - len(trained)} parameters that `model` does not have: give Outer the "
            "module that all of them are in"
        )
    for name, each in trained:
        if not each.is_floating_point():
            raise ValueError(f"`{name}` has dtype {each.dtype}; wanted floating-point parameters")
    return trained


def peers_of(
    model: nn.Module, trained: list[tuple[str, nn.Parameter]], inside: str, agreement: Agreement
) -> tuple[dist.ProcessGroup, frozenset[int] | None]:
    """Returns the group of ranks that hold the same parameters or shards as this one, and this rank's worker.

    All ranks call it: the groups of sharded models are made here.

    Args:
        model: Model given to `Outer`: a plain module, a DDP model, or a sharded one.
        trained: (Name, parameter) pairs that are trained.
        inside: Ranks of a worker, as in `Outer`: `exact`, `none` or the name of a level.
        agreement: Agreement of all ranks.

    Returns:
        The group; and the ranks of the worker, or None unless the model is in DDP or sharded, which determines them.

    Raises:
        ValueError: The model averages over all ranks already, or contradicts `inside`; only a part of it is sharded; or
            workers have different sizes or are sharded differently.
    """
    world = dist.group.WORLD
    assert world is not None
    # Find this rank's worker: the ranks over which the model is in DDP, or sharded. A plain module has none.
    sharded = [each for _, each in trained if isinstance(each, DTensor)]
    wrapped = unwrap(model)
    if isinstance(wrapped, DistributedDataParallel):
        worker = frozenset(dist.get_process_group_ranks(wrapped.process_group))
        what = (
            "a DistributedDataParallel over all ranks: give the plain module, or a process_group of the worker's ranks"
        )
    elif sharded:
        worker = frozenset(rank for each in sharded for rank in each.device_mesh.mesh.flatten().tolist())
        what = "sharded over all ranks: shard it over the ranks of each worker, fully_shard(module, mesh=mesh['shard'])"
    else:
        return world, None
    if inside != EXACT:
        raise ValueError(f"`inside` is {inside!r}, and `model` averages its gradients itself; wanted {EXACT!r}")
    if len(worker) == world.size() > 1:
        raise ValueError(f"`model` is {what}")
    # Ranks with a whole model exchange with all others; ranks with shards only with those that hold the same shards.
    if not sharded:
        return world, worker
    if len(sharded) < len(trained):
        raise ValueError(
            "`model` has parameters that are sharded and others that are not: call fully_shard on all of it"
        )
    own_shards = json.dumps([_shard_key(sharded), sorted(worker)])
    groups = shard_groups([_SHARDS.read(text) for text in agreement.gather(own_shards)])
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        made = dist.new_group(ranks)
        own = made if dist.get_rank() in ranks else own
    assert own is not None
    return own, worker


def shard_groups(held: Sequence[tuple[str, tuple[int, ...]]]) -> list[list[int]]:
    """Returns the groups in which ranks exchange parameters: the ranks of all workers that hold the same shards.

    Args:
        held: Of each rank of the job, in rank order: a key that is equal on ranks with the same shards, and the ranks
            of its worker, over which one copy of the model is sharded.

    Returns:
        Ranks of each group, ascending. Each group has at least one rank of every worker.

    Raises:
        ValueError: A group has no rank of some worker: workers have different sizes or are sharded differently.
    """
    groups = {key: [rank for rank, (each, _) in enumerate(held) if each == key] for key, _ in dict.fromkeys(held)}
    workers = {worker for _, worker in held}
    for ranks in groups.values():
        if {held[rank][1] for rank in ranks} != workers:
            sizes = ", ".join(str(len(worker)) for worker in sorted(workers))
            raise ValueError(
                f"`model` is sharded over workers of {sizes} ranks, and no rank of some worker holds the shards of "
                f"rank {ranks[0]}; wanted workers of one size, each sharded in the same way"
            )
    return list(groups.values())


def _shard_key(sharded: Sequence[DTensor]) -> str:
    """Returns a key for the shards that this rank holds, equal on ranks that hold the same shards."""
    found = []
    for each in sharded:
        place: Sequence[int] = each.device_mesh.get_coordinate() or ()
        at = [
            (place[dim], each.device_mesh.size(dim))
            for dim, how in enumerate(each.placements)
            if isinstance(how, Shard)
        ]
        found.append((tuple(each.shape), at))
    return repr(found)


def workers_in(cluster: Cluster, inside: str) -> list[tuple[int, ...]]:
    """Returns the ranks of each worker.

    Args:
        cluster: Placement of the ranks.
        inside: Ranks of a worker: `exact` (a node), `none` (each rank by itself) or the name of a level.

    Raises:
        ValueError: The cluster does not have the level `inside`.
    """
    if inside == NONE:
        return [(rank,) for rank in range(cluster.size)]
    level = LEVEL_NAMES.index(LEVEL_NAMES[0] if inside == EXACT else inside)
    if level >= cluster.depth:
        raise ValueError(
            f"`inside` is {inside!r}, and this cluster has {', '.join(cluster.level_names)}: give `location` its racks "
            "and regions, or name one of these"
        )
    return [cluster.ranks(worker) for worker in cluster.units(level)]


def workers_given(group: dist.ProcessGroup, own: frozenset[int], agreement: Agreement) -> list[tuple[int, ...]]:
    """Returns the ranks of each worker in a group, given that each rank knows its own; all ranks of the job call it.

    Args:
        group: Ranks that exchange with each other.
        own: Ranks of this rank's worker, in the default group.
        agreement: Agreement of all ranks of the job.

    Returns:
        For each worker those of its ranks that are in `group`, numbered in the default group.
    """
    worker_of_rank = agreement.gather(sorted(own))
    workers: dict[str, list[int]] = {}
    for rank in dist.get_process_group_ranks(group):
        workers.setdefault(repr(worker_of_rank[rank]), []).append(rank)
    return [tuple(worker) for worker in workers.values()]

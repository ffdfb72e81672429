"""Puts gradwire under a model that `fully_shard` has sharded, or `replicate()` of FSDP2 has replicated."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.comms.backend.planned_collectives import PlannedCollectives
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import PrefixStore, store_of, timeout_of
from gradwire.comms.bootstrap.failure_reporter import StoreFailureReporter
from gradwire.comms.bootstrap.probe import PeerWait
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import ASSUME, ELASTIC, FUSION, MEASURE, SUMMING, Config, own_version
from gradwire.comms.plan.plan import describe_plans
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.session import SessionRanks
from gradwire.comms.sharded.agreement import agree_on_grid, reporter_of_grid
from gradwire.comms.sharded.carried import RESIDUAL, SENT, LoadedShards, ShardResidual
from gradwire.comms.sharded.collectives import CARRIED, SHARD_CHOICES, WEIGHT_CHOICES, Rounding, ShardLink, install
from gradwire.comms.sharded.layout import ShardNames
from gradwire.comms.sharded.nodes import find_nodes
from gradwire.comms.sharded.ordered_launches import TorchGroups
from gradwire.comms.sharded.overlap import Overlap
from gradwire.comms.sharded.param_groups import (
    DEFAULT_SHARDED_COMMS,
    ShardedParamGroup,
    sharded_param_groups,
    sharded_roots,
)
from gradwire.comms.sharded.state import FsdpState, ShardTraffic, shard_groups
from gradwire.comms.step.loaded import LoadConsistencyCheck
from gradwire.comms.streams import HostClock
from gradwire.comms.transport.groups import why_unusable
from gradwire.comms.transport.launch_order import SerializesLaunches
from gradwire.compressors.rules import rules_from, warn_of_idle

CPU = torch.device("cpu")

NOT_SHARDED = (
    "`model` has no module that torch.distributed.fsdp.fully_shard (FSDP2), or replicate of "
    "torch.distributed._composable.replicate_with_fsdp, was called on: call fully_shard on its "
    "blocks and on the model itself first, then gradwire.fsdp.apply(model, ...). FullyShardedDataParallel (FSDP1) has "
    "no such hooks; for DistributedDataParallel use gradwire.attach(model)"
)

UNFIT = {
    FUSION: "; FSDP2 decides what is sent together, by its groups: leave it out",
    SUMMING: ", which is for the hook of a DDP model; gradients of FSDP2 are averaged: leave it out (FSDP2 has "
    "reduce_dtype and set_gradient_divide_factor)",
    ELASTIC: ", and a model of FSDP2 cannot go on without a rank: its groups stay as they were made, and shards are "
    "lost with a rank. Leave it out, and resume from a checkpoint",
}
"""Options that sharded models do not support -> the rest of the error message, behind the option's value."""


def apply(
    model: nn.Module,
    *,
    replicas: DeviceMesh | None = None,
    shards: str = "exact",
    weights: str = "exact",
    seed: int = 0,
    config: Config | None = None,
    **options: object,
) -> FsdpState:
    """Takes over the collectives of an FSDP2 model: call it after all `fully_shard` or `replicate()`, before a step.

    All ranks of the model call it, with the same arguments.

    Args:
        model: The model on which, and on whose blocks, `fully_shard` was called; or `replicate()` of
            torch.distributed._composable.replicate_with_fsdp.
        replicas: The other dimension of the mesh, `mesh["replicate"]`: the ranks that hold the same shards. Their
            gradients are averaged by the cheapest plan, or compressed. It can be left out if torch averages over them:
            if all calls of `fully_shard` were given the mesh of both dimensions, or all of the model is replicated.
            Then it is that dimension, or the mesh of `replicate()`. None and no such mesh: there are no replicas.
        shards: Format of gradients between nodes, in the reduce-scatter over the ranks that share parameters: "exact",
            "bf16", "int8", "int4" or "waterfill4". On CPUs an exact reduce-scatter follows a plan if that is predicted
            to beat the library, on any backend; on CUDA, and with `plan="flat"`, it is torch's own. With fewer bits
            gradients are still summed exactly inside a node, and all of them exactly if those ranks are on one node;
            `plan="flat"` counts each rank as a node. int8 and int4 round at random without bias and keep no residual;
            the compression error of waterfill4 is added to the next sum, and kept as N - 1 float32 tensors of the size
            of this rank's shards on N nodes.
        weights: Format of weights between nodes, in the all-gather: "exact" (see `shards`), "bf16", "int8"
            or "waterfill4". All ranks compute with the decoded weights; those that the optimizer changes stay exact.
            waterfill4 sends differences from the weights sent last, for which this rank keeps N float32 tensors of the
            size of its shards; the first all-gather is exact, and those of the backward pass send nothing between
            nodes. Call `flush()` on all ranks after weights were changed by hand: the next all-gather is exact.
        seed: Seed of the random rounding of int8 and int4.
        config: The configuration; None takes it from the environment.
        **options: Fields of `Config` by name: `compressor`, `compressor_options`, `rules`, `plan`, ...; they win over
            the environment. A rule in `rules` that leaves a parameter dense holds for `shards` and `weights` too, and
            goes by the parameter's whole shape; vectors and the smallest matrices are always dense. Refused are
            `fusion`, because FSDP2's parameter groups decide what is sent together;
            `nic_bytes_per_second="measure"`; `reduction`; and `elastic`, because the shards of a failed rank are lost.

    Returns:
        The state; keep it for reports, checkpoints and `flush`.

    Raises:
        TypeError: An option has an unknown name, is given besides `config`, or `replicas` is no mesh.
        ValueError: `model` is not one of FSDP2, its mesh or `replicas` do not fit, or a value does not fit or differs
            between the ranks. All ranks raise it, except for an option out of its range: that rank raises it alone.
        RuntimeError: torch.distributed is not initialised, or a rank did not join.
    """
    # Check what can be checked on this rank alone.
    config = Config.given(config, options)
    if replicas is not None and not isinstance(replicas, DeviceMesh):
        raise TypeError(
            f"`replicas` is a {type(replicas).__name__}; wanted one dimension of a DeviceMesh, mesh['replicate']"
        )
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise RuntimeError("torch.distributed is not initialised: call dist.init_process_group() first")
    param_groups = sharded_param_groups(model)
    error = (
        _error_of_complex(model, {"shards": shards, "weights": weights, "compressor": config.compressor})
        or _error_of_choices(shards, weights, param_groups)
        or _error_of(model, param_groups, replicas, config)
    )
    names: ShardNames | None = None
    if error is None:
        try:
            names = _names(model, param_groups)
        except ValueError as failed:
            error = str(failed)
    # Compare the settings of all ranks, so that a mistake on one of them raises on all.
    replica_ranks = _replica_ranks(param_groups, replicas)
    wanted = (
        f"gradwire {own_version()}, replicas of {len(replica_ranks)} ranks, shards={shards!r}, weights={weights!r}, "
        f"seed={seed}, {_shapes(param_groups, names)}"
    )
    config = config.with_timeout_of(timeout_of(dist.group.WORLD, param_groups[0].device if param_groups else CPU))
    number = SessionRanks.name_in(dist.group.WORLD, "grid")
    agree_on_grid(
        store_of(dist.group.WORLD),
        number,
        dist.get_rank(),
        _peers(param_groups) | replica_ranks,
        wanted,
        error,
        config.timeout,
    )
    assert names is not None
    if config.compressor is not None:
        warn_of_idle(config.rules, names.numels(), "Patterns are shell-style, of the whole name.")
    # From here on the model is changed. First connect the replicas, and all ranks of the grid for failures.
    for param_group in param_groups:
        param_group.note_present()
    between = _group_between(param_groups) if replicas is None else replicas.get_group()
    groups = [*shard_groups(param_groups), *([] if between is None or between.size() == 1 else [between])]
    reporter = reporter_of_grid(
        store_of(dist.group.WORLD), number, groups, _peers(param_groups) | replica_ranks, config.timeout
    )
    device, compressed = param_groups[0].device, shards != "exact" or weights != "exact"
    beside = device.type == "cuda" and (compressed or between is not None)
    torchs = TorchGroups(device) if beside else None  # before the first communicator is made
    state = FsdpState(model, param_groups, names, between, config, reporter)
    # Then put gradwire's collectives in the place of torch's, between the ranks that share parameters.
    stats = PhaseStats(HostClock(), ())
    links = ShardLinks(device, config, reporter, torchs, stats, compressed=compressed)
    rounding = Rounding(seed, dist.get_rank())
    overlap = Overlap()
    carried = install(param_groups, names, shards, weights, rules_from(config.rules), rounding, links.of, overlap)
    described = f"shards {shards}, weights {weights}: parameters shared by {links.describe()}" if links.made else ""
    # Compare loaded states between ranks, and pass everything to the state.
    rows = [rows for link in links.made.values() for rows in link.loaded.values()]
    if shards == CARRIED and state._session is not None and state._session.compression is None:
        rows.append(LoadedShards())  # between replicas, where no compressor's state is compared
        for key, each in carried.items():
            if isinstance(each, ShardResidual):
                rows[-1].add(key, each)
        state._session.compare_loaded(beside=rows[-1], kept=links.nodes)
    state._take_shards(
        model,
        ShardTraffic(
            tuple(links.communicators),
            stats if compressed else None,
            rounding if compressed else None,
            described,
            links.describe_plans(),
            overlap if device.type == "cpu" else None,
            torchs,
            links.nodes if carried else "",
            carried,
            tuple(rows),
        ),
    )
    return state


class ShardLinks:
    """Makes and keeps the `ShardLink` of each group of ranks that share parameters.

    Args:
        device: Device on which the model computes.
        config: The configuration.
        reporter: Reports a rank failure to all ranks of the grid.
        torchs: Orders the launches of torch's collectives and gradwire's on one CUDA device; None on a CPU, and if
            only torch launches collectives.
        stats: Counts what compressed collectives send on CUDA; on a CPU the executor of each communicator counts.
        compressed: Whether gradients or weights are compressed between nodes.

    Attributes:
        made: Ranks of a group, in the default group -> its link.
    """

    def __init__(
        self,
        device: torch.device,
        config: Config,
        reporter: StoreFailureReporter,
        torchs: TorchGroups | None,
        stats: PhaseStats,
        *,
        compressed: bool,
    ) -> None:
        self.made: dict[tuple[int, ...], ShardLink] = {}
        self._device = device
        self._config = config
        self._reporter = reporter
        self._compressed = compressed
        self._torchs = torchs
        self._stats = stats

    @property
    def communicators(self) -> list[Communicator]:
        """The communicators of all links made so far, one for each group; empty on CUDA."""
        return [link.communicator for link in self.made.values() if link.communicator is not None]

    def of(self, group: dist.ProcessGroup) -> ShardLink:
        """Returns the link of a group; makes it at the first call. All ranks of the group call it at the same point.

        Args:
            group: The ranks that share parameters.

        Raises:
            RuntimeError: A rank did not join within the time-out.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self.made:
            communicator = self._communicator(group, ranks) if self._device.type == "cpu" else None
            flat = self._config.plan_name == "flat"
            nodes = None
            if self._compressed:
                nodes = find_nodes(group, self._config.host, flat, communicator, self._torchs, self._stats)
            plans = communicator is not None and not isinstance(group, SerializesLaunches)
            planned = PlannedCollectives(communicator) if communicator is not None and plans else None
            loaded = {}
            if nodes is not None:
                for kind, like in ((RESIDUAL, None), (SENT, nodes.counterparts)):
                    loaded[kind] = self._loaded(kind, ranks, communicator, like)
            self.made[ranks] = ShardLink(nodes, communicator, planned, self._torchs, loaded)
        return self.made[ranks]

    @property
    def nodes(self) -> str:
        """The placement for compressed collectives as text: the ranks of each node, numbered in their group, `0,1 2,3`.

        Groups are separated by `; `. Empty if nothing is compressed between the ranks that share parameters. With the
        plan `flat` each rank counts as a node.
        """
        found = [link.nodes.members for link in self.made.values() if link.nodes is not None]
        return "; ".join(" ".join(",".join(map(str, node)) for node in members) for members in found)

    def describe(self) -> str:
        """Returns text for a report: the placement of the ranks by nodes if collectives are compressed, `2 nodes of 4`.

        Otherwise `exact collectives by plans where they are faster` on a CPU, and where there are no plans, as on CUDA,
        `the group's own exact collectives`. Different texts of several groups are joined.
        """
        exact = ("the group's own exact collectives", "exact collectives by plans where they are faster")
        found = {
            link.nodes.describe() if link.nodes else exact[link.planned is not None] for link in self.made.values()
        }
        return ", ".join(sorted(found))

    def describe_plans(self) -> Callable[[], tuple[str, ...]]:
        """Returns a function that returns a paragraph for each plan of a compressed collective, for a report.

        On CUDA it returns none. It keeps no link alive, because a link closes its communicator when it is collected.
        """
        made = [
            (link.nodes.planned, link.communicator) for link in self.made.values() if link.nodes and link.communicator
        ]
        planned = [(plans, communicator.cluster.level_names) for plans, communicator in made]

        def describe() -> tuple[str, ...]:
            found = [describe_plans([each.plan for each in plans.values()], names) for plans, names in planned]
            return tuple(dict.fromkeys(chain.from_iterable(found)))

        return describe

    def _loaded(
        self, kind: str, ranks: Sequence[int], communicator: Communicator | None, like: Sequence[int] | None
    ) -> LoadedShards:
        """Returns an object that compares one kind of loaded state between the ranks of a group.

        Args:
            kind: `RESIDUAL` or `SENT`.
            ranks: The group's ranks, in the default group.
            communicator: Connects the ranks on a CPU; None on CUDA.
            like: Rank of the group whose state each rank's must equal, by rank; None compares all of them.
        """
        index = ranks.index(dist.get_rank())
        find_exited = None if communicator is None else communicator.ended
        peer_wait = PeerWait(range(len(ranks)), index, find_exited, self._reporter.abort_reason)
        consensus = Agreement(
            PrefixStore(f"loaded/{kind}/{'-'.join(map(str, ranks))}", self._reporter.plain_store),
            index,
            len(ranks),
            "load_state_dict()",
            self._config.timeout,
            "come to their first step, and load a state before the same one, or none",
            peer_wait.exited_among,
            ranks,
        )
        return LoadedShards(lambda rows: LoadConsistencyCheck(communicator, rows, consensus, like))

    def _communicator(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> Communicator:
        """Connects the ranks of a group on a CPU; all of them call it at the same point."""
        return Communicator(
            store_of(group),
            group.rank(),
            group.size(),
            self._device,
            replace(self._config, compressor=None),
            name=SessionRanks.name_in(group, "shards"),
            group=group,
            reporter=self._reporter.of_group(ranks),
        )


def _error_of_choices(shards: str, weights: str, param_groups: Sequence[ShardedParamGroup]) -> str | None:
    """Returns what is wrong with `shards` or `weights`, as an error message; None if both fit the model."""
    for name, value, choices in (("shards", shards, SHARD_CHOICES), ("weights", weights, WEIGHT_CHOICES)):
        if value not in choices:
            return f"`{name}` is {value!r}; wanted one of {', '.join(choices)}"
        if value != "exact" and param_groups and all(param_group.shard_group is None for param_group in param_groups):
            return (
                f"`{name}` is {value!r}, and `model` is replicated: no parameter of it is sharded. Leave it out; "
                "`compressor` is for gradients between replicas"
            )
    if weights != "exact" and any(one.gathers_itself for param_group in param_groups for one in param_group.parameters):
        return (
            f"`weights` is {weights!r}, and `model` has weights that bring an all-gather of their own (float8, say): "
            "leave one of the two out"
        )
    for param_group in param_groups if weights != "exact" else ():
        dtypes = sorted({str(one.compute_dtype) for one in param_group.parameters})
        if param_group.shard_group is not None and len(dtypes) > 1:
            return (
                f"`weights` is {weights!r}, and a {type(param_group.module).__name__} of `model` has parameters of "
                f"several dtypes ({', '.join(dtypes)}), which torch gathers as bytes: leave `weights` out, or call "
                "fully_shard on the modules with each dtype on their own"
            )
    return None


def _error_of_complex(model: nn.Module, asked: Mapping[str, str | None]) -> str | None:
    """Returns an error message if a complex model is to be compressed; None if it is not.

    Codecs would drop the imaginary parts, and flat shards are not viewed as pairs of real numbers here.

    Args:
        model: The sharded model.
        asked: Option -> its value; None, "none" and "exact" compress nothing.
    """
    few = [f"`{name}` is {value!r}" for name, value in asked.items() if value not in (None, "none", "exact")]
    names = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if not few or not names:
        return None
    return (
        f"{' and '.join(few)}, and `model` has complex parameters ({', '.join(names[:3])}), which are sharded exactly "
        "alone: leave it out, or keep them as pairs, torch.view_as_real"
    )


def _error_of(
    model: nn.Module, param_groups: Sequence[ShardedParamGroup], replicas: DeviceMesh | None, config: Config
) -> str | None:
    """Returns what is wrong with the model, the meshes or the options on this rank, as a message; None if all fit.

    Args:
        model: The model as the caller gave it.
        param_groups: The model's parameter groups; empty if it is not one of FSDP2.
        replicas: The mesh of the replicas as the caller gave it.
        config: The configuration with the caller's options.
    """
    # Check the model, then the options.
    if not param_groups:
        return NOT_SHARDED
    if sharded_roots(model) > 1:
        return (
            f"`model` has {sharded_roots(model)} sharded modules that are in no other one: call fully_shard on the "
            "model itself too, after its blocks"
        )
    if any(param_group.hooked or param_group.comm_names != DEFAULT_SHARDED_COMMS for param_group in param_groups):
        return (
            "`model` has an all-reduce hook or collectives of its own already: call gradwire.fsdp.apply() once, and "
            "leave out set_all_reduce_hook, set_custom_all_gather and set_custom_reduce_scatter"
        )
    if (why := why_unusable(param_groups[0].device)) is not None:
        return f"`model` is {why}"
    if (unfit := unfit_option(config)) is not None:
        return unfit
    # Compare the options and `replicas` with the meshes of the model: replicated, sharded without and with replicas.
    if replicas is None and (ranks := _replicated_over(param_groups)):
        if len(ranks) > 1:
            return (
                f"`model` has modules that torch averages over different ranks, {_listed(ranks)}; wanted the same "
                "replicas for all of them: give the same mesh to each replicate() and each fully_shard()"
            )
    elif replicas is None:
        for name, value in (("compressor", config.compressor), ("trace", config.trace)):
            if value not in (None, "none"):
                return (
                    f"`{name}` is {value!r}, which is for what is sent between replicas, and `replicas` is not given: "
                    + _how_to_replicate(param_groups)
                )
    elif (found := _error_of_replicas(param_groups, replicas)) is not None:
        return found
    if any(param_group.offloads for param_group in param_groups) and (
        replicas is not None or _replicated_over(param_groups)
    ):
        return (
            "`model` has CPUOffloadPolicy, which is not safe together with replicas: the copy of a gradient to the "
            "host may read memory that has been reused (pytorch issue 180665); leave the policy out"
        )
    return None


def unfit_option(config: Config) -> str | None:
    """Returns an error message about the first option that sharded models do not support; None if there is none."""
    if config.measures_links:
        return (
            f"`nic_bytes_per_second` is {MEASURE!r}, which only the hook of a DDP model does; wanted a number, "
            f"{ASSUME!r} or None"
        )
    for options, why in UNFIT.items():
        for name in config.asked_for(options):
            return f"`{name}` is {getattr(config, name)!r}{why}"
    return None


def _error_of_replicas(param_groups: Sequence[ShardedParamGroup], replicas: DeviceMesh) -> str | None:
    """Returns why `replicas` does not fit the mesh of the model, as an error message; None if it fits."""
    rank = dist.get_rank()
    if replicas.ndim != 1:
        return (
            f"`replicas` has {replicas.ndim} dimensions; wanted the one along which the shards are the same: "
            "mesh['replicate']"
        )
    ranks = set(replicas.mesh.flatten().tolist())
    if rank not in ranks:
        return f"`replicas` is of ranks {sorted(ranks)}, without rank {rank}: give each rank its own, mesh['replicate']"
    if others := [each for each in _replicated_over(param_groups, some=True) if each != ranks]:
        return (
            f"`replicas` of rank {rank} is of ranks {sorted(ranks)}, and torch averages modules of `model` over "
            f"{_listed(others)}: give replicate() and fully_shard() the same replicas as here, or leave `replicas` out "
            "if all modules have them"
        )
    for param_group in param_groups:
        sharers = _ranks(param_group.shard_group)
        if sharers & ranks - {rank}:
            return (
                f"`replicas` of rank {rank} is of ranks {sorted(ranks)}, and its parameters are sharded over "
                f"{sorted(sharers)}: the two must have this rank alone in common; give mesh['shard'] to fully_shard "
                "and mesh['replicate'] as `replicas`"
            )
    return None


def _replicated_over(param_groups: Sequence[ShardedParamGroup], *, some: bool = False) -> list[set[int]]:
    """Returns the sets of ranks over which torch averages gradients, with `replicate()` and native HSDP, each set once.

    Args:
        param_groups: Parameter groups of the model.
        some: False returns an empty list if torch averages any parameter group over no replicas; True leaves such
            groups out.
    """
    found: list[set[int]] = []
    for param_group in param_groups:
        if param_group.replica_group is None:
            if not some:
                return []
        elif (ranks := _ranks(param_group.replica_group)) not in found:
            found.append(ranks)
    return found


def _listed(ranks: Sequence[set[int]]) -> str:
    return " and ".join(str(sorted(each)) for each in ranks)


def _group_between(param_groups: Sequence[ShardedParamGroup]) -> dist.ProcessGroup | None:
    """Returns the group over which torch averages, and gradwire if `replicas` is not given; None without one."""
    return param_groups[0].replica_group if _replicated_over(param_groups) else None


def _how_to_replicate(param_groups: Sequence[ShardedParamGroup]) -> str:
    """Returns the advice that ends an error message: how this model gets the `replicas` that it needs."""
    if _replicated_over(param_groups, some=True):
        return (
            "some modules of `model` are sharded without replicas, and others have replicas. Give the mesh of the "
            'latter, replicas=mesh["replicate"]'
        )
    return (
        'make a mesh of two dimensions, ("replicate", "shard"), and give it to each fully_shard(module, mesh=mesh); or '
        'fully_shard(module, mesh=mesh["shard"]), and replicas=mesh["replicate"] here'
    )


def _names(model: nn.Module, param_groups: Sequence[ShardedParamGroup]) -> ShardNames:
    """Returns the names of all sharded parameters, after resharding modules that hold whole ones.

    Raises:
        ValueError: A parameter that `fully_shard` took over is not in `model`.
    """
    for param_group in param_groups:
        param_group.reshard()
    return ShardNames({id(parameter): name for name, parameter in model.named_parameters()}, param_groups)


def _ranks(group: dist.ProcessGroup | None) -> set[int]:
    return set() if group is None else set(dist.get_process_group_ranks(group))


def _peers(param_groups: Sequence[ShardedParamGroup]) -> set[int]:
    """Returns the ranks that share a parameter with this one, this one included; empty if nothing is sharded."""
    return set().union(*(_ranks(param_group.shard_group) for param_group in param_groups))


def _replica_ranks(param_groups: Sequence[ShardedParamGroup], replicas: DeviceMesh | None) -> set[int]:
    """Returns the ranks to average over: those of `replicas`, or torch's replicas if it is None; empty without both."""
    if replicas is not None:
        return set(replicas.mesh.flatten().tolist())
    return set().union(*_replicated_over(param_groups))


def _shapes(param_groups: Sequence[ShardedParamGroup], names: ShardNames | None) -> str:
    """Returns a description of the parameter groups, names and shapes, which must be equal on all ranks of a grid."""
    if names is None:
        return ""
    shards = [shard for param_group in param_groups for shard in names.of(param_group.parameters)]
    digest = hashlib.sha256(repr([(shard.name, shard.shape) for shard in shards]).encode()).hexdigest()[:12]
    over = sorted({len(_ranks(param_group.shard_group)) for param_group in param_groups})
    return f"{len(param_groups)} groups of {len(shards)} parameters (digest {digest}) sharded over {over} ranks"

"""Options of the hook: one frozen `Config`, checked in one place, and the variables that set its fields."""

import dataclasses
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, ClassVar, Self

from gradwire.comms.environment import OFF, ON

if TYPE_CHECKING:
    from gradwire.compressors.registry import Option
    from gradwire.compressors.rules import Rule

log = logging.getLogger("gradwire")

PLANS = ("auto", "flat", "hierarchical", "leader")
BUCKET, AUTO_FUSION, DELAYED = FUSIONS = ("bucket", "auto", "delayed")
CUTS_SUFFIX = ".json"
"""End of the name of a file that `fusion` keeps cuts in: tells it from a misspelt word."""
SAMPLES = "samples"
REDUCTIONS = ("sum", SAMPLES)
SUM_DTYPES = ("own", "float32")
TRANSPORTS = ("auto", "gloo", "nccl", "mpi")
TCP_TRANSPORTS = ("auto", "gloo")
"""Transports that accept a number of connections, `gloo:8`."""
NICS = GLOOS_NIC, NIC_PER_RANK = "auto", "per_rank"
RATES = MEASURE, ASSUME = "measure", "assume"
"""Words that `nic_bytes_per_second` may be in place of a number."""
ENVIRONMENT_PREFIX = "GRADWIRE_"

NEARLY = 0.8
"""Least similarity of a misspelt name to the one that was meant, by difflib: COMPRESSION has 0.86, COMPRESOR 0.95."""

MOST_CHUNKS = 1024
"""Most pieces of a bucket, 16 times as many as the planner takes: with 100,000 a rank plans for minutes."""
NVTX = "nvtx"
"""Value of `trace` that marks NVTX ranges for Nsight Systems, and writes no file."""
TRACE_STEPS = 20
"""Steps of a trace if no number is given."""

VERSION = "gradwire"
"""Key of gradwire's version among the settings that must be equal on all ranks; versions before it have no such key."""

AUTOMATIC = ENVIRONMENT_PREFIX + "HOOK"
"""Names the compressor that every DDP model of the process gets, `none` for an exact hook."""


class OptionGroup:
    """Base class of dataclasses whose fields are set by one option of `Config`: `PlanChoice` and `Reduction`.

    The option is the value of the first field, a mapping of fields by name, or an object of the class.
    """

    __slots__ = ()
    OPTION: ClassVar[str]
    """Name of the option."""

    @classmethod
    def of(cls, given: object) -> Self:
        """Makes the group from the value of its option; returns an object of the class unchanged.

        Raises:
            ValueError: A field's value does not fit.
            TypeError: A field has an unknown name, or a value of the wrong type.
        """
        if isinstance(given, cls):
            return given
        known = [entry.name for entry in dataclasses.fields(cls)]  # type: ignore[arg-type]  # subclasses are dataclasses
        values = given if isinstance(given, Mapping) else {known[0]: given}
        for name in values:
            if name not in known:
                raise TypeError(f"`{cls.OPTION}` has {name!r}; wanted some of {', '.join(known)}")
        return cls(**values)

    def __repr__(self) -> str:
        """Returns the shortest value of the option that makes this group."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # as above
        given = {each.name: value for each in fields if (value := getattr(self, each.name)) != each.default}
        first = fields[0].name
        return repr(getattr(self, first)) if given.keys() <= {first} else repr(given)


@dataclass(frozen=True, slots=True, repr=False)
class PlanChoice(OptionGroup):
    """Choice of a plan for all-reduces, a part of `Config`.

    The option `plan` takes the value of `name`, or a mapping with some of the names `name` and `chunks`.

    Raises:
        TypeError: `chunks` is no int.
        ValueError: There is no such plan, or `chunks` is negative or more than `MOST_CHUNKS` (1024).
    """

    OPTION: ClassVar[str] = "plan"

    name: str = "auto"
    """`auto` takes the cheapest plan for exact sums, and `hierarchical` for compressed ones between nodes; `flat`,
    `hierarchical` and `leader` force one."""

    chunks: int = 0
    """Chunks that a bucket is cut into so that the phases of a plan overlap; 0 lets the planner choose."""

    def __post_init__(self) -> None:
        _check_choice("plan", self.name, PLANS)
        _check_kinds(self, {"chunks": int})
        if not 0 <= self.chunks <= MOST_CHUNKS:
            raise ValueError(f"`chunks` is {self.chunks}; wanted 0 (the planner chooses), or 1 to {MOST_CHUNKS}")


@dataclass(frozen=True, slots=True, repr=False)
class Reduction(OptionGroup):
    """Reduction of the ranks' gradients, a part of `Config`.

    The option `reduction` takes the value of `kind`, or a mapping with some of the names of the attributes.

    Raises:
        TypeError: `average` is no bool.
        ValueError: Another value does not fit, or two of them contradict each other.
    """

    OPTION: ClassVar[str] = "reduction"

    kind: str = "sum"
    """`sum` adds them; `samples` averages over samples instead of ranks: each rank says how many its gradients are the
    mean of, `state.samples`."""

    average: bool = True
    """Whether gradients are averaged over the ranks; else they are summed (Apex: `gradient_average=False`)."""

    predivide: float | None = None
    """Gradients are divided by this before the sum, and by the number of ranks over it afterwards (Horovod, Apex:
    `gradient_predivide_factor`); None divides by the number of ranks before the sum."""

    sum_dtype: str = "own"
    """`float32` sums float16 and bfloat16 buckets between nodes in float32, which doubles their bytes there (Apex:
    `allreduce_always_fp32`); inside nodes of CPUs they are summed in float32 anyway. `own` sums in their dtype."""

    sparse_as_dense: bool | str = "auto"
    """Whether sparse gradients (`nn.Embedding(sparse=True)`) are sent between nodes as dense tensors; `auto` where that
    takes fewer bytes."""

    def __post_init__(self) -> None:
        _check_choice("reduction", self.kind, REDUCTIONS)
        _check_choice("sum_dtype", self.sum_dtype, SUM_DTYPES)
        if not isinstance(self.average, bool):
            raise TypeError(f"`average` is {self.average!r} ({type(self.average).__name__}); wanted bool")
        if not isinstance(self.sparse_as_dense, bool) and self.sparse_as_dense != "auto":
            raise ValueError(f"`sparse_as_dense` is {self.sparse_as_dense!r}; wanted auto, True or False")
        number = isinstance(self.predivide, int | float) and not isinstance(self.predivide, bool)
        if self.predivide is not None and not (number and 0 < self.predivide < float("inf")):
            raise ValueError(f"`predivide` is {self.predivide!r}; wanted a number > 0, or None")
        if self.predivide is not None and not self.average:
            raise ValueError("`predivide` is given and `average` is off: nothing is divided; wanted one of them alone")
        if self.kind == SAMPLES and (self.predivide is not None or not self.average):
            name = "average" if self.predivide is None else "predivide"
            raise ValueError(
                f"`{name}` is {getattr(self, name)} and `reduction` is {SAMPLES}, which divides by the samples of all "
                "ranks: leave one of the two out"
            )


def _check_kinds(options: object, kinds: Mapping[str, type]) -> None:
    """Checks that options have the types that they are declared with; a bool is no int.

    Args:
        options: Object with the options as attributes.
        kinds: Name of each option to check -> its type.

    Raises:
        TypeError: An option has another type.
    """
    for name, kind in kinds.items():
        value = getattr(options, name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"`{name}` is {value!r} ({type(value).__name__}); wanted {kind.__name__}")


def _check_switch(options: object, name: str, wanted: str) -> None:
    """Refuses an option that is neither a bool nor a text with characters.

    Args:
        options: Object with the options as attributes.
        name: Name of the option.
        wanted: Allowed values, as text for the error.

    Raises:
        TypeError: The option is refused.
    """
    if not isinstance(value := getattr(options, name), bool | str) or value == "":
        raise TypeError(f"`{name}` is {value!r} ({type(value).__name__}); wanted {wanted}")


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Holds the options of connections and collectives, which the hook, the backend, `Outer` and `fsdp.apply` take.

    `Config` inherits them. They are checked when an object is made.

    Raises:
        TypeError: The value of an option has the wrong type.
        ValueError: The value of an option does not fit.
    """

    plan: "PlanChoice | str | Mapping[str, object]" = field(default_factory=PlanChoice)
    """Plan of the all-reduces: `auto`, `flat`, `hierarchical` or `leader`; or a mapping such as
    `{"name": "hierarchical", "chunks": 4}`, see `PlanChoice`, which it is once the Config is made."""

    transport: str = "auto"
    """Library that carries data between nodes: `gloo`, `nccl` or `mpi`; `auto` chooses by the tensor's device. `gloo:8`
    sends large messages over 8 TCP connections between two nodes of CPUs, `gloo:1` over gloo's own alone; without a
    number the measured round trip and the rate decide. No bit depends on it. See docs/results/distance.md."""

    timeout: timedelta = timedelta(0)
    """Time after which a collective fails on all ranks. 0 takes the time-out of the process group: torch's defaults are
    10 minutes for NCCL and 30 for gloo. In shared memory it counts anew for each rank that is waited for, on CUDA from
    the end of the step."""

    hostname: str | None = None
    """Name of the node that this rank is on (own on every rank): ranks with equal names share a node. Units above it
    come first, outermost first: `region1/rack7/node3`; with a slash at the end, `region1/rack7/`, and with None, the
    node has its host's name."""

    nic_bytes_per_second: float | str | None = None
    """Bytes per second of this node to the others in one direction, or how they are found. A number is own on every
    rank and given on all or none; slower nodes then own less of what is exchanged. None takes the NIC's rate if every
    rank knows its own. Else it measures the links between CPU nodes for a moment before the first step (0.1 to 0.9 s at
    10 Mbit/s or more, 1.1 to 2.7 s at 1 Mbit/s), not with `elastic`: that prices plans and gives nodes their shares,
    and changes no bit. `assume` sends nothing, and takes the cost model's default. `measure` measures latency and
    bandwidth of every level (two to five seconds on 200 Mbit/s), and plans are chosen by that: their last bits may then
    differ between runs; only the hook can. `fusion="auto"` measures in any case."""

    nics: str = GLOOS_NIC
    """Network interface that gloo listens on, on CPUs: `auto` leaves it to gloo, `per_rank` takes the one that the
    topology gives each local rank. gloo's own is that of GLOO_SOCKET_IFNAME, which `per_rank` overrides, or the one
    that the hostname resolves to. To send one rank's messages over several, bond them, or use MPTCP."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", PlanChoice.of(self.plan))
        _check_kinds(self, {"transport": str, "timeout": timedelta})
        _check_transport(self.transport)
        _check_choice("nics", self.nics, NICS)
        if self.timeout < timedelta(0):
            raise ValueError(
                f"`timeout` is {self.timeout}; wanted a positive duration, or 0 for that of the process group"
            )
        if self.hostname is not None and (len(self.location) > 2 or not all(self.location)):
            raise ValueError(
                f"`hostname` is {self.hostname!r}; wanted a name, with at most two units before it: region/rack/name"
            )
        _check_rate(self.nic_bytes_per_second)

    @property
    def plan_name(self) -> str:
        """Plan of the all-reduces: `auto`, `flat`, `hierarchical` or `leader`."""
        return PlanChoice.of(self.plan).name

    @property
    def chunks(self) -> int:
        """Chunks that a bucket is cut into; 0 lets the planner choose."""
        return PlanChoice.of(self.plan).chunks

    @property
    def given_rate(self) -> float | None:
        """Bytes per second of this node to the others, if the user gave a number; else None."""
        return None if isinstance(self.nic_bytes_per_second, str) else self.nic_bytes_per_second

    @property
    def measures_links(self) -> bool:
        """Whether every level is measured before the first step, and plans are chosen by that."""
        return self.nic_bytes_per_second == MEASURE

    @property
    def probes_links(self) -> bool:
        """Whether unknown links between CPU nodes are measured for a moment before the first step."""
        return self.nic_bytes_per_second is None

    @property
    def host(self) -> str | None:
        """Name of the node without the units above it; None if the node has its host's name."""
        return (self.hostname or "").rpartition("/")[2] or None

    @property
    def location(self) -> tuple[str, ...]:
        """Units above the node that this rank is in, outermost first: `("region1", "rack7")`."""
        return tuple((self.hostname or "").split("/")[:-1])

    @property
    def transport_name(self) -> str:
        """Name of the transport, without a number of connections."""
        return self.transport.partition(":")[0]

    @property
    def connections(self) -> int:
        """Number of TCP connections of a large message between two nodes; 0 derives it from round trip and rate."""
        return int(self.transport.partition(":")[2] or 0)

    def with_timeout_of(self, group: timedelta) -> Self:
        """Returns a copy with a process group's timeout; returns this object itself if it has a timeout of its own.

        Args:
            group: Timeout of the process group.
        """
        return self if self.timeout else dataclasses.replace(self, timeout=group)


@dataclass(frozen=True, kw_only=True)
class Compressing:
    """Holds the options of compression between nodes, a part of `Config`; a ValueError if there is no such compressor.

    Options of the compressor and rules are not checked here, but when the compressor is made.
    """

    compressor: str | None = None
    """Name of the compressor for the phase between nodes; None is exact."""

    compressor_options: "Mapping[str, Option]" = field(default_factory=dict)
    """Options of that compressor, as its documentation names them."""

    rules: "Sequence[Rule | Mapping[str, object]]" = ()
    """Rules that choose how each parameter is compressed: `gradwire.compressors.rules.Rule`s, or mappings."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", self.rules or ())
        if self.compressor is not None:
            _check_compressor(self.compressor)


@dataclass(frozen=True, kw_only=True)
class Summing:
    """Holds the option that decides how the ranks' gradients are combined, a part of `Config`; see `Reduction`."""

    reduction: "Reduction | str | Mapping[str, object]" = field(default_factory=Reduction)
    """Reduction of the ranks' gradients; see `Reduction`. `sum` (which `average` divides by the ranks), `samples`, or a
    mapping such as `{"average": False}`; a Reduction once the Config is made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduction", Reduction.of(self.reduction))

    @property
    def sums(self) -> Reduction:
        """Reduction of the ranks' gradients."""
        return Reduction.of(self.reduction)


@dataclass(frozen=True, kw_only=True)
class Fusing:
    """Holds the option that decides which buckets are joined into one all-reduce, a part of `Config`.

    It is a finite number of MiB, 0 or more, or a text: `bucket`, `auto`, `delayed`, or a file for cuts whose name ends
    with `.json`; `auto` and the file may be followed by a colon and a number of MiB: `auto:25`, `cuts.json:25`.
    Everything else is a ValueError.
    """

    fusion: str | float = BUCKET
    """Buckets that are sent in one all-reduce: `bucket` sends each of DDP's buckets alone; a number joins buckets up to
    so many MiB (for models wrapped with small buckets, see `gradwire.wrap`). `auto` records in the first steps when
    gradients arrive, and then cuts once so that the last transfer ends first; a file, `cuts.json`, does so and keeps
    the cuts for the next run, which reads them instead (own on every rank; rank 0's counts). `auto:25` and
    `cuts.json:25` join up to 25 MiB until then. `delayed` sends all gradients of a dtype in one all-reduce after the
    backward pass (Apex: `delay_allreduce`). See docs/how-to/tune.md."""

    def __post_init__(self) -> None:
        if isinstance(self.fusion, str):
            _check_fusion(self.fusion)
        elif isinstance(self.fusion, bool) or not (isinstance(self.fusion, Real) and 0 <= self.fusion < float("inf")):
            raise ValueError(f"`fusion` is {self.fusion}; wanted a number of MiB >= 0")

    @property
    def fusion_mb(self) -> float:
        """MiB that buckets are joined up to, as long as no cuts are known; 0 joins none."""
        _, mebibytes = _fusion_parts(self.fusion)
        return float(mebibytes or 0) if isinstance(self.fusion, str) else float(self.fusion)

    @property
    def fuses(self) -> bool:
        """Whether several buckets may be joined into one all-reduce, in some step."""
        return self.fusion_mb > 0 or self.fusion == DELAYED or self.learns_cuts

    @property
    def learns_cuts(self) -> bool:
        """Whether the cuts between all-reduces are found from the first steps, or read from a file."""
        return self.cuts_file is not None or str(self.fusion).startswith(AUTO_FUSION)

    @property
    def cuts_file(self) -> str | None:
        """JSON file that keeps the cuts for the next run; None keeps none."""
        kind, _ = _fusion_parts(self.fusion)
        return kind if kind.endswith(CUTS_SUFFIX) else None


@dataclass(frozen=True, kw_only=True)
class Watching:
    """Holds the options of warnings and traces during training, a part of `Config`.

    Raises:
        TypeError: `straggler_every` is no int, or `trace` neither a file nor (file, steps).
        ValueError: A number is out of range, or `nvtx` is given with a number of steps.
    """

    straggler_every: int = 50
    """Most steps between two exchanges of arrival times, which name a straggler; 0 exchanges none. A summary of four
    numbers, sent about every 12 steps, may bring one forward. See docs/how-to/find_the_slow_rank.md."""

    stall_seconds: float = 10.0
    """Seconds without progress after which a warning names the missing rank and the collective that others wait in; 0
    never warns."""

    trace: "str | tuple[str, int] | None" = None
    """File for Perfetto into which rank 0 writes a timeline of all ranks, from the sixth step on: of 20 steps, or
    (file, steps). None writes none. `HookState.trace` does so at any step. `nvtx` marks what the hook issues
    on CUDA as NVTX ranges instead, for Nsight Systems; torch.profiler needs no switch."""

    def __post_init__(self) -> None:
        _check_kinds(self, {"straggler_every": int})
        if self.straggler_every < 0:
            raise ValueError(f"`straggler_every` is {self.straggler_every}; wanted a number of steps, or 0 for never")
        if not 0 <= self.stall_seconds < float("inf"):
            raise ValueError(f"`stall_seconds` is {self.stall_seconds}; wanted a number of seconds, or 0 for never")
        file: object = self.trace or ""
        steps: object = TRACE_STEPS
        if isinstance(self.trace, tuple) and len(self.trace) == 2:
            file, steps = self.trace
        if not isinstance(file, str | os.PathLike) or isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"`trace` is {self.trace!r}; wanted a file, or (file, steps)")
        if file == NVTX and isinstance(self.trace, tuple):
            raise ValueError(f"`trace` is {self.trace!r}; wanted {NVTX} alone, which marks every step")
        if self.trace_steps < 1:
            raise ValueError(f"`trace` is of {self.trace_steps} steps; wanted a number of steps >= 1")

    @property
    def trace_file(self) -> str | None:
        """Path of the file that a timeline is written to; None writes none."""
        if self.marks_nvtx:
            return None
        return self.trace[0] if isinstance(self.trace, tuple) else self.trace

    @property
    def marks_nvtx(self) -> bool:
        """Whether work that is issued on CUDA is marked with NVTX ranges, for Nsight Systems."""
        return self.trace == NVTX

    @property
    def trace_steps(self) -> int:
        """Number of steps in the timeline: that of `trace=(file, steps)`, else `TRACE_STEPS`."""
        return self.trace[1] if isinstance(self.trace, tuple) else TRACE_STEPS


@dataclass(frozen=True, kw_only=True)
class Surviving:
    """Holds the option that decides what happens when a rank fails, a part of `Config`.

    Raises:
        TypeError: `elastic` is neither a bool nor a text.
        ValueError: The text is not HOST:PORT.
    """

    elastic: bool | str = False
    """Whether training continues with the other ranks after a rank or a node fails; see
    docs/how-to/survive_a_lost_node.md. HOST:PORT is the store of a running elastic job, which this process joins."""

    def __post_init__(self) -> None:
        _check_switch(self, "elastic", "True, False or HOST:PORT")
        if self.join is not None and not self.join.rpartition(":")[2].isdigit():
            raise ValueError(f"`elastic` is {self.join!r}; wanted True, or HOST:PORT of a running job's store")

    @property
    def join(self) -> str | None:
        """HOST:PORT of the store of the running job that this process joins; None if it joins none."""
        return self.elastic if isinstance(self.elastic, str) else None


def _names_of(part: type) -> tuple[str, ...]:
    """Returns the names of the options in one part of `Config`, in the order of its fields."""
    return tuple(entry.name for entry in dataclasses.fields(part))


PLANNING, COMPRESSION, SUMMING = map(_names_of, (Planning, Compressing, Summing))
FUSION, WATCHING, ELASTIC = map(_names_of, (Fusing, Watching, Surviving))
"""Names of each part's options; entry points declare by parts which options they take."""


@dataclass(frozen=True, kw_only=True)
class Config(Surviving, Watching, Fusing, Summing, Compressing, Planning):
    """Holds all options that a user can set.

    They are equal on all ranks, except `hostname`, a number in `nic_bytes_per_second`, a file in `fusion` and an
    address in `elastic`.

    Raises:
        TypeError: The value of an option has the wrong type.
        ValueError: The value of an option does not fit; or two exclude each other: `elastic` with `transport` mpi,
            `elastic` with the reduction `samples`, a compressor with the reduction's `sum_dtype` float32.
    """

    def __post_init__(self) -> None:
        global _made
        _made = True
        for part in (Planning, Compressing, Summing, Fusing, Watching, Surviving):
            part.__post_init__(self)
        if self.elastic and self.transport_name == "mpi":
            raise ValueError("`elastic` is set and `transport` is mpi; wanted gloo or nccl")
        self._check_sums()

    def _check_sums(self) -> None:
        """Raises a ValueError for two combinations of options that exclude each other.

        They are the reduction's `sum_dtype="float32"` with a compressor other than `none`, and the reduction `samples`
        with `elastic`.
        """
        sums = self.sums
        if sums.sum_dtype != "own" and self.compressor not in (None, "none"):
            raise ValueError(
                f"`sum_dtype` is {sums.sum_dtype} and `compressor` is {self.compressor}, which sums in float32 anyway; "
                "wanted one of them alone"
            )
        if sums.kind == SAMPLES and self.elastic:
            raise ValueError(
                "`reduction` is samples and `elastic` is set: a step that survivors repeat would be weighed by lost "
                "ranks, too; wanted one of them alone"
            )

    @classmethod
    def from_env(cls, **options: object) -> "Config":
        """Builds a configuration from `options` and the environment; an option wins over its variable.

        Also the option `compressor=None` wins over GRADWIRE_COMPRESSOR, which is logged. The option `elastic=True` does
        not win over a HOST:PORT in GRADWIRE_ELASTIC, which names the running job that is joined. A variable whose name
        is nearly one of gradwire's is warned of, once.

        The variable of a field is `GRADWIRE_<NAME>`, for `timeout` it is `GRADWIRE_TIMEOUT_SECONDS`; an empty one is
        not set. Switches are `1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`; `compressor_options` is a JSON
        object and `rules` a JSON list of objects.

        Args:
            **options: Fields by name.

        Raises:
            TypeError: An option has an unknown name, or its value has the wrong type.
            ValueError: A value does not fit; the message names the option or the variable. Or `compressor_options` or
                `rules` are among `options`, and no compressor is set.
        """
        known = {known_field.name for known_field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise TypeError(_unknown(name, sorted(known)))
        # Read the variables.
        values: dict[str, object] = {}
        for name, (entry, convert) in _VARIABLES.items():
            text = os.environ.get(ENVIRONMENT_PREFIX + name)
            if text:
                try:
                    values[entry] = convert(text)
                except ValueError as error:
                    raise ValueError(f"`{ENVIRONMENT_PREFIX}{name}` is {text!r}; wanted {error}") from None
        _warn_of_misspelt()
        # Options win over variables, but for the exceptions that the docstring names.
        given = values | options
        if options.get("elastic") is True and isinstance(values.get("elastic"), str):
            given["elastic"] = values["elastic"]  # a joining process runs the same script; its variable names the job
        for each in ("compressor_options", "rules"):
            if given.get("compressor") in (None, "none") and options.get(each):
                raise ValueError(
                    f"`{each}` is {options[each]!r}, and no compressor is given; wanted `compressor`, or "
                    "GRADWIRE_COMPRESSOR, too: name the one that this is for. Exact sums take no options"
                )
        if "compressor" in options and options["compressor"] is None and values.get("compressor") is not None:
            log.info("compressor=None: exact; GRADWIRE_COMPRESSOR=%s does not count here", values["compressor"])
        return cls(**given)  # type: ignore[arg-type]  # checked by name above, by value in __post_init__

    @classmethod
    def given(cls, config: "Config | None", options: Mapping[str, object]) -> "Config":
        """Returns `config` itself, or builds a configuration from `options` and the environment if it is None.

        Args:
            config: A complete configuration; None builds one from `options` and the environment.
            options: Options by name.

        Raises:
            TypeError: Both are given, or an option has an unknown name or a value of the wrong type.
            ValueError: A value does not fit; see `from_env`.
        """
        if config is not None and options:
            raise TypeError(
                f"`config` and {', '.join(f'`{name}`' for name in options)} are both given: put the options into the "
                "Config"
            )
        return config or cls.from_env(**options)

    @classmethod
    def automatic(cls) -> "Config | None":
        """Builds the configuration from GRADWIRE_HOOK and the other variables.

        Returns:
            The configuration; None if GRADWIRE_HOOK is unset or empty.

        Raises:
            ValueError: GRADWIRE_HOOK names no compressor, or another one than GRADWIRE_COMPRESSOR; or another
                variable's value does not fit.
        """
        name = os.environ.get(AUTOMATIC)
        if not name:
            return None
        other = os.environ.get(ENVIRONMENT_PREFIX + "COMPRESSOR") or name
        if other != name:
            raise ValueError(f"`{AUTOMATIC}` is {name!r}, but `GRADWIRE_COMPRESSOR` is {other!r}: set one of them")
        try:
            _check_compressor(name)
        except ValueError as error:
            raise ValueError(f"{error}".replace("`compressor`", f"`{AUTOMATIC}`")) from None
        return cls.from_env(compressor=name)

    def asked_for(self, names: Sequence[str]) -> list[str]:
        """Returns those of the named options whose value is not the default, in the order of `names`.

        `nic_bytes_per_second="assume"` does not count: it only leaves out a measurement that is made by default.

        Args:
            names: Names of options.
        """
        return [name for name in names if asks(name, getattr(self, name))]

    def only(self, names: Sequence[str]) -> "Config":
        """Returns a copy that keeps the values of the named options, and has the defaults for all others."""
        return Config(**{name: getattr(self, name) for name in names})

    def shared(self) -> dict[str, str]:
        """Returns what must be equal on all ranks, as text: `VERSION` -> gradwire's, then option's name -> value.

        `hostname` is left out. A rate, a file of cuts and the address in `elastic`, which each rank has for itself, are
        replaced by a text that says only that there is one.
        """
        names = [entry.name for entry in dataclasses.fields(self) if entry.name != "hostname"]
        values = {name: getattr(self, name) for name in names}
        if self.given_rate is not None:
            values["nic_bytes_per_second"] = "a number"
        values["elastic"] = bool(self.elastic)
        if self.cuts_file is not None:  # each rank may name another file
            values["fusion"] = f"a file:{self.fusion_mb}"
        return {VERSION: own_version()} | {name: _plain(value) for name, value in values.items()}


@cache
def own_version() -> str:
    """Returns the version of the installed gradwire, as `gradwire --version` prints it; `not installed` without one."""
    try:
        return importlib.metadata.version("gradwire")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


_made = False
"""True once this process has made a `Config`, as every hook, wrapper and backend of gradwire does."""
_warned: set[str] = set()
"""Names of misspelt variables that a warning was logged about."""


def _warn_of_misspelt() -> None:
    """Logs a warning about each variable whose name is nearly that of one of gradwire's: it has no effect."""
    own = sorted({*_VARIABLES, *_OTHER_VARIABLES})
    for variable in sorted(set(os.environ) - _warned):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in own:
            continue
        if near := _nearest(name, own):
            _warned.add(variable)
            log.warning("`%s` is set, and nothing reads it; wanted `%s%s`?", variable, ENVIRONMENT_PREFIX, near)


def _unknown(name: str, known: Sequence[str]) -> str:
    """Returns the text of an error about an option that does not exist, with the nearest name and all names.

    Args:
        name: Name that was given.
        known: Names of all options.
    """
    near = _nearest(name, known)
    return f"`{name}` is no option of gradwire; {f'did you mean `{near}`? It is' if near else 'wanted'} one of " + (
        ", ".join(known)
    )


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """Returns the known name most like a misspelt one, by its letters or its first words; None if none is similar."""
    begun = [each for each in known if each.startswith(f"{name}_")]  # TIMEOUT for TIMEOUT_SECONDS
    near = begun or get_close_matches(name, known, 1, NEARLY)
    return next(iter(near or [each for each in known if name.startswith(f"{each}_")]), None)


def _fusion_parts(fusion: str | float) -> tuple[str, str]:
    """Splits the option `fusion` at its colon into two texts; neither is checked.

    Args:
        fusion: Value of the option, such as `auto:25`, `cuts.json:25`, `delayed`, or a number of MiB.

    Returns:
        (the text before the colon, or the whole value as text if it has none; the text after it: the MiB up to which
        buckets are joined until cuts are known; empty if there is no colon).
    """
    kind, _, mebibytes = str(fusion).partition(":")
    return kind, mebibytes


def _check_fusion(fusion: str) -> None:
    """Raises a ValueError for a text that is no value of the option `fusion`."""
    kind, mebibytes = _fusion_parts(fusion)
    looks = kind == AUTO_FUSION or (kind.endswith(CUTS_SUFFIX) and kind != CUTS_SUFFIX)
    try:
        fits = not mebibytes or (looks and 0 <= float(mebibytes) < float("inf"))
    except ValueError:
        fits = False
    if not fits or not (looks or fusion in FUSIONS) or fusion.endswith(":"):
        raise ValueError(
            f"`fusion` is {fusion!r}; wanted one of {', '.join(FUSIONS)}, a number of MiB, or a file for the cuts "
            f"whose name ends with {CUTS_SUFFIX}"
        )


def asks(name: str, value: object) -> bool:
    """Returns whether a value of an option differs from its default, but for `nic_bytes_per_second="assume"`.

    Args:
        name: Name of the option.
        value: Value of the option.
    """
    if name == "nic_bytes_per_second" and value == ASSUME:
        return False
    for group in (PlanChoice, Reduction):
        if name == group.OPTION:
            value = group.of(value)
    entry = next(entry for entry in dataclasses.fields(Config) if entry.name == name)
    missing = entry.default is dataclasses.MISSING
    return bool(value != (entry.default_factory() if missing and callable(entry.default_factory) else entry.default))


def automatic_hook_wanted() -> bool:
    """Returns whether GRADWIRE_HOOK is set; its value is checked when the first model is made."""
    return bool(os.environ.get(AUTOMATIC))


def unused_variables() -> dict[str, str]:
    """Returns name -> value of the variables of options that are set while nothing of gradwire that reads them is used.

    Empty once this process has made a `Config`, and if GRADWIRE_HOOK is set. GRADWIRE_HOSTNAME does not count: it also
    says which emulated node a process is on.
    """
    if _made or automatic_hook_wanted():
        return {}
    names = (ENVIRONMENT_PREFIX + name for name in _VARIABLES if name != "HOSTNAME")
    return {name: value for name in names if (value := os.environ.get(name))}


def _plain(value: object) -> str:
    """Returns a value as text that is equal for equal values; of a mapping, whatever its order."""
    if isinstance(value, Mapping):
        return repr(sorted((str(name), repr(entry)) for name, entry in value.items()))
    return repr(value)


def _check_compressor(name: str) -> None:
    """Raises a ValueError for a name that no compressor has."""
    from gradwire.compressors.registry import (
        options_of,  # here: it needs torch, and commands without torch read this file
    )

    options_of(name)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises a ValueError for a value of an option that is none of its choices."""
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}; wanted one of {', '.join(choices)}")


def _check_transport(text: str) -> None:
    """Raises a ValueError for a text that is no value of the option `transport`."""
    name, colon, number = text.partition(":")
    _check_choice("transport", name, TRANSPORTS)
    if colon and not (name in TCP_TRANSPORTS and number.isascii() and number.isdigit() and 1 <= int(number) <= 256):
        raise ValueError(
            f"`transport` is {text!r}; wanted {' or '.join(TCP_TRANSPORTS)} with 1 to 256 connections behind a colon, "
            "such as gloo:8, or no colon: the round trip decides"
        )


def _check_rate(value: object) -> None:
    """Refuses a value of `nic_bytes_per_second` that is neither a positive number, `measure`, `assume`, nor None.

    Raises:
        TypeError: The value has another type.
        ValueError: The number is not positive and finite, or the text another word.
    """
    wanted = f"wanted a number of bytes per second > 0, {' or '.join(RATES)}, or None"
    if isinstance(value, bool) or not isinstance(value, float | int | str | None):
        raise TypeError(f"`nic_bytes_per_second` is {value!r} ({type(value).__name__}); {wanted}")
    fits = value in RATES if isinstance(value, str) else value is None or 0 < value < float("inf")
    if not fits:
        raise ValueError(f"`nic_bytes_per_second` is {value!r}; {wanted}")


# Functions that parse the text of an environment variable; the text of their ValueError is what was wanted.


def _reader(kind: Callable[[str], object], wanted: str) -> Callable[[str], object]:
    """Makes a parser of a variable, which raises ValueError(`wanted`) if the text cannot be converted.

    Args:
        kind: Converts the text; raises ValueError or OverflowError if it cannot.
        wanted: What the variable may be.
    """

    def read(text: str) -> object:
        try:
            return kind(text)
        except (ValueError, OverflowError):
            raise ValueError(wanted) from None

    return read


_whole_number = _reader(int, "a whole number")
_number = _reader(float, "a number")
_seconds = _reader(lambda text: timedelta(seconds=float(text)), "a number of seconds")


def _switch(text: str) -> bool:
    """Parses a switch: `1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`, in any case; else raises ValueError."""
    if text.lower() in ON:
        return True
    if text.lower() in OFF:
        return False
    raise ValueError("1, true, yes or on; or 0, false, no or off")


def _rate(text: str) -> str | float | None:
    """Parses GRADWIRE_NIC_BYTES_PER_SECOND: a float in bytes per second, or `measure`, `assume`, `auto` in any case.

    Returns the number, unchecked (`Config` refuses one that is not positive and finite); or the word in lower case,
    but None for `auto`.

    Raises:
        ValueError: The text is none of these; the message says what was wanted.
    """
    if (word := text.lower()) in ("auto", *RATES):
        return None if word == "auto" else word
    return _reader(float, f"a number of bytes per second, {', '.join(RATES)} or auto")(text)  # type: ignore[return-value]


def _number_or_word(text: str) -> str | float:
    """Parses GRADWIRE_FUSION: returns a number as a float, and any other text as it is."""
    try:
        return float(text)
    except ValueError:
        return text


def _group(wanted: str) -> Callable[[str], object]:
    """Makes a parser of a variable that is a word, or a JSON object with the fields of an `OptionGroup`.

    The parser parses a text with a brace as JSON, and returns any other text as it is.

    Args:
        wanted: Values that the variable may have, for the ValueError about malformed JSON.
    """
    return lambda text: _json(text, wanted) if "{" in text else text


def _switch_or_address(text: str) -> bool | str:
    """Parses GRADWIRE_ELASTIC: HOST:PORT, a text with a colon, is returned as it is; else a switch, see `_switch`."""
    return text if ":" in text else _switch(text)


def _trace(text: str) -> "str | tuple[str, int] | None":
    """Parses GRADWIRE_TRACE: FILE:STEPS as (file, steps), an empty text as None; returns any other text as it is."""
    file, _, steps = text.rpartition(":")
    return (file, int(steps)) if file and steps.isascii() and steps.isdecimal() else text or None


def _compressor_options(text: str) -> dict[str, object]:
    """Parses GRADWIRE_COMPRESSOR_OPTIONS: a JSON object, option -> value; its arrays become tuples.

    Raises:
        ValueError: It is no JSON object; the message says what was wanted.
    """
    wanted = 'a JSON object such as {"rank": 2}'
    found = _json(text, wanted)
    if not isinstance(found, dict):
        raise ValueError(wanted)  # noqa: TRY004  # from_env names the variable, as for every other value
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _rules(text: str) -> tuple[dict[str, object], ...]:
    """Parses GRADWIRE_RULES: a JSON array of objects, each with the fields of a `gradwire.compressors.rules.Rule`.

    Raises:
        ValueError: It is no such array; the message says what was wanted. Names of fields are not checked here.
    """
    wanted = 'a JSON list of objects such as [{"pattern": "head.*"}]'
    found = _json(text, wanted)
    if not isinstance(found, list) or not all(isinstance(rule, dict) for rule in found):
        raise ValueError(wanted)
    return tuple(found)


def _json(text: str, wanted: str) -> object:
    """Parses JSON and returns its value; raises ValueError if the text is no JSON.

    Args:
        text: Text of a variable.
        wanted: Beginning of the error message: what the variable may be.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{wanted} ({error})") from None


_VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    "PLAN": ("plan", _group('a plan, or a JSON object such as {"name": "hierarchical", "chunks": 4}')),
    "COMPRESSOR": ("compressor", str),
    "COMPRESSOR_OPTIONS": ("compressor_options", _compressor_options),
    "RULES": ("rules", _rules),
    "TRANSPORT": ("transport", str),
    "FUSION": ("fusion", _number_or_word),
    "REDUCTION": ("reduction", _group('sum, samples, or a JSON object such as {"average": false}')),
    "ELASTIC": ("elastic", _switch_or_address),
    "TIMEOUT_SECONDS": ("timeout", _seconds),
    "HOSTNAME": ("hostname", str),
    "NIC_BYTES_PER_SECOND": ("nic_bytes_per_second", _rate),
    "NICS": ("nics", str),
    "STRAGGLER_EVERY": ("straggler_every", _whole_number),
    "STALL_SECONDS": ("stall_seconds", _number),
    "TRACE": ("trace", _trace),
}
"""Name behind the prefix -> (field, what its text becomes); one for each field of `Config`."""

_OTHER_VARIABLES = ("HOOK", "PURE", "WATCH", "WATCH_JSON", "WATCH_METRICS", "WATCH_STALL_SECONDS", "WATCH_TRACE")
"""Names behind the prefix that are no field of `Config`."""

"""Compressors by name: the table, the strict check of options, and the registration of a user's own.

What comes with gradwire has an entry in `_factories` and in `CODEC_FACTS` of comms/plan/codec_price.py, which orders
compressors by distortion; one that fails or ends behind under some optimizers also in optim/fit.py. Predictions, the
laws of codecs and compressors and `gradwire bench codecs` take every entry by themselves. Formats of FSDP2's shards are
a choice of their own: `SHARD_CHOICES`, `WEIGHT_CHOICES` and `codec_of` of comms/sharded/collectives.py. Choices by
hand, which a new one joins if it is worth a place there: what predict shows without `--all` (`LINES` of
gradwire/cli/predict_show.py), the bound by which `gradwire bench` judges a result (`bound_of` and `count_outside` of
bench/nccl_tests/checks.py), and, of a compressor that keeps a momentum or needs an optimizer, `SGD_ONLY` and
`LONG_RUNS_ONLY` of comms/plan/advise.py. tests/test_budgets.py allows twelve compressors: a new one replaces one, or
raises that number and says why.

A block codec has kernels under the name `BlockFormat.family`. It has a place in

- csrc/cpu/kernels/codecs: its file, its `make_` function in block_format.h, and a row of `kFamilies` in
  block_format.cpp; without these, an invalid_argument at the first bucket;
- `INTERFACE` of csrc/cpu/bind.cpp and `_INTERFACE` of compiled.py, both one higher, so that old builds are refused;
- csrc/cuda: a file that is named as the family; its functions in `ENTRY_POINTS` of kernels/cuda/load.py, and their
  grids in `FAMILIES` of kernels/cuda/families.py; without a file, GPUs use the reference kernels, after a warning;
- `CALLS` of bench/kernels/calls.py, for `gradwire selftest`, and `CODECS` of tests/support/block_codecs.py, by which
  all sets of kernels are compared, with `HEADS` beside it if a payload begins with floats;
  tests/kernels_on_cpu/cases.py and `FAMILIES` of tests/fake_cuda/test_compressed_streams.py have one codec of each
  kind.

Bits on other processors are compared by tests/aarch64/vectors.py and tests/digests. A block of more than 1024 elements
needs another `SHARD_ALIGN` (two_stage.py).

tests/compressors/test_registry.py and the tests in tests/csrc say what is missing; `python docs/capabilities.py` writes
the page that lists every compressor.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import cast

from gradwire.compressors.base import Codec, Compressor
from gradwire.compressors.codecs.cast import Cast
from gradwire.compressors.codecs.onebit import OneBit
from gradwire.compressors.codecs.quantize import Quantize
from gradwire.compressors.codecs.waterfill import Waterfill
from gradwire.compressors.dense import Dense
from gradwire.compressors.dgc import DGC
from gradwire.compressors.powersgd import PowerSGD
from gradwire.compressors.two_stage import TwoStage

Option = bool | int | float | str | None | tuple[float, ...] | tuple[str, ...]
"""Type of an option's value."""
Factory = Callable[..., Compressor]
"""Function that makes a compressor; its keyword-only parameters are the options."""

_factories: dict[str, Factory] = {
    "none": Dense,
    "fp16": partial(Cast, "fp16"),
    "bf16": partial(Cast, "bf16"),
    "int8": partial(Quantize, "int8"),
    "int4": partial(Quantize, "int4"),
    "waterfill5": partial(Waterfill, "waterfill5"),
    "waterfill4": partial(Waterfill, "waterfill4"),
    "waterfill3": partial(Waterfill, "waterfill3"),
    "waterfill2": partial(Waterfill, "waterfill2"),
    "onebit": OneBit,
    "dgc": DGC,
    "powersgd": PowerSGD,
}
BUILT_IN = tuple(_factories)
"""Names of the compressors that come with gradwire."""

GONE = {"chunk_topk": "take waterfill2, which ends as near in as few bits where `Outer` exchanges more rarely"}
"""Name of a compressor that was removed -> what to do instead."""

_outer: dict[str, type[PowerSGD] | type[DGC]] = {"powersgd": PowerSGD, "dgc": DGC}
"""Name before the `+` of a stack -> compressor whose payload of floats can be encoded by another codec."""
_alone = (*_outer, "none")
"""Names that are not allowed behind the `+`: these compressors have an exchange of their own, or encode nothing."""
_own_narrowing = {"powersgd": "factor_dtype", "dgc": "value_dtype"}
"""Name before the `+` -> its option that narrows the payload, which a stack does not take: the codec does that."""
_inner_options = ("stochastic", "seed")
"""Options of the codec behind the `+` that a stack takes. Its others are about a residual and a dense start of its own,
which a stack does not have."""


def names() -> tuple[str, ...]:
    """Returns the values that `compressor=` accepts, in the order of registration."""
    return tuple(_factories)


def register_compressor(name: str, factory: Factory) -> None:
    """Makes `compressor=name` call `factory(**compressor_options)`.

    Call it on every rank, before the compressor is named.

    Args:
        name: Name of the compressor; no other one may have it.
        factory: Returns a new `Compressor`, whose `name` should be `name`. Its keyword-only parameters are the options;
            unknown options are refused before it is called, and so are values of another type than the default's.

    Raises:
        ValueError: `name` is already registered.
    """
    if name in _factories:
        raise ValueError(f"`name` {name!r} is taken; registered are {', '.join(_factories)}: choose another")
    _factories[name] = partial(factory)  # hashable, whatever the factory is


def register_codec(name: str, codec: Callable[[], Codec]) -> None:
    """Makes `compressor=name` use a user's codec, with residuals and the two-stage exchange around it.

    Call it on every rank, before the compressor is named. The options of the compressor are `residual` (True),
    `momentum` (0.0) and `warmup_steps` (0); see `TwoStage`.

    Args:
        name: Name of the compressor; no other one may have it.
        codec: A class, or a function without arguments, that returns a `Codec`; called once for each compressor made.

    Raises:
        ValueError: `name` is already registered.
    """

    def factory(*, residual: bool = True, momentum: float = 0.0, warmup_steps: int = 0) -> Compressor:
        return TwoStage(name, codec(), residual=residual, momentum=momentum, warmup_steps=warmup_steps)

    register_compressor(name, factory)


def options_of(name: str) -> dict[str, Option]:
    """Returns the options of a compressor and their defaults.

    Args:
        name: One of `names()`, or a stack of two: "powersgd+int8", "dgc+int4".

    Raises:
        ValueError: No compressor is registered under that name, or the two cannot be stacked.
    """
    if "+" in name:
        first, second = _parts_of(name)
        options = {key: value for key, value in options_of(first).items() if key != _own_narrowing[first]}
        return options | {key: value for key, value in options_of(second).items() if key in _inner_options}
    if name not in _factories:
        gone = f", which is gone: {GONE[name]}" if name in GONE else ""
        outer, inner = _stackable()
        raise ValueError(
            f"`compressor` is {name!r}{gone}; wanted one of {', '.join(_factories)}; or a stack of {outer}, a `+`, and "
            f"one of {inner}"
        )
    return dict(_defaults_of(_factories[name]))


@lru_cache(maxsize=64)
def _defaults_of(factory: Factory) -> Mapping[str, Option]:
    """Returns option -> default of a factory; cached, because predictions make the same compressor again and again."""
    parameters = inspect.signature(factory).parameters.values()
    return {item.name: cast(Option, item.default) for item in parameters if item.kind is item.KEYWORD_ONLY}


def make(name: str, options: Mapping[str, Option] | None = None) -> Compressor:
    """Returns a new compressor.

    Args:
        name: One of `names()`, or a stack of two: "powersgd+int8", "dgc+int4".
        options: Option -> value; options that are left out keep their defaults. A stack takes the options of its first
            part but the one that narrows its payload (`factor_dtype`, `value_dtype`), and `stochastic` and `seed` of
            its second if it has them.

    Raises:
        ValueError: An unknown compressor or option, or a value out of range.
        TypeError: A value of another type than the option's default.
    """
    valid = options_of(name)
    for option, value in (options or {}).items():
        if option not in valid:
            raise ValueError(
                f"`compressor_options` has {option!r}, which {name!r} does not take; "
                f"it takes {', '.join(sorted(valid)) or 'no options'}"
            )
        _check_type(name, option, value, valid[option])
    if "+" in name:
        return _stacked(name, dict(options or {}))
    return _factories[name](**dict(options or {}))


def _parts_of(name: str) -> tuple[str, str]:
    """Returns the two names of a stack.

    Raises:
        ValueError: The first part does not send floats that a codec could encode, or the second is no codec.
    """
    first, _, second = name.partition("+")
    if first not in _outer or second not in _factories or second in _alone:
        outer, inner = _stackable()
        raise ValueError(
            f"`compressor` is {name!r}; wanted {outer} before the `+`, and behind it a codec for what they send: one "
            f"of {inner}"
        )
    return first, second


def _stackable() -> tuple[str, str]:
    """Returns the names allowed before the `+` of a stack, and those allowed behind it, as text for errors."""
    return " or ".join(_outer), ", ".join(each for each in _factories if each not in _alone)


def _stacked(name: str, options: dict[str, Option]) -> Compressor:
    """Returns `powersgd` or `dgc` with a codec that encodes its payloads: one compressor with one residual.

    Raises:
        ValueError: The second part is a compressor with an exchange of its own.
    """
    first, second = _parts_of(name)
    own = options_of(first)
    inner = _factories[second](**{key: value for key, value in options.items() if key not in own})
    if not isinstance(inner, TwoStage):
        raise ValueError(  # noqa: TRY004  # the name is wrong, as in `_parts_of`
            f"`compressor` is {name!r}; wanted a codec behind the `+`, and {second!r} is a compressor with an exchange "
            "of its own"
        )
    return _outer[first](inner, **{key: value for key, value in options.items() if key in own})  # type: ignore[arg-type]


def _check_type(name: str, option: str, value: Option, default: Option) -> None:
    """Refuses a value of another type than the default's; an int passes for a float, but a bool for neither."""
    if default is None or value is None or isinstance(default, type):  # a user's option may have no default
        return
    kind = type(default)
    fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if not fits and not (kind is float and isinstance(value, int) and not isinstance(value, bool)):
        raise TypeError(
            f"`{option}` of compressor {name!r} is {value!r} ({type(value).__name__}); "
            f"wanted {kind.__name__}, as its default {default!r}"
        )

"""Frozen dataclasses <-> the dictionaries, lists and strings of JSON, checked against the annotations on the way in."""

from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

from gradwire.topology.errors import TopologyError

T = TypeVar("T")

MAX_NUMBER = 2**64
"""Nothing in a machine is negative or larger: bytes, rates, counts, ids."""


def to_plain(value: object) -> object:
    """Converts a value to dictionaries, lists and plain values; fields that are None or an empty tuple are left out.

    Args:
        value: A dataclass instance, a tuple, or something JSON knows.
    """
    if is_dataclass(value):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: to_plain(item) for name, item in found.items() if item is not None and item != ()}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(value: object, kind: type[T], place: str) -> T:
    """Builds a dataclass instance from the form that `to_plain` returns.

    Args:
        value: Parsed JSON; an object is expected.
        kind: Dataclass to build; its fields are plain values, None, Literals, tuples and dataclasses.
        place: Path of the value in the document, for messages: `graph.gpus[0]`.

    Raises:
        TopologyError: A value has the wrong type or is out of range, or a field is unknown or missing.
    """
    if not isinstance(value, dict):
        raise TopologyError(f"`{place}` is {_shown(value)}, expected an object")
    hints = get_type_hints(kind)
    unknown = sorted(str(name) for name in value if name not in hints)
    if unknown:
        raise TopologyError(f"`{place}` has the unknown field `{unknown[0]}`")
    arguments = {name: _convert(item, hints[name], f"{place}.{name}") for name, item in value.items()}
    try:
        return kind(**arguments)
    except TypeError as error:
        raise TopologyError(f"`{place}`: {error}") from None


def _convert(value: object, hint: object, place: str) -> object:
    """Converts a value to the type of an annotation; raises TopologyError if it does not match."""
    origin = get_origin(hint)
    if origin is UnionType:
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        return None if value is None else _convert(value, choices[0], place)
    if origin is tuple:
        if not isinstance(value, list):
            raise TopologyError(f"`{place}` is {_shown(value)}, expected a list")
        return tuple(_convert(item, get_args(hint)[0], f"{place}[{i}]") for i, item in enumerate(value))
    if origin is Literal:
        if value in get_args(hint):
            return value
        raise TopologyError(f"`{place}` is {_shown(value)}, expected one of {', '.join(map(str, get_args(hint)))}")
    if isinstance(hint, type) and is_dataclass(hint):
        return from_plain(value, hint, place)
    if hint in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value <= MAX_NUMBER or (hint is int and not isinstance(value, int)):
            raise TopologyError(f"`{place}` is {_shown(value)}, expected a number from 0 to 2^64")
        return hint(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise TopologyError(f"`{place}` is {_shown(value)}, expected {getattr(hint, '__name__', hint)}")


def _shown(value: object) -> str:
    """Returns a value's `repr`, cut to 40 characters, for messages."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

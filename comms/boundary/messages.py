"""The one parser of what other processes say: JSON of a declared type, of bounded size and depth, with finite numbers.

A message is declared by a type, as a dataclass declares its fields: `MessageType(tuple[Port, tuple[str, ...], str])`.
Whatever the bytes are, `MessageType.read` either returns a value of exactly that type or raises a `MessageError`, which
a caller answers by dropping who has said it. `inflated` does the same for compressed bytes.
"""

import dataclasses
import json
import math
import re
import types
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

MOST_NBYTES = 1 << 20
"""Bytes of a message, unless its declaration allows more: 4,096 ranks' numbers and the shapes of a model fit."""

MOST_DEPTH = 32
"""Arrays and objects inside each other. The deepest message of gradwire, a watch's word, has 6."""

MOST_DIGITS = 20
"""Digits of a whole number: 2**64 has 20. Python takes time in the square of the digits."""

WHOLE = (-(1 << 63), (1 << 64) - 1)
"""The range of a whole number whose declaration names none: what C++ and tensors hold."""

_PARTS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
"""A string, which may hold brackets, or a bracket. A string that does not end reaches to the end: one pass in all."""


class MessageError(ValueError):
    """Bytes of another process are not the message that was expected: drop whoever has said them."""


@dataclass(frozen=True, slots=True)
class Within:
    """The least and the greatest value of a number, both allowed: `Annotated[int, Within(0, 65535)]`."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Most:
    """The greatest length of a text, an array or an object: `Annotated[str, Most(100)]`."""

    length: int


Port = Annotated[int, Within(0, (1 << 16) - 1)]
"""A port of TCP or UDP; 0 for none."""
Rank = Annotated[int, Within(0, (1 << 31) - 1)]
"""A rank's number in its group."""
Count = Annotated[int, Within(0, (1 << 63) - 1)]
"""How many of something."""
Address = Annotated[str, Most(256)]
"""An IP address or a host's name (RFC 1035 has 255 characters)."""
Addresses = Annotated[tuple[Address, ...], Most(64)]
"""Those of one host."""
Kernel = Annotated[str, Most(256)]
"""What `own_kernel` returns."""

_Check = Callable[[object, str], Any]
"""Returns the value as the declared type has it, or raises a `MessageError` that names the place."""


class MessageType(Generic[T]):
    """What one kind of message is.

    Args:
        kind: The type of its value: built of None, bool, int, float, str, `Literal`, tuple, list, set, dict, Counter,
            Mapping, Sequence, unions, `Annotated` with `Within` and `Most`, dataclasses (an object with their fields),
            and `object` for any value of JSON. An int without `Within` is in `WHOLE`. A float may be written as a whole
            number. Keys of an object are str, or int for decimal digits; a mapping with other keys is an array of
            (key, value).
        most_nbytes: Bytes that a message has at most.
        finite: Whether infinity and NaN are refused, in the words that Python's json has for them.
    """

    def __init__(self, kind: object, *, most_nbytes: int = MOST_NBYTES, finite: bool = True) -> None:
        self._check = _check_of(kind, finite)
        self._most_nbytes = most_nbytes
        self._finite = finite

    @staticmethod
    def write(value: object) -> str:
        """Return `value`, built of the types that a message may have, as the JSON that `read` takes."""
        return json.dumps(_plain(value))

    def read(self, said: bytes | str) -> T:
        """Reads one message.

        Args:
            said: UTF-8 or text.

        Raises:
            MessageError: It is something else.
        """
        return self.check(parsed(said, most_nbytes=self._most_nbytes, finite=self._finite))

    def check(self, value: object) -> T:
        """Checks a value that was a part of another message.

        Raises:
            MessageError: It is something else.
        """
        found: T = self._check(value, "it")
        return found


def parsed(said: bytes | str, *, most_nbytes: int = MOST_NBYTES, finite: bool = True) -> object:
    """Reads JSON of any kind: None, bool, int, float, str, list and dict.

    Args:
        said: UTF-8 or text.
        most_nbytes: Bytes (characters of a text) at most.
        finite: Whether numbers must be finite; else Python's Infinity and NaN are read, too.

    Raises:
        MessageError: It is no JSON, too long, too deep, or has a number that is too long or not finite.
    """
    if len(said) > most_nbytes:
        raise MessageError(f"a message has {len(said)} bytes; at most {most_nbytes} are taken")
    try:
        text = said if isinstance(said, str) else said.decode()
        _refuse_deep(text)
        return json.loads(
            text,
            parse_int=_whole,
            parse_float=_finite if finite else float,
            parse_constant=_refuse_constant if finite else None,
        )
    except MessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a message is no JSON: {error}") from None


def inflated(packed: bytes, most_nbytes: int) -> bytes:
    """Inflates what zlib has deflated, without ever holding more than `most_nbytes`.

    Raises:
        MessageError: It is something else, has more, or bytes follow it.
    """
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(packed, most_nbytes)
        if not reader.eof:
            found += reader.decompress(reader.unconsumed_tail, 1)  # the end may lie behind the last byte
    except zlib.error as error:
        raise MessageError(f"compressed bytes cannot be read: {error}") from None
    if len(found) > most_nbytes or not reader.eof or reader.unused_data:
        raise MessageError(f"compressed bytes are cut off, go on behind their end, or hold more than {most_nbytes}")
    return found


def _refuse_deep(text: str) -> None:
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return
    depth = 0
    for part in _PARTS.finditer(text):
        if (first := text[part.start()]) == '"':
            continue
        depth += 1 if first in "[{" else -1
        if depth > MOST_DEPTH:
            raise MessageError(f"a message has more than {MOST_DEPTH} arrays and objects inside each other")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise MessageError(f"a message has a whole number of {len(digits)} digits; wanted at most {MOST_DIGITS}")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise MessageError(f"a message has the number {digits[:40]}, which is not finite")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise MessageError(f"a message has the number {name}, which is not finite")


def _refuse(value: object, place: str, wanted: str) -> NoReturn:
    raise MessageError(f"a message is not as expected: {place} is {repr(value)[:60]}; wanted {wanted}")


def _check_of(kind: Any, finite: bool) -> _Check:
    """Makes the check of a type; once for a declaration."""
    limits: tuple[object, ...] = ()
    if get_origin(kind) is Annotated:
        kind, *rest = get_args(kind)
        limits = tuple(rest)
    check = _check_of_plain(kind, finite)
    for limit in limits:
        check = _limited(check, limit)
    return check


def _check_of_plain(kind: Any, finite: bool) -> _Check:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is object or kind is Any:
        return lambda value, place: value
    if kind is float:
        return lambda value, place: _float(value, place, finite)
    if kind is int:
        return _int
    if kind in (bool, str):
        return lambda value, place: value if isinstance(value, kind) else _refuse(value, place, kind.__name__)
    if kind in (None, types.NoneType):
        return lambda value, place: None if value is None else _refuse(value, place, "null")
    if dataclasses.is_dataclass(kind):
        return _fields(kind, finite)
    if origin is Literal:
        return lambda value, place: _literal(value, parts, place)
    if origin in (Union, types.UnionType):
        parts = tuple(sorted(parts, key=lambda each: each is not types.NoneType))  # the last one names what is wanted
        return _either([_check_of(each, finite) for each in parts])
    if origin is tuple and parts[1:] != (Ellipsis,):
        return _row([_check_of(each, finite) for each in parts])
    if origin in (tuple, list, Sequence):
        return _array(_check_of(parts[0], finite), list if origin is list else tuple)
    if origin in (set, frozenset):
        return _set(_check_of(parts[0], finite))
    if origin is Counter:
        parts = (*parts, int)
    if origin in (dict, Mapping, Counter):
        of_pairs = parts[0] not in (str, int)
        mapping = _pairs(*(_check_of(each, finite) for each in parts)) if of_pairs else _mapping(parts, finite)
        return _made_into(Counter, mapping) if origin is Counter else mapping
    raise TypeError(f"`kind` has {kind!r}, which no message can be declared with")


def _limited(check: _Check, limit: object) -> _Check:
    def limited(value: object, place: str) -> Any:
        found = check(value, place)
        if isinstance(limit, Within) and not limit.least <= found <= limit.most:
            _refuse(value, place, f"a number from {limit.least} to {limit.most}")
        if isinstance(limit, Most) and len(found) > limit.length:
            _refuse(value, place, f"a length of at most {limit.length}, not {len(found)}")
        return found

    return limited


def _int(value: object, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not WHOLE[0] <= value <= WHOLE[1]:
        _refuse(value, place, "a whole number of 64 bits")
    return value


def _float(value: object, place: str, finite: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or (finite and not math.isfinite(value)):
        _refuse(value, place, "a finite number")
    return float(value)  # of `MOST_DIGITS` digits at most: it fits


def _literal(value: object, allowed: Sequence[object], place: str) -> object:
    if not any(type(value) is type(each) and value == each for each in allowed):
        _refuse(value, place, f"one of {', '.join(map(repr, allowed))}")
    return value


def _either(checks: Sequence[_Check]) -> _Check:
    """The first of several that takes a value; what the last one says where none does.

    No error is kept: with its frames, and what those of the callers hold, it would be a circle.
    """

    def either(value: object, place: str) -> Any:
        for check in checks[:-1]:
            try:
                return check(value, place)
            except MessageError:
                continue
        return checks[-1](value, place)

    return either


def _row(checks: Sequence[_Check]) -> _Check:
    def row(value: object, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(checks):
            _refuse(value, place, f"an array of {len(checks)}")
        return tuple(
            check(each, f"{place}[{index}]") for index, (check, each) in enumerate(zip(checks, value, strict=True))
        )

    return row


def _array(check: _Check, made: type[list[Any]] | type[tuple[Any, ...]]) -> _Check:
    def array(value: object, place: str) -> Any:
        if not isinstance(value, list):
            _refuse(value, place, "an array")
        inside = f"{place}[...]"
        return made([check(each, inside) for each in value])

    return array


def _set(check: _Check) -> _Check:
    array = _array(check, tuple)

    def found(value: object, place: str) -> Any:
        return _unique(array(value, place), value, place)

    return found


def _pairs(key: _Check, check: _Check) -> _Check:
    array = _array(_row((key, check)), tuple)

    def mapped(value: object, place: str) -> dict[Any, Any]:
        if value == {}:  # an empty mapping shows no keys, so it is written as an object
            return {}
        pairs = array(value, place)
        _unique([key for key, _ in pairs], value, place)
        return dict(pairs)

    return mapped


def _unique(found: Sequence[Any], value: object, place: str) -> set[Any]:
    try:
        unique = set(found)
    except TypeError:  # a declaration with `object` inside: this value of it cannot be hashed
        _refuse(value, place, "values that can be in a set")
    if len(unique) != len(found):
        _refuse(value, place, "each value once")
    return unique


def _mapping(parts: Sequence[Any], finite: bool) -> _Check:
    return _object(parts[0] is int, _check_of(parts[1], finite))


def _made_into(made: Callable[[Any], Any], check: _Check) -> _Check:
    return lambda value, place: made(check(value, place))


def _plain(value: object) -> object:
    """Return `value` as what JSON has: dataclasses and mappings as objects, sets as arrays."""
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value) if each.init}
    if isinstance(value, Mapping):
        if all(isinstance(key, str | int) for key in value):
            return {key: _plain(each) for key, each in value.items()}
        return [[_plain(key), _plain(each)] for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return [_plain(each) for each in sorted(value)]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _object(numbered: bool, check: _Check) -> _Check:
    def mapped(value: object, place: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            _refuse(value, place, "an object")
        found = {
            (_key(key, place) if numbered else key): check(each, f"{place}[{key[:40]!r}]")
            for key, each in value.items()
        }
        return found

    return mapped


def _key(key: str, place: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= MOST_DIGITS):
        _refuse(key, place, "keys of decimal digits")
    return int(key)


def _fields(kind: Any, finite: bool) -> _Check:
    hints = get_type_hints(kind, include_extras=True)
    fields = [each for each in dataclasses.fields(kind) if each.init]
    checks = {each.name: _check_of(hints[each.name], finite) for each in fields}
    needed = {
        each.name
        for each in fields
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    }

    def made(value: object, place: str) -> Any:
        if not isinstance(value, dict) or not needed <= value.keys() <= checks.keys():
            _refuse(value, place, f"an object with {', '.join(checks)}")
        found = {name: checks[name](each, f"{place}.{name}") for name, each in value.items()}
        try:
            return kind(**found)
        except (ValueError, TypeError, OverflowError) as error:  # what the class itself refuses
            raise MessageError(f"a message is not as expected: {place} is refused: {error}") from None

    return made

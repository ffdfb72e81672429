"""Parses messages of other processes: JSON of a declared type, of bounded size and depth, with finite numbers.

A message is declared by a type, as a dataclass declares its fields: `MessageType(tuple[Port, tuple[str, ...], str])`.
Whatever the bytes are, `MessageType.read` either returns a value of exactly that type or raises a `MessageError`, on
which the caller drops the sender. `inflated` does the same for compressed bytes. No other code parses messages.
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
from ipaddress import ip_address
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

MOST_NBYTES = 1 << 20
"""Most bytes of a message, unless its declaration gives another limit: the numbers of 4,096 ranks fit, and the shapes
of a model."""

MOST_DEPTH = 32
"""Most levels of nested arrays and objects. The deepest message of gradwire, one of a watch, has 6."""

MOST_DIGITS = 20
"""Most digits of a whole number: 2**64 has 20. The time to parse one grows with the square of its digits."""

WHOLE = (-(1 << 63), (1 << 64) - 1)
"""Least and greatest whole number if the declaration gives no range: what int64 and uint64 hold together."""

_PARTS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
"""Matches a string of JSON, with any brackets in it, or a bracket outside strings. A string without an end matches to
the end of the text, so that one pass suffices."""


class MessageError(ValueError):
    """Raised if bytes of another process are not the expected message; the caller drops the sender."""


@dataclass(frozen=True, slots=True)
class Within:
    """Limits a number to a range, both ends included: `Annotated[int, Within(0, 65535)]`."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Most:
    """Limits the length of a text, an array or an object: `Annotated[str, Most(100)]`."""

    length: int


class IpAddress:
    """Limits a text to an IP address: `Annotated[str, IpAddress()]`. A name would be looked up, which may take long."""


Port = Annotated[int, Within(0, (1 << 16) - 1)]
"""Port of TCP or UDP; 0 for none."""
Rank = Annotated[int, Within(0, (1 << 31) - 1)]
"""A rank's number in its group."""
Count = Annotated[int, Within(0, (1 << 63) - 1)]
"""Number of things, from 0 on."""
Address = Annotated[str, Most(64), IpAddress()]
"""An IP address, IPv4 or IPv6."""
Addresses = Annotated[tuple[Address, ...], Most(64)]
"""Addresses of one host."""
Kernel = Annotated[str, Most(256)]
"""Text that identifies a running kernel, as `own_kernel` returns it."""

_Check = Callable[[object, str], Any]
"""(parsed JSON, its place in the message) -> the value in its declared type; raises a `MessageError` that names the
place if it has another type."""


class MessageType(Generic[T]):
    """Declares one kind of message by the type of its value, and reads and writes such messages.

    Args:
        kind: Type of the value, built of None, bool, int, float, str, `Literal`, tuple, list, set, dict, Counter,
            Mapping, Sequence, unions, `Annotated` with limits (`Within`, ...), dataclasses (an object of their fields),
            and `object` for any value of JSON. An int without `Within` is in `WHOLE`. A float may be written as a whole
            number. Keys of an object are str, or int for decimal digits; a mapping with other keys is an array of
            (key, value).
        most_nbytes: Most bytes of a message (characters, if it is read from a str).
        finite: Whether `read` refuses infinities and NaN; if not, it takes them as Python's json writes them.

    Raises:
        TypeError: No message can have this type.
    """

    def __init__(self, kind: object, *, most_nbytes: int = MOST_NBYTES, finite: bool = True) -> None:
        self._check = _check_of(kind, finite)
        self._most_nbytes = most_nbytes
        self._finite = finite

    @staticmethod
    def write(value: object) -> str:
        """Returns the JSON text of a value, which `read` takes; the value is not checked.

        Args:
            value: Built of the types that a message may have.
        """
        return json.dumps(_plain(value))

    def read(self, message: bytes | str) -> T:
        """Parses one message, and returns its value in the declared type.

        Args:
            message: The message, as UTF-8 or as text.

        Raises:
            MessageError: It is no such message.
        """
        return self.check(parsed(message, most_nbytes=self._most_nbytes, finite=self._finite))

    def check(self, value: object) -> T:
        """Checks a value that was parsed already, as a part of another message, and returns it in the declared type.

        Args:
            value: Parsed JSON, which is not changed.

        Raises:
            MessageError: The value is not of the declared type.
        """
        checked: T = self._check(value, "it")
        return checked


def parsed(text: bytes | str, *, most_nbytes: int = MOST_NBYTES, finite: bool = True) -> object:
    """Parses JSON of any type into None, bool, int, float, str, list and dict.

    Args:
        text: The JSON, as UTF-8 or as text.
        most_nbytes: Most bytes (characters, of a str).
        finite: Whether numbers must be finite; if not, Infinity and NaN as Python writes them are read, too.

    Raises:
        MessageError: The text is no JSON, too long, nested too deep, or has a number that is too long or not finite.
    """
    if len(text) > most_nbytes:
        raise MessageError(f"a message has {len(text)} bytes; at most {most_nbytes} are taken")
    try:
        if not isinstance(text, str):
            text = text.decode()
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
    """Decompresses zlib data, and refuses it before it takes much more memory than `most_nbytes`.

    Args:
        packed: Compressed bytes.
        most_nbytes: Most bytes of the result.

    Raises:
        MessageError: The data is no zlib data, is cut off, holds more, or has bytes behind its end.
    """
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(packed, most_nbytes)
        if not reader.eof:
            content += reader.decompress(reader.unconsumed_tail, 1)  # the end may lie behind the last byte
    except zlib.error as error:
        raise MessageError(f"compressed bytes cannot be read: {error}") from None
    if len(content) > most_nbytes or not reader.eof or reader.unused_data:
        raise MessageError(f"compressed bytes are cut off, go on behind their end, or hold more than {most_nbytes}")
    return content


def _refuse_deep(text: str) -> None:
    """Refuses JSON whose arrays and objects are nested more than 32 levels deep (`MOST_DEPTH`), without parsing it.

    Args:
        text: The JSON; brackets inside its strings do not count. May be no JSON at all.

    Raises:
        MessageError: It is nested too deep.
    """
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
    """Converts the digits of a whole number, as json passes them; a MessageError if there are more than 20."""
    if len(digits) > MOST_DIGITS:
        raise MessageError(f"a message has a whole number of {len(digits)} digits; wanted at most {MOST_DIGITS}")
    return int(digits)


def _finite(digits: str) -> float:
    """Converts the digits of a number with a fraction or exponent; a MessageError if it is too large for a float."""
    if not math.isfinite(value := float(digits)):
        raise MessageError(f"a message has the number {digits[:40]}, which is not finite")
    return value


def _refuse_constant(name: str) -> NoReturn:
    """Raises a MessageError for the constants Infinity, -Infinity and NaN, which json passes by name."""
    raise MessageError(f"a message has the number {name}, which is not finite")


def _refuse(value: object, place: str, wanted: str) -> NoReturn:
    """Raises a `MessageError` that names a value, its place in the message, and what was wanted there."""
    raise MessageError(f"a message is not as expected: {place} is {repr(value)[:60]}; wanted {wanted}")


def _check_of(kind: Any, finite: bool) -> _Check:
    """Makes the function that checks a value of a type (see `_Check`), with the limits of `Annotated`.

    Args:
        kind: The type.
        finite: Whether floats must be finite.

    Raises:
        TypeError: No message can have this type.
    """
    limits: tuple[object, ...] = ()
    if get_origin(kind) is Annotated:
        kind, *rest = get_args(kind)
        limits = tuple(rest)
    check = _check_of_plain(kind, finite)
    for limit in limits:
        check = _limited(check, limit)
    return check


def _check_of_plain(kind: Any, finite: bool) -> _Check:
    """Makes the function that checks a value of a type that is not `Annotated`; see `_check_of`."""
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
        return _tuple([_check_of(each, finite) for each in parts])
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
    """Returns a check that calls `check`, and then applies a `Within`, `Most` or `IpAddress`, or nothing for others."""

    def limited(value: object, place: str) -> Any:
        checked = check(value, place)
        if isinstance(limit, Within) and not limit.least <= checked <= limit.most:
            _refuse(value, place, f"a number from {limit.least} to {limit.most}")
        if isinstance(limit, Most) and len(checked) > limit.length:
            _refuse(value, place, f"a length of at most {limit.length}, not {len(checked)}")
        if isinstance(limit, IpAddress):
            try:
                ip_address(checked)
            except ValueError:
                _refuse(value, place, "an IP address")
        return checked

    return limited


def _int(value: object, place: str) -> int:
    """Checks that a value is a whole number from -2**63 to 2**64 - 1 and no bool, and returns it."""
    if isinstance(value, bool) or not isinstance(value, int) or not WHOLE[0] <= value <= WHOLE[1]:
        _refuse(value, place, "a whole number of 64 bits")
    return value


def _float(value: object, place: str, finite: bool) -> float:
    """Checks that a value is a number and no bool, and finite if `finite` is set, and returns it as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or (finite and not math.isfinite(value)):
        _refuse(value, place, "a finite number")
    return float(value)  # of `MOST_DIGITS` digits at most: it fits


def _literal(value: object, allowed: Sequence[object], place: str) -> object:
    """Checks that a value is one of `allowed`, with the same type (True is not 1), and returns it."""
    if not any(type(value) is type(each) and value == each for each in allowed):
        _refuse(value, place, f"one of {', '.join(map(repr, allowed))}")
    return value


def _either(checks: Sequence[_Check]) -> _Check:
    """Returns a check for a union: that of the first type that takes the value; the last one's error if none does.

    Errors of the others are not kept: an error refers to its frames, which would refer to it.
    """

    def either(value: object, place: str) -> Any:
        for check in checks[:-1]:
            try:
                return check(value, place)
            except MessageError:
                continue
        return checks[-1](value, place)

    return either


def _tuple(checks: Sequence[_Check]) -> _Check:
    """Returns a check for an array with one entry for each check; it makes a tuple."""

    def fixed(value: object, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(checks):
            _refuse(value, place, f"an array of {len(checks)}")
        return tuple(
            check(each, f"{place}[{index}]") for index, (check, each) in enumerate(zip(checks, value, strict=True))
        )

    return fixed


def _array(check: _Check, made: type[list[Any]] | type[tuple[Any, ...]]) -> _Check:
    """Returns a check for an array of any length whose entries pass `check`; it returns a `made`, a list or a tuple."""

    def array(value: object, place: str) -> Any:
        if not isinstance(value, list):
            _refuse(value, place, "an array")
        inside = f"{place}[...]"
        return made([check(each, inside) for each in value])

    return array


def _set(check: _Check) -> _Check:
    """Returns a check for an array of different values that pass `check`; it returns a set."""
    array = _array(check, tuple)

    def unique(value: object, place: str) -> Any:
        return _unique(array(value, place), value, place)

    return unique


def _pairs(key: _Check, check: _Check) -> _Check:
    """Returns a check for an array of [key, value] with different keys, or an empty object; it returns a dict."""
    array = _array(_tuple((key, check)), tuple)

    def mapped(value: object, place: str) -> dict[Any, Any]:
        if value == {}:  # an empty mapping shows no keys, so it is written as an object
            return {}
        pairs = array(value, place)
        _unique([key for key, _ in pairs], value, place)
        return dict(pairs)

    return mapped


def _unique(entries: Sequence[Any], value: object, place: str) -> set[Any]:
    """Returns the set of checked entries; refuses `value`, the JSON that they came from, if two of them are equal."""
    try:
        unique = set(entries)
    except TypeError:  # a declaration with `object` inside: this value of it cannot be hashed
        _refuse(value, place, "values that can be in a set")
    if len(unique) != len(entries):
        _refuse(value, place, "each value once")
    return unique


def _mapping(parts: Sequence[Any], finite: bool) -> _Check:
    """Returns a check for an object, given the types of its keys (str or int) and its values."""
    return _object(parts[0] is int, _check_of(parts[1], finite))


def _made_into(made: Callable[[Any], Any], check: _Check) -> _Check:
    """Returns a check that calls another check, and converts its result by `made`."""
    return lambda value, place: made(check(value, place))


def _plain(value: object) -> object:
    """Converts a value to types of JSON: dataclasses and mappings to dicts, sets to sorted lists.

    A mapping with a key that is neither str nor int becomes a list of [key, value].
    """
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
    """Returns a check for an object whose values pass `check`; with `numbered` its keys are made ints."""

    def mapped(value: object, place: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            _refuse(value, place, "an object")
        return {
            (_key(key, place) if numbered else key): check(each, f"{place}[{key[:40]!r}]")
            for key, each in value.items()
        }

    return mapped


def _key(key: str, place: str) -> int:
    """Converts a key of at most 20 decimal digits to an int; a MessageError for any other key."""
    if not (key.isascii() and key.isdigit() and len(key) <= MOST_DIGITS):
        _refuse(key, place, "keys of decimal digits")
    return int(key)


def _fields(kind: Any, finite: bool) -> _Check:
    """Returns a check for an object with the fields of a dataclass, of which it returns an instance.

    Fields with defaults may be missing; other keys are refused, and so is what the class itself refuses.
    """
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
        values = {name: checks[name](each, f"{place}.{name}") for name, each in value.items()}
        try:
            return kind(**values)
        except (ValueError, TypeError, OverflowError) as error:  # what the class itself refuses
            raise MessageError(f"a message is not as expected: {place} is refused: {error}") from None

    return made


COUNT: MessageType[int] = MessageType(Count)
"""A message that is one number from 0 on."""

"""Rules for which parameters are compressed, and how: the first rule that matches a parameter decides."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gradwire.compressors.base import Slice, plain_name
from gradwire.compressors.callers import warn


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Matches parameters by name, dimensions and size; all conditions must hold."""

    pattern: str = "*"
    """Shell-style pattern of the whole parameter name, case-sensitive: `*.embedding.weight`."""
    max_dim: int | None = None
    """Matches parameters of at most this many dimensions; None matches any."""
    max_numel: int | None = None
    """Matches parameters of at most this many elements; None matches any."""
    compressor: str = "none"
    """Name of the compressor for the parameters that match."""
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Options of that compressor."""

    def matches(self, item: Slice) -> bool:
        """Returns whether the rule applies to the parameter that `item` is a part of."""
        return self.matches_parameter(item.name, item.shape)

    def matches_parameter(self, name: str, shape: Sequence[int]) -> bool:
        """Returns whether the rule applies to a parameter of this name and whole shape."""
        return (
            fnmatchcase(name, plain_name(self.pattern))
            and (self.max_dim is None or len(shape) <= self.max_dim)
            and (self.max_numel is None or math.prod(shape) <= self.max_numel)
        )


DEFAULT_RULES = (Rule(max_dim=1), Rule(max_numel=1023))
"""Biases, norms and whatever is smaller than a block are sent dense: they cost few bytes and are sensitive to noise.

Source: both the authors' DGC code and PowerSGD (NeurIPS 2019, section 3) leave parameters of one dimension dense.
"""


def first_match(rules: Sequence[Rule], name: str, shape: Sequence[int]) -> Rule | None:
    """Returns the rule that decides about a parameter, or None if the main compressor is used."""
    return next((rule for rule in rules if rule.matches_parameter(name, shape)), None)


def rules_from(items: Sequence[Rule | Mapping[str, object]]) -> tuple[Rule, ...]:
    """Returns the user's rules, followed by the default ones.

    Args:
        items: Rules, or mappings with the names of a rule's fields.

    Raises:
        ValueError: A mapping has a key that is no field of a rule.
    """
    fields = tuple(Rule.__dataclass_fields__)
    rules = []
    for number, item in enumerate(items):
        if isinstance(item, Rule):
            rules.append(item)
            continue
        for key in item:
            if key not in fields:
                raise ValueError(f"`rules[{number}]` has {key!r}; a rule has {', '.join(fields)}")
        rules.append(Rule(**item))  # type: ignore[arg-type]  # checked by name above, by kind in the compressor
    return (*rules, *DEFAULT_RULES)


def warn_of_idle(items: Sequence[Rule | Mapping[str, object]], names: Collection[str], remedy: str) -> None:
    """Warns of each rule whose pattern matches no parameter: a misspelt one would change nothing without a word.

    Args:
        items: The user's rules, as for `rules_from`.
        names: Names of all parameters of the model.
        remedy: Advice that ends the warning.

    Raises:
        ValueError: A mapping has a key that is no field of a rule.
    """
    for number, rule in enumerate(rules_from(items)[: len(items)]):
        if not any(fnmatchcase(name, rule.pattern) for name in names):
            examples = ", ".join(repr(name) for name in list(names)[:3])
            warn(
                f"`rules[{number}]` has the pattern {rule.pattern!r}, which matches none of the {len(names)} "
                f"parameters ({examples}{', ...' if len(names) > 3 else ''}): the rule changes nothing. {remedy}"
            )

"""Saves the cuts that were found for the next run, in a JSON file that is checked before its cuts are used."""

import hashlib
import json
import logging
from pathlib import Path

from gradwire.comms.boundary.files import replace_text
from gradwire.comms.boundary.messages import parsed
from gradwire.comms.fusion import FusionPlan

log = logging.getLogger("gradwire")

VERSION = 1
"""Version of the file's format; a file of another version is ignored."""


def record_of(plan: FusionPlan) -> dict[str, object]:
    """Returns a fusion plan's cuts, sizes and threshold as a dict that JSON can hold; `plan_from` reads it.

    Args:
        plan: The fusion plan. Its pieces and its delay are not recorded.
    """
    return {"cuts": list(plan.cuts), "sizes": list(plan.sizes), "threshold_nbytes": plan.threshold_nbytes}


def plan_from(values: object) -> FusionPlan:
    """Makes a fusion plan from a record of `record_of` that was read from JSON.

    Args:
        values: The parsed JSON, of any type: it is checked here.

    Raises:
        ValueError: An entry is missing, unknown, of the wrong type, or not a possible value; the message names it.
    """
    names = tuple(record_of(FusionPlan()))
    if not isinstance(values, dict) or set(values) != set(names):
        raise ValueError(f"`plan` is {str(values)[:80]}; wanted {', '.join(names)}")
    cuts, sizes, threshold = _list(values, "cuts"), _list(values, "sizes"), values["threshold_nbytes"]
    if any(
        not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in [*cuts, *sizes, threshold]
    ):
        raise ValueError("`plan` holds something else than whole numbers >= 0")
    return FusionPlan(tuple(cuts), tuple(sizes), threshold)


def fingerprint(*facts: object) -> str:
    """Returns a digest of some values: 32 hexadecimal digits of the SHA-256 of their JSON.

    Args:
        facts: The values; one that JSON cannot hold counts as its `str`.
    """
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]


def save(file: Path, key: dict[str, object], plan: FusionPlan) -> None:
    """Writes the cuts, sizes and threshold of a fusion plan to a JSON file, whole or not at all.

    Args:
        file: The file; replaced if it exists.
        key: Facts that the plan is valid for (model, ranks, topology, ...), by name; `load` compares them.
        plan: The fusion plan.

    Raises:
        OSError: The file cannot be written.
    """
    document = {"version": VERSION, "key": key, "plan": record_of(plan)}
    replace_text(file, json.dumps(document | {"digest": fingerprint(document)}, indent=1))


def load(file: Path, key: dict[str, object]) -> FusionPlan | None:
    """Reads a fusion plan from a file that `save` has written; raises nothing for a file that cannot be used.

    Args:
        file: The file.
        key: Facts that the plan must have been saved with, by name.

    Returns:
        The plan; None if the file is missing; None, with a warning, if it cannot be read, is damaged, or was made for
        other facts.
    """
    if not file.exists():
        return None
    try:
        document = parsed(file.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("version") != VERSION:
            raise ValueError(f"its version is not {VERSION}")
        if document.pop("digest", None) != fingerprint(document):
            raise ValueError("its content does not match its digest")
        other = sorted(name for name in key if document["key"].get(name) != parsed(json.dumps(key[name])))
        if other:
            raise ValueError(f"it was made for another {', '.join(other)}")
        return plan_from(document["plan"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        log.warning("gradwire: the cuts in %s are ignored: %s; they are determined again", file, error)
        return None


def _list(values: dict[str, object], name: str) -> list[int]:
    """Returns an entry of a record, or raises ValueError if it is not a list."""
    entry = values[name]
    if not isinstance(entry, list):
        raise ValueError(f"`{name}` is {entry!r}; wanted a list")  # noqa: TRY004 - of a file, not of a caller
    return entry

"""What the tuner found, kept for the next run: one JSON file, checked before it is believed."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire.comms.boundary.files import replace_text
from gradwire.comms.boundary.messages import parsed
from gradwire.comms.fusion import FusionPlan

log = logging.getLogger("gradwire")

VERSION = 1


@dataclass(frozen=True, slots=True)
class TunerSetting:
    """What the tuner may change; none of it changes what is computed, only how it travels.

    Attributes:
        label: What it is, in a word or two.
        cuts: As in `FusionPlan`.
        sizes: As in `FusionPlan`.
        threshold_nbytes: As in `FusionPlan`.
        plan: Name of the plan.
        chunks: Pieces of a transfer; 0 leaves it to the planner.
    """

    label: str
    cuts: tuple[int, ...]
    sizes: tuple[int, ...]
    threshold_nbytes: int
    plan: str
    chunks: int

    @classmethod
    def of(cls, found: dict[str, Any]) -> "TunerSetting":
        """Made of what `dataclasses.asdict` has made, by way of JSON."""
        lists = {name: tuple(found[name]) for name in ("cuts", "sizes")}
        return cls(**{**found, **lists, "label": str(found["label"])})

    @property
    def fusion(self) -> FusionPlan:
        """The cuts as a plan."""
        return FusionPlan(self.cuts, self.sizes, self.threshold_nbytes)


def setting_from(values: object) -> TunerSetting:
    """A setting from what JSON gives back.

    Raises:
        ValueError: Something is missing, or of the wrong type, or impossible.
    """
    if not isinstance(values, dict) or set(values) != set(TunerSetting.__dataclass_fields__):
        raise ValueError(f"`setting` is {str(values)[:80]}; wanted {', '.join(TunerSetting.__dataclass_fields__)}")
    if not isinstance(values["plan"], str) or values["plan"] not in ("flat", "hierarchical", "leader"):
        raise ValueError(f"`plan` is {values['plan']!r}; wanted flat, hierarchical or leader")
    numbers = [*_list(values, "cuts"), *_list(values, "sizes"), values["threshold_nbytes"], values["chunks"]]
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers):
        raise ValueError("`setting` holds something else than whole numbers >= 0")
    setting = TunerSetting.of(values)
    FusionPlan(setting.cuts, setting.sizes, setting.threshold_nbytes)
    return setting


def fingerprint(*facts: object) -> str:
    """A short digest of what a profile is valid for."""
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]


def save(file: Path, key: dict[str, object], setting: TunerSetting, step_seconds: float) -> None:
    """Writes a profile, whole or not at all."""
    document = {"version": VERSION, "key": key, "setting": asdict(setting), "step_seconds": step_seconds}
    replace_text(file, json.dumps(document | {"digest": fingerprint(document)}, indent=1))


def load(file: Path, key: dict[str, object]) -> TunerSetting | None:
    """Reads a profile; None, with one warning, where it is broken or was made for something else.

    Args:
        file: May be missing: then there is nothing to warn of.
        key: What the profile must have been made for.
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
        return setting_from(document["setting"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        log.warning("the tuning profile %s is ignored: %s; tuning starts anew", file, error)
        return None


def _list(values: dict[str, object], name: str) -> list[object]:
    entry = values[name]
    if not isinstance(entry, list):
        raise ValueError(f"`{name}` is {entry!r}; wanted a list")  # noqa: TRY004 - of a file, not of a caller
    return entry

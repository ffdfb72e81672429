"""The variables that NCCL and its plugins read, from the process, a file or nccl.conf; secrets never pass."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

PREFIXES = ("NCCL_", "UCX_", "FI_", "OFI_NCCL_", "CCL_")
"""Only names that begin so are looked at or captured (CCL_: a typing error that costs a cluster its GDR)."""

_VALUE_LENGTH = 1024
_ASSIGNMENT = re.compile(r"^([A-Z][A-Z0-9_]{1,80})=(.*)$")


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """Holds a variable's value and where it was set (`environment`, or the path of a file)."""

    value: str
    source: str


def read_environment(mapping: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables with one of `PREFIXES`, their values cut to 1024 characters.

    KUBERNETES_SERVICE_HOST, if set, is included with the value `set`.

    Args:
        mapping: Variables to filter; None takes this process's environment.
    """
    everything = os.environ if mapping is None else mapping
    kept = {name: value[:_VALUE_LENGTH] for name, value in sorted(everything.items()) if name.startswith(PREFIXES)}
    if "KUBERNETES_SERVICE_HOST" in everything:
        kept["KUBERNETES_SERVICE_HOST"] = "set"
    return kept


def parse_environment(text: str) -> dict[str, str]:
    """Parses the output of `env` or a /proc/PID/environ (NUL between entries), filtered as by `read_environment`."""
    entries = text.split("\0") if "\0" in text else text.splitlines()
    matches = [_ASSIGNMENT.match(entry) for entry in entries]
    return read_environment({match[1]: match[2] for match in matches if match})


def parse_nccl_conf(text: str) -> dict[str, str]:
    """Reads NAME=VALUE lines of an nccl.conf; `#` begins a comment line.

    Source: NCCL user guide, "Environment Variables", section System configuration.
    """
    matches = [_ASSIGNMENT.match(line.strip()) for line in text.splitlines() if not line.lstrip().startswith("#")]
    return {match[1]: match[2].strip()[:_VALUE_LENGTH] for match in matches if match and match[1].startswith("NCCL_")}


def merge(environment: Mapping[str, str], files: Mapping[str, Mapping[str, str]]) -> dict[str, EffectiveSetting]:
    """Merges the environment with configuration files: NCCL never overwrites a variable, so the first value wins.

    Args:
        environment: Variables of the process.
        files: nccl.conf path -> its variables, in the order NCCL reads them.
    """
    settings = {name: EffectiveSetting(value, "environment") for name, value in environment.items()}
    for path, values in files.items():
        for name, value in values.items():
            settings.setdefault(name, EffectiveSetting(value, path))
    return settings


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with the variables of `extra` added or replaced, for a child process."""
    return {**os.environ, **extra}

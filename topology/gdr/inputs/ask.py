"""Asks the driver libraries, each in a child process of its own and all at once: one that breaks spoils only its answers."""

import json
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from gradwire.topology.gdr.inputs.child import run_child
from gradwire.topology.gdr.inputs.native_nvml import Answers

SECONDS = 60.0  # cuInit on eight GPUs without persistence mode takes up to half of this
_LIBRARIES = ("nvml", "cuda", "verbs", "nccl")
_MAX_NBYTES = 1 << 20


def ask_libraries(prove: bool) -> Answers:
    """Everything that the libraries say.

    Args:
        prove: Also register GPU memory.
    """
    names = (*_LIBRARIES, "probe") if prove else _LIBRARIES
    with ThreadPoolExecutor(len(names)) as pool:
        return merged(pool.map(_ask, names))


def _ask(name: str) -> Answers:
    """What one child answers, or how it ended.

    -P keeps the current folder off the child's module path: a prolog runs as root wherever it was started.
    """
    ended = run_child([sys.executable, "-P", "-m", "gradwire.topology.gdr.inputs.native", name], SECONDS)
    try:
        answers = json.loads(ended.output[-_MAX_NBYTES:])
    except ValueError:
        return {f"{name}_error": ended.last_words}
    return answers if isinstance(answers, dict) else {f"{name}_error": "no answer"}


def merged(parts: Iterable[Answers]) -> Answers:
    """All answers; descriptions of one GPU by its bus id become one."""
    everything: Answers = {}
    gpus: dict[str, Answers] = {}
    for part in parts:
        everything |= part
        listed = part.get("gpus")
        for gpu in listed if isinstance(listed, list) else ():
            gpus.setdefault(gpu["bus_id"], {}).update(gpu)
    return everything | ({"gpus": list(gpus.values())} if "gpus" in everything else {})

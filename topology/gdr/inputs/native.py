"""The child process that asks one driver library and prints its facts, so that a crash or a hang stays in there."""

import ctypes
import json
import sys
from collections.abc import Callable

from gradwire.topology.gdr.inputs.facts import RawFacts
from gradwire.topology.gdr.inputs.native_cuda import cuda_facts
from gradwire.topology.gdr.inputs.native_verbs import verbs_facts
from gradwire.topology.gdr.inputs.registration import prove
from gradwire.topology.readers.nvml import gdr_facts


def nccl_facts() -> RawFacts:
    """Asks the loader for libnccl.so.2 (`nccl_version`) and libnccl-net.so (`nccl_plugin`). Source: nccl.h."""
    facts: RawFacts = {}
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)) == 0:
            facts["nccl_version"] = str(version.value)
    except (OSError, AttributeError):  # not in the loader's path; the caller may know a wheel's version
        pass
    try:
        ctypes.CDLL("libnccl-net.so")
        facts["nccl_plugin"] = True
    except OSError:
        facts["nccl_plugin"] = False
    return facts


LIBRARIES: dict[str, Callable[[], RawFacts]] = {
    "nvml": gdr_facts,
    "cuda": cuda_facts,
    "verbs": verbs_facts,
    "nccl": nccl_facts,
    "probe": prove,
}
"""Library -> the function that asks it; where it cannot be asked, the facts have NAME_error instead."""


def main(argv: list[str]) -> int:
    """Prints the facts of one library as a JSON object; returns 0.

    Args:
        argv: One word, a key of `LIBRARIES`.
    """
    print(json.dumps(LIBRARIES[argv[0]]()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

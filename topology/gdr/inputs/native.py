"""One driver library is asked and its answers printed; run as a child, so that a crash or a hang there is survived."""

import json
import sys
from collections.abc import Callable

from gradwire.topology.gdr.inputs.native_cuda import cuda_answers
from gradwire.topology.gdr.inputs.native_nccl import nccl_answers
from gradwire.topology.gdr.inputs.native_nvml import Answers, nvml_answers
from gradwire.topology.gdr.inputs.native_verbs import verbs_answers
from gradwire.topology.gdr.inputs.registration import prove

QUESTIONS: dict[str, Callable[[], Answers]] = {
    "nvml": nvml_answers,
    "cuda": cuda_answers,
    "verbs": verbs_answers,
    "nccl": nccl_answers,
    "probe": prove,
}
"""Whom to ask -> the function that asks; what a library leaves unanswered is told as NAME_error."""


def main(argv: list[str]) -> int:
    """Prints the answers to one question as a JSON object."""
    print(json.dumps(QUESTIONS[argv[0]]()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the loader finds of NCCL: the library's version, and a network plugin."""

import ctypes

from gradwire.topology.gdr.inputs.native_nvml import Answers


def nccl_answers() -> Answers:
    """Version of libnccl.so.2 where the loader finds it, and whether a network plugin is there. Source: nccl.h."""
    answers: Answers = {}
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)) == 0:
            answers["nccl_version"] = str(version.value)
    except (OSError, AttributeError):  # not in the loader's path; the caller may know a wheel's version
        pass
    try:
        ctypes.CDLL("libnccl-net.so")
        answers["nccl_plugin"] = True
    except OSError:
        answers["nccl_plugin"] = False
    return answers

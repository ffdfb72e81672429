"""Examination of one machine without a launcher: NICs, cores, memory, variables, GPUDirect RDMA.

torch is used if it is installed. Without it, cores and torch's threads are not measured, and a note says so; thus
`uvx gradwire doctor` needs nothing but Python.
"""

from dataclasses import replace

from gradwire.bench.doctor import local
from gradwire.bench.doctor.checks.machine import available_cores
from gradwire.bench.doctor.facts import CoreWork, JobFacts
from gradwire.bench.doctor.script import run_script
from gradwire.bench.doctor.wanted import Wanted, with_script

NO_TORCH = (
    "what torch makes of this machine (its threads, its GPUs, its versions): there is no torch in this Python; run the "
    "doctor once more in the one that trains"
)


def examine_alone(wanted: Wanted) -> JobFacts:
    """Examines this machine only, and returns its facts, with the measurements of `--script` if it is given.

    Args:
        wanted: Options of the command line.

    Raises:
        RuntimeError: `--script` was given, and there is no torch to run the script with.
    """
    wanted.show_progress("looking at this machine")
    has_torch = local.has_torch()
    if wanted.script and not has_torch:
        raise RuntimeError(
            "`--script` needs torch, which is not installed in this Python: start the doctor with the Python that "
            "trains, `python -m gradwire doctor --script ...`"
        )
    own = replace(local.read_rank(0, None), gdr=local.gdr_verdicts())
    if not has_torch:
        own = replace(own, gpus=local.gpu_states())
        return with_script(JobFacts(ranks=(own,), notes=(NO_TORCH,)), wanted, [])
    from gradwire.bench.doctor.work import WORK_SECONDS, busy_gpu_states, core_work, threads_seconds  # these need torch

    own = replace(own, gpus=busy_gpu_states())
    work = CoreWork(rank=0, per_second=core_work(WORK_SECONDS))
    if own.threads > (cores := available_cores([own])):
        slow, fair = threads_seconds(max(1, int(cores)), 0.15)
        work = replace(work, threads_seconds=slow, fair_seconds=fair)
    runs = []
    if wanted.script:
        wanted.show_progress(f"running {wanted.script[0]}")
        runs = [run_script(wanted.script, None)]
    return with_script(JobFacts(ranks=(own,), work=(work,)), wanted, runs)

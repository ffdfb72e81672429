"""Checks of the machines: shared memory, cores, quotas and threads, slow nodes and GPUs, GPUDirect RDMA, clocks."""

import math
from collections.abc import Iterator, Sequence
from statistics import median

from gradwire.bench.doctor.checks.steps import LEAST_SECONDS, waited_seconds
from gradwire.bench.doctor.facts import CoreWork, Diagnosis, JobFacts, RankFacts
from gradwire.topology.levels import HOST_BYTES_PER_SECOND
from gradwire.topology.wording import duration, listed, nbytes

SMALL_SHM_NBYTES = 256 << 20
"""Size of /dev/shm below which it is too small. Docker's default is 64 MB; NCCL asks for 1 GB, DataLoader's workers for
their batches. Source: NCCL user guide, Troubleshooting, section Docker; `docker run` reference, --shm-size."""

FULL_SHM_NBYTES = 32 << 20
"""Free bytes of /dev/shm below which it is full: less than a bucket of 25 MiB and its neighbours need."""

SLOW_NODE, NEVER_ABOVE = 0.7, 0.95
"""A node is slow if its median speed is below the first share of a good node's and its best below the second, while no
other node of the job computes. Under load a good node keeps up in at least one try of five."""

CROWD_EFFECT = 1.25
"""Least slowdown, against one thread for each core, from which too many threads are a finding; less may be noise."""

CLOCK_SECONDS = 1.0
"""Difference of two clocks above which it is a finding. Certificates, logs and file systems tolerate less."""


def available_cores(ranks: Sequence[RankFacts]) -> float:
    """Returns the number of cores of a node's ranks together: those they are bound to, or fewer under a quota.

    Args:
        ranks: All ranks of one node.
    """
    return min(float(len(_cores(ranks))), _limit(ranks))


def _limit(ranks: Sequence[RankFacts]) -> float:
    """Returns the CPUs that a quota allows the ranks of a node together; infinite without a quota."""
    return min((each.cpu_limit for each in ranks if each.cpu_limit is not None), default=math.inf)


def shared_memory(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports nodes whose /dev/shm is too small (below 256 MiB, as in containers) or full (below 32 MiB free)."""
    failed = [each for each in facts.backends if each.error and "shared memory" in each.error]
    for name, ranks in zip(facts.names, facts.nodes, strict=True):
        size, free = ranks[0].shm_nbytes, ranks[0].shm_free_nbytes
        if size is None or free is None or (size >= SMALL_SHM_NBYTES and free >= FULL_SHM_NBYTES):
            continue
        small = size < SMALL_SHM_NBYTES
        evidence = [
            f"/dev/shm of {name} has {nbytes(size)}, of which {nbytes(free)} are free; Docker's default is 64 MB"
        ]
        evidence += [f"{each.backend} failed for it: {each.error}" for each in failed[:1]]
        yield Diagnosis(
            key="shared_memory",
            title=f"The shared memory of {name} is {'too small' if small else 'full'}",
            confidence=0.98 if failed else 0.8,
            cost_seconds=0.0,
            evidence=tuple(evidence),
            fix=(
                "Docker: docker run --shm-size=8g ...   or --ipc=host",
                "Kubernetes: an emptyDir with `medium: Memory`, mounted at /dev/shm",
                "as root: mount -o remount,size=8g /dev/shm",
            )
            if small
            else (f"on {name}: ls -lt /dev/shm   # remove what jobs that have ended left there",),
            nodes=(name,),
            stops=bool(failed),
        )


def oversubscribed_cores(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports ranks bound to one core, too small a quota, and more threads than cores; one finding of each kind."""
    crowds: dict[str, list[tuple[str, float, str, tuple[str, ...]]]] = {}
    for name, ranks in zip(facts.names, facts.nodes, strict=True):
        cores, count = available_cores(ranks), len(ranks)
        bound, limit = len(_cores(ranks)), _limit(ranks)
        if limit < count and limit < bound:
            title, crowd = _QUOTA_TITLE, (name, count / limit, f"{limit:g} CPUs for {count} ranks", _QUOTA)
        elif bound < count and bound < ranks[0].cores:
            text = f"its {count} ranks are all bound to core{'s' if bound > 1 else ''} {listed(_cores(ranks))}"
            title, crowd = _BINDING_TITLE, (name, count / bound, text, _BINDING)
        elif (effect := _effect(facts, ranks)) > CROWD_EFFECT:
            threads = sum(each.threads for each in ranks)
            each_has = sorted({each.threads for each in ranks})
            number = f"{each_has[0]}" if len(each_has) == 1 else f"{each_has[0]} to {each_has[-1]}"
            text = (
                f"{count} ranks with {number} threads each are {threads} threads on {cores:g} cores; the same work "
                f"takes {effect:.1f} times as long as with one thread for each core"
            )
            title, crowd = _THREADS_TITLE, (name, effect, text, _threads_fix(cores, count))
        else:
            continue
        crowds.setdefault(title, []).append(crowd)
    for title, nodes in crowds.items():
        names = tuple(name for name, *_ in nodes)
        worst, times, text, fix = max(nodes, key=lambda each: each[1])
        yield Diagnosis(
            key="oversubscribed_cores",
            title=title.format(who=listed(names)),
            confidence=0.9,
            cost_seconds=facts.compute_seconds * (times - 1),
            evidence=(f"{worst}: {text}",),
            fix=fix,
            nodes=names,
        )


def _cores(ranks: Sequence[RankFacts]) -> list[int]:
    return sorted({core for each in ranks for core in each.affinity})


def _effect(facts: JobFacts, ranks: Sequence[RankFacts]) -> float:
    """Returns how many times longer work takes with the node's threads than with one a core; 1 if not measured."""
    numbers = {each.rank for each in ranks}
    ratios = [
        each.threads_seconds / each.fair_seconds
        for each in facts.work
        if each.rank in numbers and each.threads_seconds is not None and each.fair_seconds
    ]
    return median(ratios) if ratios else 1.0


_QUOTA_TITLE = "{who} may use too few CPUs"
_BINDING_TITLE = "The ranks of {who} share a core while others idle"
_THREADS_TITLE = "More threads than cores on {who}"
_QUOTA: tuple[str, ...] = (
    "Docker: docker run --cpus=N   Kubernetes: resources.limits.cpu, at least one CPU for each rank",
    "systemd: systemctl show -p CPUQuotaPerSecUSec UNIT",
)
_BINDING: tuple[str, ...] = (
    "Open MPI: mpirun --bind-to none   or --map-by slot:PE=CORES_OF_A_RANK",
    "Slurm: srun --cpu-bind=none   or --cpus-per-task=CORES_OF_A_RANK",
    "taskset -pc PID   # shows to which cores a process is bound",
)


def _threads_fix(cores: float, count: int) -> tuple[str, ...]:
    return (f"export OMP_NUM_THREADS={max(1, int(cores / count))}   # the node's cores divided by its ranks",)


def slow_node(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports nodes whose cores were far slower than a good node's in several tries while no other node computed.

    That is a median speed below 70 % of the good node's, and no try above 95 %. Skipped are nodes whose CPU quota is
    below their number of ranks, and in the user's own script those for which the others wait next to nothing.
    """
    names = facts.names
    for name, ranks in zip(names, facts.nodes, strict=True):
        share = _share(facts.work, ranks)
        if share is None or _limit(ranks) < len(ranks):  # a quota is named by its own check
            continue
        # In the user's own script the node costs no more than the others wait for its ranks.
        waited = waited_seconds(facts, [each.rank for each in ranks])
        if waited is not None and waited < LEAST_SECONDS:
            continue
        cost = facts.compute_seconds * (1 / max(share, 0.01) - 1)
        governor = ranks[0].governor
        hint = f"; its clock governor is {governor}" if governor in ("powersave", "conservative") else ""
        yield Diagnosis(
            key="slow_node",
            title=f"{name} computes {1 / max(share, 0.01):.1f} times slower than the others",
            confidence=0.9,
            cost_seconds=cost if waited is None else min(cost, waited),
            evidence=(
                (
                    f"a core of {name} usually did {share:.0%} of a good node's work, in several tries while no other "
                    f"node computed{hint}; in every step all ranks wait for it"
                ),
            ),
            fix=(
                f"on {name}: top   # does something else run there?",
                f"on {name}: dmesg | grep -iE 'thrott|temperature'; sensors   # heat, a fan, a power limit",
                f"on {name}: cpupower frequency-set -g performance",
                "a virtual machine: the column `st` of top is what its host takes away; take another node",
            ),
            nodes=(name,),
        )


def _share(work: Sequence[CoreWork], ranks: Sequence[RankFacts]) -> float | None:
    """Returns the median over several tries of a node's speed over a good node's; None if the node is not slow."""
    numbers = {each.rank for each in ranks}
    tries = next((each.again for each in work if each.rank in numbers and each.again), ())
    return median(tries) if tries and median(tries) < SLOW_NODE and max(tries) < NEVER_ABOVE else None


def slow_gpus(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports GPUs whose clock the driver or the hardware lowers for heat, power or a fault."""
    for name, ranks in zip(facts.names, facts.nodes, strict=True):
        bad = [gpu for gpu in ranks[0].gpus if gpu.slowed_by]
        if bad:
            gpu = bad[0]
            times = gpu.max_sm_mhz / gpu.sm_mhz if gpu.sm_mhz and gpu.max_sm_mhz else 1.0
            yield Diagnosis(
                key="slow_gpu",
                title=f"GPU {listed([each.index for each in bad])} of {name} is held down: {listed(gpu.slowed_by)}",
                confidence=0.85,
                cost_seconds=facts.compute_seconds * (times - 1),
                evidence=(f"clock {gpu.sm_mhz} MHz of {gpu.max_sm_mhz} MHz",),
                fix=(f"on {name}: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.index}",),
                nodes=(name,),
            )


P2P_WORDS = {
    1: "the chipset does not support it",
    2: "this model does not",
    3: "they are on unlike root complexes",
    4: "a registry key of the driver switches it off",
    5: "the driver does not support it here",
}
"""Source: NVML API reference, nvmlGpuP2PStatus_t."""

P2P_FIX = {
    1: "a board with a PCIe switch, or whose root complex passes reads between its ports",
    2: "none by a setting: consumer GPUs come without it; fewer bytes between the GPUs help (a compressor does not)",
    3: "cards of one socket next to each other: nvidia-smi topo -m shows which are; CUDA_VISIBLE_DEVICES picks them",
    4: "modprobe.d: NVreg_RegistryDwords without PeerMappingOverride or RMDisableP2P; then load the driver anew",
    5: "a virtual machine needs its host's permission (vGPU, passthrough with ACS off); else a newer driver",
}


def no_peer_to_peer(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports GPUs of one node without peer access, which exchange data through the host's memory."""
    for name, ranks in zip(facts.names, facts.nodes, strict=True):
        gpus = ranks[0].gpus
        states = {
            (gpu.index, other): status
            for gpu in gpus
            for other, status in enumerate(gpu.p2p)
            if other > gpu.index and status
        }
        if not states:
            continue
        pairs = len(gpus) * (len(gpus) - 1) // 2
        status = max(set(states.values()), key=list(states.values()).count)
        share = 2 * (len(gpus) - 1) / len(gpus)
        who = "The GPUs" if len(states) == pairs else f"{len(states)} of {pairs} pairs of GPUs"
        yield Diagnosis(
            key="no_peer_to_peer",
            title=f"{who} of {name} cannot reach each other directly",
            confidence=0.7,
            cost_seconds=share * facts.gradient_nbytes / HOST_BYTES_PER_SECOND,
            evidence=(
                f"the driver says: {P2P_WORDS.get(status, f'status {status}')} (nvidia-smi topo -p2p r shows it)",
                "NCCL then goes through the host's memory (its transport SHM); the cost is an estimate, at 12 GB/s",
            ),
            fix=(P2P_FIX.get(status, "nvidia-smi topo -p2p r   # and the driver's log"),),
            nodes=(name,),
        )


def gpudirect(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports nodes on which a check of gdr-check failed, so that NICs reach GPU memory through the host's."""
    for name, ranks in zip(facts.names, facts.nodes, strict=True):
        failed = [each for rank in ranks for each in rank.gdr if each[0] == "fail"]
        if failed:
            yield Diagnosis(
                key="gpudirect",
                title=f"GPUs and network cards of {name} do not talk to each other directly (GPUDirect RDMA)",
                confidence=0.8,
                # Through the host each byte crosses its memory and PCIe twice more; half the rate is usual.
                cost_seconds=facts.exchange_seconds(facts.good_rate()) if len(facts.nodes) > 1 else 0.0,
                evidence=tuple(each[1] for each in failed[:3]),
                fix=(
                    *(each[2] for each in failed[:3] if each[2]),
                    f"on {name}: gradwire gdr-check   # all of it",
                ),
                nodes=(name,),
            )


def clocks(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports clocks that differ by more than a second."""
    bad = [pair for pair in facts.pairs if abs(pair.clock_seconds) > CLOCK_SECONDS]
    if not bad:
        return
    worst = max(bad, key=lambda pair: abs(pair.clock_seconds))
    a, b = facts.names[worst.a], facts.names[worst.b]
    ahead = b if worst.clock_seconds > 0 else a
    yield Diagnosis(
        key="clocks",
        title=f"The clocks of {a} and {b} are {duration(abs(worst.clock_seconds))} apart",
        confidence=0.95,
        evidence=(f"{ahead} is ahead; it slows nothing down, but logs cannot be compared and certificates fail",),
        fix=("timedatectl set-ntp true   # or chronyc tracking, to see why it does not follow",),
        nodes=(a, b),
    )


CHECKS = (shared_memory, oversubscribed_cores, slow_node, slow_gpus, no_peer_to_peer, gpudirect, clocks)

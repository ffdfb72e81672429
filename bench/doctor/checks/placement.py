"""Checks of the placement: the order of ranks on the nodes, and whether each rank has a GPU to itself."""

from collections import Counter
from collections.abc import Iterator

from gradwire.bench.doctor.facts import Diagnosis, JobFacts
from gradwire.topology.compare import ring_cost
from gradwire.topology.wording import listed, rate


def rank_order(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports an order of ranks in which neighbours are on other nodes, as round-robin assignment makes it.

    It is a finding if a ring in rank order crosses the busiest node's network card more than once at a time.
    """
    node_of = {each.rank: place for place, ranks in enumerate(facts.nodes) for each in ranks}
    cost = ring_cost(node_of)
    if cost <= 1:
        return
    names, count, good = facts.names, len(node_of), facts.good_rate()
    shown = ", ".join(f"rank {rank} on {names[node_of[rank]]}" for rank in sorted(node_of)[:4])
    ring = 2 * (count - 1) / count * facts.gradient_nbytes / good
    yield Diagnosis(
        key="rank_order",
        title="The ranks are assigned to the nodes round robin instead of node by node",
        confidence=0.9,
        cost_seconds=(cost - 1) * ring,
        evidence=(
            f"{shown}, ...",
            (
                f"a ring in the order of ranks crosses the busiest network card {cost} times at once, each at "
                f"a part of its {rate(good)}; gloo and MPI go in that order, NCCL orders its rings itself, but "
                "groups of neighbouring ranks (tensor parallelism, FSDP's shards) then span nodes with it too"
            ),
        ),
        fix=(
            "Open MPI: mpirun --map-by slot   MPICH, Intel MPI: mpirun -ppn RANKS_OF_A_NODE",
            "Slurm: srun --distribution=block   or #SBATCH --distribution=block",
            "your own launcher: RANK = NODE_RANK * RANKS_OF_A_NODE + LOCAL_RANK, as torchrun numbers them",
            *(
                ('or use init_process_group("gradwire"): its plans go by who shares a node',)
                if facts.gains_by_gradwire
                else ()
            ),
        ),
        nodes=tuple(names),
    )


def shared_gpus(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports nodes with two ranks of one LOCAL_RANK, or with more ranks than GPUs."""
    for name, ranks in zip(facts.names, facts.nodes, strict=True):
        numbers = Counter(each.local_rank for each in ranks if each.local_rank is not None)
        twice = [number for number, count in numbers.items() if count > 1]
        if twice:
            which = [each.rank for each in ranks if each.local_rank == twice[0]]
            yield Diagnosis(
                key="shared_gpu",
                title=f"Several ranks of {name} have the same LOCAL_RANK, so they use one GPU or card together",
                confidence=0.95,
                cost_seconds=facts.compute_seconds * (numbers[twice[0]] - 1) if facts.has_gpus else 0.0,
                evidence=(f"ranks {listed(which)} all say LOCAL_RANK={twice[0]}",),
                fix=("Slurm: export LOCAL_RANK=$SLURM_LOCALID inside srun's command   (torchrun sets it itself)",),
                nodes=(name,),
            )
        gpus = len(ranks[0].gpus)
        if gpus and ranks[0].device == "cuda" and len(ranks) > gpus:
            yield Diagnosis(
                key="shared_gpu",
                title=f"{name} has {len(ranks)} ranks and {gpus} GPU{'s' if gpus > 1 else ''}",
                confidence=0.95,
                cost_seconds=facts.compute_seconds * (len(ranks) / gpus - 1),
                evidence=("ranks that share a GPU take turns on it; NCCL refuses two ranks on one GPU",),
                fix=(f"torchrun --nproc-per-node {gpus}",),
                nodes=(name,),
                stops=True,
            )


CHECKS = (rank_order, shared_gpus)

"""Predicts the time of each plan on clusters of GPUs, beside NCCL's own best; feeds docs/results/gpu_plans.md.

    python -m gradwire.bench.studies.gpu.plans      # prints the tables
    python -m gradwire.bench.studies.tables         # writes them into the page

Nothing is measured, no GPU is needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.tables.page import put_between
from gradwire.comms.plan.chooser import COMPRESS_INSIDE_GAIN
from gradwire.comms.plan.codec_price import codec_price, square_layout
from gradwire.comms.plan.machine_cluster import cluster_of_machines, codec_bytes_per_second
from gradwire.comms.plan.nccl_model import nccl_model
from gradwire.comms.plan.plan import NVLS_TREE, RING, TREE, Plan
from gradwire.comms.plan.planner import candidate_plans, plan_all_reduce
from gradwire.topology.cluster import Cluster
from gradwire.topology.graph import Machine
from gradwire.topology.presets import dgx_a100, dgx_h100, p4d, pcie_box

NODES = (2, 4, 8, 16)
MEGABYTES = (1, 25, 100)

CODEC_HOST_SECONDS = 100e-6
"""Host time that each chunk of a compressed bucket takes beyond one NCCL call (120 us less 20)."""

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
COLUMNS = ("nodes", "MB", "ring", "tree", "NVLSTree", "gradwire's plan", "ms", "gain", "bf16", "int8", "recommended")


@dataclass(frozen=True, slots=True)
class GpuCluster:
    """One machine of a table, and the command that predicts for it alone."""

    title: str
    machine: Machine
    command: str
    nic_bits_per_second: float | None = None

    def cluster(self, nodes: int) -> Cluster:
        """Returns a cluster of `nodes` such machines."""
        return cluster_of_machines(self.machine, nodes, nic_bits_per_second=self.nic_bits_per_second)


CLUSTERS = (
    GpuCluster("DGX H100: 8 GPUs, NVSwitch, 8 x 400 Gbit/s InfiniBand", dgx_h100(), "--preset dgx_h100"),
    GpuCluster("AWS p4d.24xlarge: 8 A100, NVSwitch, 4 x 100 Gbit/s EFA", p4d(), "--preset p4d"),
    GpuCluster("Cloud box: 8 A100, NVSwitch, 1 x 100 Gbit/s TCP", dgx_a100(), "--preset dgx_a100 --nic 100gbit", 100e9),
    GpuCluster("Cloud box: 8 A10 on PCIe, 1 x 100 Gbit/s TCP", pcie_box(8), "--preset pcie_box_8 --nic 100gbit", 100e9),
    GpuCluster("PCIe box: 8 A10, 1 x 25 Gbit/s TCP", pcie_box(8), "--preset pcie_box_8 --nic 25gbit", 25e9),
    GpuCluster("PCIe box: 4 A10, 1 x 25 Gbit/s TCP", pcie_box(4), "--preset pcie_box --nic 25gbit", 25e9),
)


@dataclass(frozen=True, slots=True)
class GpuPrediction:
    """One row of a table.

    Attributes:
        nodes: Number of machines.
        megabytes: Size of the gradient.
        nccl: Seconds of NCCL's flat all-reduce, by algorithm.
        plan: gradwire's exact plan.
        compressed: The fastest hierarchical plan with each compressor, by its name.
    """

    nodes: int
    megabytes: int
    nccl: dict[str, float]
    plan: Plan
    compressed: dict[str, Plan]

    @property
    def recommended(self) -> str:
        """Name of the exact plan, or of a compressor that clearly pays: bf16 unless int8 clearly gains on it."""
        best, seconds = self.plan.name, self.plan.seconds
        for name in ("bf16", "int8"):
            plan = self.compressed[name]
            saved = seconds - plan.seconds
            if seconds / plan.seconds >= COMPRESS_INSIDE_GAIN and saved > plan.chunks * CODEC_HOST_SECONDS:
                best, seconds = name, plan.seconds
        return best

    def cells(self) -> Iterator[str]:
        """Yields the row's cells in the order of `COLUMNS`."""
        fastest = min(self.nccl.values())
        yield str(self.nodes)
        yield str(self.megabytes)
        for algorithm in (RING, TREE, NVLS_TREE):
            yield milliseconds(self.nccl[algorithm]) if algorithm in self.nccl else "-"
        yield self.plan.name + (f", {self.plan.chunks} chunks" if self.plan.chunks > 1 else "")
        yield milliseconds(self.plan.seconds)
        yield f"{fastest / self.plan.seconds:.2f}"
        for name in ("bf16", "int8"):
            yield milliseconds(self.compressed[name].seconds)
        yield self.recommended


def milliseconds(seconds: float) -> str:
    """Formats seconds as milliseconds, with three digits up to 99.9."""
    value = seconds * 1e3
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def predict(machines: GpuCluster) -> Iterator[GpuPrediction]:
    """Yields the rows of one cluster's table, by number of nodes and size."""
    rate = codec_bytes_per_second(machines.machine)
    for nodes in NODES:
        cluster = machines.cluster(nodes)
        for megabytes in MEGABYTES:
            nbytes = megabytes * 10**6
            layout = square_layout(nbytes)
            compressed = {
                name: min(
                    candidate_plans(cluster, nbytes, "hierarchical", 0, codec_price(name, layout, nodes, rate)),
                    key=lambda plan: plan.seconds,
                )
                for name in ("bf16", "int8")
            }
            plan = plan_all_reduce(cluster, nbytes, library="nccl")
            yield GpuPrediction(nodes, megabytes, nccl_model(cluster).flat(nbytes), plan, compressed)


def tables() -> str:
    """Returns the tables of all clusters as Markdown."""
    lines: list[str] = []
    for machines in CLUSTERS:
        intra, inter = (level.link for level in machines.cluster(2).levels)
        lines += [
            f"## {machines.title}",
            "",
            f"GB/s: {intra.bytes_per_second / 1e9:g} a GPU inside, {inter.bytes_per_second / 1e9:g} a node outwards.",
            f"`gradwire predict {machines.command} --nodes N --gradient-mb MB`",
            "",
            f"| {' | '.join(COLUMNS)} |",
            "|" + "---|" * len(COLUMNS),
            *(f"| {' | '.join(row.cells())} |" for row in predict(machines)),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def with_tables(page: str) -> str:
    """Returns the page's text with its tables made anew.

    Raises:
        ValueError: The page lacks the marks `BEGIN` and `END` around its tables.
    """
    return put_between(page, tables().strip(), BEGIN, END)


def main(argv: list[str] | None = None) -> int:
    """Prints the tables."""
    StudyParser("gpu.plans", __doc__).parse_args(argv)
    print(tables(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

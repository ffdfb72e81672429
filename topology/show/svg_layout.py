"""Lays out the picture of a machine: CPUs left, switches in columns, a row per device, links between devices right.

A row per device keeps the picture as wide as a page whatever the number of devices, and a box spans the rows of what
hangs off it, so that every PCIe link is one straight line with its rate on it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gradwire.topology.bandwidth import pcie_bytes_per_second
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Cpu, Gpu, Machine, Nic
from gradwire.topology.labels import (
    UNKNOWN,
    Labels,
    cpu_name,
    gigabytes,
    model_name,
    nic_name,
    nic_rate,
    vendor_name,
)
from gradwire.topology.paths import PathType
from gradwire.topology.show.draw import used_switches

MAX_DEVICES = 128
"""More devices than this make no readable picture."""

ROW, BOX_HEIGHT, CPU_GAP = 36, 30, 28
"""Height of a device's row, of the box in it, and the space between two CPUs."""
MARGIN, TOP = 24, 86
CPU_WIDTH, SWITCH_WIDTH, DEVICE_WIDTH, LINK_WIDTH = 128, 92, 290, 64
"""The last is the space for a link and its rate."""
LANE_WIDTH, FABRIC_WIDTH, NVSWITCH_WIDTH = 46, 26, 104
NARROWEST = 760
WIDEST_LANES, NARROWEST_LANE = 460, 4
"""The brackets have so much room; where there are many they move together, down to the second figure."""

BoxKind = Literal["cpu", "switch", "gpu", "nic", "nvswitch", "nowhere"]


@dataclass(slots=True)
class Box:
    """Describes one rectangle of the picture; lengths in pixels, the origin is the upper left corner."""

    key: str
    kind: BoxKind
    x: float
    y: float
    width: float
    height: float
    lines: list[str]
    """Text, the first line bold."""
    virtual: bool = False

    @property
    def middle(self) -> float:
        """Returns the y coordinate of the centre."""
        return self.y + self.height / 2

    @property
    def right(self) -> float:
        """Returns the x coordinate of the right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Returns the y coordinate of the lower edge."""
        return self.y + self.height


@dataclass(frozen=True, slots=True)
class Edge:
    """Describes a drawn PCIe link, a straight line from the box on the left to the box on the right."""

    above: Box
    below: Box
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Describes a bracket that joins GPUs and NICs with the same path to each other."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    path: str
    good: bool
    """Whether NCCL uses GPUDirect RDMA between them by default."""
    lane: int = 0
    """Which of the vertical lines right of the devices it takes."""


@dataclass(slots=True)
class Drawing:
    """Holds everything that has been placed in the picture."""

    boxes: dict[str, Box] = field(default_factory=dict)
    nvswitches: list[Box] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    brackets: list[Bracket] = field(default_factory=list)
    lane_width: float = LANE_WIDTH
    """Pixels from one bracket to the next."""
    lanes_x: float = 0
    """Right edge of the devices, where the brackets begin."""
    fabric_x: float = 0
    """Left edge of the bar that stands for NVLink."""
    width: float = 0
    bottom: float = 0


def layout(labels: Labels) -> Drawing:
    """Returns the places of all boxes.

    Args:
        labels: The machine and its names.

    Raises:
        TopologyError: There are too many devices for a picture.
    """
    machine = labels.machine
    count = len(machine.gpus) + len(machine.nics)
    if count > MAX_DEVICES or len(machine.cpus) > MAX_DEVICES:
        raise TopologyError(f"{count} devices do not fit a picture of at most {MAX_DEVICES}")
    placer = _Placer(labels)
    for cpu in sorted(
        machine.cpus, key=lambda cpu: (cpu.socket is None, cpu.socket, cpu.numa is None, cpu.numa, cpu.key)
    ):
        placer.cpu(cpu)
    placer.nowhere()
    return placer.finish()


def brackets(labels: Labels) -> list[Bracket]:
    """Groups GPUs with NICs: those fit for GPUDirect RDMA by default, or else each GPU's nearest NICs.

    Args:
        labels: The machine and its names.
    """
    machine, distances = labels.machine, labels.distances
    users: dict[tuple[tuple[str, ...], str, bool], list[str]] = defaultdict(list)
    for gpu in machine.gpus:
        good = [nic for nic in machine.nics if distances.qualifies_for_gdr(gpu, nic)]
        nics = good or list(distances.nearest_nics(gpu)[1])
        by_path: dict[PathType | None, list[str]] = defaultdict(list)
        for nic in nics:
            by_path[distances.gpu_nic(gpu, nic)].append(nic.key)
        for path, keys in by_path.items():
            users[tuple(keys), UNKNOWN if path is None else path.name, bool(good)].append(gpu.key)
    return [Bracket(gpus=tuple(gpus), nics=nics, path=path, good=good) for (nics, path, good), gpus in users.items()]


class _Placer:
    """Places the boxes of a machine's picture, row by row from the top."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.machine: Machine = labels.machine
        self.layout = Drawing()
        self.y: float = TOP
        self.switches = {switch.key: switch for switch in used_switches(self.machine)}
        self.below: dict[str | None, list[str]] = {}
        self.leaves: dict[str, Gpu | Nic] = {gpu.key: gpu for gpu in self.machine.gpus}
        self.leaves |= {nic.key: nic for nic in self.machine.nics}
        self.numbers = {gpu.key: int(labels.gpu(gpu).removeprefix("GPU")) for gpu in self.machine.gpus}
        nearest = {gpu.key: labels.distances.nearest_nics(gpu)[1] for gpu in self.machine.gpus}
        self.nearest = {gpu: {nic.key for nic in nics} for gpu, nics in nearest.items()}
        for each in (*self.leaves.values(), *self.switches.values()):
            self.below.setdefault(each.parent, []).append(each.key)
        depth = max((self._depth(key) for key in self.switches), default=0)
        self.devices_x = MARGIN + CPU_WIDTH + LINK_WIDTH + depth * (SWITCH_WIDTH + LINK_WIDTH)

    def _depth(self, key: str) -> int:
        """Returns the number of switches on the way from a switch up to its CPU, itself included."""
        depth = 0
        step: str | None = key
        while step in self.switches:
            depth += 1
            step = self.switches[step].parent
        return depth

    def cpu(self, cpu: Cpu) -> None:
        """Places a CPU and everything that hangs off it."""
        start = self.y
        children = self._children(cpu.key, 0)
        self.y = max(self.y, start + ROW)
        box = Box(cpu.key, "cpu", MARGIN, start, CPU_WIDTH, self.y - start - (ROW - BOX_HEIGHT), _about(cpu))
        self._connect(box, children)
        self.y += CPU_GAP

    def _children(self, key: str | None, depth: int) -> list[Box]:
        """Places the switches, GPUs and NICs directly below a CPU or switch, and returns their boxes in drawn order.

        Args:
            key: Key of the CPU or switch.
            depth: Number of switches from the CPU down to what is placed.
        """
        keys = sorted(self.below.get(key, ()), key=self._order)
        return [self._switch(child, depth) if child in self.switches else self._leaf(child) for child in keys]

    def _order(self, key: str) -> tuple[int, bool, str]:
        """Returns the sort key of a child: GPUs by number; a NIC after the last GPU that it is nearest to.

        Only GPUs of the NIC's own CPU count; without one it comes last.
        """
        nic = self.leaves.get(key)
        if not isinstance(nic, Nic):
            return self._first_gpu(key), False, key
        cpu = self.labels.distances.cpu_of(nic)
        users = [
            self.numbers[gpu.key]
            for gpu in self.machine.gpus
            if key in self.nearest[gpu.key] and self.labels.distances.cpu_of(gpu) == cpu
        ]
        return max(users, default=MAX_DEVICES), True, key

    def _first_gpu(self, key: str) -> int:
        """Returns the number of a GPU, or the lowest number below a switch."""
        if key in self.numbers:
            return self.numbers[key]
        return min((self._first_gpu(child) for child in self.below.get(key, ())), default=MAX_DEVICES)

    def _switch(self, key: str, depth: int) -> Box:
        """Places a switch, and right of it what hangs off it; returns the switch's box.

        Args:
            key: Key of the switch.
            depth: Number of switches between it and its CPU; decides the column.
        """
        start = self.y
        children = self._children(key, depth + 1)
        switch = self.switches[key]
        name = "virtual" if switch.virtual else vendor_name(switch.vendor) or "switch"
        x = MARGIN + CPU_WIDTH + LINK_WIDTH + depth * (SWITCH_WIDTH + LINK_WIDTH)
        height = self.y - start - (ROW - BOX_HEIGHT)
        lines = [name, key.removeprefix("0000:")]
        box = Box(key, "switch", x, start, SWITCH_WIDTH, height, lines, switch.virtual)
        self._connect(box, children)
        return box

    def _connect(self, above: Box, children: list[Box]) -> None:
        """Adds a box to the drawing, and a labelled link from it to each box directly below it."""
        self.layout.boxes[above.key] = above
        for child in children:
            self.layout.edges.append(Edge(above, child, self._rate(child.key)))

    def _rate(self, key: str) -> str:
        """Returns the label of the link above a device or switch: its rate, `virtual`, or an empty text."""
        pcie = (self.leaves.get(key) or self.switches[key]).pcie
        if pcie is None or self._is_inside_a_chip(key):
            return ""
        return "virtual" if pcie.virtual else gigabytes(pcie_bytes_per_second(pcie))

    def _is_inside_a_chip(self, key: str) -> bool:
        """Returns whether the link above a switch is inside its chip, so that the rate it states limits no data.

        Source: NCCL src/graph/topo.cc (ncclTopoFlattenBcmSwitches): the parts of a Broadcom PEX are one switch, though
        they show themselves as several with a link of 2.5 GT/s x1 between them.
        """
        switch = self.switches.get(key)
        above = self.switches.get(switch.parent or "") if switch is not None else None
        if switch is None or above is None or switch.vendor is None or switch.vendor != above.vendor:
            return False
        below = [(self.leaves.get(child) or self.switches[child]).pcie for child in self.below.get(key, ())]
        rates = [rate for pcie in below if pcie is not None and (rate := pcie_bytes_per_second(pcie)) is not None]
        own = None if switch.pcie is None else pcie_bytes_per_second(switch.pcie)
        return own is not None and own < 0.1 * max(rates, default=0.0)

    def _leaf(self, key: str) -> Box:
        """Places a GPU or NIC in the next free row of the devices' column, and returns its box."""
        device = self.leaves[key]
        bus = (device.bus or "").removeprefix("0000:")
        if isinstance(device, Gpu):
            lines = [
                self.labels.gpu(device),
                " · ".join(filter(None, (model_name(device), self.labels.c2c(device)))),
                bus,
            ]
        else:
            layers = "/".join(sorted({port.link_layer for port in device.ports if port.link_layer}))
            rate = nic_rate(device).replace(UNKNOWN, "")
            name = nic_name(device).removeprefix("0000:")
            lines = [name, " ".join(filter(None, (rate, layers))) or model_name(device), bus if bus != name else ""]
        kind: BoxKind = "gpu" if isinstance(device, Gpu) else "nic"
        box = Box(key, kind, self.devices_x, self.y, DEVICE_WIDTH, BOX_HEIGHT, lines)
        self.layout.boxes[key] = box
        self.y += ROW
        return box

    def nowhere(self) -> None:
        """Places the devices whose place is unknown, without links, beside a dashed box."""
        lost = [key for key, leaf in self.leaves.items() if key not in self.layout.boxes]
        if not lost:
            return
        start = self.y
        for key in sorted(lost, key=self._order):
            self._leaf(key)
        height = self.y - start - (ROW - BOX_HEIGHT)
        self.layout.boxes["nowhere"] = Box("nowhere", "nowhere", MARGIN, start, CPU_WIDTH, height, ["place unknown"])
        self.y += CPU_GAP

    def finish(self) -> Drawing:
        """Places what joins the devices at their right, and returns the drawing."""
        plan = self.layout
        plan.lanes_x = self.devices_x + DEVICE_WIDTH
        plan.brackets = self._in_lanes(brackets(self.labels))
        lanes = max((bracket.lane + 1 for bracket in plan.brackets), default=0)
        plan.lane_width = max(NARROWEST_LANE, min(LANE_WIDTH, WIDEST_LANES / max(lanes, 1)))
        plan.fabric_x = plan.lanes_x + 14 + lanes * plan.lane_width
        linked = [plan.boxes[gpu.key] for gpu in self.machine.gpus if self.labels.bundles[gpu.key]]
        x = plan.fabric_x + (FABRIC_WIDTH + 34 if linked else 12)
        boxes = linked or [plan.boxes[gpu.key] for gpu in self.machine.gpus] or list(plan.boxes.values())
        top, bottom = min((box.y for box in boxes), default=TOP), max((box.bottom for box in boxes), default=TOP)
        switches = self.machine.nvswitches
        step = max(ROW, (bottom - top) / len(switches)) if switches else ROW
        for number, switch in enumerate(switches):
            lines = ["NVSwitch"] if switch.key == "hidden" else ["NVSwitch", switch.key.removeprefix("0000:")]
            y = top + (number + 0.5) * step - BOX_HEIGHT / 2
            plan.nvswitches.append(Box(switch.key, "nvswitch", x, y, NVSWITCH_WIDTH, BOX_HEIGHT, lines))
        right = x + (NVSWITCH_WIDTH if switches else 0)
        plan.width = max(NARROWEST, right + MARGIN)
        plan.bottom = max([self.y - CPU_GAP, *(box.bottom for box in plan.nvswitches)], default=TOP)
        return plan

    def _in_lanes(self, found: Sequence[Bracket]) -> list[Bracket]:
        """Returns the brackets, each in the first lane where it overlaps no other."""
        spans = [(bracket, self._span((*bracket.gpus, *bracket.nics))) for bracket in found]
        free: list[float] = []
        placed = []
        for bracket, (top, bottom) in sorted(spans, key=lambda item: item[1]):
            lane = next((number for number, until in enumerate(free) if until < top), len(free))
            free[lane : lane + 1] = [bottom]
            placed.append(replace(bracket, lane=lane))
        return placed

    def _span(self, keys: Iterable[str]) -> tuple[float, float]:
        """Returns the y coordinates of the upper and lower end of some devices' boxes."""
        boxes = [self.layout.boxes[key] for key in keys]
        return min(box.y for box in boxes), max(box.bottom for box in boxes)


def _about(cpu: Cpu) -> list[str]:
    """Returns the lines of text in a CPU's box: its name, socket and maker, cores."""
    maker = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}.get(cpu.vendor or "", cpu.vendor)
    socket = None if cpu.socket is None else f"socket {cpu.socket}"
    cores = f"cores {cpu.cores}" if cpu.cores else None
    return [cpu_name(cpu), *filter(None, [" · ".join(filter(None, [socket, maker])), cores])]

"""Where everything goes in the picture: the PCI tree from the CPUs down, a bar per switch, the devices in one row."""

from dataclasses import dataclass, field
from typing import Literal

from gradwire.topology.bandwidth import pcie_bytes_per_second
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Gpu, Machine, Nic
from gradwire.topology.labels import (
    UNKNOWN,
    Labels,
    cpu_name,
    gigabytes,
    model_name,
    nic_name,
    nic_rate,
    switch_name,
)

MAX_DEVICES = 128
"""More devices than this make no readable picture."""

LEAF_WIDTH, LEAF_HEIGHT, GAP, GROUP_GAP, SOCKET_GAP = 104, 78, 12, 14, 66
BAR_HEIGHT, CPU_HEIGHT, STEP = 30, 40, 62
SWITCH_GLYPH = 6.6
"""Width of a letter on a switch."""
MARGIN, TOP = 28, 104

BoxKind = Literal["cpu", "switch", "gpu", "nic", "socket", "nowhere"]


@dataclass(slots=True)
class Box:
    """One rectangle; lengths in pixels, the origin is the upper left corner."""

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
        """Horizontal centre."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """Lower edge."""
        return self.y + self.height


@dataclass(frozen=True, slots=True)
class Edge:
    """A PCIe link, from the box above straight down to the box below."""

    above: Box
    below: Box
    label: str


@dataclass(slots=True)
class Drawing:
    """Everything that has been placed."""

    boxes: dict[str, Box] = field(default_factory=dict)
    sockets: list[Box] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    width: float = 0
    leaves_bottom: float = 0


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
    cpus = sorted(machine.cpus, key=lambda cpu: (cpu.socket is None, cpu.socket, cpu.numa is None, cpu.numa, cpu.key))
    for position, cpu in enumerate(cpus):
        before = cpus[position - 1].socket if position else None
        if position:
            placer.x += GROUP_GAP if cpu.socket is not None and cpu.socket == before else SOCKET_GAP
        maker = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}.get(cpu.vendor or "", cpu.vendor)
        about = " · ".join(filter(None, [maker, cpu.cores and f"cores {cpu.cores}"]))
        placer.cpu(cpu.key, [cpu_name(cpu), about])
        if cpu.socket is not None:
            placer.socket(cpu.socket, cpu.key, new=cpu.socket != before or not position)
    placer.nowhere()
    placer.layout.width = placer.x + MARGIN
    placer.layout.leaves_bottom = placer.leaf_y + LEAF_HEIGHT
    return placer.layout


class _Placer:
    """Places boxes from left to right."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.machine: Machine = labels.machine
        self.layout = Drawing()
        self.x: float = MARGIN + 8
        self.switches = {switch.key: switch for switch in self.machine.switches}
        self.below: dict[str | None, list[str]] = {}
        self.leaves: dict[str, Gpu | Nic] = {gpu.key: gpu for gpu in self.machine.gpus}
        self.leaves |= {nic.key: nic for nic in self.machine.nics}
        self.numbers = {gpu.key: int(labels.gpu(gpu).removeprefix("GPU")) for gpu in self.machine.gpus}
        nearest = {gpu.key: labels.distances.nearest_nics(gpu)[1] for gpu in self.machine.gpus}
        self.nearest = {gpu: {nic.key for nic in nics} for gpu, nics in nearest.items()}
        for leaf in self.leaves.values():
            self.below.setdefault(leaf.parent, []).append(leaf.key)
        self._keep_used_switches()
        depth = max((self._depth(key) for key in self.switches), default=0)
        self.leaf_y = TOP + CPU_HEIGHT + STEP - 14 + depth * STEP

    def _keep_used_switches(self) -> None:
        """Hangs switches with devices below them into the tree, each once."""
        used: set[str] = set()
        for leaf in self.leaves.values():
            key = leaf.parent
            while key in self.switches and key not in used:
                used.add(key)
                self.below.setdefault(self.switches[key].parent, []).append(key)
                key = self.switches[key].parent
        self.switches = {key: switch for key, switch in self.switches.items() if key in used}

    def _depth(self, key: str) -> int:
        """Returns the number of switches from `key` up, itself included."""
        depth = 0
        step: str | None = key
        while step in self.switches:
            depth += 1
            step = self.switches[step].parent
        return depth

    def cpu(self, key: str, lines: list[str]) -> None:
        """Places a CPU and everything below it."""
        start = self.x
        children = self._children(key, 1)
        end = max(self.x - GAP, start + 150)
        box = Box(key, "cpu", start, TOP, end - start, CPU_HEIGHT, lines)
        self.x = end
        self._connect(box, children)

    def _children(self, key: str | None, depth: int) -> list[Box]:
        """Places what hangs off a box; GPUs next to their NICs, switches after single devices."""
        keys = sorted(self.below.get(key, ()), key=lambda child: self._order(child, self.below[key]))
        return [self._switch(child, depth) if child in self.switches else self._leaf(child) for child in keys]

    def _order(self, key: str, siblings: list[str]) -> tuple[bool, int, bool, str]:
        """Returns what children are sorted by: GPUs by number, a NIC right after the last GPU it is nearest to."""
        if key in self.switches:
            return True, 0, False, key
        if key in self.numbers:
            return False, self.numbers[key], False, key
        users = [self.numbers[gpu] for gpu in siblings if key in self.nearest.get(gpu, ())]
        return False, max(users, default=-1), True, key

    def _switch(self, key: str, depth: int) -> Box:
        """Places a switch as a bar over what hangs off it."""
        start = self.x
        children = self._children(key, depth + 1)
        switch = self.switches[key]
        y = TOP + CPU_HEIGHT + STEP - 22 + (depth - 1) * STEP
        name, width = switch_name(switch).replace("0000:", ""), self.x - GAP - start
        short = key.removeprefix("0000:") if len(name) * SWITCH_GLYPH > width - 8 else name
        box = Box(key, "switch", start, y, width, BAR_HEIGHT, [short], switch.virtual)
        self._connect(box, children)
        return box

    def _connect(self, above: Box, children: list[Box]) -> None:
        """Stores a box and the links to its children."""
        self.layout.boxes[above.key] = above
        for child in children:
            self.layout.edges.append(Edge(above, child, self._rate(child.key)))

    def _rate(self, key: str) -> str:
        """Returns what is written next to the link above a device or switch."""
        pcie = (self.leaves.get(key) or self.switches[key]).pcie
        if pcie is None:
            return ""
        return "virtual" if pcie.virtual else gigabytes(pcie_bytes_per_second(pcie))

    def _leaf(self, key: str) -> Box:
        """Places a GPU or NIC in the row of devices."""
        device = self.leaves[key]
        bus = (device.bus or "").removeprefix("0000:")
        if isinstance(device, Gpu):
            lines = [self.labels.gpu(device), *_split(model_name(device)), bus]
        else:
            layers = {port.link_layer for port in device.ports if port.link_layer}
            rate = nic_rate(device).replace(UNKNOWN, "")
            about = [rate, "/".join(sorted(layers)), bus] if device.ports else _split(model_name(device))
            lines = [nic_name(device).removeprefix("0000:"), *about]
        kind: BoxKind = "gpu" if isinstance(device, Gpu) else "nic"
        box = Box(key, kind, self.x, self.leaf_y, LEAF_WIDTH, LEAF_HEIGHT, [line for line in lines if line])
        self.layout.boxes[key] = box
        self.x += LEAF_WIDTH + GAP
        return box

    def nowhere(self) -> None:
        """Places the devices whose place is unknown, without links, below a dashed bar."""
        lost = [key for key, leaf in self.leaves.items() if key not in self.layout.boxes]
        if not lost:
            return
        start = self.x = self.x + (SOCKET_GAP if self.layout.boxes else 0)
        for key in lost:
            self._leaf(key)
        self.x -= GAP
        width = max(self.x - start, 150)
        self.x = start + width
        self.layout.boxes["nowhere"] = Box("nowhere", "nowhere", start, TOP, width, CPU_HEIGHT, ["place unknown"])

    def socket(self, number: int, cpu: str, *, new: bool) -> None:
        """Starts a processor package around a CPU, or widens the last one to take the CPU in."""
        box = self.layout.boxes[cpu]
        if new:
            y, bottom = TOP - 30, self.leaf_y + LEAF_HEIGHT
            place = Box(
                f"socket{number}", "socket", box.x - 10, y, box.width + 20, bottom - y + 10, [f"Socket {number}"]
            )
            self.layout.sockets.append(place)
        else:
            self.layout.sockets[-1].width = box.x + box.width + 10 - self.layout.sockets[-1].x


def _split(model: str) -> list[str]:
    """Returns a model's name on at most two short lines."""
    head, _, tail = model.partition(" ")
    return [head, tail] if len(model) > 14 and tail else [model]

"""Recognizes a pasted text: which program prints it, whether it is a topology, and what pasting has added to it."""

import re
from collections.abc import Callable, Iterator

HEAD_CHARACTERS = 1 << 16
OTHER_TOOLS = (
    (r"NCCL (?:INFO|WARN)", "a log of NCCL", "`gradwire gdr-check --nccl-log FILE` reads it"),
    (
        r"^GPU \d+: .*\n\s+Link \d+:",
        "`nvidia-smi nvlink -s`",
        "`gradwire gdr-check` reads it; here `nvidia-smi topo -m`",
    ),
    (
        r"^GPU \d+: .*\n\s+C2C Link \d+:",
        "`nvidia-smi c2c -s`",
        "give `nvidia-smi topo -m`",
    ),
    (r"^GPU \d+: .*\(UUID: ", "`nvidia-smi -L`", "give `nvidia-smi topo -m`"),
    (r"^=+NVSMI LOG=+", "`nvidia-smi -q`", "give `nvidia-smi topo -m`"),
    (
        r"^The GPUs? that (?:have|has) an affinity|^The (?:NIC|device)s? .*(?:GPU|connect)",
        "`nvidia-smi topo` with another option",
        "give `nvidia-smi topo -m`",
    ),
    (r"NVIDIA-SMI \d|^\| +GPU +Name ", "the table of `nvidia-smi`", "give `nvidia-smi topo -m`"),
    (
        r"^\[P2P \(Peer-to-Peer\) GPU Bandwidth Latency Test\]",
        "`p2pBandwidthLatencyTest` of the CUDA samples",
        "give `nvidia-smi topo -m`",
    ),
    (
        r"^nvbandwidth Version|^Running (?:host_to_device|device_to_device)_",
        "`nvbandwidth`",
        "give `nvidia-smi topo -m`",
    ),
    (
        r"^# nThread \d+ nGpus \d+|^# +size +count +type +redop",
        "the table of nccl-tests",
        "give `nvidia-smi topo -m`",
    ),
    (
        r"^(?:index|name|uuid|timestamp|gpu_name|pci\.bus_id)(?:, ?[\w.]+(?: \[\w+\])?)+$",
        "`nvidia-smi --query-gpu`",
        "give `nvidia-smi topo -m`",
    ),
    (r"^# dmidecode \d", "`dmidecode`", "give `nvidia-smi topo -m`, or `lspci -vvv` as root"),
    (r"^provider: \w+\n\s+fabric: ", "`fi_info`", "`gradwire topo` reads the cards itself"),
    (r"^# +Memory domain: |^# +Transport: ", "`ucx_info -d`", "`gradwire topo` reads the cards itself"),
    (
        r"^Operational Info\n-+|^MST modules:|^(?:CA|Switch): (?:0x|\w+ HCA)|^# Topology file: generated on",
        "a tool of the InfiniBand fabric",
        "`gradwire topo` reads /sys/class/infiniband itself",
    ),
    (r"^NodeName=\w|^PARTITION +AVAIL", "Slurm's `scontrol` or `sinfo`", "give `nvidia-smi topo -m` of the node"),
    (
        r"^(?:strict )?(?:di)?graph\b.*\{",
        "a graph of Graphviz",
        "give `lstopo file.xml`, or the text that it was made of",
    ),
    (
        r"^\s*(?:-\+-|-)\[[0-9a-f]{4}:[0-9a-f]{2}(?:-[0-9a-f]{2})?\]-|^\s*[+\\]-[0-9a-f]{2}\.[0-9a-f]",
        "`lspci -t`",
        "give `lspci -vvv`, as root",
    ),
    (
        r"^\[ *\d+\.\d+\]|^\[[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]+ \d{4}\]",
        "the kernel's log",
        "`gradwire gdr-check` reads it on the host",
    ),
    (
        r"^CA '\w+'|^\s*CA type:",
        "`ibstat`",
        "`gradwire topo` reads /sys/class/infiniband itself; or give `nvidia-smi topo -m`",
    ),
    (
        r"^hca_id:|^\d+ HCAs? found:|^\s*device\s+node GUID",
        "`ibv_devinfo` or `ibv_devices`",
        "`gradwire topo` reads /sys/class/infiniband itself; or give `nvidia-smi topo -m`",
    ),
    (r"^link \w+/\d+ .*state \w+", "`rdma link`", "`gradwire topo` reads /sys/class/infiniband itself"),
    (r"^Infiniband device '\w+' port \d+ status", "`ibstatus`", "`gradwire topo` reads /sys/class/infiniband itself"),
    (r"^\w+ port \d+ ==> \w+", "`ibdev2netdev`", "`gradwire topo` reads /sys/class/infiniband itself"),
    (r"^DEV\s+PORT\s+INDEX\s+GID", "`show_gids`", "`gradwire gdr-check` reads the GIDs itself"),
    (
        r"^\s*NPU\d+\s+NPU\d+|^\| npu-smi ",
        "`npu-smi`",
        "Ascend is not known here; `lspci -vvv` shows its place in the machine",
    ),
    (r"HL-SMI|hl-smi", "`hl-smi`", "Gaudi is not known here; `lspci -vvv` shows its place in the machine"),
    (
        r"^(?:ACCESS|WEIGHT|HOPS|NUMA BW|LINK STATUS) TABLE:",
        "a part of `amd-smi topology`",
        "give all of it, with its LINK TYPE TABLE",
    ),
    (r"AMD-SMI \d|^\| AMD-SMI ", "the table of `amd-smi`", "give `amd-smi topology`"),
    (r"ROCm System Management Interface|^=+ ROCm", "`rocm-smi`", "give `amd-smi topology`, or `rocm-smi --showtopo`"),
    (
        r"\bGPU \d+/\d+\b.*(?:GPU \d+/\d+|CPU Affinity)",
        "`xpu-smi topology`",
        "Intel's GPUs are not known here; `lspci -vvv` shows their place in the machine",
    ),
    (r"^Architecture: +\w", "`lscpu`", "`gradwire topo` reads that itself; or give `lstopo file.xml`"),
    (r"^available: \d+ nodes \(", "`numactl -H`", "`gradwire topo` reads that itself; or give `lstopo file.xml`"),
    (r"^Module +Size +Used by", "`lsmod`", "`gradwire gdr-check` reads that itself"),
    (
        r"^[\w.@-]+ +(?:UP|DOWN|UNKNOWN) +(?:(?:[0-9a-f]{2}:){5}[0-9a-f]{2}|[\d.]+/\d+)",
        "`ip -br link`",
        "`gradwire topo` reads that itself; or give `nvidia-smi topo -m`",
    ),
    (r"^\d+: [\w.@-]+: <[A-Z]", "`ip link`", "`gradwire topo` reads that itself; or give `nvidia-smi topo -m`"),
    (r"^Settings for [\w.-]+:", "`ethtool`", "`gradwire topo` reads that itself; or give `nvidia-smi topo -m`"),
    (r"<!DOCTYPE html|<html\b", "a web page", "give the file itself, as `raw` shows it"),
    (r"^Machine \(\d+\w+ total|^ +(?:Package|NUMANode) L#\d", "the text of `lstopo`", "give `lstopo file.xml`"),
    (r'"tool": "gradwire gdr-check"', "the JSON of `gradwire gdr-check`", "its `--compare` reads it"),
    (
        r"^Collecting environment information|^PyTorch version: ",
        "`torch.utils.collect_env`",
        "give `nvidia-smi topo -m`",
    ),
    (r"^(?:\w+=.*\n){0,200}(?:NCCL|PATH|HOME)\w*=", "the output of `env`", "`gradwire gdr-check --env FILE` reads it"),
    (
        r"neuron-device|instance-type: (?:inf|trn)",
        "`neuron-ls`",
        "Neuron is not known here; `lspci -vvv` shows its place",
    ),
)
"""First lines of what people have at hand: a pattern, what prints it, what to do with it."""


def tool_of(text: str) -> tuple[str, str] | None:
    """Recognizes the tool that printed a text which describes no topology.

    Args:
        text: Any text; only its first 65,536 characters are searched.

    Returns:
        (name of the tool, what to do with the text or to pass instead); None if it is not recognized.
    """
    found = (
        (tool, do) for pattern, tool, do in OTHER_TOOLS if re.search(pattern, text[:HEAD_CHARACTERS], re.MULTILINE)
    )
    return next(found, None)


_PREFIX = re.compile(r"> ?|\[[\w,. -]{1,40}\](?:<std\w+>)?:? ?|[\w.-]{1,64}(?:\[[\w,-]{1,64}\])?: ?|[\w.-]{1,64} +\| ")
"""What stands before each line: a quotation, `[1,0]<stdout>:` of mpirun, `3: ` of srun -l, `node1: ` of pdsh and
clush, `name | ` of docker compose."""
_RULE = re.compile(r"\s*\|?[\s:|-]*-[\s:|-]*\|?\s*")
_LEAST_LINES = 2


def unwrapped(text: str, is_known: Callable[[str], bool]) -> tuple[str, str]:
    """Removes what pasting or a parallel shell put around the lines of a text: table borders, quotes, host names.

    Args:
        text: Text that no reader recognizes as it is.
        is_known: Function of a text that returns whether a reader recognizes it.

    Returns:
        (text without the additions, a note if lines with other prefixes, perhaps of other hosts, were left out, else
        an empty text); the unchanged text and no note if nothing helps.
    """
    for inner, note in _layers(text):
        if is_known(inner):
            return inner, note
    return text, ""


def _layers(text: str) -> Iterator[tuple[str, str]]:
    """Yields candidates for `unwrapped`: (text without table borders or one common prefix, note)."""
    lines = text[: 1 << 20].splitlines()
    piped = [line for line in lines if line.strip().startswith("|")]
    if len(piped) >= _LEAST_LINES:
        rows = (line.strip().strip("|").replace("|", "\t") for line in piped if not _RULE.fullmatch(line))
        yield "\n".join("\t".join(cell.strip() for cell in row.split("\t")) for row in rows), ""
    prefixes = [match[0] for line in lines if (match := _PREFIX.match(line))]
    for prefix in dict.fromkeys(prefixes):
        if prefixes.count(prefix) < _LEAST_LINES:
            continue
        inner = "\n".join(line[len(prefix) :] for line in lines if line.startswith(prefix))
        others = [each.strip() for each in dict.fromkeys(prefixes) if each != prefix and prefixes.count(each) > 1]
        note = f"Lines of {', '.join(others[:4])} were left out: only those of {prefix.strip()} are shown."
        yield inner, note if others else ""

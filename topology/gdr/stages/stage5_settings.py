"""Stage 5, the settings: variables of the process and nccl.conf that switch RDMA off or bend it."""

import difflib
import re

from gradwire.topology.gdr.glue import chain_state, dmabuf_chain, peermem_known, peermem_path
from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.model import (
    CheckOutcome,
    Finding,
    GdrCheck,
    Verdict,
    failed,
    judge_pairs,
    passed,
    unknown,
    warned,
)
from gradwire.topology.gdr.nccl import (
    DYNAMIC_GID_SINCE,
    LEVELS,
    default_level,
    name_matches,
    parse_level,
    within,
    without_level,
)
from gradwire.topology.gdr.stages.stage4_path import domain_type
from gradwire.topology.nccl_variables import CURES, KNOWN, RENAMED, unread
from gradwire.topology.networks import TCPX, TCPXO, Plugin
from gradwire.topology.printable import shortened


def _plugins(host: Host) -> dict[str, Plugin]:
    """Returns name of a card -> the plug-in by which NCCL uses it, for those cards of the host that need one."""
    return {nic.family.title: nic.family.plugin for nic in host.nics if nic.family and nic.family.plugin}


def rdma_switched_off(host: Host) -> Finding:
    """Checks that no variable turns RDMA off, hides the plug-in of cards that need one, or names missing devices.

    Command: `env | grep -E "NCCL_(IB_DISABLE|NET|NET_PLUGIN|IB_HCA)="; cat /etc/nccl.conf`
    Source: NCCL user guide, NCCL_IB_DISABLE, NCCL_NET, NCCL_NET_PLUGIN, NCCL_IB_HCA; aws-ofi-nccl issues 241, 1055.
    """
    plugins = _plugins(host)
    net = " or ".join(dict.fromkeys(plugin.net for plugin in plugins.values())) or "IB"
    by_verbs = not host.nics or any(nic.plugin is None for nic in host.nics)
    if host.setting("NCCL_IB_DISABLE") not in (None, "0") and by_verbs:
        return failed(
            _shown(host, "NCCL_IB_DISABLE"),
            f"one run without it, with a time limit: {CURES['ib']}",
        )
    if (host.setting("NCCL_NET") or "").lower() == "socket":
        return failed(
            _shown(host, "NCCL_NET"),
            f"one run without it, or with the RDMA network ({net}), with a time limit: {CURES['ib']}",
        )
    if plugins and host.setting("NCCL_NET_PLUGIN") == "none":
        return failed(
            f"{_shown(host, 'NCCL_NET_PLUGIN')}: {' and '.join(plugins)} needs the plugin",
            f"one run without it, with a time limit: {CURES['plugin']}",
        )
    if not by_verbs and (host.setting("NCCL_NET") or "").upper() == "IB":
        return failed(
            f"{_shown(host, 'NCCL_NET')}: {' and '.join(plugins)} is no network of NCCL's own",
            f"one run without it, or with {net}, with a time limit",
        )
    value, names = host.setting("NCCL_IB_HCA"), [d.name for d in host.rdma_devices or () if d.verbs]
    if value and names and not any(name_matches(value, name) for name in names):
        return failed(
            f"{_shown(host, 'NCCL_IB_HCA')} matches none of {', '.join(names[:8])}", "name devices that exist"
        )
    return passed("RDMA is not switched off")


def _shown(host: Host, name: str) -> str:
    """Returns a variable in force as `NAME=value (where it was set)`."""
    found = (host.settings or {})[name]
    return f"{name}={shortened(found.value, 80)} ({found.source})"


def gdr_level(host: Host) -> Finding:
    """Checks that the level in force reaches the pair: NCCL_NET_GDR_LEVEL, else the default of this version of NCCL.

    Command: `env | grep NCCL_NET_GDR`
    Source: NCCL user guide, NCCL_NET_GDR_LEVEL and NCCL_NET_GDR_READ; src/graph/paths.cc (ncclTopoCheckGdr); nccl
    issue 1295.
    """
    level, value = host.gdr_level, host.setting("NCCL_NET_GDR_LEVEL")

    def judge(gpu: str, nic: str) -> Finding:
        path = host.distances[gpu, nic]
        if path is None:
            return unknown(f"{gpu} to {nic}: distance not known, level {level}")
        if within(path, level):
            return passed(f"{gpu} to {nic}: {path} is within {level}")
        return failed(f"{gpu} to {nic}: {path} is beyond {level}{'' if value else ', the default'}")

    standard = default_level(host.nccl_version)
    lowered = value is not None and any(
        path is not None and not within(path, level) and within(path, standard) for path in host.distances.values()
    )
    moved = f"{host.to_bring_up}move the card, or measure NCCL_NET_GDR_LEVEL=PHB (SYS) against the default"
    coherent = any(host.distances[pair] == "P2C" for pair in host.best_pairs)
    finding = judge_pairs(host, judge, without_level(standard) if lowered else _OVER_C2C if coherent else moved)
    doubt = _doubt_about_level(host, value, level)
    if finding.outcome is CheckOutcome.PASS and doubt:
        return Finding(CheckOutcome.WARN, *doubt, finding.pairs)
    return finding


_OVER_C2C = (
    "the card is on the GPU's own CPU, over a chip-to-chip link: NCCL 2.27 or later uses GPUDirect RDMA there by "
    "default, 2.26 with NCCL_NET_GDR_C2C=1, earlier releases with NCCL_NET_GDR_LEVEL=PHB"
)
"""Source: NCCL user guide, NCCL_NET_GDR_C2C."""


def _doubt_about_level(host: Host, value: str | None, level: str) -> tuple[str, str] | None:
    """Returns (what is odd about the variables of GPUDirect RDMA, its fix), or None if nothing is odd.

    Args:
        host: The machine as it was read.
        value: Value of NCCL_NET_GDR_LEVEL; None if it is not set.
        level: Name of the level in force.
    """
    for old in ("NCCL_IB_GDR_LEVEL", "NCCL_IB_CUDA_SUPPORT"):
        if value is None and host.setting(old) is not None:
            return (
                f"{_shown(host, old)} {RENAMED[old].words}",
                f"the default level is {level}",
            )
    if value is not None and parse_level(value, host.nccl_version) is None:
        numbers = host.nccl_version is not None and host.nccl_version < (2, 6)
        wanted = "a number from 0 to 5, as NCCL before 2.6 reads it" if numbers else f"one of {', '.join(LEVELS)}"
        return f"{_shown(host, 'NCCL_NET_GDR_LEVEL')} is no level: NCCL ignores it", wanted
    if host.setting("NCCL_NET_GDR_READ") == "0":
        return (
            f"{_shown(host, 'NCCL_NET_GDR_READ')}: sends go through the host",
            "compare with a run without it; where GPUs have no NVLink 0 is NCCL's default, and may be faster",
        )
    if value is not None and value.strip().isdigit():
        return f"NCCL_NET_GDR_LEVEL={value.strip()} is a legacy number", f"NCCL_NET_GDR_LEVEL={level}"
    return None


def dmabuf_switched_off(host: Host) -> Finding:
    """Checks that no variable turns dma-buf off if it is the only way to register GPU memory.

    Also warns if a variable of EFA's plug-in lets a missing GDR go unnoticed.

    Command: `env | grep -E "NCCL_DMABUF_ENABLE|OFI_NCCL_DISABLE"`
    Source: NCCL src/init.cc (NCCL_DMABUF_ENABLE, default 1); aws-ofi-nccl doc (OFI_NCCL_DISABLE_DMABUF).
    """
    off = [
        n for n, bad in (("NCCL_DMABUF_ENABLE", ("0",)), ("OFI_NCCL_DISABLE_DMABUF", ("1",))) if host.setting(n) in bad
    ]
    if not off:
        loose = "OFI_NCCL_DISABLE_GDR_REQUIRED_CHECK"
        if host.setting(loose) == "1":
            return warned(f"{_shown(host, loose)}: a missing GDR goes unnoticed", "unset it")
        return passed("dma-buf is not switched off")
    if peermem_path(host):
        return passed(f"{_shown(host, off[0])}: peer memory works and is used instead ({CURES['dmabuf']})")
    if chain_state(dmabuf_chain(host)) is None and not peermem_known(host):
        return unknown(f"{_shown(host, off[0])}; whether dma-buf is the only way is not known", "unset it")
    return failed(f"{_shown(host, off[0])}, and there is no peer memory", "unset it")


def gid_index(host: Host) -> Finding:
    """Checks that no variable fixes the GID index: NCCL picks it from 2.21 on, and a fixed one breaks in containers.

    Command: `env | grep NCCL_IB_GID_INDEX; show_gids`
    Source: NCCL user guide, NCCL_IB_GID_INDEX (default -1 since 2.21).
    """
    value = host.setting("NCCL_IB_GID_INDEX")
    if value in (None, "-1"):
        return passed("not set")
    if host.nccl_version is not None and host.nccl_version < DYNAMIC_GID_SINCE:
        return passed(f"{value}, as NCCL before 2.21 needs it")
    return warned(_shown(host, "NCCL_IB_GID_INDEX"), "unset it from NCCL 2.21 on")


def left_over_debugging(host: Host) -> Finding:
    """Checks that no transport inside the node is switched off, as is done to hunt for a bug.

    Command: `env | grep -E "NCCL_(P2P_DISABLE|SHM_DISABLE|P2P_LEVEL)"`
    Source: NCCL user guide, section Debugging (variables that are not for production).
    """
    names = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_LEVEL")
    found = [name for name in names if host.setting(name) is not None]
    if not found:
        return passed("none set")
    shown = ", ".join(_shown(host, name) for name in found)
    if "NCCL_SHM_DISABLE" in found and len(found) == 1:
        return warned(shown, "unset it where /dev/shm is large enough (df /dev/shm; 1 GiB is plenty)")
    cure = _needs_no_peer_to_peer(host)
    if cure:
        return warned(f"{shown}: {cure}", "keep it until that is mended (P4, P5), or NCCL may hang")
    without = " ".join(f"-u {name}" for name in found)
    return warned(
        f"{shown}: a cure where GPUs cannot reach each other, else a loss",
        f"keep it until a short run without it has ended well: timeout 300 env {without} ...; nvidia-smi topo -p2p r",
    )


def _needs_no_peer_to_peer(host: Host) -> str:
    """Returns why transfers between GPUs of this host may hang, so that it is right to turn them off; empty if unseen.

    Source: NCCL user guide, Troubleshooting, PCI Access Control Services; rtx6kpro issue 15 (local-inference-lab).
    """
    parents = {bus for gpu in host.gpus for bus in gpu.parents or ()}
    bridges = [function for bus, function in host.tree.functions.items() if bus in parents]
    if any(bridge.config is not None and bridge.config.acs_redirect for bridge in bridges):
        return "PCIe access control (ACS) redirects what GPUs send each other"
    if any((domain_type(host, gpu) or "").startswith("DMA") for gpu in host.gpus):
        return "the IOMMU translates what GPUs send each other"
    return ""


def socket_interface(host: Host) -> Finding:
    """Checks that NCCL_SOCKET_IFNAME names an interface that exists: otherwise no communicator starts.

    Command: `env | grep NCCL_SOCKET_IFNAME; ip -br link`
    Source: NCCL user guide, NCCL_SOCKET_IFNAME.
    """
    value, interfaces = host.setting("NCCL_SOCKET_IFNAME"), host.files.names("sys/class/net")
    if value is None:
        return passed("not set")
    if interfaces is None:
        return unknown("/sys/class/net cannot be seen")
    matching = [name for name in interfaces if name_matches(value, name)]
    if not matching:
        return failed(f"{_shown(host, 'NCCL_SOCKET_IFNAME')} matches none of {', '.join(interfaces[:8])}", "name one")
    states = {name: host.files.text(f"sys/class/net/{name}/operstate") for name in matching}
    if all(state == "down" for state in states.values()):
        return failed(f"down: {', '.join(states)}", "ip link set DEV up")
    odd = [name for name in matching if name == "lo" or name.startswith("docker")]
    if len(odd) == len(matching):
        return failed(f"{_shown(host, 'NCCL_SOCKET_IFNAME')} cannot leave this host", "name a network interface")
    return passed(", ".join(matching[:8]))


def spelling(host: Host) -> Finding:
    """Checks that no variable is obsolete, not read by this NCCL, or spelt almost like one of NCCL's.

    Unknown names that begin with NCCL_ and are like no known one pass: a plug-in may read them.

    Command: `env | grep -E "CCL_"`
    Source: NCCL user guide, Environment Variables (old names); NERSC podman-hpc issue 136 (`CCL_NET_GDR_LEVEL`).
    """
    odd = []
    for name in host.settings or {}:
        if (renamed := RENAMED.get(name)) is not None:
            odd.append(f"{name} {renamed.words}")
        elif reason := unread(name, host.nccl_version):
            odd.append(f"{name} {reason}")
        elif name not in KNOWN and re.match(r"N?CCL_", name):
            near = difflib.get_close_matches(f"N{name}" if name.startswith("CCL_") else name, KNOWN, 1, 0.9)
            odd += [f"{name} (is {near[0]} meant?)"] if near else []
    return warned(", ".join(odd[:4]), "NCCL ignores names it does not know") if odd else passed("no near miss")


def topology_file(host: Host) -> Finding:
    """Checks that the file of NCCL_TOPO_FILE exists and describes this machine.

    Command: `grep -o 'busid="[^"]*"' $NCCL_TOPO_FILE; lspci -D`
    Source: NCCL user guide, NCCL_TOPO_FILE.
    """
    path = host.setting("NCCL_TOPO_FILE")
    if path is None:
        return passed("not set")
    found = host.files.find(path.lstrip("/"), r'<system\b|\bbusid="[0-9a-fA-F:.]{7,16}"')
    if found is None:
        state = host.files.state(path.lstrip("/"))
        return unknown(f"{path} cannot be read") if state != "absent" else failed(f"{path} does not exist", "unset it")
    if "<system" not in found:
        return failed(f"{path} is no NCCL topology", "a file with a <system> element, NCCL_TOPO_DUMP_FILE writes one")
    named = {match.partition('"')[2].rstrip('"').lower() for match in found if match.startswith("busid")}
    if named and host.tree.functions and not named & set(host.tree.functions):
        return warned(f"{path} names no device of this machine", "take the file of this machine type")
    return passed(path)


def vendor_settings(host: Host) -> Finding:
    """Checks that settings fit the plug-ins: no obsolete EFA variables, libfabric's provider, a profile for Google's.

    Command: `env | grep -E "^(FI_|NCCL_FASTRAK_|NCCL_GPUDIRECTTCPX_|NCCL_NET=)"`
    Source: aws-ofi-nccl release notes 1.6 and 1.7; libfabric fi_provider(7), fi_efa(7); Google Cloud, GPU networking.
    """
    if host.setting("FI_EFA_USE_DEVICE_RDMA") is not None:
        return warned(
            _shown(host, "FI_EFA_USE_DEVICE_RDMA"), "obsolete from libfabric 1.18 and aws-ofi-nccl 1.7 on: unset it"
        )
    providers = host.setting("FI_PROVIDER") or ""
    for title, plugin in _plugins(host).items():
        named = set(re.split("[,;]", providers.lower().lstrip("^")))  # ^ excludes those that follow
        if providers and plugin.providers and bool(named & set(plugin.providers)) == providers.startswith("^"):
            wanted = f"unset it, or FI_PROVIDER={plugin.providers[0]}"
            return warned(f"{_shown(host, 'FI_PROVIDER')}: {title} NICs are not used", wanted)
    net, names = host.setting("NCCL_NET") or "", host.settings or {}
    for plugin in (TCPX, TCPXO):
        if net.startswith(plugin.net) and not any(name.startswith(plugin.settings) for name in names):
            lacking = f"NCCL_NET={net} without its {plugin.settings} profile"
            return failed(lacking, "source nccl-env-profile.sh of the plugin, or set what Google Cloud's guide lists")
    return passed("nothing out of place")


CHECKS = (
    GdrCheck("V1", "RDMA not switched off", rdma_switched_off, Verdict.CONFIGURED, of_settings=True),
    GdrCheck("V2", "GDR level", gdr_level, Verdict.CONFIGURED, ("R1",), of_settings=True),
    GdrCheck("V3", "dma-buf not switched off", dmabuf_switched_off, Verdict.CONFIGURED, of_settings=True),
    GdrCheck("V4", "GID index", gid_index, of_settings=True),
    GdrCheck("V5", "left-over debugging", left_over_debugging, of_settings=True),
    GdrCheck("V6", "socket interface", socket_interface, of_settings=True),
    GdrCheck("V7", "spelling", spelling, of_settings=True),
    GdrCheck("V8", "topology file", topology_file, of_settings=True),
    GdrCheck("V9", "cloud settings", vendor_settings, of_settings=True),
)

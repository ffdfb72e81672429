"""Finds out whether this process runs as root, in a container, or in a virtual machine."""

from dataclasses import dataclass

from gradwire.topology.gdr.inputs.files import Files

CAP_IPC_LOCK = 14
CAP_SYS_ADMIN = 21

_HYPERVISORS = ("qemu", "kvm", "vmware", "xen", "microsoft corporation", "amazon ec2", "google", "openstack", "bochs")


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """Describes the privileges and the container of a process, which decide what it can read. None is unknown."""

    container: str | None
    """`docker`, `kubernetes`, `podman`, ...; empty on the host."""
    virtual: bool | None
    """True in a virtual machine."""
    root: bool | None
    """True if the effective user id is 0."""
    capabilities: int | None
    """Bit mask of the effective capabilities."""

    def can(self, capability: int) -> bool | None:
        """Returns whether the process has a capability; None if that is unknown.

        Args:
            capability: Bit number, such as `CAP_SYS_ADMIN`.
        """
        return None if self.capabilities is None else bool(self.capabilities >> capability & 1)

    def __str__(self) -> str:
        """Returns one line: `root, kubernetes container, virtual machine`."""
        user = {True: "root", False: "not root", None: "user unknown"}[self.root]
        container = {None: "container unknown", "": "no container"}.get(self.container, f"{self.container} container")
        machine = {True: "virtual machine", False: "bare metal", None: "machine unknown"}[self.virtual]
        return f"{user}, {container}, {machine}"


def read_process_context(files: Files, kubernetes: bool) -> ProcessContext:
    """Finds out, from /proc and DMI, as which user and inside which container and machine this process runs.

    Args:
        files: Root folder to read below.
        kubernetes: True if KUBERNETES_SERVICE_HOST is set.
    """
    status = files.find("proc/self/status", r"^(Uid|CapEff):.*$")
    words = {line.split(":")[0]: line.split(":")[1].split() for line in status or ()}
    uid = words.get("Uid", [])
    return ProcessContext(
        container="kubernetes" if kubernetes else _container(files),
        virtual=_virtual(files),
        root=uid[1] == "0" if len(uid) > 1 else None,
        capabilities=_hexadecimal(words.get("CapEff", [])),
    )


def _hexadecimal(words: list[str]) -> int | None:
    try:
        return int(words[0], 16) & (1 << 64) - 1
    except (IndexError, ValueError):
        return None


def _container(files: Files) -> str | None:
    if files.state(".dockerenv") == "present":
        return "docker"
    if files.state("run/.containerenv") == "present":
        return "podman"
    if files.state(".singularity.d") == "present":
        return "apptainer"
    groups = files.find("proc/1/cgroup", r"kubepods|docker|containerd|lxc|garden|^0::/$|^\S*:/init\.scope$")
    if groups is None:
        return None
    named = [word.replace("kubepods", "kubernetes") for word in groups if ":" not in word]
    # A lone `0::/` is a container's own view, or a host without systemd: not known.
    return named[0] if named else None if "0::/" in groups else ""


def _virtual(files: Files) -> bool | None:
    if files.find("proc/cpuinfo", r"\bhypervisor\b"):
        return True
    vendor = " ".join(files.text(f"sys/class/dmi/id/{name}") or "" for name in ("sys_vendor", "product_name")).lower()
    if vendor.strip():  # EC2 says "amazon ec2" on metal too; only its .metal instance types are not virtual
        return any(word in vendor for word in _HYPERVISORS) and ".metal" not in vendor and "surface" not in vendor
    return False if files.state("proc/cpuinfo") == "present" and files.state("sys/class/dmi/id") == "present" else None

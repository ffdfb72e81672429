"""Conditions under which the fix of a check is the right one; printed with the fix, and with the check's source.

A fix that is wrong for the machine at hand is worse than none: it may hang the job, or cost a day.
"""

import inspect

from gradwire.topology.gdr.model import GdrCheck

HOLDS = {
    "E0": "the machine is yours: what root changes, others who use it will notice",
    "E1": "this is a container or a chroot; where the kernel itself shows no bus there is no PCI",
    "E2": "no other device of this machine needs the parameter",
    "G1": "the driver was installed for this kernel; in a container its host's driver counts",
    "G2": "NCCL's traffic leaves the machine: inside one, GPUs need none of this",
    "G3": "the GPU is of Turing or later, which the open modules need",
    "G4": "there is no peer memory; with it dma-buf is not needed",
    "G5": "the firmware has the setting; without it cards of 256 MiB stay so",
    "G6": "the card has as many lanes in use elsewhere: some slots have fewer by design",
    "G7": "the cards had an NVLink bridge or switch that all of them reach",
    "G8": "the machine has NVSwitches and is not a guest, whose host runs the fabric manager",
    "G9": "the GPUs train as a whole; slices that others use stay",
    "R1": "the card is meant for RDMA and belongs to this host, not to one of its guests",
    "R2": "the container may see the host's cards, which its administrator decides",
    "R3": "verbs are used: EFA, Slingshot and Omni-Path come through libfabric instead",
    "R4": "the port is cabled; an unused one may stay down",
    "R5": "those ports carry gradients: storage and management ports may be slower",
    "R6": "there is a card with RDMA in hardware",
    "R7": "it is RoCE; InfiniBand has its addresses from the subnet manager",
    "R8": "all switches on the way carry such packets, or they are lost",
    "R9": "the counters grow while a job runs; old ones may be of a cable that was changed",
    "R10": "the job registers memory: with sockets alone the limit does not matter",
    "R11": "several ranks run on this host",
    "R12": "RoCE is used from inside the container",
    "M1": "GPU and card are ones that can (G2, R6)",
    "M2": "GPU and card are ones that can (G2, R6), and dma-buf is not there instead (M3)",
    "M3": "GPU and card are ones that can (G2, R6), and peer memory is not there instead (M2)",
    "M4": "another NCCL can be used: torch's wheels bring their own",
    "M5": "both halves came from NVIDIA's packages; a distribution's own need not be alike",
    "M6": "UCX or EFA's provider wants it: NCCL runs without",
    "M7": "the cards are EFA, Slingshot or Omni-Path",
    "P1": "the machine has a slot nearer to the GPU; a level beyond the default may be slower, or faster: measure",
    "P2": "as many cards as GPUs are meant for training",
    "P3": "those cards do not lead to the other nodes, or lead there more slowly",
    "P4": "no guest of this machine owns a device: isolation ends with it",
    "P5": "no guest of this machine owns a device: isolation ends with it, and each boot sets the bits anew",
    "P6": "this is a guest whose host gives it the card",
    "P7": "the card does not set it itself again; others than ConnectX were not measured by anybody we know of",
    "P8": "it is not NCCL 2.18.1, whose LL128 was wrong with it",
    "P9": "the card has as many lanes in use elsewhere: some slots have fewer by design",
    "P10": "the machine has several NUMA nodes",
    "P11": "the cloud has such a file for this very machine type",
    "V1": "RDMA leads to the other nodes; where it does not, the variable is the cure",
    "V2": "the variable was set for another machine, or an experiment: where cards hang behind ACS it is the cure",
    "V3": "there was no fault that dma-buf had on this kernel",
    "V4": "NCCL is 2.21 or later, and all hosts have one address a port",
    "V5": "peer-to-peer works here: with ACS or an IOMMU that redirects, the variable keeps the job from hanging",
    "V6": "that interface leads to all nodes",
    "V7": "NCCL was meant, and not another program's variable",
    "V8": "NCCL does not find the machine by itself, as in some guests",
    "V9": "the machine is that cloud's",
    "U1": "GPU and card are ones that can (G2, R6)",
    "U2": "nothing else used card and GPU meanwhile",
    "U3": "the log is of the job that was slow, of all its ranks",
    "U4": "the two were measured in turn, several times: a share of a few percent is chance",
    "U5": "the hosts are meant to be alike",
}
"""Check -> the condition under which its fix helps, to go on after `this holds where`."""


def source_of(check: GdrCheck) -> str:
    """Returns the source of a check and its fix: the `Source:` of its docstring, on one line; empty without one.

    Args:
        check: A check of the checklist.
    """
    words = inspect.getdoc(check.function) or ""
    return " ".join(words.partition("Source: ")[2].split()).removesuffix(".")

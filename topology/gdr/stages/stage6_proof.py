"""Stage 6, the proof: a registration that worked, a log that shows channels, hosts that agree."""

import errno
import os
import re
from dataclasses import replace

from gradwire.topology.gdr.compare import differences
from gradwire.topology.gdr.glue import no_gpu_has_gdr
from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.facts import Registration
from gradwire.topology.gdr.inputs.nccl_log import NcclLog
from gradwire.topology.gdr.inputs.nccl_warnings import TORCH_SPEAKS, KnownWarning
from gradwire.topology.gdr.model import (
    CheckOutcome,
    Finding,
    GdrCheck,
    Verdict,
    failed,
    informed,
    judge_pairs,
    passed,
    unknown,
    warned,
)
from gradwire.topology.gdr.nccl import parse_level, within, without_level
from gradwire.topology.printable import shortened

_HOST_SHARE = 0.8  # of the host-memory rate; redirected traffic loses about half (nccl-tests issue 112)
_NOISE_SHARE = 0.95
_HCA_FIX = (
    "with a data-centre or professional GPU and a NIC in hardware: load nvidia_peermem (M1), or make dma-buf work "
    "(M3); NCCL before 2.23.4 looks for peer memory only below /sys/kernel/mm/memory_peers (M4). GB10, GeForce and "
    "soft RoCE have no GPUDirect RDMA: nothing helps there (G2, R6)"
)
_RCCL_FIX = (
    "AMD GPUs: amdgpu-dkms built where MLNX_OFED was installed before it, or the module ib_peer_mem (RCCL looks for "
    "/sys/kernel/mm/memory_peers/amdkfd/version, /sys/kernel/memory_peers, /sys/memory_peers); or dma-buf in the "
    "kernel, with NCCL_DMABUF_ENABLE=1"
)
"""Source: RCCL src/transport/net_ib (ncclIbGdrSupport); github.com/ROCm/amdgpu/issues/102."""
_OF_NVIDIA = re.compile(r"\bM[1-7]\b|nvidia|GeForce", re.IGNORECASE)
"""Pattern of a fix that is for NVIDIA's driver alone."""
_NO_GDR_FIX = "none: no GPU of this machine has GPUDirect RDMA (G2)"
_LEVEL_FIX = "P1: a card near the GPU; or measure NCCL_NET_GDR_LEVEL=PHB (SYS) against the default"
_ERRNO_NAMES = {
    **errno.errorcode,
    errno.EOPNOTSUPP: "EOPNOTSUPP",
}  # ENOTSUP is the same number; verbs and kernel say this


def registration(host: Host) -> Finding:
    """Checks that `--prove` has registered GPU memory with the NIC, by peer memory or dma-buf.

    Command: `gradwire gdr-check --prove`
    Source: ibv_reg_mr(3), ibv_reg_dmabuf_mr(3); CUDA driver API, cuMemGetHandleForAddressRange.
    """
    attempts = host.facts.registrations
    if not attempts:
        return unknown(host.facts.probe_error or "not tried", "--prove")
    by_pair = {(attempt.gpu, attempt.device): attempt for attempt in attempts}
    names = {nic.bus_id: [device.name for device in nic.devices] for nic in host.nics}

    def judge(gpu: str, nic: str) -> Finding:
        mine = [by_pair[gpu, name] for name in names[nic] if (gpu, name) in by_pair]
        good = [attempt for attempt in mine if 0 in (attempt.peermem_errno, attempt.dmabuf_errno)]
        if good:
            return passed(f"{gpu} with {good[0].device}: {_registration_text(good[0])}")
        if not mine or all(attempt.peermem_errno is attempt.dmabuf_errno is None for attempt in mine):
            return unknown(f"{gpu} with {nic}: {(mine and mine[0].note) or 'not tried'}")
        return failed(f"{gpu} with {mine[0].device}: {_registration_text(mine[0])}")

    return judge_pairs(
        host, judge, "EFAULT: no peer memory; EOPNOTSUPP: driver without dma-buf; ENOMEM: ulimit -l; see M1"
    )


def _registration_text(attempt: Registration) -> str:
    """Returns `peer memory EFAULT (Bad address), dma-buf ok`; the note is the reason why one was not tried."""
    words = []
    for name, code in (("peer memory", attempt.peermem_errno), ("dma-buf", attempt.dmabuf_errno)):
        if code is not None:
            words.append(f"{name} {f'{_ERRNO_NAMES.get(code, code)} ({os.strerror(code)})' if code else 'ok'}")
    return ", ".join([*words, attempt.note] if attempt.note else words)


def perftest(host: Host) -> Finding:
    """Checks that writing from GPU memory is about as fast as from host memory, by the outputs of `--perftest`.

    Warns below 0.8 of the rate from host memory.

    Command: `ib_write_bw -d DEV PEER; ib_write_bw -d DEV --use_cuda=0 [--use_cuda_dmabuf] PEER`
    Source: linux-rdma perftest README; the threshold is a judgement.
    """
    from_host, from_gpu = host.bandwidths.get("host"), host.bandwidths.get("gdr")
    if not from_host or from_gpu is None:
        return unknown(
            "not measured", "--perftest HOST.txt GPU.txt: the outputs of ib_write_bw without and with --use_cuda"
        )
    shown = f"{from_gpu:.1f} Gb/s from GPU memory, {from_host:.1f} from host memory"
    if from_gpu < _HOST_SHARE * from_host:
        return warned(shown, "look at ACS (P5), IOMMU (P4), read request size (P7) and links (P9)")
    return passed(shown)


def nccl_log(host: Host) -> Finding:
    """Checks that all network channels in the log use GDRDMA, both ways; "Enabled for HCA" proves nothing.

    - PASS: no channel goes through the host, and at least one line says [send] and one [receive], of whatever ranks.
    - UNKNOWN: all lines are of one direction, or the log shows channels inside a host alone, or nothing about channels.
    - INFO: all channels go over NVLink between hosts.
    - WARN: some channels go through the host, or some pairs of GPU and NIC are too far.
    - FAIL: no network channel uses GDRDMA, or RDMA is not used at all on some host, or, without lines about channels,
      no card can register GPU memory or all pairs are too far.

    An error that ends the job is a FAIL in any case. A warning that is not known, or that the job survives, is added to
    the text, and turns all but FAIL into WARN.

    Command: `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH ...; grep "via NET" LOG`
    Source: NCCL src/transport/net.cc (channel lines); nccl issue 897 (one direction only).
    """
    log = host.log
    if log is None:
        return unknown(host.proof_error or "no log given", "--nccl-log FILE")
    if log.fatal is not None:
        text, known = log.fatal
        who = "torch" if text.startswith(TORCH_SPEAKS) else "NCCL WARN"
        found = f"the job failed: {known.cause} ({who}: {shortened(text)})"
        return failed(found, _for_vendor(log, f"{known.fix} [{known.source}]"))
    finding = _by_channels(host, log)
    finding = replace(finding, fix=_for_vendor(log, finding.fix))
    said = [(text, known) for text, known in log.warnings.items() if known is None or known.kind == "remark"]
    return _with_warning(finding, *said[0]) if said else finding


def _for_vendor(log: NcclLog, fix: str) -> str:
    """Returns the fix, or AMD's in its place if RCCL wrote the log and the fix is for NVIDIA's driver."""
    return _RCCL_FIX if log.is_rccl and _OF_NVIDIA.search(fix) else fix


def _with_warning(finding: Finding, text: str, known: KnownWarning | None) -> Finding:
    """Adds an unrelated warning of the log to a finding; one that is neither FAIL nor WARN becomes WARN.

    Args:
        finding: Result from the channel lines.
        text: Text of the warning.
        known: Meaning of the warning; None if unknown.
    """
    said = f"{finding.text}; but NCCL warned: {shortened(text)}" + (f" ({known.cause})" if known else "")
    if finding.outcome in (CheckOutcome.FAIL, CheckOutcome.WARN):
        return replace(finding, text=said)
    return warned(said, f"{known.fix} [{known.source}]" if known else "look it up: grep 'NCCL WARN' LOG")


def _by_channels(host: Host, log: NcclLog) -> Finding:
    """Judges the log's lines about channels: GDRDMA, staged through the host, sockets, or none at all."""
    fix = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH; then the first failed check above"
    # No network was used: NVLink between hosts needs none; channels inside one host prove nothing.
    if log.nvlink_channels and not log.network_channels and len(log.hosts_with_local) > 1:
        hosts = len(log.hosts_with_local)
        return informed(
            f"{log.nvlink_channels} channels of {hosts} hosts go over NVLink between hosts (MNNVL), none over a "
            "network: inside one NVLink domain GPUDirect RDMA is not needed"
        )
    if log.local_channels and not log.network_channels:
        between = "; between hosts this NCCL would use sockets" if log.networks == {"Socket"} else ""
        return unknown(
            f"all {log.local_channels} channels in the log are inside a host: no network was used{between}",
            "give the log of a job on two hosts, or --prove",
        )
    # TCP sockets in place of RDMA: on all hosts, or on those that found no device.
    sockets = log.network_channels and log.socket_channels == log.network_channels
    lacking = log.hosts_lacking_device
    if log.networks == {"Socket"} or lacking or sockets:
        where = f" on {', '.join(sorted(lacking)[:8])}" if any(lacking) else ""
        found = f"No device found{where}; " if lacking else ""
        there = where if log.gdr_channels else ""
        said = f"{found}network is Socket{there}: RDMA is not used {'there' if there else 'at all'}"
        off = [f"the log has {log.switched_off}"] if log.switched_off else []
        return failed("; ".join([said, *off, *log.reasons]), _sockets(log))
    if not log.network_channels:
        return _without_channels(log, fix)
    # No channel, or only some channels, with GPUDirect RDMA.
    if not log.gdr_channels:
        reasons = "; ".join(log.reasons) or _path_words(log)
        if no_gpu_has_gdr(host):
            return failed(f"0 of {log.network_channels} network channels use GDRDMA; {reasons}", _NO_GDR_FIX)
        fix = _HCA_FIX if False in log.hcas.values() else _level_fix(log) if log.far_pairs else fix
        fix = _notes(log) or fix
        return failed(f"0 of {log.network_channels} network channels use GDRDMA; {reasons}", fix)
    if log.staged_channels:
        staged = [
            f"rank {rank} {direction} {log.gdr_channels[rank, direction]}/{log.gdr_channels[rank, direction] + count}"
            for (rank, direction), count in sorted(log.staged_channels.items())
        ]
        found = f"{log.gdr_channels.total()} of {log.network_channels} channels use GDRDMA: {', '.join(staged[:6])}"
        over = [f"{log.socket_channels} are NET/Socket"] if log.socket_channels else []
        return warned("; ".join([found, *over, *log.reasons]), fix)
    # All channels with GPUDirect RDMA, which is a proof only if the log shows both directions.
    unseen = [way for way in ("send", "receive") if all(other != way for _, other in log.gdr_channels)]
    if unseen:
        return unknown(
            f"all {log.network_channels} channels in the log use GDRDMA, but no line says how ranks {unseen[0]}: one "
            "direction may go through the host",
            f"give the log of all ranks; grep '[{unseen[0]}] via NET' LOG",
        )
    ranks = {rank for rank, _ in log.gdr_channels}
    part = f" in the first {log.lines} lines (the log goes on)" if log.truncated else ""
    return passed(
        f"all {log.network_channels} network channels of {len(ranks)} rank{'s' * (len(ranks) > 1)} use GDRDMA{part}"
    )


def _sockets(log: NcclLog) -> str:
    """Returns the fix for sockets: an NCCL_IB_HCA that matches nothing, a plug-in's own note, else the variable."""
    name, _, value = log.switched_off.partition("=")
    if name == "NCCL_IB_HCA":
        return f"name cards that exist and are up in place of {value}: ibv_devices; or one run without NCCL_IB_HCA"
    return _notes(log) or (f"one run without {name}, with a time limit (V1)" if name else "see R1, R2, R3, V1")


def _notes(log: NcclLog) -> str:
    """Returns the fix and source of the first line that says why GPUDirect RDMA is not used; empty if there is none."""
    return next((f"{known.fix} [{known.source}]" for known in log.notes), "")


def _without_channels(log: NcclLog, fix: str) -> Finding:
    """Judges a log without lines about network channels: it may still say that NCCL cannot or will not use GDR."""
    if not log.spoken and not log.network_channels:
        tool = f"; it looks like {log.other_tool}" if log.other_tool else ""
        found = f"{log.lines} lines, none of them NCCL's{tool}" if log.lines else "the file is empty"
        return unknown(found, "the job's output with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH")
    if log.hcas and not any(log.hcas.values()):
        return failed("; ".join(log.reasons), _HCA_FIX)
    if log.far_pairs:
        far, all_ = log.far_pairs.total(), log.far_pairs.total() + log.near_pairs
        found = f"{far} of {all_} GPU-NIC pairs in the log are Disabled: {'; '.join(log.reasons)}"
        return warned(found, _level_fix(log)) if log.near_pairs else failed(found, _level_fix(log))
    level = log.overrides.get("NCCL_NET_GDR_LEVEL", "PXB").upper()
    known = level if level in ("LOC", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS") else "PXB"
    if log.nearest and not within(log.nearest, known) and "NCCL_NET_GDR_LEVEL" not in log.overrides:
        able = sum(log.hcas.values())
        return failed(f"0 pairs within the default level: {_path_words(log)}, although {able} NICs say Enabled", fix)
    lines = f"the first {log.lines} lines (the log goes on)" if log.truncated else f"{log.lines} lines"
    return unknown("; ".join([f"{lines}, none about network channels", *log.reasons]), fix)


def _level_fix(log: NcclLog) -> str:
    """Returns the fix for pairs that are too far: to unset a level below the default, else to use nearer NICs."""
    level = log.overrides.get("NCCL_NET_GDR_LEVEL")
    if level is not None and not within("PXB", (parse_level(level, log.version) or "SYS")):
        return without_level("PXB")
    return _LEVEL_FIX


def _path_words(log: NcclLog) -> str:
    return (
        f"nearest GPU-NIC path is {log.nearest}" if log.nearest else "the log does not say why (2.30 hides the reason)"
    )


def with_and_without(host: Host) -> Finding:
    """Checks whether GDR is faster than staging in host memory; through some host bridges it is not.

    Warns if the rate as configured is below 0.95 of the rate through the host.

    Command: `all_reduce_perf` twice, with NCCL_NET_GDR_LEVEL=LOC and without
    Source: nccl issues 1151, 1181, 1295, 1579.
    """
    staged, default = host.bandwidths.get("LOC"), host.bandwidths.get("default")
    if not staged or default is None:
        return unknown(host.proof_error or "not measured", "on two hosts: torchrun ... -m gradwire gdr-check --prove")
    shown = f"{default:.1f} Gb/s as configured, {staged:.1f} through the host"
    return (
        warned(shown, "try NCCL_NET_GDR_READ=0, or a lower NCCL_NET_GDR_LEVEL")
        if default < _NOISE_SHARE * staged
        else passed(shown)
    )


def agreement(host: Host) -> Finding:
    """Checks that all hosts of a job have the same results: one host without peer memory slows the whole job.

    Command: `gradwire gdr-check --compare A.json B.json ...`
    Source: nccl issue 897.
    """
    if len(host.peers) < 2:
        return unknown("one host only", "--compare A.json B.json ... with the --json of every host")
    found = differences(host.peers)
    if found:
        return failed("; ".join(found[:4]), "run gradwire gdr-check on the odd host, bring it to the others' state")
    return passed(f"{len(host.peers)} hosts agree")


CHECKS = (
    GdrCheck("U1", "registration probe", registration, Verdict.IN_USE, ()),
    GdrCheck("U2", "perftest", perftest, None, ()),
    GdrCheck("U3", "NCCL log", nccl_log, Verdict.IN_USE, ()),
    GdrCheck("U4", "with and without GDR", with_and_without, None, ()),
    GdrCheck("U5", "agreement of the job", agreement, None, ()),
)

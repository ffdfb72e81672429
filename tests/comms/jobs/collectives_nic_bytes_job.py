"""One rank on the emulated cluster: groups of some ranks run each collective, one group after the other.

Arguments: for each placement its ranks, in the group's order; how often each backend's collectives run; elements of
float32 in the whole tensor. Prints what this rank's NIC sent in the last of each, and the seconds they took.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from gradwire.bench.emulation.fork import ForkedRank
from gradwire.comms.backend.process_group import GradwireGroup
from gradwire.comms.bootstrap.compat import AllgatherOptions, GroupOptions, PrefixStore
from gradwire.comms.config import Config


def sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    torch.set_num_threads(1)
    place.connect()
    runs, numel = json.loads(arguments[1]), int(arguments[2])
    for name, members in json.loads(arguments[0]).items():
        if place.rank in members:
            for row in measured(name, members, members.index(place.rank), runs, numel):
                os.write(1, (json.dumps({"placement": name, "node": place.node} | row) + "\n").encode())
        dist.barrier()
    place.leave()
    return 0


def measured(name: str, members: list[int], rank: int, runs: dict[str, int], numel: int) -> list[dict[str, object]]:
    size = len(members)
    store = PrefixStore(name, _get_default_store())
    options = GroupOptions(store, rank, size, timedelta(seconds=60), name, members)
    group = GradwireGroup(options, Config())
    groups = {"gradwire": group, "gloo": group.inner}
    piece, whole = torch.full((numel // size,), float(rank)), torch.empty(numel)
    source, part = torch.full((numel,), float(rank)), torch.empty(numel // size)
    ends = (torch.arange(size) + 1) * (numel // size) - 1
    sums = float(sum(range(size)))
    root = size - 1
    from_root = dist.BroadcastOptions()
    from_root.rootRank = root
    cases: dict[str, tuple[Callable[[dist.ProcessGroup], dist.Work], Callable[[], bool]]] = {
        "all_gather": (
            lambda group: group._allgather_base(whole, piece, AllgatherOptions()),
            lambda: torch.equal(whole[ends], torch.arange(float(size))),
        ),
        "reduce_scatter": (
            lambda group: group._reduce_scatter_base(part, source, dist.ReduceScatterOptions()),
            lambda: bool((part == sums).all() and (source == rank).all()),
        ),
        "broadcast": (
            lambda group: group.broadcast([whole.fill_(rank)], from_root),
            lambda: bool((whole == root).all()),
        ),
    }
    rows: list[dict[str, object]] = []
    for op, (run, holds) in cases.items():
        times: dict[str, list[float]] = {backend: [] for backend in runs}
        nbytes: dict[str, int] = {}
        for number in range(1 + max(runs.values())):
            for backend, most in runs.items():
                if number > most:
                    continue
                group.inner.barrier().wait()
                before = sent()
                began = time.perf_counter()
                run(groups[backend]).wait()
                took = time.perf_counter() - began
                assert holds(), (op, backend)
                if number == 0:  # it connects
                    continue
                group.inner.barrier().wait()
                time.sleep(0.05)  # acknowledgements under way
                nbytes[backend] = sent() - before
                times[backend].append(took)
        rows += [
            {"op": op, "backend": backend, "sent": nbytes[backend], "seconds": times[backend], "size": size}
            for backend in runs
        ]
    group.shutdown()
    return rows

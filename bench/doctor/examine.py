"""Examination of a job: each rank measures, and rank 0 collects the facts.

What looks bad is measured again while nothing else is, and the best of all tries counts: other load makes a network
look slow, never fast.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire.bench.doctor import local
from gradwire.bench.doctor.arrival import PREFIX
from gradwire.bench.doctor.checks.machine import available_cores
from gradwire.bench.doctor.checks.network import CONFIRMED, doubtful_pairs
from gradwire.bench.doctor.checks.transfers import SLOW_EXCHANGE, exchange_bound
from gradwire.bench.doctor.control import Control, spread
from gradwire.bench.doctor.facts import (
    BackendTime,
    CoreWork,
    ForeignTraffic,
    InterfaceRate,
    JobFacts,
    PairRates,
    RankFacts,
    ScriptRun,
    UnreachedPair,
    from_record,
    to_record,
)
from gradwire.bench.doctor.network import STREAMS, Client, Listener, measure_pair
from gradwire.bench.doctor.script import run_script
from gradwire.bench.doctor.wanted import Wanted, left_behind, with_script
from gradwire.bench.doctor.work import WORK_SECONDS, busy_gpu_states, core_work, threads_seconds
from gradwire.bench.emulation.launch import held_port
from gradwire.bench.nccl_tests.backends.select import BackendSpec, connect
from gradwire.bench.nccl_tests.ranks import RankInfo, World, gather
from gradwire.bench.nccl_tests.start import Start
from gradwire.bench.terminal import complain
from gradwire.comms.bootstrap.compat import PrefixStore, clone_of
from gradwire.comms.bootstrap.kernel import outside_connections
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.environment import local_rank
from gradwire.comms.links.unit_rates import pairings
from gradwire.topology.wording import listed

ARRIVE = timedelta(minutes=5)
"""Time limit for all ranks to join; importing torch from a cold network file system alone takes minutes."""
SAY_LATE_SECONDS = 30.0
"""Seconds after which the missing ranks are printed once, also without a terminal."""
TIMEOUT = timedelta(seconds=60)
"""Timeout of a message between ranks."""
GROUP = timedelta(seconds=15)
"""Timeout of a backend's connection, and of each of its collectives."""

LONGEST_FLOW, SHORTEST_FLOW = 0.5, 0.12
"""Seconds of a transfer: long enough that TCP finds its rate, short enough for `--seconds` with many nodes."""
MOST_ROUNDS = 16
"""Rounds of pairwise measurements, in each of which every node has one partner."""
MOST_AGAIN = 3
"""Number of doubtful pairs that are measured again in each repeat."""
REPEATS = 5
"""Most repeats of doubtful pairs."""
REPEATS_SHARE = 0.6
"""Share of `--seconds` after which no further repeat begins."""
AGAIN_FLOW = 0.35
"""Seconds of a transfer of a repeat."""
GLOO_SECONDS = 25.0
"""Time limit of gloo's connection, far below the 90 s for which gloo itself may try."""
BACKEND_SECONDS = 0.4
"""Time that an all-reduce of a backend should take, by which its size is chosen."""
ROUNDS, MOST_BACKEND_ROUNDS = 4, 10
"""Number of all-reduces of a backend, the first of which is a warm-up; up to the second number if they look slow."""
AGAIN_TRIES = 5
"""Number of repeated comparisons of a slow node with a good one."""
QUIET_SECONDS, LISTEN_SECONDS = 0.1, 0.5
"""Pause before the counters of a NIC are read, and the time between two readings."""
SUSPECT = 0.75
"""Share of the other nodes' speed below which a node's cores are measured again, with nothing else running."""


def open_control(start: Start) -> Control:
    """Connects to the store that the launcher serves or, if it serves none, rank 0; rank 0 then serves it from here on.

    Other ranks wait for the store up to `ARRIVE` (5 minutes); no rank waits for the others.

    Args:
        start: Rank, size and store address of this process.

    Raises:
        RuntimeError: The store cannot be reached.
    """
    serves = start.rank == 0 and not start.agent_store
    store = TCPStore(start.address, start.port, start.size, serves, ARRIVE, wait_for_workers=False)
    return Control(PrefixStore(PREFIX, store), start.rank, start.size)


def examine_job(start: Start, control: Control, wanted: Wanted) -> JobFacts | None:
    """Examines the job: every rank measures, and rank 0 collects the facts. Collective.

    Args:
        start: Rank, size and store address of this process.
        control: Messages between the ranks.
        wanted: Options of the command line.

    Returns:
        Facts of the job on rank 0; None on the others.

    Raises:
        RuntimeError: A rank did not respond in time.
    """
    return _Examination(start, control, wanted).run()


class _Examination:
    """Examination of a job by one rank. All methods are collective and called in the order of `run`."""

    def __init__(self, start: Start, control: Control, wanted: Wanted) -> None:
        self._start = start
        self._control = control
        self._wanted = wanted
        self._began = time.monotonic()
        self._said_late = False
        self._facts = JobFacts(ranks=())
        """Facts so far; complete on rank 0 only."""

    def run(self) -> JobFacts | None:
        """Runs all parts of the examination, and returns the facts on rank 0, None on the other ranks.

        If ranks have not joined within `ARRIVE`, nothing is measured: rank 0 returns which ones are missing.
        """
        # Wait for all ranks; without one of them nothing can be measured.
        self._wanted.show_progress("waiting for all ranks")
        missing = self._control.arrive(ARRIVE, self._late)
        if received := self._control.broadcast(missing, ARRIVE + TIMEOUT):
            assert isinstance(received, list)
            if self._start.rank != 0:
                return None
            return JobFacts(
                ranks=(local.read_rank(0, local_rank()),),
                missing_ranks=tuple(received),
                started_ranks=self._control.started(missing),
                launcher=self._start.by,
                waited_seconds=ARRIVE.total_seconds(),
            )
        # Read the machine, connect gloo, and tell all ranks about the nodes.
        with ExitStack() as stack:
            self._listener = stack.enter_context(Listener())
            links = local.link_changes()
            self._own = local.read_rank(self._start.rank, local_rank())
            self._control.barrier(TIMEOUT)
            self._connect_gloo()
            if self._gloo:
                stack.callback(dist.destroy_process_group)
            self._exchange_nodes()
            # Run the user's script first: measurements need the size of its gradients.
            if self._wanted.script:
                self._script()
            else:
                self._facts = with_script(self._facts, self._wanted, [])
            # Measure the network, listening for other traffic before and after; then cores and backends.
            if len(self._nodes) > 1:
                self._foreign()
                self._pairs()
                self._other_interfaces()
                self._foreign()
            self._work()
            self._backends()
            self._note_links(links)
            self._control.barrier(TIMEOUT)
        return self._facts if self._start.rank == 0 else None

    def _note_links(self, before: Mapping[str, int]) -> None:
        """Records on rank 0 which links went up or down since `before`, a return value of `local.link_changes`."""
        said = self._gather({name: count - before.get(name, count) for name, count in local.link_changes().items()})
        ranks = tuple(
            replace(
                each,
                interfaces=tuple(replace(nic, link_changes=changes.get(nic.name, 0)) for nic in each.interfaces),
            )
            for each, changes in zip(self._facts.ranks, said, strict=True)
            if isinstance(changes, dict)
        )
        self._facts = replace(self._facts, ranks=ranks)

    def _late(self, missing: list[int], seconds: float) -> None:
        """Shows which ranks are missing, and prints it once after `SAY_LATE_SECONDS`.

        Args:
            missing: Ranks that have not joined.
            seconds: Seconds since the wait began.
        """
        started = self._control.started(missing)
        absent = [rank for rank in missing if rank not in started]
        words = []
        if started:
            hosts = listed(list(dict.fromkeys(started.values())))
            words.append(f"rank {listed(list(started))} on {hosts}, which has started and imports torch")
        if absent:
            words.append(f"rank {listed(absent)}, of which nothing was heard")
        text = f"waiting for {'; '.join(words)}"
        self._wanted.show_progress(text)
        if seconds > SAY_LATE_SECONDS and not self._said_late:
            self._said_late = True
            complain("doctor", f"after {seconds:.0f} s still {text}; for {ARRIVE.total_seconds() - seconds:.0f} s more")

    def _gather(self, own: object) -> list[object]:
        """Gathers a value of each rank; returns them by rank on rank 0, and an empty list on the others."""
        return self._control.gather(own, TIMEOUT) or []

    def _collect(self, own: object) -> list[object]:
        """Gathers as `_gather` does, with a barrier: no rank returns before rank 0 has all values."""
        found = self._gather(own)
        self._broadcast(None)
        return found

    def _broadcast(self, what: object) -> object:
        """Returns on all ranks the value that rank 0 passes."""
        return self._control.broadcast(what, TIMEOUT)

    def _connect_gloo(self) -> None:
        """Connects gloo among all ranks as the user's job would, and observes which interface its connections use.

        All ranks call it. Afterwards `_gloo` says, equally on all ranks, whether gloo connected on all of them; the
        facts of this rank have its error, and the interface. A thread connects, because gloo tries far longer than its
        timeout if an address leads nowhere (90 s, torch 2.13). This rank waits until its thread has connected or
        failed, another rank has failed, or `GLOO_SECONDS` have passed; a thread that still tries is kept in
        `left_behind`.
        """
        # Start the thread, and wait until it has connected, another rank has failed, or the time is up.
        self._wanted.show_progress("connecting with gloo")
        before = _local_addresses()
        errors: list[str] = []
        failed = PrefixStore("doctor-gloo-failed", self._control.store)
        thread = BackgroundThread(
            "doctor's gloo",
            partial(self._init_gloo, errors),
            without=None,
            on_failure=lambda error: errors.append(f"{type(error).__name__}: {error}"),
            awaited=False,  # the process ends without it: see `left_behind`
        )
        thread.start()
        deadline = time.monotonic() + GLOO_SECONDS
        while thread.is_alive() and time.monotonic() < deadline and not failed.check(["one"]):
            thread.join(0.1)
        # If another rank has failed, leave a moment for this rank's own error.
        thread.join(1.0)
        if thread.is_alive():
            errors.append("gloo did not connect to the other ranks")
            left_behind.append(thread)
        if errors:
            failed.set("one", "1")
        # The addresses of new connections show which interface gloo uses.
        seen = _local_addresses() - before
        names = [each.name for each in self._own.interfaces if seen & set(each.addresses)]
        self._own = replace(
            self._own,
            gloo_error=errors[0] if errors else None,
            gloo_interface=names[0] if names else self._own.gloo_interface,
            gloo_seen=bool(names) and not errors,
        )
        # gloo is used from here on only if it connected on all ranks.
        everybody = self._gather(bool(errors))
        self._gloo = bool(self._broadcast(not any(everybody)))
        if not errors and not self._gloo:
            dist.destroy_process_group()

    def _init_gloo(self, errors: list[str]) -> None:
        """Connects gloo, with a separate connection to the store, because a wait blocks the connection it uses.

        Args:
            errors: List to which the first line of an error is appended.
        """
        try:
            dist.init_process_group(
                "gloo",
                store=PrefixStore("doctor-gloo", clone_of(self._control.store)),
                rank=self._start.rank,
                world_size=self._start.size,
                timeout=GROUP,
            )
            dist.all_reduce(torch.zeros(1))
        except (RuntimeError, dist.DistStoreError) as problem:
            errors.append(str(problem).splitlines()[0][:300])

    def _exchange_nodes(self) -> None:
        """Gathers each rank's facts on rank 0, and tells all ranks which of them share a node and how to reach it.

        Before that, the first rank of each node runs the checks of gdr-check, and reads the states of the node's GPUs.
        Sets `_layout` (addresses, ports and MTUs of the nodes, and interfaces not in use), `_nodes` (ranks of each
        node), `_node` (number of this rank's node) and `_leads` (whether this is the first rank of its node).
        """
        self._wanted.show_progress("reading the machines of all ranks")
        first_here = (self._own.local_rank or 0) == 0
        if first_here:
            self._own = replace(self._own, gdr=local.gdr_verdicts(), gpus=busy_gpu_states())
        route = _route_address(self._start.address, self._start.port)
        everybody = self._gather({"facts": to_record(self._own), "ports": self._listener.ports, "route": route})
        layout: object = None
        if self._start.rank == 0:
            found = [each for each in everybody if isinstance(each, dict)]
            self._facts = JobFacts(ranks=tuple(from_record(RankFacts, each["facts"]) for each in found))
            nodes = self._facts.nodes
            layout = {
                "nodes": [[each.rank for each in node] for node in nodes],
                "addresses": [_address(node[0], str(found[node[0].rank]["route"])) for node in nodes],
                "ports": [found[node[0].rank]["ports"] for node in nodes],
                "mtus": [_mtu(node[0]) for node in nodes],
                "others": [_candidates(node[0]) for node in nodes],
            }
        received = self._broadcast(layout)
        assert isinstance(received, dict)
        self._layout = received
        self._nodes: list[list[int]] = received["nodes"]
        self._node = next(place for place, ranks in enumerate(self._nodes) if self._start.rank in ranks)
        self._leads = self._nodes[self._node][0] == self._start.rank

    def _script(self) -> None:
        """Runs the user's script as this rank of the job, and records the size of its gradients and its step time."""
        with held_port() as free:
            port = self._broadcast(free if self._start.rank == 0 else None)
            ranks = self._nodes[self._node]
            self._wanted.show_progress(f"running {self._wanted.script[0]}")
            run = run_script(
                self._wanted.script,
                {
                    "RANK": str(self._start.rank),
                    "WORLD_SIZE": str(self._start.size),
                    "LOCAL_RANK": str(ranks.index(self._start.rank)),
                    "LOCAL_WORLD_SIZE": str(len(ranks)),
                    "MASTER_ADDR": self._start.address,
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_USE_AGENT_STORE": "False",
                },
            )
        runs = [from_record(ScriptRun, each) for each in self._control.gather(to_record(run), 2 * TIMEOUT) or []]
        if self._start.rank == 0:
            self._facts = with_script(self._facts, self._wanted, runs)

    def _foreign(self) -> None:
        """Measures other programs' traffic on each node: the byte rates of gloo's NIC while no rank sends.

        It is called before and after the links are measured; for each node the larger of the two measurements is kept.
        """
        self._wanted.show_progress("listening for other traffic")
        self._control.barrier(TIMEOUT)
        name = self._own.gloo_interface or ""
        own: dict[str, object] | None = None
        if self._leads:
            time.sleep(QUIET_SECONDS)  # the last bytes of what ranks said before are gone
            before, began = local.interface_nbytes().get(name), time.monotonic()
            time.sleep(LISTEN_SECONDS)
            after, passed = local.interface_nbytes().get(name), time.monotonic() - began
            if before is not None and after is not None:
                sent, received = ((late - early) / passed for early, late in zip(before, after, strict=True))
                own = {"node": self._node, "interface": name, "sent": sent, "received": received}
        found = [from_record(ForeignTraffic, each) for each in self._collect(own) if isinstance(each, dict)]
        known = {each.node: each for each in self._facts.foreign}
        for each in found:
            old = known.get(each.node)
            if old is None or max(each.sent, each.received) > max(old.sent, old.received):
                known[each.node] = each
        self._facts = replace(self._facts, foreign=tuple(known[node] for node in sorted(known)))

    def _pairs(self) -> None:
        """Measures every pair of nodes, or some pairs of each node if there are many, then the doubtful ones again."""
        # Choose rounds in which each node has one partner, and the length of a flow so that all rounds fit the time.
        count = len(self._nodes)
        rounds = spread(pairings(count, count), MOST_ROUNDS)
        seconds = min(max(0.35 * self._wanted.seconds / (5 * len(rounds)), SHORTEST_FLOW), LONGEST_FLOW)
        # Measure over the loopback, too: no rate of a network above this can be measured.
        own_rate = 0.0
        if self._leads:
            with closing(Client("127.0.0.1", self._listener.ports)) as client:
                own_rate = min(client.rates(STREAMS, STREAMS, seconds))
        own = self._gather([self._node, own_rate])
        # Measure the rounds one after the other.
        found: list[object] = []
        for number, pairs in enumerate(rounds):
            self._wanted.show_progress(f"measuring links, round {number + 1} of {len(rounds)}")
            found += self._measured(pairs, seconds)
        self._take(found)
        if self._start.rank == 0:
            rates = {int(each[0]): float(each[1]) for each in own if isinstance(each, list) and each[1]}
            self._facts = replace(self._facts, own_bytes_per_second=rates)
        # Repeat doubtful pairs one at a time while nothing else is measured, until none is left or the time is up.
        for number in range(REPEATS):
            late = time.monotonic() - self._began > REPEATS_SHARE * self._wanted.seconds and number >= CONFIRMED - 1
            again = self._broadcast([] if late else doubtful_pairs(self._facts)[:MOST_AGAIN])
            assert isinstance(again, list)
            if not again:
                return
            found = []
            for pair in again:
                self._wanted.show_progress(f"measuring the links that look bad again ({number + 1})")
                found += self._measured([(pair[0], pair[1])], AGAIN_FLOW)
            self._take(found)

    def _measured(self, pairs: list[tuple[int, int]], seconds: float) -> list[object]:
        """Measures the pairs of one round at the same time; returns their records on rank 0, and nothing on others.

        Args:
            pairs: Pairs of nodes, (the one that requests the measurement, its partner).
            seconds: Length of a flow.
        """
        own = None
        mine = next((pair for pair in pairs if self._leads and pair[0] == self._node), None)
        if mine is not None:
            own = self._measure_to(mine, seconds)
        return [each for each in self._collect(own) if each is not None]

    def _measure_to(self, pair: tuple[int, int], seconds: float) -> dict[str, object]:
        """Measures from this node to another; returns a record of `PairRates`, or of `UnreachedPair` on an error."""
        a, b = pair
        try:
            with closing(Client(self._layout["addresses"][b], tuple(self._layout["ports"][b]))) as client:
                mtu = min(self._layout["mtus"][a], self._layout["mtus"][b])
                return to_record(measure_pair(client, pair, seconds, mtu))
        except (OSError, ValueError) as error:
            return {"a": a, "b": b, "error": f"{type(error).__name__}: {error}"}

    def _take(self, records: list[object]) -> None:
        """Adds measurements of pairs of nodes to the facts.

        If a pair was measured before, the better values count (`PairRates.better`). A pair that was measured is no
        longer listed as unreached.

        Args:
            records: Records (`to_record`) of `PairRates` and, with an error, of `UnreachedPair`.
        """
        known = {(pair.a, pair.b): pair for pair in self._facts.pairs}
        unreached = {(each.a, each.b): each for each in self._facts.unreached}
        for record in records:
            assert isinstance(record, dict)
            if "error" in record:
                failed = from_record(UnreachedPair, record)
                unreached[failed.a, failed.b] = failed
                continue
            pair = from_record(PairRates, record)
            old = known.get((pair.a, pair.b))
            known[pair.a, pair.b] = pair if old is None else old.better(pair)
            unreached.pop((pair.a, pair.b), None)
        self._facts = replace(
            self._facts,
            pairs=tuple(known[key] for key in sorted(known)),
            unreached=tuple(unreached[key] for key in sorted(unreached)),
        )

    def _other_interfaces(self) -> None:
        """Measures up to four interfaces that the job does not use, between each node and one partner at most.

        The rate of the slower direction is kept; 0 if the nodes do not reach each other over the interface.
        """
        others: list[dict[str, str]] = self._layout["others"]
        if not any(others):
            return
        self._wanted.show_progress("measuring interfaces that are not in use")
        own: list[dict[str, object]] = []
        pair = next((each for each in pairings(len(self._nodes), 1)[0] if each[0] == self._node), None)
        if self._leads and pair is not None:
            a, b = pair
            for name in [each for each in others[a] if each in others[b]][:4]:
                try:
                    with closing(Client(others[b][name], tuple(self._layout["ports"][b]), others[a][name])) as client:
                        rate = min(client.rates(STREAMS, 0, LONGEST_FLOW)[0], client.rates(0, STREAMS, LONGEST_FLOW)[1])
                except OSError:  # it does not lead there: the rate says so
                    rate = 0.0
                own.append({"a": a, "b": b, "interface": name, "bytes_per_second": rate})
        found = self._collect(own)
        rates = [from_record(InterfaceRate, each) for group in found if isinstance(group, list) for each in group]
        self._facts = replace(self._facts, others=tuple(rates))

    def _work(self) -> None:
        """Measures every rank's core at the same time, then slow nodes again beside a good one only."""
        # All ranks compute at once, as in training; the better of two tries counts.
        self._wanted.show_progress("measuring the processors")
        self._control.barrier(TIMEOUT)
        own = max(core_work(WORK_SECONDS) for _ in range(2))
        oversubscribed: object = None
        found = self._gather(own)
        if self._start.rank == 0:
            rates = [float(str(each)) for each in found]
            self._facts = replace(
                self._facts, work=tuple(CoreWork(rank=rank, per_second=rate) for rank, rate in enumerate(rates))
            )
            oversubscribed = {
                str(place): max(1, int(available_cores(node) / len(node)))
                for place, node in enumerate(self._facts.nodes)
                if sum(each.threads for each in node) > available_cores(node)
            }
        oversubscribed = self._broadcast(oversubscribed)
        assert isinstance(oversubscribed, dict)
        self._threads(oversubscribed)
        suspects = self._broadcast(suspect_nodes(self._facts) if self._start.rank == 0 else None)
        assert isinstance(suspects, list)
        for slow, good in suspects:
            self._again(slow, good)

    def _threads(self, oversubscribed: dict[str, int]) -> None:
        """Measures what too many threads cost, on the nodes whose ranks have more threads than cores.

        Args:
            oversubscribed: Number of such a node as text -> cores for each of its ranks, at least 1.
        """
        if not oversubscribed:
            return
        fair = oversubscribed.get(str(self._node))
        measured = threads_seconds(fair, 0.15) if fair is not None else None
        found = self._collect(measured)
        work = [
            each if not isinstance(times, list) else replace(each, threads_seconds=times[0], fair_seconds=times[1])
            for each, times in zip(self._facts.work, found, strict=False)
        ]
        self._facts = replace(self._facts, work=tuple(work))

    def _again(self, slow: int, good: int) -> None:
        """Measures again a node whose core looked slow, beside one that did not, while all other ranks compute nothing.

        All ranks call it. The first rank of each of the two nodes repeats a small computation; that is done
        `AGAIN_TRIES` times, and the ratios of both speeds are added to the facts of the slow node's ranks
        (`CoreWork.again`).

        Args:
            slow: Number of the node that looked slow.
            good: Number of the node with which it is compared.
        """
        shares = []
        for _ in range(AGAIN_TRIES):
            self._control.barrier(TIMEOUT)
            rate = core_work(WORK_SECONDS) if self._leads and self._node in (slow, good) else 0.0
            found = self._collect(rate)
            if found:
                first, second = (float(str(found[self._nodes[node][0]])) for node in (slow, good))
                shares.append(first / max(second, 1e-9))
        ranks = self._nodes[slow]
        self._facts = replace(
            self._facts,
            work=tuple(replace(each, again=tuple(shares)) if each.rank in ranks else each for each in self._facts.work),
        )

    def _backends(self) -> None:
        """Times a short all-reduce of each backend that this job can use.

        Nothing is timed if gloo has not connected all ranks, or if packets of full size are lost; the latter gives a
        note.
        """
        # Without gloo there is no control group; with lost packets the all-reduces would hang.
        if not self._gloo:
            return
        if self._broadcast(any(pair.packets_pass is False for pair in self._facts.pairs)):
            lost = "all-reduces were not tried: they would wait for packets that are lost"
            self._facts = replace(self._facts, notes=(*self._facts.notes, lost))
            return
        # All ranks learn from rank 0 which backends are timed, and with how many bytes.
        kinds = self._broadcast(_backends_of(self._facts, self._start.by) if self._start.rank == 0 else None)
        nbytes = self._broadcast(_backend_nbytes(self._facts) if self._start.rank == 0 else None)
        assert isinstance(kinds, list) and isinstance(nbytes, int)
        bound = self._broadcast(
            exchange_bound(self._facts, nbytes) if self._start.rank == 0 and self._facts.pairs else None
        )
        assert bound is None or isinstance(bound, float)
        control = dist.group.WORLD
        assert control is not None
        infos = [
            RankInfo(rank, 0, f"node{node}", ranks.index(rank))
            for node, ranks in enumerate(self._nodes)
            for rank in ranks
        ]
        store = PrefixStore("doctor-backends", self._control.store)
        world = World(self._start, store, control, tuple(sorted(infos, key=lambda info: info.rank)))
        # The slowest rank's time counts; of errors, the one that caused the others.
        times = []
        for number, (kind, device) in enumerate(kinds):
            self._wanted.show_progress(f"all-reduce by {kind}")
            own = _time_backend(kind, torch.device(device), world, nbytes, number, bound)
            found = [from_record(BackendTime, each) for each in self._collect(to_record(own))]
            if found:
                failed = [replace(each, rank=rank) for rank, each in enumerate(found) if each.error]
                slowest = max(found, key=lambda each: each.seconds or 0.0)
                times.append(min(failed, key=_second_hand, default=slowest))
        self._facts = replace(self._facts, backends=tuple(times))


def _second_hand(failed: BackendTime) -> tuple[bool, bool]:
    """Returns a sort key by which the error that caused the others comes first among those of several ranks.

    Out of memory comes first, then any other error of the rank itself, and last a time-out or an error about a peer,
    which is usually the consequence of another rank's error.

    Args:
        failed: Timing of a backend that failed on a rank.
    """
    text = failed.error or ""
    return "memory" not in text, any(word in text for word in ("within", "imeout", "imed out", "peer", "gave up"))


def suspect_nodes(facts: JobFacts) -> list[tuple[int, int]]:
    """Returns nodes whose cores look slow, each paired with the fastest node, to be measured again.

    These are the up to three slowest of the nodes whose speed is less than 75 % (`SUSPECT`) of the median of the
    others.

    Args:
        facts: Facts with the speed of each rank's core.
    """
    rates = node_work(facts)
    found = [node for node in sorted(rates, key=rates.__getitem__) if rates[node] < SUSPECT * _others(rates, node)]
    best = max(rates, key=rates.__getitem__, default=0)
    return [(node, best) for node in found[:3]]


def _others(rates: dict[int, float], node: int) -> float:
    """Returns the median rate of all nodes but one; 0 if there is no other."""
    return median([rate for each, rate in rates.items() if each != node] or [0.0])


def node_work(facts: JobFacts) -> dict[int, float]:
    """Returns the median speed of the ranks' cores by node, without nodes of which a rank was not measured.

    Args:
        facts: Facts with the speed of each rank's core.
    """
    by_rank = {each.rank: each.per_second for each in facts.work}
    return {
        place: median(by_rank[each.rank] for each in node)
        for place, node in enumerate(facts.nodes)
        if all(each.rank in by_rank for each in node)
    }


def _local_addresses() -> set[str]:
    """Returns the local addresses of this process's TCP connections to other addresses, as those to other hosts."""
    return {own.removeprefix("::ffff:") for own, _, _ in outside_connections()}


def _route_address(address: str, port: int) -> str:
    """Returns this host's address on the route to rank 0.

    Args:
        address: Address of rank 0's store.
        port: Port of the store; no packet is sent to it.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # nothing is sent
        return str(probe.getsockname()[0])


def _address(first: RankFacts, route: str) -> str:
    """Returns the address at which a node is measured: that of gloo's interface, else the one on the route to rank 0.

    Args:
        first: Facts of the node's first rank.
        route: Return value of `_route_address` on that rank.
    """
    used = first.interface(first.gloo_interface) if first.gloo_seen else None
    return used.addresses[0] if used is not None and used.addresses else route


def _mtu(first: RankFacts) -> int:
    """Returns the MTU of the interface that gloo uses on a node; 1500 if it is not known or the loopback."""
    used = first.interface(first.gloo_interface)
    return 1500 if used is None or used.kind == "loopback" else used.mtu


def _candidates(first: RankFacts) -> dict[str, str]:
    """Returns the interfaces of a node that may lead to other nodes and are not in use: name -> first address."""
    return {
        each.name: each.addresses[0]
        for each in first.interfaces
        if each.up and each.addresses and each.kind in ("nic", "virtual") and each.name != first.gloo_interface
    }


def _backends_of(facts: JobFacts, launcher: str) -> list[tuple[str, str]]:
    """Returns the backends to time, each with its device.

    Args:
        facts: Facts of the job.
        launcher: Launcher of the ranks, as `Start.by` names it.
    """
    cuda = all(each.device == "cuda" for each in facts.ranks)
    found = [("nccl", "cuda"), ("gradwire", "cuda")] if cuda else [("gradwire", "cpu")]
    found.append(("gloo", "cpu"))
    found += [("mpi", "cpu")] if launcher == "mpirun" else []
    found += [("shm", "cpu")] if len(facts.nodes) == 1 and len(facts.ranks) > 1 else []
    return found


def _backend_nbytes(facts: JobFacts) -> int:
    """Returns the bytes of the all-reduce by which backends are timed, so that it takes about `BACKEND_SECONDS`.

    At most the bytes of the gradients and 64 MiB, at least 64 KiB; 16 MB at most if no link was measured.

    Args:
        facts: Facts of the job, with the rates of the links.
    """
    moment = BACKEND_SECONDS * facts.good_rate() / 2 if facts.pairs else 16e6
    return max(min(facts.gradient_nbytes, int(moment), 64 << 20) // 4 * 4, 1 << 16)


def _looks_slow(took: Sequence[float], bound: float | None) -> bool:
    """Returns whether even the fastest all-reduce was slower than the links allow. All ranks get the same answer.

    Args:
        took: Seconds of each round on its slowest rank; the first is a warm-up.
        bound: Least seconds that the links allow; None if it is not known, which returns False.
    """
    return bound is not None and min(took[1:]) > SLOW_EXCHANGE * bound


def _time_backend(
    kind: str, device: torch.device, world: World, nbytes: int, number: int, bound: float | None
) -> BackendTime:
    """Connects a backend and times all-reduces of float32 by it. Collective.

    Args:
        kind: Name of the backend.
        device: Device of the tensor; on CUDA the rank's own GPU is taken.
        world: Ranks of the job.
        nbytes: Size of the tensor.
        number: Number of the backend among those that are timed, which keeps their store keys apart.
        bound: Least seconds that the links allow; slower backends get more rounds. None if it is not known.

    Returns:
        The times; if it failed on this rank, the error.
    """
    if device.type == "cuda":
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    spec = BackendSpec(kind, "auto", "none") if kind == "gradwire" else BackendSpec(kind)
    try:
        for _, backend in connect([spec], world, device, GROUP, number):
            issue = backend.all_reduce(torch.ones(nbytes // 4, device=device), "sum")
            took: list[float] = []
            while len(took) < ROUNDS or (len(took) < MOST_BACKEND_ROUNDS and _looks_slow(took, bound)):
                dist.barrier(world.control)
                began = time.perf_counter()
                issue().wait()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                took.append(max(gather(time.perf_counter() - began, world.control)))
            return BackendTime(backend=kind, nbytes=nbytes, seconds=median(took[1:]), best_seconds=min(took[1:]))
        raise RuntimeError("no backend was made")
    except (RuntimeError, OSError, ValueError, ImportError) as error:
        # pybind11 adds the Python stack of a callback; its end has the cause.
        text = " ".join(str(error).partition("At:\n")[0].split())
        return BackendTime(backend=kind, nbytes=nbytes, seconds=None, error=f"{type(error).__name__}: {text[:300]}")

"""A law of all waits: each has a time, or is in a short table that says what ends it.

A wait is a call of a method that blocks until another thread, process or device has done something.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

TIMED = {"wait": 1, "join": 1, "select": 1, "poll": 1, "acquire": 1, "wait_for": 2}
"""Method -> from how many arguments on one of them is a time."""

SOCKET = {"recv": 1, "recv_into": 1, "recv_fds": 3, "accept": 0}
"""Method of a socket -> its arguments: it has no time, but the socket may. Of more arguments it is a method of ours."""
SENDING = {"sendall", "sendmsg", "send_fds", "connect"}
"""Methods of a socket that wait for the other end, too: for room in its buffer, or for it to accept."""
LOOKING_UP = {"getaddrinfo", "gethostbyname"}
OF_MPI = {"Create_group", "Dup", "Split_type", "bcast"}
BLOCKING = {"synchronize", "communicate"}

LONGEST = 60
"""Characters of a receiver from which its arguments are left out."""

ENDED_BY = {
    "a work of gradwire's own transports: each kind has a deadline (`Waiting`, `_Pending`, ShmGroup, MPI)": """
        comms/communicator.py: transport.all_to_all(received, source).wait
        comms/communicator.py: work.wait
        comms/links/quick_probe.py: rail.sendrecv(other, received[:numel], sent[:numel]).wait
        comms/run/lane_executor.py: work.wait
        comms/run/sparse.py: transport.all_to_all(got_keys, keys).wait
        comms/run/sparse.py: transport.all_to_all(got_values, values).wait
        comms/run/sparse.py: work.wait
        comms/transport/mpi.py: self._gather(self._communicators[1], flat, bounds).wait
        comms/transport/sum_order.py: rail.all_reduce(total).wait
        comms/transport/works.py: self._work.wait
        comms/transport/torch_group.py: super().all_gather(output, source).wait
        comms/transport/works.py: work.wait
    """,
    "the future of a launch: a lane completes it, whatever happens, and all that lanes wait for has a deadline": """
        comms/communicator.py: ranks.all_reduce(both).wait
        comms/compression.py: bucket.future.wait
        comms/elastic/ddp.py: kept.wait
        comms/elastic/gradient_backup.py: bucket.result().wait
        comms/elastic/resilient_ops.py: future.wait
        comms/elastic/transfer.py: self._planned.broadcast(flat, 0).wait
        comms/links/probe.py: communicator.run(barrier, plan).wait
        comms/links/probe.py: communicator.run(flat, plan).wait
        comms/links/quick_probe.py: communicator.run(own, plan).wait
        comms/migration.py: node.all_reduce(rows.view(-1)).wait
        comms/migration.py: node.all_reduce(word).wait
        comms/observe/number_exchange.py: self._bucket.future.wait
        comms/observe/number_exchange.py: self._bucket.result().wait
        comms/observe/trace.py: bucket.future.wait
        comms/observe/trace.py: bucket.result().wait
        comms/outer/averaging.py: future.wait
        comms/outer/averaging.py: pending.checksums.wait
        comms/outer/averaging.py: pending.checksums.wait
        comms/outer/averaging.py: pending.future.wait
        comms/run/stream_executor.py: bucket.result().wait
        comms/sharded/state.py: future.wait
        comms/step/compressed_steps.py: bucket.result().wait
    """,
    "a device: `deadline.Deadline` and NCCL's time-out end what waits on it": """
        comms/backend/work.py: self._passed.synchronize
        comms/links/probe.py: torch.cuda.synchronize
        comms/observe/number_exchange.py: self._copied.synchronize
        comms/observe/trace.py: self._anchor.synchronize
        comms/run/stream_executor.py: work.wait
        comms/step/used_map.py: torch.cuda.synchronize
        comms/streams.py: first.synchronize
        comms/streams.py: last.synchronize
        comms/streams.py: self._copied.synchronize
        comms/transport/launch_order.py: work.wait
        comms/transport/nccl.py: self._group.allreduce(...).wait
    """,
    "it is done already": """
        comms/backend/work.py: self._future.wait
        comms/watch/watch.py: opened.get
    """,
    "a method of ours that has a deadline itself": """
        comms/autotune/cuts.py: self._communicator.connect
        comms/communicator.py: self.connect
        comms/sharded/state.py: session.connect
        comms/backend/work.py: self.wait
        comms/backend/work.py: work.wait
        comms/bootstrap/threads.py: each.get
        comms/bootstrap/failure_reporter.py: self.failures.poll
        comms/bootstrap/failure_reporter.py: self._abort.poll
        comms/bootstrap/liveness.py: self._connections.accept
        comms/bootstrap/threads.py: each.get
        comms/elastic/resilient_ops.py: self.synchronize
        comms/outer/outer.py: self.exchange.synchronize
        comms/sharded/overlap.py: self._reducing.pop(0).wait
        comms/sharded/overlap.py: work.wait
        comms/transport/segment.py: words.wait_for
        comms/watch/session.py: self._analyzer.poll
        comms/watch/watch.py: session.poll
    """,
    "a thread of ours that has nothing to do: `close`, or the end of the process, wakes it": """
        comms/backend/node_collectives.py: self._calls.get
        comms/lanes.py: waiting.arrivals.get
        comms/transport/parallel_tcp.py: self._poll.poll
    """,
    "`connect_within`, whose thread makes this call and is abandoned": """
        comms/transport/mpi.py: first.Dup
        comms/transport/mpi.py: world.Create_group
    """,
    "mpirun, which ends a job whose rank has ended: these are the first calls after MPI's own start": """
        comms/bootstrap/mpi_launch.py: world.Split_type
        comms/bootstrap/mpi_launch.py: world.bcast
    """,
    "the resolver: on a thread that is waited for a second; for the host's own name when mpirun starts": """
        comms/bootstrap/addresses.py: socket.getaddrinfo
        comms/bootstrap/mpi_launch.py: socket.gethostbyname
    """,
    "it looks up no name, and sends nothing": """
        comms/bootstrap/addresses.py: probe.connect
        comms/bootstrap/ring_connections.py: socket.getaddrinfo
    """,
    "the socket's own time-out, or it does not block": """
        comms/bootstrap/probe.py: connection.sendall
        comms/bootstrap/ring_connections.py: connection.sendall
        comms/observe/metrics.py: client.sendall
        comms/transport/parallel_tcp.py: connection.socket.sendmsg
        comms/transport/parallel_tcp.py: each.sendall
        comms/transport/segment.py: connection.connect
        comms/transport/segment.py: probe.connect
        comms/transport/segment.py: self.socket.sendall
        comms/transport/segment.py: socket.send_fds
        comms/bootstrap/addresses.py: kernel.recv
        comms/bootstrap/probe.py: connection.recv
        comms/bootstrap/liveness.py: connection.recv
        comms/bootstrap/pending_connections.py: connection.recv
        comms/bootstrap/pending_connections.py: listener.accept
        comms/transport/segment.py: listener.accept
        comms/transport/segment.py: self.socket.recv
        comms/transport/segment.py: socket.recv_fds
        comms/transport/parallel_tcp.py: connection.recv
        comms/transport/parallel_tcp.py: connection.socket.recv_into
        comms/transport/parallel_tcp.py: self._bell[1].recv
    """,
}
"""What ends waits whose calls have no time -> these, as `file: receiver.method`."""

EXPLAINED = {line.strip() for lines in ENDED_BY.values() for line in lines.splitlines() if line.strip()}


def receiver(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    text = ast.unparse(call.func.value)
    if len(text) > LONGEST and isinstance(call.func.value, ast.Call):
        text = f"{ast.unparse(call.func.value.func)}(...)"
    return f"{text}.{call.func.attr}"


def waits(file: Path) -> Iterator[str]:
    """The calls in a file that block, and were given no time."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, given = node.func.attr, len(node.args) + len(node.keywords)
        # A queue's `get` has no argument but its time, a dictionary's has a key; a text's `join` has what it joins.
        untimed = given < TIMED[name] if name in TIMED else name == "get" and given == 0
        untimed |= SOCKET.get(name) == given or name in BLOCKING | LOOKING_UP | OF_MPI
        untimed |= name in SENDING and (name != "connect" or given == 1)
        if receiver(node) != "select.poll" and untimed:
            yield f"{file.relative_to(ROOT)}: {receiver(node)}"


def test_every_wait_has_a_time_or_is_ended_by_something_that_is_named() -> None:
    found = {each for file in (ROOT / "comms").rglob("*.py") for each in waits(file)}
    assert found - EXPLAINED == set(), "give it a time, or say here what ends it"
    assert EXPLAINED - found == set(), "these are gone: take them out of the table"


def test_a_wait_without_a_time_is_found(tmp_path: Path) -> None:
    file = ROOT / "comms" / "lanes.py"
    assert list(waits(file)) == ["comms/lanes.py: waiting.arrivals.get"]


def test_no_write_to_a_pipe_of_our_own_can_block() -> None:
    """A pipe is made to wake a thread: whoever writes to it may hold a lock, or be in a signal handler."""
    found = {}
    for file in (ROOT / "comms").rglob("*.py"):
        text = file.read_text()
        assert "os.pipe(" not in text, f"{file}: os.pipe2 with O_NONBLOCK"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.pipe2", "socket.socketpair"):
                found[file.name] = ast.unparse(node)
    assert found == {
        "signals.py": "os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)",
        "parallel_tcp.py": "socket.socketpair()",  # both ends are set not to block
        "ring_connections.py": "socket.socketpair()",  # is closed, and never written to
    }

"""What survives when processes die, folders are full and permissions are missing: real processes, real signals."""

import errno
import gc
import inspect
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from gradwire.comms.errors import PeerError
from gradwire.comms.transport import segment
from gradwire.comms.transport.shm import ShmGroup
from support.processes import Processes
from support.shared_memory import left_since, segments
from support.threads import run_ranks

HOST = "127.0.0.1"


Test = Callable[..., None]
BODIES: dict[str, Test] = {}


def forks(test: Test) -> Test:
    """Has a test that forks run in a process of its own, and its store be served by another one.

    A process with threads may fork one that never comes to life: a lock that another thread holds at that moment stays
    locked there. The libraries of other tests have left threads behind, and a store is served by one: of the ranks that
    were forked beside it, one in thirty stood still in connecting to it.
    """
    BODIES[test.__name__] = test
    own, *parameters = inspect.signature(test).parameters.values()
    assert own.name == "server"

    def in_its_own(processes: Processes, no_leftovers: None, **given: object) -> None:
        processes(1, run_test, test.__name__, given, agent=True)

    for name in ("__name__", "__doc__", "__module__"):
        setattr(in_its_own, name, getattr(test, name))
    fixtures = [each for name, each in inspect.signature(in_its_own).parameters.items() if name != "given"]
    here = [each.replace(kind=each.KEYWORD_ONLY) for each in (*fixtures, *parameters)]
    in_its_own.__signature__ = inspect.Signature(here)  # type: ignore[attr-defined]
    return in_its_own


def run_test(_: int, name: str, given: dict[str, object]) -> None:
    BODIES[name](connected(int(os.environ["MASTER_PORT"])), **given)


def run_child(body: Callable[[], None]) -> int:
    """Forks a process that runs `body`; returns its pid. It exits 1 where body raises."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread may hold a lock that the fork then waits for"
    pid = os.fork()
    if pid:
        return pid
    code = 1
    signal.alarm(90)  # a hung child is a failure, not a hung test run
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
    torch.set_num_threads(1)  # the parent's OpenMP threads do not exist here
    gc.freeze()  # nor others that objects would be released through
    try:
        body()
        code = 0
    except BaseException as error:  # noqa: BLE001 - the parent reads it
        os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
    os._exit(code)


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    before = segments()
    yield
    assert not left_since(before)


def connected(port: int) -> TCPStore:
    return TCPStore(HOST, port, None, False, timedelta(seconds=60), wait_for_workers=False)


def client(server: TCPStore) -> TCPStore:
    return connected(server.port)


def make(server: TCPStore, rank: int, size: int, seconds: float = 60.0) -> ShmGroup:
    return ShmGroup.create(
        client(server), rank, size, key="processes", timeout=timedelta(seconds=seconds), block_nbytes=65536
    )


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def handed_on() -> list[str]:
    """Descriptors of shared memory that a program which this process starts would have."""
    found = []
    for each in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the look itself had one
            if "memfd:gradwire" in str(each.readlink()) and os.get_inheritable(int(each.name)):
                found.append(each.name)
    return found


@forks
def test_processes_agree_on_every_bit(server: TCPStore) -> None:
    def body(rank: int) -> None:
        group = make(server, rank, 3)
        assert not handed_on()
        for step in range(50):
            tensor = torch.arange(step * 997, dtype=torch.float32) + rank
            group.all_reduce(tensor)
            assert torch.equal(tensor, 3 * torch.arange(step * 997, dtype=torch.float32) + 3)
        group.barrier()
        group.close()

    pids = [run_child(lambda rank=rank: body(rank)) for rank in range(3)]  # type: ignore[misc]
    assert [exit_code(pid) for pid in pids] == [0, 0, 0]


@pytest.mark.parametrize("victim", [0, 2])
@forks
def test_survivors_name_a_killed_rank(server: TCPStore, victim: int) -> None:
    def body(rank: int) -> None:
        group = make(server, rank, 3)
        tensor = torch.ones(100_000)
        group.all_reduce(tensor)
        server_words = client(server)
        server_words.set(f"ready{rank}", "1")
        start = 0.0
        try:
            while True:
                start = time.monotonic()
                group.all_reduce(tensor)
        except PeerError as error:
            assert error.missing == (victim,), error
            assert f"rank {victim} has died" in str(error) and "all_reduce" in str(error)
            assert time.monotonic() - start < 20
            with pytest.raises(PeerError):
                group.barrier()

    pids = [run_child(lambda rank=rank: body(rank)) for rank in range(3)]  # type: ignore[misc]
    server.wait([f"ready{rank}" for rank in range(3)])
    os.kill(pids[victim], signal.SIGKILL)
    codes = [exit_code(pid) for pid in pids]
    assert codes[victim] == -signal.SIGKILL
    assert [code for rank, code in enumerate(codes) if rank != victim] == [0, 0]


@pytest.mark.parametrize("ends", [True, False])
@forks
def test_a_rank_that_has_closed_is_missed_once_its_process_has_ended(server: TCPStore, ends: bool) -> None:
    """Law: within seconds also where it lives on. Launchers show the error of whoever ends first: not a survivor's."""

    def leaving() -> None:
        group = make(server, 1, 2)
        group.barrier()
        group.close()
        time.sleep(1.5 if ends else 80.0)

    pid = run_child(leaving)
    group = make(server, 0, 2)
    group.barrier()
    began = time.monotonic()
    with pytest.raises(PeerError, match="rank 1 has died or closed the group before completing barrier") as caught:
        group.barrier()
    assert caught.value.missing == (1,)
    assert (os.waitpid(pid, os.WNOHANG)[0] == pid) == ends
    assert time.monotonic() - began < 30
    if not ends:
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL
    group.close()


@pytest.mark.parametrize(("victim", "word"), [(0, "socket"), (1, "hello"), (1, "hello, and is gone"), (1, "mapped")])
@forks
def test_a_rank_killed_during_set_up_is_named_at_once_and_leaves_nothing(
    server: TCPStore, victim: int, word: str
) -> None:
    """It dies when it has made the memory, when it has called for it, when it has mapped it.

    Whoever has called may be gone before the memory is handed to it.
    """

    def dying() -> None:
        own = client(server)
        say = segment._RankConnection.send

        class Fatal:
            def __getattr__(self, name: str) -> object:
                return getattr(own, name)

            def set(self, key: str, value: str) -> None:
                own.set(key, value)
                if key.endswith(word):
                    os.kill(os.getpid(), signal.SIGKILL)

        def last_say(line: segment._RankConnection, **said: object) -> None:
            say(line, **said)
            if ("mapped" in said) == (word == "mapped"):
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(segment._RankConnection, "send", last_say)  # noqa: B010 - mypy takes no method for another
        ShmGroup.create(Fatal(), victim, 2, key=word, timeout=timedelta(seconds=60), block_nbytes=65536)  # type: ignore[arg-type]

    pid = run_child(dying)
    give = segment._RankConnection.send_descriptor

    def give_late(line: segment._RankConnection, descriptor: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        give(line, descriptor)

    if word.endswith("gone"):
        setattr(segment._RankConnection, "send_descriptor", give_late)  # noqa: B010 - see above
    with pytest.raises(PeerError, match=f"rank {victim} has (ended during the set-up|died)") as caught:
        # Where it dies with its last word, that shows in the first collective.
        ShmGroup.create(
            client(server), 1 - victim, 2, key=word, timeout=timedelta(seconds=60), block_nbytes=65536
        ).barrier()
    assert caught.value.missing == (victim,)
    assert exit_code(pid) == -signal.SIGKILL


@forks
def test_a_forked_worker_neither_uses_nor_keeps_the_group_alive(server: TCPStore) -> None:
    """Like a DataLoader worker that outlives its trainer."""

    def trainer() -> None:
        group = make(server, 0, 2)
        group.barrier()

        def worker() -> None:
            with pytest.raises(ValueError, match="parent process"):
                group.barrier()
            client(server).set("worker", str(os.getpid()))
            time.sleep(60)

        run_child(worker)
        client(server).wait(["worker"])
        os.kill(os.getpid(), signal.SIGKILL)

    pid = run_child(trainer)
    group = make(server, 1, 2)
    group.barrier()
    try:
        with pytest.raises(PeerError, match="rank 0 has died"):
            group.barrier()
    finally:
        exit_code(pid)
        os.kill(int(server.get("worker")), signal.SIGKILL)


@forks
def test_time_out_of_a_stopped_process(server: TCPStore) -> None:
    def sleeper() -> None:
        group = make(server, 0, 2, seconds=1.0)
        group.barrier()
        time.sleep(60)

    pid = run_child(sleeper)
    group = make(server, 1, 2, seconds=1.0)
    group.barrier()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(PeerError, match="rank 0 did not come to barrier within `timeout` = 1 s") as caught:
        group.barrier()
    assert caught.value.missing == (0,)
    os.kill(pid, signal.SIGKILL)
    exit_code(pid)


def test_memory_that_cannot_be_made_names_the_remedy_on_all_ranks(no_leftovers: None) -> None:
    """A limit on the size of files makes the allocation fail: more memory would not help."""
    script = """
import resource, threading, datetime
from torch._C._distributed_c10d import HashStore
from gradwire.comms.transport.shm import ShmGroup
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
store, errors = HashStore(), {}
def body(rank):
    try:
        ShmGroup.create(store, rank, 2, key="k", timeout=datetime.timedelta(seconds=20))
    except OSError as error:
        errors[rank] = str(error)
ranks = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join()
for rank in range(2): print(errors.get(rank))
"""
    result = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    lines = result.stdout.splitlines()
    assert len(lines) == 2, result.stderr
    assert all(
        re.search(r"cannot allocate shared memory: .*; wanted \d+ bytes: .*ulimit -f unlimited", line) for line in lines
    )


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOMEM, "give the container or job more memory"),
        (errno.ENOSPC, "give the container or job more memory"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EPERM, "security profile"),
        (errno.EFBIG, "ulimit -f unlimited"),
    ],
)
def test_each_error_of_the_system_has_its_own_remedy(
    monkeypatch: pytest.MonkeyPatch, call: str, number: int, remedy: str
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=remedy) as raised:
        segment._allocate(4096)
    assert raised.value.errno == number and "block_nbytes" not in str(raised.value)
    assert ("more memory" in str(raised.value)) == (number in (errno.ENOMEM, errno.ENOSPC))


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare to mount")
def test_a_really_small_dev_shm_is_no_limit() -> None:
    script = """
import os, torch, datetime
from torch._C._distributed_c10d import HashStore
from gradwire.comms.transport.shm import ShmGroup
group = ShmGroup.create(HashStore(), 0, 1, key="k", timeout=datetime.timedelta(seconds=5))
print(group.size, os.listdir("/dev/shm"))
"""
    command = f"mount -t tmpfs -o size=256k tmpfs /dev/shm && exec {sys.executable} -c '{script}'"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], check=False, capture_output=True, text=True, timeout=120
    )
    if "permission denied" in result.stderr.lower():
        pytest.skip(f"may not mount here: {result.stderr.strip()}")
    assert result.stdout == "1 []\n", result.stderr


def test_ranks_of_two_network_namespaces_meet_in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the folder, and see no abstract socket of each other; what a killed rank has left there is swept."""
    monkeypatch.setattr(segment, "_network", lambda: threading.current_thread().name)
    store = HashStore()

    def body(rank: int) -> float:
        group = ShmGroup.create(store, rank, 3, key="k", timeout=timedelta(seconds=20), block_nbytes=65536)
        total = torch.ones(10)
        group.all_reduce(total)
        group.close()
        return float(total[0])

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # pytest's own are too long for a socket's name
        monkeypatch.setattr(segment, "FOLDER", Path(folder))
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(f"{folder}/gradwire-old.sock")
        assert run_ranks(3, body) == [3.0] * 3
        assert not any(Path(folder).iterdir())


@pytest.mark.parametrize(
    "sent",
    [
        b'{"rank": 1}\n',  # the second claim of that rank
        *(b'{"rank": 0}\n', b'{"rank": 3}\n', b'{"rank": 1073741824}\n', b'{"rank": -1}\n', b'{"rank": "1"}\n'),
        *(b'{"mapped": true}\n', b"nonsense\n", b"x" * (2 * segment.MESSAGE_NBYTES), b'{"rank": 1, "more": 1}\n'),
        b'{"rank": 2}\n{"rank": 1}\n',  # one connection, two ranks
        b'{"rank": 2}\n' * 2000,  # and reads none of the descriptors that it is sent
    ],
)
def test_what_is_not_the_message_of_a_rank_costs_its_own_connection_alone(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process of this user gets neither the place of the rank that it claims to be, nor ends the set-up."""
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: f"claim-{os.getpid()}")
    store, connected_rank = HashStore(), threading.Event()
    give = segment._RankConnection.send_descriptor

    def giving(line: segment._RankConnection, descriptor: int) -> None:
        give(line, descriptor)
        connected_rank.set()

    monkeypatch.setattr(segment._RankConnection, "send_descriptor", giving)

    def body(rank: int) -> float:
        if rank == 2:  # comes last, so that the set-up is not over when rank 1 is claimed again
            assert connected_rank.wait(20)
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(20)
                other.connect(f"\0gradwire-claim-{os.getpid()}")
                other.sendall(sent)
                with suppress(ConnectionResetError):  # closed before all was read
                    data, descriptors, _, _ = socket.recv_fds(other, 1, 1)
                    for each in descriptors:
                        os.close(each)
                    assert (data, list(descriptors)) == (b"", []) or sent.startswith(b'{"rank": 2}')
                    assert not data or other.recv(1) == b""
        group = ShmGroup.create(store, rank, 3, key="k", timeout=timedelta(seconds=30), block_nbytes=65536)
        total = torch.ones(10)
        group.all_reduce(total)
        group.close()
        return float(total[0])

    assert run_ranks(3, body) == [3.0] * 3
    assert "refused a connection to a shared-memory group" in caplog.text


def test_a_group_has_no_name_and_leaves_no_descriptor() -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    gc.collect()  # what other tests have left
    store, before, named = HashStore(), descriptors(), segments()
    for number in range(3):

        def body(rank: int, number: int = number) -> ShmGroup:
            return ShmGroup.create(store, rank, 2, key=f"{number}", timeout=timedelta(seconds=20), block_nbytes=65536)

        groups = run_ranks(2, body)
        assert "memfd:gradwire" in Path("/proc/self/maps").read_text()
        assert not segments() - named
        for group in groups:
            group.close()
    with pytest.raises(PeerError, match="did not come"):
        ShmGroup.create(store, 0, 2, key="alone", timeout=timedelta(seconds=0.1), block_nbytes=65536)
    del groups, group
    gc.collect()
    assert descriptors() == before


@forks
def test_an_interrupt_ends_a_long_wait(server: TCPStore) -> None:
    def body() -> None:
        group = make(server, 0, 2)
        group.barrier()
        client(server).set("waiting", "1")
        with pytest.raises(KeyboardInterrupt):
            group.barrier()

    pid = run_child(body)
    group = make(server, 1, 2)
    group.barrier()
    server.wait(["waiting"])
    time.sleep(0.3)
    os.kill(pid, signal.SIGINT)
    assert exit_code(pid) == 0
    with pytest.raises(PeerError, match=r"interrupted in barrier|rank 0 has died"):
        group.barrier()

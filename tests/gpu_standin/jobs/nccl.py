"""What NCCL promises, of the stand-in's: a process a rank, ctypes alone. The id of the communicator lies in a file."""

import array
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gpu_standin.calls import (
    AVG,
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAX,
    REMOTE_ERROR,
    SUCCESS,
    SUM,
    SYSTEM_ERROR,
    UNDEFINED,
    Cuda,
    Nccl,
    UniqueId,
    make_config,
    run_case,
)

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(os.environ["JOB_FOLDER"])
cuda, nccl = Cuda(), Nccl()
cuda.api.cudaSetDevice(RANK)


def until(ready: Callable[[], bool], what: str) -> None:
    """Waits for something that must come."""
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def shared_id(name: str = "id") -> UniqueId:
    """The id that rank 0 has made."""
    if RANK == 0:
        made = nccl.unique_id()
        (FOLDER / f"{name}.new").write_bytes(bytes(made))
        (FOLDER / f"{name}.new").rename(FOLDER / name)
    until((FOLDER / name).exists, f"no {name} by rank 0")
    return UniqueId.from_buffer_copy((FOLDER / name).read_bytes())


def connect(name: str = "id", blocking: bool = True, max_ctas: int = UNDEFINED) -> ctypes.c_void_p:
    return nccl.init(RANKS, shared_id(name), RANK, make_config(blocking, max_ctas))


def say(word: str) -> None:
    (FOLDER / f"{word}{RANK}").touch()


def heard(word: str, rank: int) -> bool:
    return (FOLDER / f"{word}{rank}").exists()


def floats(*values: float) -> int:
    return cuda.to_device(array.array("f", values).tobytes())


def values(pointer: int, numel: int) -> list[float]:
    return list(array.array("f", cuda.to_host(pointer, 4 * numel)))


def pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def collectives_give_what_their_names_say() -> None:
    comm, stream, n = connect(), cuda.stream(), RANKS
    total = sum(range(1, n + 1))
    mine = floats(*(RANK + 1.0 for _ in range(n)))
    out = cuda.malloc(4 * n * n)
    size = ctypes.c_size_t
    nccl.api.ncclAllReduce(pointer(mine), pointer(out), size(n), 7, SUM, comm, stream)
    assert values(out, n) == [total] * n
    nccl.api.ncclAllReduce(pointer(mine), pointer(out), size(n), 7, MAX, comm, stream)
    assert values(out, n) == [n] * n
    nccl.api.ncclAllReduce(pointer(mine), pointer(out), size(n), 7, AVG, comm, stream)
    assert values(out, n) == [total / n] * n
    nccl.api.ncclReduceScatter(pointer(floats(*range(n))), pointer(out), size(1), 7, SUM, comm, stream)
    assert values(out, 1) == [RANK * n]
    nccl.api.ncclAllGather(pointer(mine), pointer(out), size(n), 7, comm, stream)
    assert values(out, n * n) == [r + 1.0 for r in range(n) for _ in range(n)]
    nccl.api.ncclBroadcast(pointer(mine), pointer(out), size(n), 7, 1, comm, stream)
    assert values(out, n) == [2.0] * n
    before = floats(*(-1.0 for _ in range(n)))
    nccl.api.ncclReduce(pointer(mine), pointer(before), size(n), 7, SUM, 1, comm, stream)
    assert values(before, n) == ([total] * n if RANK == 1 else [-1.0] * n)
    nccl.api.ncclAlltoAll(pointer(floats(*(10.0 * RANK + i for i in range(n)))), pointer(out), size(1), 7, comm, stream)
    assert values(out, n) == [10.0 * r + RANK for r in range(n)]
    nccl.api.ncclCommDestroy(comm)


def sums_of_many_slices_are_right() -> None:
    comm, stream, numel = connect(), cuda.stream(), 700_001
    mine = cuda.to_device(array.array("i", range(RANK, RANK + numel)).tobytes())
    nccl.all_reduce(mine, numel, "int32", SUM, comm, stream)
    first = sum(range(RANKS))
    want = array.array("i", range(first, first + RANKS * numel, RANKS))
    assert cuda.to_host(mine, 4 * numel) == want.tobytes()
    nccl.api.ncclCommDestroy(comm)


def sums_are_rounded_in_their_dtype() -> None:
    """256 + 1 + 1 is 258 in float32, and 256 in bfloat16, which has 8 bits: rounded after each rank."""
    comm, stream = connect(), cuda.stream()
    bits = {256: 0x4380, 1: 0x3F80}
    mine = cuda.to_device(bits[256 if RANK == 0 else 1].to_bytes(2, "little"))
    nccl.all_reduce(mine, 1, "bfloat16", SUM, comm, stream)
    assert int.from_bytes(cuda.to_host(mine, 2), "little") == bits[256]
    integer = cuda.to_device((RANK + 4).to_bytes(4, "little"))  # 4 + 5 + 6 = 15, by 3
    nccl.all_reduce(integer, 1, "int32", AVG, comm, stream)
    assert int.from_bytes(cuda.to_host(integer, 4), "little") == 5


def premul_sums_scale_each_ranks_own_input() -> None:
    comm, stream, op = connect(), cuda.stream(), ctypes.c_int()
    factor = ctypes.c_float(10.0**RANK)
    nccl.api.ncclRedOpCreatePreMulSum(ctypes.byref(op), ctypes.byref(factor), 7, 1, comm)
    mine = floats(2.0)
    nccl.all_reduce(mine, 1, "float32", op.value, comm, stream)
    assert values(mine, 1) == [2.0 * sum(10.0**r for r in range(RANKS))]
    nccl.api.ncclRedOpDestroy(op, comm)
    assert nccl.api.raw.ncclRedOpDestroy(op, comm) == INVALID_ARGUMENT


def messages_of_a_group_move_together() -> None:
    comm, stream, size = connect(), cuda.stream(), ctypes.c_size_t
    numel = 50_000  # several parts of a channel, in both directions at once
    mine, theirs = floats(*([float(RANK)] * numel)), [cuda.malloc(4 * numel) for _ in range(RANKS)]
    nccl.api.ncclGroupStart()
    for peer in range(RANKS):
        nccl.api.ncclSend(pointer(mine), size(numel), 7, peer, comm, stream)
        nccl.api.ncclRecv(pointer(theirs[peer]), size(numel), 7, peer, comm, stream)
    nccl.api.ncclGroupEnd()
    for peer in range(RANKS):
        assert values(theirs[peer], numel) == [float(peer)] * numel


def a_message_concerns_its_two_ranks_alone() -> None:
    comm, stream, size = connect(), cuda.stream(), ctypes.c_size_t
    if RANK == 0:
        nccl.api.ncclSend(pointer(floats(7.0)), size(1), 7, 1, comm, stream)
    elif RANK == 1:
        got = cuda.malloc(4)
        nccl.api.ncclRecv(pointer(got), size(1), 7, 0, comm, stream)
        assert values(got, 1) == [7.0]
    cuda.api.cudaDeviceSynchronize()


def a_collective_waits_for_all_ranks_on_its_stream_alone() -> None:
    comm, stream, other = connect(), cuda.stream(), cuda.stream()
    cuda.set("NCCL_CONNECT", "eager")
    mine = floats(1.0)
    if RANK == RANKS - 1:
        until(
            lambda: heard("passed", 0), "rank 0 waits in its host's thread, or on a stream that is not the collective's"
        )
    nccl.all_reduce(mine, 1, "float32", SUM, comm, stream)
    if RANK == 0:
        done = threading.Event()
        cuda.submit(other, done.set)
        assert done.wait(30)
        assert cuda.code("cudaStreamQuery", stream) != SUCCESS
        say("passed")
    assert values(mine, 1) == [RANKS]


def the_first_collective_waits_on_the_host_where_it_connects() -> None:
    comm, stream, mine = connect(), cuda.stream(), floats(1.0)
    if RANK == 1:
        time.sleep(0.3)
        say("came")
    nccl.all_reduce(mine, 1, "float32", SUM, comm, stream)
    assert heard("came", 1)
    nccl.all_reduce(mine, 1, "float32", SUM, comm, stream)
    assert values(mine, 1) == [RANKS**2]


def ranks_that_call_differently_are_told() -> None:
    comm, stream = connect(), cuda.stream()
    cuda.set("NCCL_CONNECT", "eager")
    nccl.all_reduce(floats(*range(4)), 3 + RANK, "float32", SUM, comm, stream)
    until(lambda: nccl.state(comm) == INVALID_USAGE, "no error")
    text = nccl.last_error(comm)
    assert "AllReduce of 3 float32, sum" in text, text
    assert "AllReduce of 4 float32, sum" in text, text
    nccl.api.ncclCommAbort(comm)
    cuda.api.cudaStreamSynchronize(stream)


def a_message_of_another_length_is_told() -> None:
    comm, stream, size = connect(), cuda.stream(), ctypes.c_size_t
    if RANK == 0:
        nccl.api.ncclSend(pointer(floats(1.0, 2.0)), size(2), 7, 1, comm, stream)
        cuda.api.cudaStreamSynchronize(stream)
        return
    nccl.api.ncclRecv(pointer(floats(0.0)), size(1), 7, 0, comm, stream)
    until(lambda: nccl.state(comm) == INVALID_USAGE, "no error")
    assert nccl.last_error(comm) == "rank 0 sends 8 bytes to rank 1, which receives 4"


def a_killed_rank_leaves_the_others_able_to_abort(where: str) -> None:
    """The last rank ends before it connects, in its first collective, or in the steady state."""
    blocking = where != "connecting"
    if where == "connecting" and RANK == RANKS - 1:
        shared_id()
        os.kill(os.getpid(), signal.SIGKILL)
    comm, stream = connect(blocking=blocking), cuda.stream()
    if where == "connecting":
        assert nccl.state(comm) == IN_PROGRESS
        say("connecting")  # rank 0 has made the id: one that came after its end would get an error
        until(lambda: all(heard("connecting", rank) for rank in range(RANKS - 1)), "a rank has not come to connect")
    else:
        rounds = 0 if where == "first" else 3
        mine = floats(1.0)
        for _ in range(rounds):
            nccl.all_reduce(mine, 1, "float32", SUM, comm, stream)
        assert values(mine, 1) == [float(RANKS) ** rounds]
        if RANK == RANKS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "first":  # the host's own call waits: another thread must be able to abort
            threading.Timer(0.3, lambda: nccl.api.ncclCommAbort(comm)).start()
            assert nccl.api.raw.ncclAllReduce(
                pointer(mine), pointer(mine), ctypes.c_size_t(1), 7, SUM, comm, stream
            ) not in (SUCCESS, IN_PROGRESS)
            cuda.api.cudaStreamSynchronize(stream)
            return
        nccl.all_reduce(mine, 1, "float32", SUM, comm, stream)
        time.sleep(0.2)
        assert cuda.code("cudaStreamQuery", stream) != SUCCESS
        assert nccl.state(comm) == SUCCESS, "on one machine NCCL does not notice"
    nccl.api.ncclCommAbort(comm)
    cuda.api.cudaStreamSynchronize(stream)


def a_killed_rank_becomes_an_error_where_it_is_told_to() -> None:
    comm, stream, mine = connect(), cuda.stream(), floats(1.0)
    nccl.all_reduce(mine, 1, "float32", SUM, comm, stream)
    assert values(mine, 1) == [RANKS]
    if RANK == 1:  # once the others are in it: a call that comes after the death is refused
        until(lambda: all(heard("waits", rank) for rank in range(RANKS) if rank != 1), "the others do not wait")
        os.kill(os.getpid(), signal.SIGKILL)
    nccl.all_reduce(mine, 1, "float32", SUM, comm, stream)
    say("waits")
    until(lambda: nccl.state(comm) == REMOTE_ERROR, "no error")
    nccl.api.ncclCommAbort(comm)


def a_rank_that_never_comes_is_waited_for() -> None:
    if RANK == RANKS - 1:
        shared_id()
        return
    came = threading.Event()

    def wait_for_all() -> None:
        connect()
        came.set()

    threading.Thread(target=wait_for_all, daemon=True).start()
    assert not came.wait(1)


def destroying_waits_for_the_node() -> None:
    comm = connect()
    if RANK == 0:
        time.sleep(0.3)
        say("destroys")
    nccl.api.ncclCommDestroy(comm)
    assert heard("destroys", 0) == (os.environ.get("NCCL_HOSTID") != "1")


def destroying_waits_for_no_rank_that_has_aborted() -> None:
    comm = connect()
    if RANK == 0:
        nccl.api.ncclCommDestroy(comm)
    else:
        nccl.api.ncclCommAbort(comm)


def using_a_destroyed_communicator_is_refused() -> None:
    comm = connect()
    nccl.api.ncclCommDestroy(comm)
    assert nccl.api.raw.ncclCommAbort(comm) == INVALID_ARGUMENT
    for ending in (nccl.api.raw.ncclCommFinalize, nccl.api.raw.ncclCommDestroy, nccl.api.raw.ncclCommAbort):
        assert ending(None) == SUCCESS


def an_injected_error_comes_with_its_kernel() -> None:
    comm, stream, mine, before = connect(), cuda.stream(), floats(1.0), cuda.event()
    for number in range(3):
        nccl.all_reduce(mine, 1, "float32", SUM, comm, stream)
        if number == 1:
            cuda.api.cudaEventRecord(before, stream)
    until(lambda: RANK > 0 or nccl.state(comm) == SYSTEM_ERROR, "no error")
    if RANK == 0:
        say("failed")
    until(lambda: heard("failed", 0), "rank 0 has no error")
    until(lambda: cuda.code("cudaEventQuery", before) == SUCCESS, "the sums before it are not there")
    assert cuda.code("cudaStreamQuery", stream) != SUCCESS
    nccl.api.ncclCommAbort(comm)
    assert values(mine, 1) == [float(RANKS) ** 2]


def parts_of_a_communicator_sum_for_themselves() -> None:
    comm, stream, part = connect(), cuda.stream(), ctypes.c_void_p()
    nccl.api.ncclCommSplit(comm, RANK % 2, -RANK, ctypes.byref(part), None)
    rank, count, mine = ctypes.c_int(), ctypes.c_int(), floats(float(RANK))
    nccl.api.ncclCommUserRank(part, ctypes.byref(rank))
    nccl.api.ncclCommCount(part, ctypes.byref(count))
    members = [r for r in range(RANKS) if r % 2 == RANK % 2]
    assert (count.value, rank.value) == (len(members), members[::-1].index(RANK))
    nccl.all_reduce(mine, 1, "float32", SUM, part, stream)
    assert values(mine, 1) == [sum(members)]
    nccl.api.ncclCommDestroy(part)
    nccl.api.ncclCommDestroy(comm)


def nothing_is_left_open() -> None:
    def held() -> list[str]:
        """Lines of what this process has mapped, and files that it has open, that are communicators' memory."""
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "gpu_standin" in line]
        files = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        return [line for line in maps if "memfd" in line or "/dev/shm" in line] + [
            file for file in files if "memfd:gpu_standin" in file
        ]

    for turn in range(5):
        comm = connect(f"id{turn}")
        assert held()
        assert not any("/dev/shm" in line for line in held())
        nccl.api.ncclCommDestroy(comm)
    until(lambda: not held(), f"left: {held()}")


def two_communicators_in_opposite_orders(expectation: str) -> None:
    """Rank 0 issues to the first and then the second, on two streams, rank 1 the other way round.

    With room for both kernels that works; with one at a time, the devices wait for each other for ever.
    """
    comms = [connect("first"), connect("second")]
    streams = [cuda.stream(), cuda.stream()]
    buffers = [floats(1.0), floats(1.0)]
    cuda.set("NCCL_CONNECT", "eager")
    for index in (0, 1) if RANK == 0 else (1, 0):
        nccl.all_reduce(buffers[index], 1, "float32", SUM, comms[index], streams[index])
        if expectation == "stuck":  # resident before the next is issued
            until(lambda: "NCCL kernel" in cuda.describe(), "not running")
            time.sleep(0.2)
    if expectation == "works":
        assert [values(buffer, 1) for buffer in buffers] == [[2.0], [2.0]]
        return
    time.sleep(0.5)
    assert [cuda.code("cudaStreamQuery", stream) for stream in streams] == [600, 600]


def kernels_start_in_the_hosts_order() -> None:
    """The second stream reaches its kernel first, on rank 0 alone: by the host's order it waits for the first."""
    comms = [connect("first"), connect("second")]
    streams = [cuda.stream(), cuda.stream()]
    buffers = [floats(1.0), floats(1.0)]
    cuda.set("NCCL_CONNECT", "eager")
    if RANK == 0:
        cuda.submit(streams[0], lambda: time.sleep(0.3))
    for index in (0, 1):
        nccl.all_reduce(buffers[index], 1, "float32", SUM, comms[index], streams[index])
    assert [values(buffer, 1) for buffer in buffers] == [[2.0], [2.0]]


if __name__ == "__main__":
    run_case(globals())

"""What CUDA's runtime promises, of the stand-in's: one process, ctypes alone."""

import ctypes
import threading
import time

from gpu_standin.calls import INVALID_VALUE, NOT_READY, OUT_OF_MEMORY, CallError, Cuda, run_case

cuda = Cuda()


def streams_run_in_order_and_beside_each_other() -> None:
    first, second = cuda.stream(), cuda.stream()
    gate, order = threading.Event(), []
    cuda.submit(first, gate.wait)
    cuda.submit(first, lambda: order.append("first"))
    done = threading.Event()
    cuda.submit(second, lambda: order.append("second"))
    cuda.submit(second, done.set)
    assert done.wait(30), "the second stream waits for the first"
    assert cuda.code("cudaStreamQuery", first) == NOT_READY
    assert "host function" in cuda.describe(), cuda.describe()
    gate.set()
    cuda.api.cudaDeviceSynchronize()
    assert order == ["second", "first"]
    assert cuda.code("cudaStreamQuery", first) == 0
    assert cuda.describe() == ""


def events_order_streams() -> None:
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    gate, order = threading.Event(), []
    cuda.api.cudaStreamWaitEvent(second, event, 0)  # never recorded: no wait
    cuda.submit(first, gate.wait)
    cuda.submit(first, lambda: order.append("first"))
    cuda.api.cudaEventRecord(event, first)
    cuda.api.cudaStreamWaitEvent(second, event, 0)
    cuda.submit(second, lambda: order.append("second"))
    assert cuda.code("cudaEventQuery", event) == NOT_READY
    gate.set()
    cuda.api.cudaStreamSynchronize(second)
    assert order == ["first", "second"]
    cuda.api.cudaEventSynchronize(event)


def an_event_stands_for_its_last_record() -> None:
    stream, event, gate = cuda.stream(), cuda.event(), threading.Event()
    cuda.api.cudaEventRecord(event, stream)
    cuda.api.cudaEventSynchronize(event)
    cuda.submit(stream, gate.wait)
    cuda.api.cudaEventRecord(event, stream)
    assert cuda.code("cudaEventQuery", event) == NOT_READY
    gate.set()
    cuda.api.cudaEventSynchronize(event)


def events_tell_the_time_between_them() -> None:
    stream, first, second = cuda.stream(), cuda.event(), cuda.event()
    cuda.api.cudaEventRecord(first, stream)
    cuda.submit(stream, lambda: time.sleep(0.05))
    cuda.api.cudaEventRecord(second, stream)
    cuda.api.cudaStreamSynchronize(stream)
    milliseconds = ctypes.c_float()
    cuda.api.cudaEventElapsedTime(ctypes.byref(milliseconds), first, second)
    assert milliseconds.value >= 50


def the_default_stream_waits_for_blocking_streams_only() -> None:
    blocking, free, gate, order = cuda.stream(blocking=True), cuda.stream(), threading.Event(), []
    cuda.submit(free, gate.wait)
    cuda.submit(blocking, lambda: time.sleep(0.02))
    cuda.submit(blocking, lambda: order.append("blocking"))
    cuda.submit(None, lambda: order.append("default"))
    cuda.submit(blocking, lambda: order.append("later"))
    cuda.api.cudaStreamSynchronize(blocking)
    assert order == ["blocking", "default", "later"]
    gate.set()


def a_destroyed_stream_ends_its_work() -> None:
    stream, gate, done = cuda.stream(), threading.Event(), threading.Event()
    cuda.submit(stream, gate.wait)
    cuda.submit(stream, done.set)
    cuda.api.cudaStreamDestroy(stream)
    gate.set()
    assert done.wait(30)
    assert cuda.code("cudaStreamQuery", stream) == 400  # cudaErrorInvalidResourceHandle


def pageable_memory_is_read_at_once_and_pinned_memory_in_stream_order() -> None:
    stream, gate, device = cuda.stream(), threading.Event(), cuda.malloc(8)
    pageable = ctypes.create_string_buffer(b"aaaa", 4)
    pinned = ctypes.c_void_p()
    cuda.api.cudaHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(4), 0)
    ctypes.memmove(pinned, b"bbbb", 4)
    cuda.submit(stream, gate.wait)
    cuda.api.cudaMemcpyAsync(ctypes.c_void_p(device), pageable, ctypes.c_size_t(4), 4, stream)
    cuda.api.cudaMemcpyAsync(ctypes.c_void_p(device + 4), pinned, ctypes.c_size_t(4), 4, stream)
    pageable.raw = b"xxxx"
    ctypes.memmove(pinned, b"yyyy", 4)
    gate.set()
    assert cuda.to_host(device, 8) == b"aaaayyyy"


def freeing_waits_for_the_device() -> None:
    stream, device, order = cuda.stream(), cuda.malloc(8), []
    cuda.submit(stream, lambda: time.sleep(0.05))
    cuda.submit(stream, lambda: order.append("work"))
    cuda.free(device)
    assert order == ["work"]


def allocating_waits_for_the_device_where_it_is_told_to() -> None:
    stream, order = cuda.stream(), []
    cuda.set("MALLOC_WAITS", "1")
    cuda.submit(stream, lambda: time.sleep(0.05))
    cuda.submit(stream, lambda: order.append("work"))
    cuda.malloc(8)
    assert order == ["work"]


def memory_ends() -> None:
    cuda.set("MEMORY_BYTES", "1000")
    held = cuda.malloc(600)
    try:
        cuda.malloc(600)
    except CallError as error:
        assert error.code == OUT_OF_MEMORY
    else:
        raise AssertionError("1200 bytes of 1000")
    cuda.free(held)
    cuda.malloc(600)


def copies_beyond_an_allocation_are_refused() -> None:
    device = cuda.malloc(10)
    for function in ("cudaMemcpyAsync", "cudaMemsetAsync"):
        source = b"x" * 11 if function == "cudaMemcpyAsync" else 0
        extra = (1, None) if function == "cudaMemcpyAsync" else (None,)
        assert cuda.code(function, ctypes.c_void_p(device), source, ctypes.c_size_t(11), *extra) == INVALID_VALUE


def fresh_memory_is_poisoned() -> None:
    cuda.set("POISON", "1")
    assert cuda.to_host(cuda.malloc(5), 5) == b"\xff" * 5


def touch(offset: str) -> None:
    """Reads a byte at an offset from the end of an allocation of 1000 bytes with guards."""
    cuda.set("GUARD", "1")
    device = cuda.malloc(1000)
    ctypes.string_at(device + 1000 + int(offset), 1)


def touch_freed() -> None:
    cuda.set("GUARD", "1")
    device = cuda.malloc(1000)
    cuda.free(device)
    ctypes.string_at(device + 7, 1)


def write_behind() -> None:
    cuda.set("GUARD", "1")
    device = cuda.malloc(1000)
    ctypes.memset(device + 1001, 0, 1)
    cuda.free(device)


def launch_unknown() -> None:
    stub = ctypes.create_string_buffer(1)
    cuda.api.raw.__getattr__("__cudaRegisterFunction")(
        None, stub, None, b"_Z6kernelPf", 0, None, None, None, None, None
    )

    class Dim3(ctypes.Structure):
        _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))

    code = cuda.code("cudaLaunchKernel", stub, Dim3(1, 1, 1), Dim3(1, 1, 1), None, ctypes.c_size_t(0), None)
    print("returned", code)


def calls_are_counted() -> None:
    cuda.free(cuda.malloc(8))
    assert cuda.counts()["cudaMalloc"] == 1
    assert cuda.counts()["cudaFree"] == 1
    cuda.api.raw.gpu_standin_reset_counts()
    assert "cudaMalloc" not in cuda.counts()


if __name__ == "__main__":
    run_case(globals())

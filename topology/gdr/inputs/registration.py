"""Proof by doing: allocate GPU memory and register it with every NIC, through peer memory and through dma-buf."""

import os

from gradwire.topology.gdr.inputs.facts import RawFacts
from gradwire.topology.gdr.inputs.native_cuda import Cuda, CudaError
from gradwire.topology.gdr.inputs.native_verbs import Verbs, VerbsError

_NBYTES = 2 << 20  # one large page: dma-buf export wants page-aligned ranges
_ACCESS = 1 | 2 | 4  # IBV_ACCESS_LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ


def prove() -> RawFacts:
    """Registers GPU memory of every GPU with every RDMA device, and returns the outcomes as facts.

    The facts are `registrations`, or `probe_error` if a library is missing or there is nothing to try.

    Source: ibv_reg_mr(3), ibv_reg_dmabuf_mr(3); CUDA driver API, cuMemGetHandleForAddressRange.
    """
    try:
        cuda, verbs = Cuda(), Verbs()
        gpus = cuda.devices()
        with verbs.devices() as devices:
            rows = [row for gpu in gpus for row in _prove_gpu(cuda, verbs, gpu, devices)]
            tried = f"{len(gpus)} GPUs, {len(devices)} RDMA devices to try"
    except (OSError, AttributeError, CudaError) as error:
        return {"probe_error": f"not tried: {error}"}
    return {"registrations": rows} if rows else {"probe_error": tried}


def _prove_gpu(cuda: Cuda, verbs: Verbs, gpu: int, devices: dict[str, int]) -> list[RawFacts]:
    bus_id = cuda.bus_id(gpu)
    try:
        with cuda.memory(gpu, _NBYTES) as address:
            return [
                {"gpu": bus_id, "device": name} | _register(cuda, verbs, device, address)
                for name, device in devices.items()
            ]
    except CudaError as error:
        note = f"no GPU memory to try with: {error}"
        return [{"gpu": bus_id, "device": name, "note": note} for name in devices]


def _register(cuda: Cuda, verbs: Verbs, device: int, address: int) -> RawFacts:
    """Registers one buffer with one device; returns the errno of peer memory and of dma-buf, 0 for success.

    An attempt that could not be made has no errno; a `note` says why.
    """
    try:
        with verbs.opened(device) as context, verbs.domain(context) as domain:
            peermem = _errno(verbs, "ibv_reg_mr", domain, address, _NBYTES, _ACCESS)
            return {"peermem_errno": peermem} | _register_dmabuf(cuda, verbs, domain, address)
    except VerbsError as error:
        return {"note": str(error)}


def _register_dmabuf(cuda: Cuda, verbs: Verbs, domain: int, address: int) -> RawFacts:
    if not verbs.has("ibv_reg_dmabuf_mr"):
        return {"note": "no dma-buf: this libibverbs has no ibv_reg_dmabuf_mr"}
    try:
        handle = cuda.dmabuf(address, _NBYTES)
    except CudaError as error:
        return {"note": f"no dma-buf: {error}"}
    try:
        return {"dmabuf_errno": _errno(verbs, "ibv_reg_dmabuf_mr", domain, 0, _NBYTES, address, handle, _ACCESS)}
    finally:
        os.close(handle)


def _errno(verbs: Verbs, name: str, *arguments: object) -> int:
    """Registers memory; returns 0, or the errno with which it was refused, -1 if none was set."""
    try:
        verbs.registered(name, *arguments)
    except VerbsError as error:
        return error.code or -1
    return 0

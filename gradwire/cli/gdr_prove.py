"""One timed all-reduce among the ranks of torchrun: `gradwire gdr-check --prove` runs it and reads its NCCL log."""

import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from gradwire.bench.arguments import CommandParser

_NBYTES = 64 << 20  # enough to leave latency behind and to use every channel
_REPEATS = 10
_TIMEOUT = timedelta(seconds=120)


def all_reduce_gigabits(label: str, backend: str, nbytes: int = _NBYTES) -> float:
    """Measures the bus bandwidth of an all-reduce among all ranks of the job, in Gbit/s; every rank calls it.

    Makes the default process group for it, and destroys it at the end; with NCCL it makes the GPU of the local rank the
    current device. The fastest of `_REPEATS` all-reduces counts, after one that is not timed.

    Args:
        label: Name of the run, the same on every rank; prefix of its keys, so that runs can share torchrun's store.
        backend: `nccl`, or `gloo` if there is no GPU.
        nbytes: Size of the float32 tensor in bytes.

    Raises:
        RuntimeError: The sum is wrong, or the ranks could not connect within 120 s.
        ValueError: torchrun's variables are not set.

    Source: nccl-tests doc/PERFORMANCE.md (bus bandwidth = nbytes / seconds * 2(n-1)/n for n ranks).
    """
    store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=rank % torch.cuda.device_count()))
        torch.cuda.set_device(device)
    prefixed = PrefixStore(f"gdr-prove-{label}", store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        tensor = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
        dist.all_reduce(tensor)  # builds the channels that the log is read for
        if tensor[0].item() != size:
            raise RuntimeError(f"all_reduce of ones over {size} ranks gave {tensor[0].item()}")
        seconds = min(_timed(tensor) for _ in range(_REPEATS))
        return float(nbytes * 8 * 2 * (size - 1) / size / seconds / 1e9)
    finally:
        dist.destroy_process_group()


def _timed(tensor: torch.Tensor) -> float:
    """Measures the seconds of one all-reduce of `tensor`, with the device's work; first waits for all ranks."""
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(argv: Sequence[str]) -> int:
    """Runs the all-reduce as a program, on every rank of torchrun, and prints one line of JSON on each.

    Args:
        argv: Options `--label`, `--backend` (`nccl` by default) and `--nbytes`: arguments of `all_reduce_gigabits`.

    Returns:
        Exit status: 0 with `gigabits_per_second` in the line; 3 with `error` in it, if torch sees no GPU for NCCL.

    Raises:
        RuntimeError: The sum is wrong, or the ranks could not connect.
        ValueError: torchrun's variables are not set.
        SystemExit: An option is wrong (status 2), or is `--help` (0).
    """
    parser = CommandParser(prog="gradwire.cli.gdr_prove", description=__doc__)
    parser.add_argument("--label", default="default", help="the same on every rank, different for every run")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--nbytes", type=int, default=_NBYTES, help="size of the tensor")
    options = parser.parse_args(argv)
    if options.backend == "nccl" and not torch.cuda.is_available():
        print(json.dumps({"error": "torch sees no CUDA device: the all-reduce was not run"}))
        return 3
    rate = all_reduce_gigabits(options.label, options.backend, options.nbytes)
    print(json.dumps({"label": options.label, "gigabits_per_second": rate}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

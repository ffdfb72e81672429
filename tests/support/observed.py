"""Ranks as threads that go through steps as the hook does, for what is watched of them."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.config import Config
from gradwire.comms.observe.observer import Observer
from gradwire.comms.run.all_reduces import AllReduce, Bucket
from gradwire.comms.step.listeners import EndedStep
from gradwire.compressors.base import Layout, Slice
from support.threads import run_ranks

Result = TypeVar("Result")
CPU = torch.device("cpu")
PARAMETERS = ("head.weight", "layers.1.mlp.weight", "layers.0.mlp.weight")
"""One in each bucket, in the order in which they arrive."""


class Steps:
    """One rank, and its steps of a few buckets each."""

    def __init__(self, communicator: Communicator, config: Config, numel: int) -> None:
        self.communicator = communicator
        self.observer = Observer(communicator, config)
        self.steps = 0
        self._layouts = [Layout((Slice(name, (numel,), 0, 0, numel),)) for name in PARAMETERS]
        self._flats = [torch.ones(numel) for _ in PARAMETERS]
        for index, name in enumerate(PARAMETERS):
            self.observer.contents[index] = numel, (name,)

    def step(self, pause: Callable[[int], float] = lambda index: 0.0, wait: bool = True) -> list[Bucket]:
        """One step; `pause` says how long each bucket takes to compute."""
        self.observer.step_began(self.steps)
        buckets = []
        for index, (flat, layout) in enumerate(zip(self._flats, self._layouts, strict=True)):
            if seconds := pause(index):
                time.sleep(seconds)
            bucket = Bucket.of(flat, layout, self.communicator.clock.now(), index)
            self.communicator.start(AllReduce((flat,), layout, (bucket,)), scale=1 / self.communicator.size)
            buckets.append(bucket)
        self.steps += 1
        self.observer.step_ended(EndedStep(self.steps, buckets, (), self.communicator.report))
        if wait:
            for bucket in buckets:
                bucket.result().wait()
        return buckets


def on_ranks(nodes: str, body: Callable[[Steps], Result], numel: int = 300, **options: Any) -> list[Result]:
    """Runs `body` on each rank; its node is its letter in `nodes`."""
    store = HashStore()

    def run(rank: int) -> Result:
        config = Config(hostname=f"node-{nodes[rank]}", **({"timeout": timedelta(seconds=30)} | options))
        name = config.compressor
        made = None if name is None else Compression(name, {}, (), rank, len(nodes)).compressor
        communicator = Communicator(store, rank, len(nodes), CPU, config, name="observed", compressor=made)
        steps = Steps(communicator, config, numel)
        try:
            return body(steps)
        finally:
            steps.observer.close()
            communicator.close()

    return run_ranks(len(nodes), run)

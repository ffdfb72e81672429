"""Law: a quiet elastic job loses nobody on hosts as they are, and a lost rank is given up there as anywhere.

No default route, no names (or Debian's 127.0.1.1 for a host's own), other addresses, IPv6 alone.
"""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.cluster import EmulatedCluster, Names
from gradwire.bench.emulation.fork import ForkedRank, run_forked

STEPS, STEP_SECONDS = 120, 0.06
"""Longer in all than the looks at the next rank, and than the silence after which one is given up."""


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Trains for a while without a fault; then rank 3 is killed, its node with it, and the others go on."""
    torch.set_num_threads(1)
    place.connect()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)))
    state = gradwire.HookState(model, elastic=True)
    model.register_comm_hook(state, gradwire.comm_hook)
    after = 0
    while after < 3:
        model(torch.randn(4, 8)).square().mean().backward()
        if state.steps == STEPS:
            print("quiet", state.view.size, flush=True)
            if place.rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        after += state.view.size == 2
        time.sleep(STEP_SECONDS)
    print("left", state.view.size, flush=True)
    state.close()
    os._exit(0)  # torch's default group waits for the lost ranks


@pytest.mark.netns
@pytest.mark.parametrize(("names", "network"), [("own", "10.201.0.0/16"), ("none", "fd77::/64")])
def test_nobody_is_given_up_but_who_is_lost(names: Names, network: str) -> None:
    with EmulatedCluster([1, 1], names=names, network=network) as cluster:
        run = run_forked(cluster, __file__, [], nodes=[2, 2], timeout_seconds=120)
    said = "\n".join(run.output)
    assert said.count("quiet 4") == 4, said
    assert said.count("left 2") == 2, said

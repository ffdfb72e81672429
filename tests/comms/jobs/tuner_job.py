"""One rank on the emulated cluster: a small model trains with the tuner on, long enough for one search to end."""

import logging
import sys

import torch
from torch import nn

import gradwire
from gradwire.bench.emulation.fork import ForkedRank

STEPS = 130
"""A search takes 2 + 1 + 5 steps, at most eight settings of 4, four of 8 and two of 16, and 24 to confirm: 128."""


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
    torch.set_num_threads(1)
    place.connect()
    train(arguments[0])
    place.leave()
    return 0


def train(profile: str) -> None:
    torch.manual_seed(0)
    model, _ = gradwire.wrap(
        nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))),
        base_bucket_mb=0.06,
        fusion=0.25,
        tune=profile,
    )
    for _ in range(STEPS):
        model(torch.ones(4, 128)).square().mean().backward()

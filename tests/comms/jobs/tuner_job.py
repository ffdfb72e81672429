"""One rank on the emulated cluster: a small model trains with the tuner on, long enough for one search to end."""

import logging
import sys

import torch
import torch.distributed as dist
from torch import nn

import gradwire

STEPS = 160
"""A search takes 2 + 1 + 5 steps, at most eight settings of 4, four of 8 and two of 16, and 24 to confirm: 128."""

logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model, state = gradwire.wrap(
    nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))),
    base_bucket_mb=0.06,
    fusion_mb=0.25,
    tune=True,
    tune_profile=sys.argv[1],
)
for _ in range(STEPS):
    model(torch.ones(4, 128)).square().mean().backward()
dist.destroy_process_group()

"""Training steps, predicted and measured on two emulated nodes of one rank, for docs/results/predictions.md.

    python -m gradwire.bench.studies.predict_steps            # links of 40, 100 and 200 Mbit/s; needs root
    python -m gradwire.bench.studies.predict_steps --nic 40mbit --compressor fp16,int8

All steps take turns in one job, so that other load slows them alike. Computing is sleep: 10 ms a layer forward and 20
ms backward. `gradwire predict` is given the rate of the links and the measured time of computing; nothing is probed.
"""

import json
import subprocess
import sys
import tempfile
import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.configuration import Configuration
from gradwire.bench.emulation.fork import ForkedRank
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.shared.turns import hear_turns, tell_turns
from gradwire.comms.plan.codec_price import short_start
from gradwire.compressors import registry

LAYERS, SIDE, BUCKET_MB, ROUNDS = 5, 558, 2, 9
FORWARD_SECONDS, BACKWARD_SECONDS = 0.01, 0.02
"""Seconds of sleep of a layer."""
ALONE, PLAIN, EXACT = "computing", "plain DDP", "exact"


def _sleeping_layers() -> nn.Sequential:
    """Makes the model: linear layers, each with its sleep in both passes."""

    def sleep(layer: nn.Module, given: object, output: Tensor) -> None:
        time.sleep(FORWARD_SECONDS)
        output.register_hook(lambda _: time.sleep(BACKWARD_SECONDS))  # type: ignore[no-untyped-call]

    model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))
    for layer in model:
        layer.register_forward_hook(sleep)
    return model


def _configuration(name: str) -> Configuration:
    """Makes a step with a model of its own: without DDP, with plain DDP, or with gradwire's hook and a compressor."""
    model: nn.Module = _sleeping_layers()
    if name != ALONE:
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    if name not in (ALONE, PLAIN):
        compressor, options = (None, {}) if name == EXACT else (name, short_start(name))
        gradwire.attach(model, compressor=compressor, compressor_options=options)
    return Configuration(name, lambda _: model(torch.ones(1, SIDE)).sum().backward(), lambda _: model.zero_grad())


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Runs one rank's part of the comparison; returns its exit status.

    Args:
        place: This rank of the forked job.
        arguments: Names of the steps.
    """
    return tell_turns(place, lambda _: [*map(_configuration, arguments)], rounds=ROUNDS, warmup=4)


def predicted_seconds(nic: str, computing_seconds: float) -> dict[str, float]:
    """Returns the name of each step -> its seconds, by `gradwire predict`.

    Args:
        nic: Rate of the links.
        computing_seconds: Seconds of a forward and backward pass without DDP.
    """
    share = 1e3 * computing_seconds / (FORWARD_SECONDS + BACKWARD_SECONDS)
    words = f"--preset cpu_only --nodes 2 --ranks-per-node 1 --nic {nic} --bucket-mb {BUCKET_MB}"
    words += f" --forward-ms {share * FORWARD_SECONDS} --backward-ms {share * BACKWARD_SECONDS} --model-json"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        print(
            json.dumps({n: list(one.shape) for n, one in _sleeping_layers().named_parameters()}), file=file, flush=True
        )
        command = [sys.executable, "-m", "gradwire", "predict", "--json", *words.split(), file.name]
        plans = json.loads(subprocess.check_output(command))["plans"]
    steps = {name: plan["step_seconds"] for name, plan in plans.items()}
    named = {name.removeprefix("hierarchical+"): seconds for name, seconds in steps.items()}
    return named | {ALONE: computing_seconds, PLAIN: steps["flat"], EXACT: steps["hierarchical"]}


def main(argv: list[str]) -> int:
    """Measures, and prints the page's data in milliseconds; returns 0."""
    parser = StudyParser("predict_steps", __doc__)
    parser.add_argument("--nic", default="40mbit,100mbit,200mbit", help="rates of the links, one after the other")
    parser.add_argument("--compressor", default=",".join(registry.names()[1:]), help="with commas (default: all)")
    options = parser.parse_args(argv)
    rows: dict[str, list[float]] = {name: [] for name in (ALONE, PLAIN, EXACT, *options.compressor.split(","))}
    with clean_end():
        for nic in options.nic.split(","):
            found = hear_turns("predict_steps", [*rows], nodes=(1, 1), nic=nic, timeout_seconds=540)
            predicted = predicted_seconds(nic, found[ALONE].median_seconds)
            for name, row in rows.items():
                row += [predicted[name], found[name].median_seconds, min(found[name].seconds)]
    print("".join(f",{nic} {figure}" for nic in options.nic.split(",") for figure in ("predicted", "median", "least")))
    for name, row in rows.items():
        print(",".join([name, *(f"{1e3 * each:.0f}" for each in row)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

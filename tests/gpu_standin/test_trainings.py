"""Real trainings on the stand-in: four processes on two nodes lose in each step what they lose on the CPU.

To the last bit wherever both add in the same order. Two terms have one order, so all plans that add inside a node
first have the CPU's bits on two nodes of two; and every kernel of a compressor has the bits of its CPU twin, but for
PowerSGD's, which multiplies matrices.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpu_standin.conftest import SECONDS, Jobs
from gradwire.compressors.registry import names
from support.forked import ForkServer

Settings = dict[str, Any]
TWO_NODES = "cpu:gloo,cuda:nccl"
HIERARCHICAL = {"plan": "hierarchical"}
SHORT: dict[str, Settings] = {
    "onebit": {"warmup_steps": 2},
    "dgc": {"density": 0.05, "warmup_steps": 2},
    "powersgd": {"rank": 2, "warmup_steps": 1},
}
"""Options with which a few steps go through a compressor's warm-up and beyond."""


def compressed(name: str) -> Settings:
    return {"compressor": name, "compressor_options": SHORT.get(name.partition("+")[0], {})}


EXACT: dict[str, Settings] = {
    "flat": {"hook": {"plan": "flat"}},
    "leader": {"hook": {"plan": "leader"}},
    "hierarchical": {"hook": HIERARCHICAL, "momentum": 0.9},
    "in chunks": {"hook": {"plan": {"name": "hierarchical", "chunks": 2}}},
    "joined buckets": {"hook": HIERARCHICAL | {"fusion": 0.05}},
    "find_unused_parameters": {"hook": HIERARCHICAL, "ddp": {"find_unused_parameters": True}},
    "static_graph": {"hook": HIERARCHICAL, "ddp": {"static_graph": True, "gradient_as_bucket_view": True}},
}
COMPRESSED = {name: {"hook": HIERARCHICAL | compressed(name)} for name in (*names(), "powersgd+int8", "dgc+int4")}
RESUMED = {
    name: {"kind": "resumed", "hook": HIERARCHICAL | compressed(name)}
    for name in ("none", "int8", "onebit", "powersgd")
}
BACKEND: dict[str, Settings] = {
    "without a hook": {},
    "with the hook": {"hook": HIERARCHICAL},
    "int8": {"hook": HIERARCHICAL | compressed("int8")},
    "FSDP": {"kind": "sharded", "apply": {}},
    "HSDP": {"kind": "sharded", "apply": {}, "replicas": True},
}
SHARDED: dict[str, Settings] = {
    "FSDP": {"apply": {}},
    "FSDP int8": {"apply": {"shards": "int8", "weights": "int8"}},
    "FSDP int4 bf16": {"apply": {"shards": "int4", "weights": "bf16"}},
    "HSDP": {"apply": {}, "replicas": True},
    "HSDP int8": {"apply": compressed("int8"), "replicas": True},
    "HSDP powersgd": {"apply": compressed("powersgd"), "replicas": True},
}
OFTEN = {"every": 2, "fragments": 2, "delay": 1, "compressor": None}
APART: dict[str, Settings] = {
    "averages": {"outer": OFTEN},
    "running means": {"outer": OFTEN, "normed": True},
    "momentum": {"outer": OFTEN | {"lr": 0.7, "momentum": 0.9}},
    "alone": {"outer": OFTEN | {"inside": "none", "delay": 0}},
    "int8": {"outer": OFTEN | compressed("int8")},
}
MIXED: dict[str, Settings] = {
    "float16": {"dtype": "float16", "steps": 10, "hook": HIERARCHICAL},
    "float16 int8": {"dtype": "float16", "steps": 10, "hook": HIERARCHICAL | compressed("int8")},
    "bfloat16": {"dtype": "bfloat16", "steps": 6, "hook": HIERARCHICAL},
}
GROUPS: dict[str, tuple[str, str, dict[str, Settings]]] = {
    "exact": (TWO_NODES, "hooked", EXACT),
    "compressed": (TWO_NODES, "hooked", COMPRESSED),
    "resumed": (TWO_NODES, "resumed", RESUMED),
    "backend": ("gradwire", "hooked", BACKEND),
    "sharded": (TWO_NODES, "sharded", SHARDED),
    "apart": (TWO_NODES, "apart", APART),
    "mixed": (TWO_NODES, "mixed", MIXED),
}
"""Name -> process group, kind of training, and its cases: what one set of processes does."""

OF_A_TRAINING = 30.0
"""Seconds that a case may take on average, on a machine that does much else; alone it takes two or three."""

OTHER_ORDER = {"exact flat", "sharded FSDP"}
"""Sums of four terms: gloo and gradwire's plans on the CPU add them in another order than NCCL."""
ROUNDED = 2e-6
"""Relative: a few float32 roundings of a loss."""

Ranks = list[dict[str, Any]]
"""What each rank says of its training."""


@pytest.fixture(scope="module")
def trained(standin_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Ranks]:
    """Trains all cases of a group at the first question for one of them; what each rank says of a case."""

    @cache
    def train(group: str) -> dict[str, Ranks]:
        backend, kind, cases = GROUPS[group]
        listed = json.dumps([[name, {"kind": kind} | case] for name, case in cases.items()])
        jobs = Jobs(tmp_path_factory.mktemp(group), standin_server, SECONDS + OF_A_TRAINING * len(cases))
        ranks = jobs.run("trainings.py", backend, listed, ranks=4, NODES="aabb")
        assert ranks.statuses == [0] * 4, ranks.errors
        of_ranks = [
            dict(json.loads(line) for line in output.splitlines() if line[0] == "[") for output in ranks.outputs
        ]
        return {name: [of_rank[name] for of_rank in of_ranks] for name in cases}

    return lambda group, case: train(group)[case]


def cases_of(*groups: str) -> list[tuple[str, str]]:
    return [(group, case) for group in groups for case in GROUPS[group][2]]


def off(on_gpu: list[str], on_cpu: list[str]) -> float:
    """The largest relative difference of two trainings' losses."""
    pairs = zip(map(float.fromhex, on_gpu), map(float.fromhex, on_cpu), strict=True)
    return max(abs(one - other) / other for one, other in pairs)


@pytest.mark.parametrize(("group", "case"), cases_of("exact", "compressed", "resumed", "backend", "sharded", "apart"))
def test_it_loses_what_it_loses_on_the_cpu(trained: Callable[[str, str], Ranks], group: str, case: str) -> None:
    exactly = f"{group} {case}" not in OTHER_ORDER and "powersgd" not in case
    for rank in trained(group, case):
        assert off(rank["cuda"]["losses"], rank["cpu"]["losses"]) <= (0.0 if exactly else ROUNDED)
        assert not exactly or rank["cuda"]["bits"] == rank["cpu"]["bits"]


@pytest.mark.parametrize(("group", "case"), cases_of("exact", "compressed", "resumed", "apart", "mixed"))
def test_all_ranks_end_with_the_same_bits(trained: Callable[[str, str], Ranks], group: str, case: str) -> None:
    assert len({rank["cuda"]["bits"] for rank in trained(group, case)}) == 1


@pytest.mark.parametrize("case", ["HSDP", "HSDP int8", "HSDP powersgd"])
def test_replicas_of_a_shard_end_with_the_same_bits(trained: Callable[[str, str], Ranks], case: str) -> None:
    bits = [rank["cuda"]["bits"] for rank in trained("sharded", case)]
    assert bits[:2] == bits[2:]
    assert bits[0] != bits[1]


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_training_ends_as_one_without_interruption(trained: Callable[[str, str], Ranks], case: str) -> None:
    for rank in trained("resumed", case):
        assert rank["cuda"]["whole"] == rank["cuda"]["bits"]


@pytest.mark.parametrize("case", MIXED)
def test_narrow_dtypes_lose_what_they_lose_on_the_cpu(trained: Callable[[str, str], Ranks], case: str) -> None:
    """Not its bits: autocast runs other operators in float32 on a CPU than on CUDA. The loss scale moves alike."""
    for rank in trained("mixed", case):
        assert off(rank["cuda"]["losses"], rank["cpu"]["losses"]) <= (1e-2 if case == "bfloat16" else 2e-3)
        scales = rank["cuda"]["scales"]
        assert scales == rank["cpu"]["scales"]
        if case != "bfloat16":
            assert scales[1] < scales[0], "the first steps overflow"
            assert max(scales[5:]) > min(scales), "later ones do not"


@pytest.mark.parametrize("options", [HIERARCHICAL, HIERARCHICAL | compressed("int8")], ids=["exact", "int8"])
def test_three_ranks_go_on_where_the_fourth_is_killed(torch_jobs: Jobs, options: Settings) -> None:
    ended = {}
    for device in ("cpu", "cuda"):
        ranks = torch_jobs.run("elastic.py", device, json.dumps(options), ranks=4, NODES="aabb")
        assert ranks.statuses == [0, 0, 0, -9], ranks.errors
        ended[device] = [json.loads(output) for output in ranks.outputs[:3]]
    assert ended["cuda"] == ended["cpu"]
    assert len({rank["bits"] for rank in ended["cuda"]}) == 1
    assert all(rank["sizes"] == [3] for rank in ended["cuda"])


def test_the_main_job_ends_where_it_ends_on_the_cpu(tmp_path: Path) -> None:
    """`make run-gpu-standin`: torch's own sums are in it, in another order."""
    results = {}
    for device in ("cpu", "cuda"):
        file = tmp_path / f"{device}.json"
        command = [sys.executable, "-m", "gradwire.bench.train.main_job", "--logical", "--device", device]
        command += ["--steps", "4", "--batch", "2", "--nic", "100mbit", "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        results[device] = json.loads(file.read_text())["results"]
    for on_gpu, on_cpu in zip(results["cuda"], results["cpu"], strict=True):
        assert on_gpu["hook"] == on_cpu["hook"]
        for figure in ("first_loss", "final_loss", "validation_bits_per_byte"):
            assert on_gpu[figure] == pytest.approx(on_cpu[figure], rel=1e-5)
    assert results["cuda"][1]["node_nbytes_per_step"] > 0

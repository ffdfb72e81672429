"""A representative part of PyTorch's own suite on "gradwire"; `make conformance` runs all of it, and gloo beside it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = [
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_reduce_product",
    "test_all_reduce_full_group_sum",
    "test_all_reduce_coalesced_sum",
    "test_all_gather",
    "test_all_gather_complex",
    "test_all_gather_coalesced_simple",
    "test_all_gather_coalesced_with_empty",
    "test_broadcast",
    "test_reduce_sum",
    "test_scatter",
    "test_gather",
    "test_barrier",
    "test_send_recv",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_get_backend",
    "test_destroy_full_group",
    "test_all_gather_object_default_pg",
    "test_get_future",
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_hook",
]


def test_gradwire_passes_what_gloo_passes(tmp_path: Path) -> None:
    """Gloo passes all of these (torch 2.13), so it does not run beside; `make conformance` compares test by test."""
    pytest.importorskip("expecttest", reason="PyTorch's suite needs expecttest")
    script = Path(__file__).resolve().parents[2] / "conformance.py"
    command = [
        sys.executable,
        str(script),
        "--layouts",
        "gradwire on 2x2",
        "--logs",
        str(tmp_path),
        "--only",
        *TESTS,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "gradwire-on-2x2.json").read_text())
    assert {name: outcomes[name]["message"] for name in TESTS if outcomes[name]["verdict"] != "pass"} == {}
